# SPDX-License-Identifier: Apache-2.0
"""`lorakernels SUBCOMMAND …`. Only the module of the chosen subcommand is imported.

Beside `add_arguments` and `run` a subcommand may define `PASSES_ARGUMENTS_ON`, if other programs read its remaining
arguments. It may also define `unknown(words) -> str`, the message about words that are no option. Without it, the
message suggests one of its options. With `ENDS_SOON` it runs without garbage collection.
"""

from __future__ import annotations

import argparse
import difflib
import gc
import importlib
import sys
import textwrap
from collections.abc import Sequence
from typing import Any, NoReturn

from lorakernels import __version__
from lorakernels.train.options.names import unknown_argument

WIDTH = 80  # of what formatters leave as it is
COMMANDS = {
    "doctor": "what is installed, what was built, and which implementation each op takes",
    "bench": "time the layer and the ops against their peers on this machine",
    "finetune": "fine-tune a model with LoRA adapters over its frozen FP8 base",
    "plan": "what a training takes before it is loaded: bytes, times, and what to shard, offload and recompute",
    "export": "merge an adapter into its base: a directory that transformers and vLLM load, in bf16 or FP8",
}
# What other programs call them
SYNONYMS = {
    "train": "finetune", "sft": "finetune", "tune": "finetune", "lora": "finetune", "run": "finetune",
    "merge": "export", "convert": "export", "save": "export", "estimate": "plan", "memory": "plan",
    "benchmark": "bench", "env": "doctor", "info": "doctor", "check": "doctor", "version": "doctor",
}  # fmt: skip


class Parser(argparse.ArgumentParser):
    """Takes whole option names only and prints errors of one line, without the usage, which --help shows."""

    def __init__(self, **keywords: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **keywords})

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = Parser(prog="lorakernels", description="LoRA training over an FP8 base")
    parser.add_argument("--version", action="version", version=f"lorakernels {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    chosen = next((a for a in arguments if not a.startswith("-")), "")
    if not arguments:
        arguments = ["--help"]
    parsers = {
        name: commands.add_parser(name, help=text, description=textwrap.fill(text, WIDTH))
        for name, text in COMMANDS.items()
    }
    if chosen == arguments[0] and chosen not in parsers:
        parser.error(_unknown_command(chosen))
    if chosen not in parsers:
        parser.parse_args(arguments)  # --help, --version or an error, each of which exits
    module = importlib.import_module(f"lorakernels.cli.{chosen}")
    module.add_arguments(parsers[chosen])
    options, rest = parser.parse_known_args(arguments)
    if rest and not getattr(module, "PASSES_ARGUMENTS_ON", False):
        unknown = getattr(module, "unknown", lambda words: _unknown(words, [*vars(options)]))
        parsers[chosen].error(unknown(rest))
    options.rest = rest
    return _run(module, options)


def _run(module: Any, options: argparse.Namespace) -> int:
    if not getattr(module, "ENDS_SOON", False):
        return int(module.run(options))
    gc.disable()  # a fifth of the time that importing torch and transformers takes; their objects stay
    try:
        return int(module.run(options))
    finally:
        gc.enable()


def _unknown(words: Sequence[str], options: Sequence[str]) -> str:
    if any(word.startswith("-") for word in words):
        return unknown_argument(words, options)
    return f"unexpected argument {words[0]!r}"


def _unknown_command(word: str) -> str:
    close = difflib.get_close_matches(word.lower().replace("_", ""), [*COMMANDS, *SYNONYMS], 1)
    meant = SYNONYMS.get(close[0], close[0]) if close else ""
    hint = f"did you mean {meant}?" if meant else f"there are {', '.join(COMMANDS)}"
    return f"unknown command {word!r}; {hint}"


if __name__ == "__main__":
    sys.exit(main())
