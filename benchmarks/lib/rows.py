# SPDX-License-Identifier: Apache-2.0
"""The options that every benchmark takes, what its run was made on, and how its rows are written."""

from __future__ import annotations

import argparse
import csv
import importlib.metadata
import os
import platform
import subprocess
import time
from pathlib import Path

import torch

Row = dict[str, object]


def ratio(a: object, b: object, digits: int = 3) -> object:
    """a ÷ b, rounded; "" where one of them was not measured."""
    if isinstance(a, (int, float)) and isinstance(b, (int, float)) and b:
        return round(a / b, digits)
    return ""


def parser(description: str) -> argparse.ArgumentParser:
    """The options that every benchmark takes."""
    result = argparse.ArgumentParser(description=description)
    result.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="folder for NAME.csv; else only printed",
    )
    result.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    result.add_argument(
        "--repetitions", type=int, help="default: as many as the GPU needs, 5 on a CPU"
    )
    return result


def arguments(
    options: argparse.ArgumentParser, on_gpu: int = 50
) -> tuple[argparse.Namespace, torch.device]:
    args = options.parse_args()
    device = torch.device(args.device)
    if args.repetitions is None:
        args.repetitions = on_gpu if device.type == "cuda" else 5
    if args.repetitions < 1:
        options.error(f"--repetitions must be at least 1, found {args.repetitions}")
    return args, device


# The names of what `environment` returns
FACTS = ("device", "torch", "cuda", "python", "triton", "driver", "commit", "date")


def environment(device: torch.device) -> dict[str, str]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    threads = f", {torch.get_num_threads()} threads" if device.type == "cpu" else ""
    return {
        "device": f"{device.type}: {name}{threads}",
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "python": platform.python_version(),
        "triton": _version("triton"),
        "driver": _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "commit": os.environ.get("LORAKERNELS_COMMIT")  # a copy of the tree without .git
        or _first_line("git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"),
        "date": time.strftime("%Y-%m-%d"),
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _first_line(*command: str) -> str:
    """What `command` prints first, or "unknown" where it cannot run."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return result.stdout.partition("\n")[0].strip()


def write_csv(path: Path, rows: list[Row], facts: dict[str, str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0], *facts])
        writer.writeheader()
        writer.writerows({**row, **facts} for row in rows)


def table(rows: list[Row]) -> str:
    lines = [list(rows[0]), *([str(v) for v in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(v.ljust(w) for v, w in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def finish(
    name: str, rows: list[Row], facts: dict[str, str], output: Path | None, check: str = "check"
) -> int:
    """Print and write the rows. The exit code: 1 if a provider's `check` column says WRONG."""
    print("  ".join(f"{key} {value}" for key, value in facts.items()))
    print(table(rows))
    if output:
        write_csv(output / f"{name}.csv", rows, facts)
        print(f"written to {output / name}.csv")
    return 1 if any("WRONG" in str(row[check]) for row in rows) else 0
