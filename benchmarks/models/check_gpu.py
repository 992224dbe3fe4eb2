# SPDX-License-Identifier: Apache-2.0
"""Does what users run still work on this GPU, and is it still as fast beside PEFT? For `make check-gpu`.

    python benchmarks/models/check_gpu.py [--quick | --full] [--record [--reason TEXT]]

The extension is built first where it is missing or old. Each part of ON_GPU then runs in a process of its own: what
crashes or hangs there is one red row. "× PEFT" divides by PEFT's row of the same shape in the same run. A row is red,
and the exit code 1, where

    the part fails, or no time is left for it,
    its first loss differs by more than 2 % from PEFT's, or
    its ratio is further below the recorded one than TOLERANCE; more is allowed where the host bounds one of the rates.

`--quick` has the drop-in's three forms alone, for a first look: `lorakernels bench --quick`.

What cannot run here, such as a peer that is not installed, is skipped with the reason.

results/GPU/check_gpu.json holds the records. `--record` raises them to what was measured. Machines with one kind of
GPU have hosts of different speed. Where the host bounds one of the rates, a record is therefore raised to the ratio ÷
HOSTS. One that falls needs `--reason`, which stays in that file until the ratio is reached again.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from benchmarks.lib.rows import Row, environment, table, write_csv
from benchmarks.lib.workers import Worker, WorkerError

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
TOLERANCE = {"device": 0.05, "host": 0.10}
HOSTS = 1.5  # by which machines with one kind of GPU differ in ratios that the host bounds
HOST_BOUND = 0.8  # of a step's time that the host needs to enqueue it
LOSS_TOLERANCE = 0.02
SLOWER = "RED: slower"
LONGEST = 120  # characters of a verdict
LOG_LINES = 25  # of a part that failed
AHEAD = 2  # processes that import while another one measures
# seconds; the short form takes 200 on a slow host
BUDGET = {"quick": 120.0, "short": 240.0, "full": 540.0}
PEFT, COMPILED = "PEFT bf16", "PEFT bf16, compiled by layer"
QUICK = (PEFT, "drop-in, eager", "drop-in, fused", "drop-in, fused, attached")


@dataclass(frozen=True)
class Part:
    """`peer` is the part whose rate its own is divided by; "" where nothing is compared."""

    name: str
    shape: str
    peer: str = PEFT
    timeout: float = 60.0
    full: bool = False

    @property
    def key(self) -> str:
        return f"{self.shape}: {self.name}"


def loops(shape: str, *names: str, **options: Any) -> list[Part]:
    return [Part(name, shape, **options) for name in names]


# What matters most first: a budget may end
ON_GPU = [
    Part(PEFT, "8b/8 2x4096", ""),
    Part("finetune", "8b/8 2x4096", timeout=90.0),
    Part(PEFT, "1b 1x2048", ""),
    *loops("1b 1x2048", "drop-in, fused, attached", "drop-in, fused", "drop-in, eager"),
    Part(COMPILED, "1b 1x2048", ""),
    Part("drop-in, compiled by layer", "1b 1x2048", COMPILED),
    *loops(
        "8b/8 2x4096", "drop-in, fused, attached", "drop-in, fused", "drop-in, eager", full=True
    ),
    *loops("1b 1x2048", "drop-in, attached", full=True),
    Part(COMPILED, "8b/8 2x4096", "", full=True),
    Part("drop-in, compiled by layer", "8b/8 2x4096", COMPILED, full=True),
    Part("resume", "1b/4 4x1024", "", timeout=120.0, full=True),
    Part("export and reload", "1b/4 4x1024", "", timeout=90.0, full=True),
    Part("Trainer, PEFT bf16", "8b/8 2x4096", "", full=True),
    Part("Trainer, fused, callback", "8b/8 2x4096", "Trainer, PEFT bf16", full=True),
    Part("SFTTrainer, PEFT bf16", "8b/8 2x4096", "", full=True),
    Part("SFTTrainer, fused, callback", "8b/8 2x4096", "SFTTrainer, PEFT bf16", full=True),
    Part("gpu tests", "", "", timeout=math.inf, full=True),  # what is left of the budget
]
ON_CPU = [  # the same parts, to try this file
    replace(part, shape=part.shape and "tiny 2x32", timeout=300.0)
    for part in ON_GPU
    if part.shape != "1b 1x2048"
]


class Runner:
    """Runs one part after the other; the next processes import what they need meanwhile."""

    def __init__(self, parts: list[Part], device: str, budget: float, scratch: Path) -> None:
        self.parts, self.device, self.scratch = parts, device, scratch
        self.end = time.monotonic() + budget
        self._workers: list[Worker] = []

    def _start(self) -> None:
        log = self.scratch / f"{len(self._workers):02d}.log"
        self._workers.append(Worker([sys.executable, __file__, "--worker"], log))

    def run(self) -> dict[str, dict[str, Any]]:
        """key → what the part returned, {"skipped": why} or {"failed": why}, with its "seconds"."""
        found = {}
        for number, part in enumerate(self.parts):
            while len(self._workers) < min(number + 1 + AHEAD, len(self.parts)):
                self._start()
            began = time.monotonic()
            found[part.key] = self._ask(part, number, min(part.timeout, self.end - began))
            found[part.key]["seconds"] = time.monotonic() - began
            print(f"{part.key}: {found[part.key]}", flush=True)
        return found

    def _ask(self, part: Part, number: int, timeout: float) -> dict[str, Any]:
        worker = self._workers[number]
        if timeout <= 1:
            worker.close()
            return {"failed": "not run: --budget-s was spent before"}
        scratch = self.scratch / f"{number:02d}"
        scratch.mkdir()
        options = {"part": part.name, "shape": part.shape, "device": self.device}
        try:
            found: dict[str, Any] = worker.ask(
                "run", timeout, **options, scratch=str(scratch), limit=timeout - 1
            )
            return found
        except WorkerError as why:
            print("\n".join(worker.log.read_text(errors="replace").splitlines()[-LOG_LINES:]))
            return {"failed": str(why)}
        finally:
            worker.close()
            shutil.rmtree(scratch)


def judged(
    parts: list[Part], found: dict[str, dict[str, Any]], recorded: dict[str, Any]
) -> list[Row]:
    """A row for each part that ran; "verdict" begins with RED where something is wrong."""
    rows = []
    for part in parts:
        own = found[part.key]
        peer = found.get(f"{part.shape}: {part.peer}", {}) if part.peer else {}
        ratio = ""
        if "tokens_per_s" in own and "tokens_per_s" in peer:
            ratio = round(own["tokens_per_s"] / peer["tokens_per_s"], 3)
        record = recorded.get(part.key, {})
        rows.append(
            {
                "shape": part.shape,
                "part": part.name,
                "tokens/s": round(own["tokens_per_s"]) if "tokens_per_s" in own else "",
                "× PEFT": ratio,
                "recorded": record.get("ratio", ""),
                "bound by": bound(own, peer) if ratio else "",
                "s": round(own["seconds"]),
                "verdict": verdict(own, peer, ratio, record)[:LONGEST],
                "note": str(own.get("note", ""))[:60],
            }
        )
    return rows


def bound(own: dict[str, Any], peer: dict[str, Any]) -> str:
    """ "host" if a rate of the two follows the host's speed."""
    shares = (own.get("host_share", 0.0), peer.get("host_share", 0.0))
    return "host" if max(shares) >= HOST_BOUND else "device"


