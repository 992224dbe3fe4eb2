# SPDX-License-Identifier: Apache-2.0
"""The tests marked `gpu`, one process a file, several at once over the GPUs of this machine. For `make test-gpu`.

    python tests/spread.py [--jobs N] [--limit-s S] [--logs DIR] [FILE or folder …]

A file whose text asks for several GPUs sees all of them; any other sees one, in turns. Files that ask for several begin
first, as they take longest. A line says what became of each file, with what failed in it. What does not end within the
limit is ended, and says so. The exit code is 1 if a file failed, was ended or did not begin.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NOTHING_RAN = 5  # pytest's exit code where no test is marked
SHOWN = ("FAILED ", "ERROR ", "E  ")  # beginnings of lines that say what failed
LINES = 12  # of them, a file


def files_of(places: Iterable[Path]) -> list[Path]:
    """Test files with a test for a GPU. Those that ask for several GPUs come first."""
    found = {
        file
        for place in places
        for file in (place.rglob("test_*.py") if place.is_dir() else [place])
        if asks_for(file, "gpu", '"cuda"', "device: torch.device")
    }
    return sorted(found, key=lambda file: (not asks_for_several(file), str(file)))


def asks_for(file: Path, *words: str) -> bool:
    text = file.read_text(encoding="utf-8")
    return any(word in text for word in words)


def asks_for_several(file: Path) -> bool:
    return asks_for(file, "device_count()", "backend_on_gpus", '"nccl"')


@dataclass
class Run:
    """pytest over one file, its output in `log`."""

    file: Path
    log: Path
    gpu: str | None
    began: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        environment = dict(os.environ)
        if self.gpu is not None:
            environment["CUDA_VISIBLE_DEVICES"] = self.gpu
        pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu"]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*pytest, "-rfE", str(self.file)],
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env=environment,
                start_new_session=True,  # ranks that it starts are ended with it
            )

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def lines(self) -> list[str]:
        return self.log.read_text(errors="replace").strip().splitlines()

    def end(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def gpus_of(count: int) -> list[str]:
    """What CUDA_VISIBLE_DEVICES calls each of the `count` GPUs that this process sees."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return given[:count] if len(given) >= count > 0 and given[0] else [str(n) for n in range(count)]


def run_all(
    files: Sequence[Path], jobs: int, gpus: Sequence[str], limit: float, logs: Path
) -> list[str]:
    """The names of the files that failed, were ended, or did not begin. Prints what became of each."""
    waiting, running, bad = [*files], list[Run](), list[str]()
    end, started = time.monotonic() + limit, 0
    logs.mkdir(parents=True, exist_ok=True)
    try:
        while (waiting or running) and time.monotonic() < end:
            while waiting and len(running) < jobs:
                file = waiting.pop(0)
                one = not asks_for_several(file) and len(gpus) > 1
                name = "_".join(_shown(file).split(os.sep))
                gpu = gpus[started % len(gpus)] if one else None
                running.append(Run(file, logs / f"{name}.log", gpu))
                started += one
            for run in list(running):
                if run.process.poll() is not None:
                    running.remove(run)
                    if not _passed(run):
                        bad.append(_shown(run.file))
            time.sleep(0.1)
    finally:
        for run in running:
            run.end()
    for run in running:
        last = (run.lines() or [""])[-1][:100]
        print(f"{_shown(run.file)}: ended after {run.seconds:.0f} s: {last}", flush=True)
    for file in waiting:
        print(f"{_shown(file)}: not begun", flush=True)
    return [*bad, *(_shown(run.file) for run in running), *map(_shown, waiting)]


def _passed(run: Run) -> bool:
    code, lines = run.process.returncode, run.lines()
    what = "nothing for a GPU" if code == NOTHING_RAN else "passed" if code == 0 else "failed"
    print(f"{_shown(run.file)}: {what}, {run.seconds:.0f} s", flush=True)
    good = code in (0, NOTHING_RAN)
    if not good:
        print("\n".join([line for line in lines if line.startswith(SHOWN)][:LINES]), flush=True)
    return good


def _shown(file: Path) -> str:
    file = file.resolve()
    return str(file.relative_to(ROOT)) if file.is_relative_to(ROOT) else str(file)


def main() -> int:
    options = argparse.ArgumentParser(description="the gpu tests, spread over this machine's GPUs")
    options.add_argument("places", nargs="*", type=Path, default=[ROOT / "tests"])
    options.add_argument("--jobs", type=int, help="files at once; default: six a GPU")
    options.add_argument("--limit-s", type=float, default=540.0, help="for all (default: 540)")
    options.add_argument("--logs", type=Path, help="default: a temporary folder")
    args = options.parse_args()
    import torch

    gpus = gpus_of(torch.cuda.device_count())
    if not gpus:
        print("needs a CUDA GPU: torch finds none", file=sys.stderr)
        return 2
    files = files_of(args.places)
    with tempfile.TemporaryDirectory() as scratch:
        logs = args.logs or Path(scratch)
        bad = run_all(files, args.jobs or 6 * len(gpus), gpus, args.limit_s, logs)
    print(f"{len(files)} files, {len(bad)} not passed", flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
