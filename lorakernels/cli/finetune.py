# SPDX-License-Identifier: Apache-2.0
"""``lorakernels finetune``: parse the options and return an exit code. lorakernels.train does the work."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from lorakernels.train.absent_names import ABSENT
from lorakernels.train.errors import (
    FinetuneError,
    Interrupted,
    OptionError,
    describe_os_error,
    require,
)
from lorakernels.train.names import unknown_argument
from lorakernels.train.option_sources import default_of, kinds, resolve
from lorakernels.train.options import FinetuneOptions

NEEDED = ("numpy", "rich", "matplotlib", "transformers", "tokenizers")
GROUPS = (
    "input and output", "data", "adapter", "optimisation", "evaluation", "checkpoints and logs", "runtime", "machine",
)  # fmt: skip
EPILOG = """\
exit codes: 0 done, 1 the run failed (the message says why), 2 an option is wrong,
130 / 143 saved and stopped after SIGINT / SIGTERM: run again with --resume"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add one flag per field of FinetuneOptions. A flag that is not given sets nothing in the namespace."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    groups = {name: parser.add_argument_group(name) for name in GROUPS}
    types = kinds()
    for item in fields(FinetuneOptions):
        group = groups[item.metadata["group"]]
        scalar, is_list, _ = types[item.name]
        flag = "--" + item.name.replace("_", "-")
        keywords: dict[str, Any] = {
            "dest": item.name,
            "default": argparse.SUPPRESS,
            "help": _help(item),
        }
        if scalar is bool:
            keywords["action"] = argparse.BooleanOptionalAction
        else:
            keywords.update(
                type=scalar, metavar=item.metadata["metavar"] or scalar.__name__.upper()
            )
            if is_list:
                keywords["nargs"] = "+"
        group.add_argument(flag, **keywords)
    groups["input and output"].add_argument(
        "--config",
        metavar="FILE",
        default=argparse.SUPPRESS,
        help="YAML file of option names and values; the command line wins over it",
    )


def unknown(words: Sequence[str]) -> str:
    """The message about words that are no option. It suggests our option for a name that another trainer uses."""
    return unknown_argument(words, [*kinds(), "config"], ABSENT)


def _help(item: Any) -> str:
    default = default_of(item)
    shown = " ".join(default) if isinstance(default, list) else default
    suffix = "" if shown in (None, "") else f" (default: {shown})"
    return (item.metadata["help"] + suffix).replace("%", "%%")


def run(args: argparse.Namespace) -> int:
    """Run the job. Every expected failure becomes one line on stderr and an exit code."""
    known = set(kinds()) | {"config"}
    given = {name: value for name, value in vars(args).items() if name in known}
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    output = Path(str(given.get("output", ".")))
    try:
        from lorakernels.train.demo import DEMO_DEFAULTS, run_demo

        options = resolve(given, DEMO_DEFAULTS)
        output = Path(str(options.output))
        for module in NEEDED:
            require(module)
        if options.demo:
            run_demo(options)
        else:
            from lorakernels.train.job import finetune

            finetune(options)
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


def _fail(message: str, code: int, *, label: str = "error") -> int:
    print(f"lorakernels finetune: {label}: {message}", file=sys.stderr, flush=True)
    return code