def verdict(
    own: dict[str, Any], peer: dict[str, Any], ratio: object, record: dict[str, Any]
) -> str:
    if "failed" in own:
        return f"RED: {own['failed']}"
    if "skipped" in own:
        return f"skipped: {own['skipped']}"
    losses = own.get("first_loss"), peer.get("first_loss")
    if None not in losses and not abs(losses[0] / losses[1] - 1) <= LOSS_TOLERANCE:
        return f"RED: first loss {losses[0]:.4f}, PEFT's is {losses[1]:.4f}"
    if not ratio:
        return "ok" if "failed" not in peer and "skipped" not in peer else "ok, nothing to compare"
    if "ratio" not in record:
        return "ok, not recorded"
    behind = 1 - float(str(ratio)) / record["ratio"]
    allowed = TOLERANCE[bound(own, peer)]
    if behind > allowed:
        return (
            f"{SLOWER}: {100 * behind:.1f} % behind the record, {100 * allowed:.0f} % are allowed"
        )
    return "ok"


def updated(rows: list[Row], recorded: dict[str, Any], reason: str) -> dict[str, Any]:
    """The records after this run: those that were passed rise; those of rows in red for speed fall, with the reason.

    Raises:
        ValueError: one falls and there is no reason.
    """
    result = dict(recorded)
    for row in rows:
        key, ratio = f"{row['shape']}: {row['part']}", row["× PEFT"]
        before, slower = recorded.get(key, {}), str(row["verdict"]).startswith(SLOWER)
        if not isinstance(ratio, float) or not (slower or str(row["verdict"]).startswith("ok")):
            continue
        was = before.get("was", before.get("ratio", 0.0))
        if slower and not reason:
            raise ValueError(
                f"{key}: {ratio} is less than the recorded {before['ratio']}: --record needs --reason"
            )
        if slower:
            result[key] = {"ratio": ratio, "was": was, "reason": reason}
            continue
        sure = round(ratio / HOSTS, 3) if row["bound by"] == "host" else ratio
        if sure > before.get("ratio", 0.0):
            result[key] = {**before, "ratio": sure} if sure < was else {"ratio": sure}
    return result


def write_records(folder: Path, rows: list[Row], records: dict[str, Any], device: str) -> None:
    """check_gpu.json with the records and the reasons of those that fell, and check_gpu.csv with the run's table."""
    facts = environment(torch.device(device))
    write_csv(folder / "check_gpu.csv", rows, facts)
    text = json.dumps({**facts, "ratios": records}, indent=1, ensure_ascii=False)
    (folder / "check_gpu.json").write_text(text + "\n", encoding="utf-8")


