# SPDX-License-Identifier: Apache-2.0
"""All that is measured on one node of several GPUs, by one command.

    python benchmarks/parallel/node.py --output DIR [--gpus 8] [--parts 405b layouts …] [--budget-s S] [--list]

Each part is one benchmark of this folder, or a test, on the first GPUs that are free, and ends within its own time.
Parts run in the order of PARTS, several at once where they leave GPUs free. DIR has a folder for each part, with its
tables, and its log beside it. A part that fails, or is ended, leaves the others alone. What would not end within the
budget is named and not started. The exit code is 1 if a part failed or was ended.

    405b          Llama-3.1-405B, one base for 8 GPUs, 1 x 8192 tokens each; "405b on 4": 1 x 4096
    s003          the same model, rank 64 on all layers, 4 x 1024 tokens, ShardedAdamW; "s003 on 4": 27 % on the host
    layouts       all layers of Llama-2-70B, 8 rows a step: data parallel, one base, and tp x cp
    quality       loss curves of 300 steps in each layout, beside one GPU's
    killed        a killed rank ends all others within 60 s, and half of the ranks go on in another layout
    128k          all layers of Llama-2-70B, one row of 131,072 tokens over 4 GPUs; "packed": four documents
    strong N      8 layers of 70B and all of 8B over N GPUs, 8 rows a step: what report/scaling.py joins
    tensor        tp over 4 GPUs with its variants, of 70B's widths and of 1B's
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PORT = 29700  # of the first part; each has its own
PATIENCE = 15.0  # seconds that a part has to end after it is told to
ON_ONE_HOST = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64",
}


@dataclass(frozen=True)
class Part:
    """One benchmark. `seconds` is its limit. `words` follow torchrun, or Python's `-m` if they begin with "pytest"."""

    name: str
    gpus: int
    seconds: float
    words: str

    def command(self, folder: Path, port: int) -> list[str]:
        words = shlex.split(self.words)
        if words[0] == "pytest":
            return [sys.executable, "-m", *words]
        script = str(ROOT / "benchmarks" / "parallel" / words[0])
        start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(self.gpus)]
        return [*start, "--master-port", str(port), script, "--output", str(folder), *words[1:]]


LAYOUTS = 'dp sharded "tp 4 x cp 2" "tp 2" "tp 4" "cp 2" "tp 8" "cp 8" "sharded x cp 2"'
STRONG = "bench_scaling.py --model 70b 8b --layers 8 0 --rows 8 --repetitions 3 --warm-up 1"
PARTS = (
    Part("405b", 8, 150, "bench_sharded_base.py --preset 405b"),
    Part("s003", 8, 130, "bench_sharded_base.py --preset s003"),
    Part(
        "layouts",
        8,
        360,
        f"bench_scaling.py --model 70b --rows 8 --repetitions 3 --warm-up 1 --budget-s 325 --ways {LAYOUTS}",
    ),
    Part("quality", 8, 160, "quality_ranks.py --layers 4 --steps 300"),
    Part("killed", 8, 150, "pytest -q -s tests/train/test_ranks_that_end.py -k one_of_all_gpus"),
    Part("128k", 4, 330, "bench_context.py --repetitions 2 --budget-s 300 --ways alone cp"),
    Part("strong 4", 4, 130, f"{STRONG} --budget-s 100 --ways dp sharded tp cp"),
    Part("strong 2", 2, 130, f"{STRONG} --budget-s 100 --ways dp sharded tp cp"),
    Part("strong 1", 1, 130, f"{STRONG} --budget-s 100 --ways alone"),
    Part("strong 8", 8, 115, f"{STRONG} --budget-s 85 --ways dp tp cp sharded"),
    Part(
        "tensor",
        4,
        110,
        "bench_scaling.py --model 70b 1b --layers 8 0 --repetitions 40 --budget-s 75 "
        '--ways alone tp "tp, in turn" "tp, eager" "tp, frozen" "alone, frozen"',
    ),
    Part(
        "packed",
        4,
        150,
        'bench_context.py --repetitions 2 --budget-s 95 --ways alone "cp, documents 32768"',
    ),
    Part("405b on 4", 4, 130, "bench_sharded_base.py --preset 405b --length 4096"),
    Part("s003 on 4", 4, 200, "bench_sharded_base.py --preset s003 --offload 0.27 --spare 0.05"),
)


class Running:
    """A part that was started."""

    def __init__(self, part: Part, gpus: Sequence[int], output: Path, port: int) -> None:
        self.part, self.gpus, self.began = part, tuple(gpus), time.monotonic()
        name = part.name.replace(" ", "_")
        self.log = output / f"{name}.log"
        environment = {**ON_ONE_HOST, **os.environ}
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                part.command(output / name, port),
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env=environment,
                start_new_session=True,  # so that all of its processes can be ended together
            )

    def ended(self) -> str | None:
        """What became of it; None while it runs within its time. One that takes longer is ended."""
        code, took = self.process.poll(), time.monotonic() - self.began
        if code is None and took <= self.part.seconds:
            return None
        if code is None:
            self.end()
            return f"ended after its {self.part.seconds:.0f} s"
        return f"{'ok' if code == 0 else f'exit code {code}'}, {took:.0f} s"

    def end(self) -> None:
        for number, patience in ((signal.SIGTERM, PATIENCE), (signal.SIGKILL, None)):
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(patience)
                return


def run_all(
    parts: Iterable[Part], gpus: int, output: Path, budget: float = float("inf")
) -> dict[str, str]:
    """{name: what became of it}. Each is printed as it ends."""
    output.mkdir(parents=True, exist_ok=True)
    waiting, running, found = list(parts), list[Running](), dict[str, str]()
    free, until, port = set(range(gpus)), time.monotonic() + budget, PORT

    def say(name: str, what: str) -> None:
        found[name] = what
        print(f"{name}: {what}", flush=True)

    try:
        while waiting or running:
            for part in list(waiting):
                if part.gpus > gpus:
                    say(part.name, f"not run: it needs {part.gpus} GPUs of {gpus}")
                elif time.monotonic() + part.seconds > until:
                    say(part.name, f"not run: its {part.seconds:.0f} s are more than is left")
                elif part.gpus <= len(free):
                    own = sorted(free)[: part.gpus]
                    free -= {*own}
                    running.append(Running(part, own, output, port))
                    port += 1
                else:
                    break  # in order: a smaller one behind it would make it wait
                waiting.remove(part)
            for one in list(running):
                what = one.ended()
                if what is not None:
                    running.remove(one)
                    free |= {*one.gpus}
                    say(one.part.name, what)
            time.sleep(0.1)
    finally:
        for one in running:
            one.end()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="all that is measured on one node")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR")
    parser.add_argument("--gpus", type=int, help="the first of the node; default: all")
    parser.add_argument("--parts", nargs="+", choices=[part.name for part in PARTS])
    parser.add_argument("--budget-s", type=float, default=float("inf"))
    parser.add_argument("--list", action="store_true", help="print the commands, and run none")
    args = parser.parse_args()
    parts = [part for part in PARTS if args.parts is None or part.name in args.parts]
    if args.list:
        for part in parts:
            command = part.command(args.output / part.name.replace(" ", "_"), PORT)
            print(f"{part.name}, {part.gpus} GPUs, {part.seconds:.0f} s: {shlex.join(command)}")
        return 0
    if args.gpus is None:
        import torch

        args.gpus = torch.cuda.device_count()
    found = run_all(parts, args.gpus, args.output, args.budget_s)
    return 1 if any(what.startswith(("exit", "ended")) for what in found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
