# SPDX-License-Identifier: Apache-2.0
"""`lorakernels bench`: the tests of an op, then its benchmark, in the source tree that this was installed from.

An op's tests are those of its own and what tests/ops/test_contract.py asks of it.

A red test stops its benchmark: numbers of a wrong kernel are worth nothing. `--tune` times the tile sizes of
`kernels/tune.py` instead. `--quick` trains a model of 1B's widths by the drop-in, beside PEFT, for a minute.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
TUNE = FOLDER / "ops" / "tune.py"
QUICK = FOLDER / "models" / "check_gpu.py"
TESTS = FOLDER.parent / "tests"
CONTRACT = TESTS / "ops" / "test_contract.py"
# {benchmark of scales of blocks: the op}
OF_BLOCKS = {"fp8_block_linear": "fp8_linear_lora", "fp8_block_grad_input": "fp8_grad_input"}
PASSES_ARGUMENTS_ON = True
NO_TESTS_COLLECTED = 5  # pytest's exit code


def scripts() -> dict[str, Path]:
    """Name → benchmarks/KIND/bench_NAME.py, by name; empty for an installed wheel."""
    paths = {path.stem.removeprefix("bench_"): path for path in FOLDER.glob("*/bench_*.py")}
    return dict(sorted(paths.items()))


def tests_of(name: str) -> list[Path]:
    """The test files of an op or a layer: tests/**/test_NAME.py, the folder tests/NAME, and of an op the contract."""
    name = OF_BLOCKS.get(name, name)
    files = sorted([*TESTS.rglob(f"test_{name}.py"), *(TESTS / name).glob("test_*.py")])
    return files + [CONTRACT] * _has_cases(name)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = "|".join([*scripts(), "all"])
    parser.usage = (
        f"lorakernels bench [{names}] [--no-test] [--output DIR] [--device D] [--repetitions N] ...\n"
        "       lorakernels bench --quick [--device D]\n"
        "       lorakernels bench --tune [--shapes MxNxK ...] [--ranks R ...] [--top N] [--budget-s S]"
    )
    parser.add_argument("--no-test", action="store_true", help="do not run the op's tests first")
    alone = parser.add_mutually_exclusive_group()
    alone.add_argument(
        "--quick", action="store_true", help="tokens/s of the drop-in beside PEFT, in a minute"
    )
    alone.add_argument(
        "--tune", action="store_true", help="time tile sizes, print lines for kernels/tune.py"
    )
    parser.epilog = (
        "The name comes first; without one, all are run. Options of a single benchmark: "
        "`python benchmarks/KIND/bench_NAME.py --help`. Exit code 1: a test was red, or a result was wrong."
    )


def run(args: argparse.Namespace) -> int:
    """The largest exit code of what ran; 2 where there are no benchmarks, the name is unknown or has no test."""
    if not (available := scripts()):
        return _fail(
            "the benchmarks are in the source tree, not in an installed wheel; "
            "run `make bench` there, or install it with `pip install -e .`"
        )
    named = bool(args.rest) and not args.rest[0].startswith("-")
    name, options = (args.rest[0], args.rest[1:]) if named else ("all", args.rest)
    if named and (args.tune or args.quick):
        return _fail(f"--{'tune' if args.tune else 'quick'} takes no name, found {name!r}")
    if args.tune:
        return _script(TUNE, options)
    if args.quick:
        return _script(QUICK, ["--quick", *options])
    if name not in (*available, "all"):
        return _fail(f"no benchmark named {name!r}; there are {', '.join(available)} and all")
    chosen = available if name == "all" else {name: available[name]}
    return max(_bench(*script, options, not args.no_test) for script in chosen.items())


def _bench(name: str, script: Path, options: list[str], test: bool) -> int:
    print(f"{name}:", flush=True)
    if test and (code := _test(name, options)):
        return code
    return _script(script, options)


def _test(name: str, options: list[str]) -> int:
    """Returns 0 if all tests of `name` passed on the device that will be timed."""
    files = tests_of(name)
    if not files:
        return _fail(f"{name} has no test (tests/**/test_{name}.py); --no-test times it anyway")
    marker = "gpu" if _on_gpu(options) else "not gpu"
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", marker, *map(str, files)]
    if CONTRACT in files:
        command += ["-k", name]  # keeps every test of a file that has the name
    code = subprocess.run(command, cwd=TESTS.parent).returncode
    if code == NO_TESTS_COLLECTED:
        return _fail(f"{name}'s tests hold none marked {marker!r}; --no-test times it anyway")
    return _fail(f"{name} is not timed: its tests are red", 1) if code else 0


def _has_cases(name: str) -> bool:
    """Whether tests/ops/cases has an op of that name, or one that goes on after it, as rope_qkv_backward does."""
    return any(f"ops.{name}" in path.read_text() for path in (TESTS / "ops/cases").glob("*.py"))


def _on_gpu(options: list[str]) -> bool:
    """Whether the benchmark's --device, or its default, is a GPU."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--device")
    device: str | None = parser.parse_known_args(options)[0].device
    if device is not None:
        return device.startswith("cuda")
    import torch

    return torch.cuda.is_available()


def _script(path: Path, options: list[str]) -> int:
    code = subprocess.run([sys.executable, str(path), *options]).returncode
    return code if code >= 0 else 128 - code  # a signal's number, as a shell would say it


def _fail(message: str, code: int = 2) -> int:
    print(f"lorakernels bench: {message}", file=sys.stderr, flush=True)
    return code
