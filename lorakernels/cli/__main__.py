# SPDX-License-Identifier: Apache-2.0
"""`lorakernels SUBCOMMAND …`. Only the module of the chosen subcommand is imported.

Beside `add_arguments` and `run` a subcommand may define `PASSES_ARGUMENTS_ON`, if other programs read its remaining
arguments. It may also define `unknown(words) -> str`, the message about words that are no option.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from lorakernels import __version__

COMMANDS = {
    "doctor": "what is installed, what was built, and which implementation each op takes",
    "bench": "time the layer and the ops against their peers on this machine",
    "finetune": "fine-tune a model with LoRA adapters over its frozen FP8 base",
    "plan": "what a training takes before it is loaded: bytes, times, and what to shard, offload and recompute",
    "export": "merge an adapter into its base: a directory that transformers and vLLM load, in bf16 or FP8",
}


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
    parsers = {
        name: commands.add_parser(name, help=text, description=text)
        for name, text in COMMANDS.items()
    }
    if chosen not in parsers:
        parser.parse_args(arguments)  # --help, --version or an error, each of which exits
    module = importlib.import_module(f"lorakernels.cli.{chosen}")
    module.add_arguments(parsers[chosen])
    options, rest = parser.parse_known_args(arguments)
    if rest and not getattr(module, "PASSES_ARGUMENTS_ON", False):
        unknown = getattr(
            module, "unknown", lambda words: f"unrecognized arguments: {' '.join(words)}"
        )
        parsers[chosen].error(unknown(rest))
    options.rest = rest
    return int(module.run(options))


if __name__ == "__main__":
    sys.exit(main())
