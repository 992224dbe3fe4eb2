# SPDX-License-Identifier: Apache-2.0
"""`lorakernels bench`: runs benchmarks/bench_NAME.py of the source tree that this package was installed from."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
PASSES_ARGUMENTS_ON = True


def names() -> list[str]:
    """The benchmarks that are there; empty for an installed wheel."""
    return sorted(path.stem.removeprefix("bench_") for path in FOLDER.glob("bench_*.py"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    known = "|".join([*names(), "all"])
    parser.usage = f"lorakernels bench [{known}] [--output DIR] [--device D] [--repetitions N] ..."
    parser.epilog = (
        "The name comes first; without one, all are run. Options of a single benchmark: "
        "`python benchmarks/bench_NAME.py --help`. Exit code 1: a provider's results were wrong."
    )


def run(args: argparse.Namespace) -> int:
    """The largest exit code of the benchmarks that ran; 2 where there are none or the name is unknown."""
    if not (known := names()):
        return _fail(
            "the benchmarks are in the source tree, not in an installed wheel; "
            "run `make bench` there, or install it with `pip install -e .`"
        )
    named = bool(args.rest) and not args.rest[0].startswith("-")
    name = args.rest[0] if named else "all"
    if name not in (*known, "all"):
        return _fail(f"no benchmark named {name!r}; there are {', '.join(known)} and all")
    return max(_run(each, args.rest[named:]) for each in (known if name == "all" else [name]))


def _run(name: str, options: list[str]) -> int:
    print(f"{name}:", flush=True)
    code = subprocess.run([sys.executable, str(FOLDER / f"bench_{name}.py"), *options]).returncode
    return code if code >= 0 else 128 - code  # a signal's number, as a shell would say it


def _fail(message: str) -> int:
    print(f"lorakernels bench: {message}", file=sys.stderr)
    return 2
