# SPDX-License-Identifier: Apache-2.0
"""``lorakernels finetune``: parse the options and return an exit code. lorakernels.train does the work."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import Field, fields
from functools import partial
from pathlib import Path
from typing import Any

from lorakernels.train.data.sources import find_sources, held_entries
from lorakernels.train.errors import (
    FinetuneError,
    Interrupted,
    ModelError,
    OptionError,
    describe_os_error,
    require,
)
from lorakernels.train.model.folder import why_no_model
from lorakernels.train.options.absent_names import ABSENT
from lorakernels.train.options.names import unknown_argument
from lorakernels.train.options.options import FinetuneOptions
from lorakernels.train.options.sources import Kind, default_of, kinds, resolve

NEEDED = ("numpy", "rich", "matplotlib", "transformers", "tokenizers")
GROUPS = (
    "input and output", "data", "adapter", "optimisation", "evaluation", "checkpoints and logs", "runtime", "machine",
)  # fmt: skip
EPILOG = """\
exit codes: 0 done, 1 the run failed (the message says why), 2 an option is
wrong, 130 / 143 saved and stopped after SIGINT / SIGTERM: go on with --resume"""
USAGE = """\
lorakernels finetune --model DIR --data FILE... --output DIR [options]
       lorakernels finetune --demo"""
EXAMPLE = "lorakernels finetune --model smollm2 --data chat.jsonl --output out --epochs 3"


class HelpAll(argparse.Action):
    """--help-all: the page of --help, with every option, by groups."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        page = type(parser)(prog=parser.prog)
        add_arguments(page, every=True)
        page.description = parser.description
        page.print_help()
        parser.exit()


def add_arguments(parser: argparse.ArgumentParser, every: bool = False) -> None:
    """Add the flags of each field of FinetuneOptions. A flag that is not given sets nothing in the namespace.

    --help shows those with a brief text, or `every` one.
    """
    parser.formatter_class = partial(argparse.RawDescriptionHelpFormatter, max_help_position=26)
    parser.usage = USAGE
    parser.description = f"{parser.description}, for example:\n  {EXAMPLE}"
    parser.epilog = EPILOG
    what = f"show all {len(fields(FinetuneOptions)) + 1} options"
    parser.add_argument("--help-all", nargs=0, action=HelpAll, default=argparse.SUPPRESS, help=what)
    groups = [parser.add_argument_group(name) if every else parser for name in GROUPS]
    add_to = {name: group.add_argument for name, group in zip(GROUPS, groups, strict=True)}
    types = kinds()
    for item in fields(FinetuneOptions):
        _add_option(add_to[item.metadata["group"]], item, types[item.name], _help(item, every))
    add_to["input and output"](
        "--config",
        metavar="FILE",
        default=argparse.SUPPRESS,
        help="YAML file of option names and values; the command line wins over it",
    )


def _add_option(add: Callable[..., Any], item: Field[Any], kind: Kind, text: str) -> None:
    """Add one flag. A switch that is off has a --no- form, too, against a YAML file's; no page shows it."""
    scalar, is_list, _ = kind
    name = item.name.replace("_", "-")
    keywords: dict[str, Any] = {"dest": item.name, "default": argparse.SUPPRESS, "help": text}
    if scalar is bool and item.default is False:
        add(f"--{name}", action="store_true", **keywords)
        hidden = keywords | {"help": argparse.SUPPRESS}
        add(f"--no-{name}", action="store_false", **hidden)
    elif scalar is bool:
        add(f"--{name}", action=argparse.BooleanOptionalAction, **keywords)
    else:
        metavar = item.metadata["metavar"] or scalar.__name__.upper()
        keywords |= {"type": scalar, "metavar": metavar} | ({"nargs": "+"} if is_list else {})
        add(f"--{name}", **keywords)


def unknown(words: Sequence[str]) -> str:
    """The message about words that are no option. It suggests our option for a name that another trainer uses."""
    return unknown_argument(words, [*kinds(), "config", "help_all"], ABSENT)


def _help(item: Field[Any], every: bool) -> str:
    brief = item.metadata["brief"]
    if brief is None and not every:
        return argparse.SUPPRESS
    text = item.metadata["help"] if every else brief or item.metadata["help"]
    default = default_of(item)
    shown = " ".join(default) if isinstance(default, list) else default
    suffix = "" if shown in (None, "") or shown is False else f" (default: {shown})"
    return (str(text) + suffix).replace("%", "%%")


def run(args: argparse.Namespace) -> int:
    """Run the job. Every expected failure becomes one line on stderr and an exit code."""
    names = set(kinds()) | {"config"}
    options = {name: value for name, value in vars(args).items() if name in names}
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    output = Path(str(options.get("output", ".")))
    try:
        from lorakernels.train.demo import DEMO_DEFAULTS, run_demo

        resolved = resolve(options, DEMO_DEFAULTS)
        output = Path(str(resolved.output))
        _check_paths(resolved)
        for module in NEEDED:
            require(module)
        if resolved.demo:
            run_demo(resolved)
        else:
            from lorakernels.train.job import finetune

            finetune(resolved)
    except OptionError as error:
        return _fail(str(error), 2)
    except Interrupted as error:
        return _fail(str(error), error.exit_code, label=error.signal_name)
    except FinetuneError as error:
        return _fail(str(error), 1)
    except OSError as error:
        return _fail(describe_os_error(error, Path(error.filename or output)), 1)
    except KeyboardInterrupt:
        return _fail(
            "interrupted outside of the training steps; checkpoints that are there stay",
            130,
            label="SIGINT",
        )
    return 0


def _check_paths(options: FinetuneOptions) -> None:
    """Name a folder or file that is not there before torch is imported. Ranks look together, later."""
    if options.demo or "RANK" in os.environ:
        return
    if (why := why_no_model(Path(str(options.model)))) is not None:
        raise ModelError(why)
    find_sources([Path(name) for name in options.data])
    find_sources(held_entries([Path(name) for name in options.eval_data])[0])


def _fail(message: str, code: int, *, label: str = "error") -> int:
    print(f"lorakernels finetune: {label}: {message}", file=sys.stderr, flush=True)
    return code
