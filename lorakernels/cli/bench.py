# SPDX-License-Identifier: Apache-2.0
"""`lorakernels bench`: runs benchmarks/bench_lora_linear.py of the source tree this package was installed from."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "bench_lora_linear.py"


PASSES_ARGUMENTS_ON = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "lorakernels bench [--output DIR] [--shapes MxNxK ...] [--rank R] [--dropout P] "
        "[--device D] [--repetitions N]"
    )


def run(args: argparse.Namespace) -> int:
    if not SCRIPT.is_file():
        print(
            "lorakernels bench: the benchmarks are in the source tree, not in an installed wheel; "
            "run `make bench` there, or install it with `pip install -e .`",
            file=sys.stderr,
        )
        return 2
    return subprocess.run([sys.executable, str(SCRIPT), *args.rest]).returncode