def kind_of(device: str) -> str:
    """The folder of its results: "h200" for "NVIDIA H200", "cpu" without a GPU."""
    if not device.startswith("cuda"):
        return "cpu"
    words = torch.cuda.get_device_name(device).replace("NVIDIA", "").split()
    return words[0].lower()


def read_records(folder: Path) -> dict[str, Any]:
    path = folder / "check_gpu.json"
    if not path.exists():
        return {}
    ratios: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["ratios"]
    return ratios


def build() -> None:
    """Install the tree in place, unless an extension with CUDA is there that is newer than its sources."""
    sources = [ROOT / "setup.py", *(p for p in (ROOT / "csrc").rglob("*") if p.is_file())]
    built = [p.stat().st_mtime for p in (ROOT / "lorakernels").glob("_C*.so")]
    good = f"assert c.build_info()['cuda'] and c.__file__.startswith({str(ROOT)!r})"
    imports = [sys.executable, "-c", f"import lorakernels._C as c; {good}"]
    newest = max(p.stat().st_mtime for p in sources)
    if built and max(built) > newest and not subprocess.run(imports, cwd=ROOT.parent).returncode:
        return
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-build-isolation", "--no-deps"]
    subprocess.run([*pip, "-e", str(ROOT)], check=True)


def serve_parts() -> int:
    """What a worker does: import, then answer."""
    from benchmarks.lib.workers import serve
    from benchmarks.peers.te import te_first_or_hidden

    with te_first_or_hidden(False):  # PEFT would import it
        from benchmarks.lib import check_full

        if torch.cuda.is_available():  # its context and cuBLAS, while another part is measured
            torch.ones(8, 8, device="cuda") @ torch.ones(8, 8, device="cuda")
        serve({"run": check_full.run})
    return 0


def show(rows: list[Row]) -> bool:
    """Print the table; red lines in red on a terminal. Whether there is none."""
    for line in table(rows).splitlines():
        red = "RED: " in line and sys.stdout.isatty()
        print(f"\033[31m{line}\033[0m" if red else line)
    count = sum(str(row["verdict"]).startswith("RED") for row in rows)
    skipped = sum(str(row["verdict"]).startswith("skipped") for row in rows)
    print(f"{len(rows)} parts, {count} red, {skipped} skipped", flush=True)
    return count == 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="what users run, on this GPU, beside PEFT")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--quick", action="store_true", help="the drop-in beside PEFT, in a minute")
    form.add_argument("--full", action="store_true", help="everything, in nine minutes")
    parser.add_argument("--only", nargs="+", metavar="WORD", help="parts whose name holds a WORD")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR")
    parser.add_argument("--record", action="store_true", help="write the ratios down")
    parser.add_argument("--reason", default="", help="why a recorded ratio falls")
    parser.add_argument(
        "--budget-s", type=float, help="default: 240, with --quick 120, with --full 540"
    )
    parser.add_argument("--scratch", type=Path, help="where a folder of 5 GB may be")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def chosen(form: str, only: list[str] | None, device: str) -> list[Part]:
    """Parts of that form; with `only` those it names and the peers they are divided by."""
    parts = ON_GPU if device.startswith("cuda") else ON_CPU
    if form == "quick":
        shape = "1b 1x2048" if parts is ON_GPU else parts[0].shape
        parts = [p for p in parts if p.shape == shape and p.name in QUICK]
    parts = [p for p in parts if form != "short" or not p.full]
    if only is None:
        return parts
    named = [p for p in parts if any(word in p.key for word in only)]
    peers = {f"{p.shape}: {p.peer}" for p in named}
    return [p for p in parts if p in named or p.key in peers]


def main() -> int:
    args, began = arguments(), time.monotonic()
    if args.worker:
        return serve_parts()
    if args.device.startswith("cuda"):
        build()
        print(f"built in {time.monotonic() - began:.0f} s", flush=True)
    form = "full" if args.full else "quick" if args.quick else "short"
    budget = args.budget_s or BUDGET[form]
    parts = chosen(form, args.only, args.device)
    if not parts:
        print(f"no part of this form has a name with {' or '.join(args.only)}", file=sys.stderr)
        return 2
    folder = args.results / kind_of(args.device)
    recorded = read_records(folder)
    with tempfile.TemporaryDirectory(dir=args.scratch) as scratch:
        left = budget - (time.monotonic() - began)
        found = Runner(parts, args.device, left, Path(scratch)).run()
    rows = judged(parts, found, recorded)
    print(f"{time.monotonic() - began:.0f} s of {budget:.0f}")
    good = show(rows)
    if args.record:
        try:
            records = updated(rows, recorded, args.reason)
        except ValueError as error:
            print(f"not recorded: {error}", file=sys.stderr)
            return 1
        write_records(folder, rows, records, args.device)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
