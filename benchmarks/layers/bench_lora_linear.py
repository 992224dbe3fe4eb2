# SPDX-License-Identifier: Apache-2.0
"""LoRALinear, forward and forward + backward, against its peers.

    python benchmarks/layers/bench_lora_linear.py --output DIR [--shapes 8192x8192x8192 …] [--ranks 16 …]
    python benchmarks/layers/bench_lora_linear.py --output DIR --full [--budget-s 150]

The layers are those of `peers/`. All see the same x, dy, W, bias, adapter and dropout probability. Each is checked
against float64 before it is timed. Without dropout, y, dx, dA and dB are compared. With dropout, W is 0: the zeros of
dx are then the mask that y, dA and dB must have used too. A layer that misses is not timed. The exit code is 1 if a
result is wrong or ours raises. A peer that is not installed, or that raises, says so in its row.

"ms" is the device's time while nothing waits for the host. A layer by itself takes the longer of that and "CPU µs".
All peers of a shape are timed in order and then in reverse order. A steady drift of the GPU's clock then cancels in
the ratios. A graphed peer's x is the graph's own. FLOPs are the algorithm's, without a gradient of W:

    forward 2MNK, dx 2MNK, LoRA 6MR(K + N)

"saved MB" is what a forward leaves allocated besides y; a fresh x counts if it is kept. "peak MB" is the most during
forward and backward, with that x and the gradients. Neither counts parameters. Graphs own their memory and have
neither. "÷ gemms" divides by cuBLASLt's two FP8 products alone, on ready operands and without LoRA.

`--full` times every shape and rank, by default with the providers of `SWEEP` only, in one order only. A layer is built
and checked once for a weight and a rank, at the fewest rows, and then given the other x and dy. The rest of
`--budget-s` is spread over the timings that are left. Each takes three samples at least, so a slow GPU exceeds the
budget.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from benchmarks.lib.rows import Row, arguments, environment, finish, parser, ratio
from benchmarks.lib.timing import NOT_TIMED, Timing, heat, repetitions_within, samples_of
from benchmarks.peers import PEERS, Case, Peer, Unavailable
from benchmarks.peers.base import dropout_fault, exact, fault, make_case

CPU_SHAPES = ["256x512x512"]
SHORT = [("4096x4096x4096", 16), ("8192x8192x8192", 16), ("8192x8192x8192", 64)]
# N x K: square, Llama-2-70B's projections (fused q,k,v; proj; gate and up; down) and their shards of 4
FULL_WEIGHTS = [
    (4096, 4096),
    (8192, 8192),
    (10240, 8192),
    (57344, 8192),
    (8192, 28672),
    (2560, 8192),
    (8192, 2048),
    (14336, 8192),
    (8192, 7168),
]
FULL_ROWS, FULL_RANKS = (1024, 2048, 4096, 8192), (8, 16, 64, 128)
SECONDS = 0.1  # for one of the four timings of a peer
SWEEP = (
    "cublaslt fp8, gemms only",
    "te fp8, no lora",
    "te fp8 + lora",
    "peft bf16",
    "ours fp8",
)
SHARE = 0.3  # of a timing's time that its samples are, beside warm-up, host samples and overwriting the L2 cache
RATIOS = {
    "÷ gemms": "cublaslt fp8, gemms only",
    "÷ te base": "te fp8, no lora",
    "÷ te + lora": "te fp8 + lora",
    "÷ te graphed": "te fp8 + lora, graphed",
    "÷ te op-fuser": "te op-fuser lora",
    "÷ peft": "peft bf16",
}
Calls = dict[str, list[tuple[list[float], list[float]]]]


Group = tuple[str, list[int], int]  # N x K, rows, rank


class Budget:
    """Seconds for the samples of one timing, so that `timings` of them end by `seconds` from now."""

    def __init__(self, seconds: float, timings: int) -> None:
        self.end, self.timings = time.perf_counter() + seconds, timings

    def share(self) -> float:
        left = max(0.0, self.end - time.perf_counter())
        share = min(SECONDS, SHARE * left / max(self.timings, 1))
        self.timings -= 1
        return share


def groups(args: argparse.Namespace, device: torch.device) -> Iterator[Group]:
    """The problems, those of one weight and rank together."""
    if args.full:
        for (n, k), rank in product(FULL_WEIGHTS, FULL_RANKS):
            yield f"{n}x{k}", list(FULL_ROWS), rank
        return
    chosen = SHORT
    if args.shapes or args.ranks or device.type == "cpu":
        shapes = args.shapes or (CPU_SHAPES if device.type == "cpu" else ["8192x8192x8192"])
        chosen = list(product(shapes, args.ranks or [16]))
    for shape, rank in chosen:
        m, _, weight = shape.partition("x")
        yield weight, [int(m)], rank


def checked(
    name: str, case: Case, truths: dict[bool, tuple[torch.Tensor, ...]]
) -> tuple[Peer | None, Row]:
    """(the peer, ready to be timed, or None; its columns "check" and "error")."""
    try:
        peer = PEERS[name](case.without_dropout())
        if peer.has_lora not in truths:
            truths[peer.has_lora] = exact(case, peer.has_lora)
        wrong, error = fault(peer, truths[peer.has_lora])
        if not wrong and peer.has_lora and case.p > 0:
            del peer
            peer = PEERS[name](case.without_base())
            wrong = dropout_fault(peer)
            wrong = wrong and f"dropout: {wrong}"
        if wrong:
            return None, {"check": f"WRONG: {wrong}", "error": f"{error:.1e}"}
        del peer
        peer = PEERS[name](case)
        peer.warm_up()
        return peer, {"check": "ok", "error": f"{error:.1e}"}
    except Unavailable as reason:
        return None, {"check": str(reason), "error": ""}
    except Exception as problem:  # a peer's own limits are its row's business; ours are wrong
        kind = "WRONG" if name.startswith("ours") else "raised"
        message = f"{kind}: {type(problem).__name__}: {problem}".partition("\n")[0][:160]
        return None, {"check": message, "error": ""}


def memory(peer: Peer) -> Row:
    """MB that a forward leaves behind, and the most during forward and backward."""
    if not (peer.eager and peer.x.is_cuda):
        return {"saved MB": "", "peak MB": ""}
    device = peer.x.device
    before = torch.cuda.memory_allocated(device)
    x = peer.x.clone()  # not a leaf: freed here unless the layer keeps it
    torch.cuda.reset_peak_memory_stats(device)
    y = peer.forward(x)
    del x
    saved = torch.cuda.memory_allocated(device) - before - y.numel() * y.element_size()
    torch.autograd.grad(y, (peer.x, *peer.adapters), peer.dy)
    peak = torch.cuda.max_memory_allocated(device) - before
    return {"saved MB": round(saved / 1e6, 3), "peak MB": round(peak / 1e6, 3)}


def timed(
    peers: dict[str, Peer],
    args: argparse.Namespace,
    device: torch.device,
    budget: Budget | None = None,
) -> dict[str, Row]:
    """Columns of the peers, each timed once on the way there and, without a budget, once on the way back."""
    runs: dict[str, Calls] = {name: {"forward": [], "step": []} for name in peers}
    heat(device, 0.5 if budget is None else 0.02)
    for name in [*peers, *([] if budget else reversed(peers))]:
        for what, call in (("forward", peers[name].forward_only), ("step", peers[name].step)):
            seconds = budget.share() if budget else SECONDS
            often = repetitions_within(seconds, call, device, args.repetitions)
            runs[name][what].append(samples_of(call, device, often))
    result = {}
    for name, run in runs.items():
        forward = Timing.of_samples(run["forward"]).columns()
        step = Timing.of_samples(run["step"]).columns()
        result[name] = {**{f"fwd {key}": value for key, value in forward.items()}, **step}
    return result


def bench_group(
    group: Group, args: argparse.Namespace, device: torch.device, budget: Budget | None = None
) -> list[Row]:
    """The rows of all problems of one weight and rank; the layers are made and checked for the first."""
    weight, many_rows, rank = group
    case = make_case(f"{many_rows[0]}x{weight}", rank, args.dropout, device)
    truths: dict[bool, tuple[torch.Tensor, ...]] = {}
    peers, heads = {}, {}
    for name in args.providers:
        peer, heads[name] = checked(name, case, truths)
        if peer is not None:
            peers[name] = peer
    truths.clear()
    rows: list[Row] = []
    for m in many_rows:
        if m != many_rows[0]:
            case = case.with_rows(m)
            for peer in peers.values():
                peer.take(case)
        rows += bench_case(case, peers, heads, args, timed(peers, args, device, budget))
    return rows


def bench_case(
    case: Case,
    peers: dict[str, Peer],
    heads: dict[str, Row],
    args: argparse.Namespace,
    columns: dict[str, Row],
) -> list[Row]:
    untimed = {**{f"fwd {key}": "" for key in NOT_TIMED}, **NOT_TIMED}
    by_name = {name: columns.get(name, untimed) for name in args.providers}
    (m, n, k), rank = case.shape, case.rank
    rows: list[Row] = []
    for name in args.providers:
        peer, ms = peers.get(name), by_name[name]["ms"]
        flops = 4 * m * n * k + (6 * m * rank * (k + n) if not peer or peer.has_lora else 0)
        rows.append(
            {
                "shape MxNxK": f"{m}x{n}x{k}",
                "provider": name,
                "adapter": peer.adapter_dtype if peer else "",
                "rank": rank,
                "dropout": args.dropout,
                **heads[name],
                **by_name[name],
                **(memory(peer) if peer else {"saved MB": "", "peak MB": ""}),
                "weight B/param": ratio(peer.weight_bytes() if peer else None, n * k),
                "TFLOP/s": ratio(flops / 1e9, ms),
                **{key: ratio(ms, by_name.get(of, NOT_TIMED)["ms"]) for key, of in RATIOS.items()},
            }
        )
    return rows


def main() -> int:
    options = parser("LoRALinear, forward and forward + backward, against its peers")
    options.add_argument("--shapes", nargs="+", metavar="MxNxK")
    options.add_argument("--ranks", nargs="+", type=int)
    options.add_argument("--dropout", type=float, default=0.1)
    options.add_argument("--providers", nargs="+", choices=list(PEERS), help="default: all")
    options.add_argument("--full", action="store_true", help="every shape and rank, those of SWEEP")
    options.add_argument("--budget-s", type=float, default=150.0, help="of --full, about")
    args, device = arguments(options, on_gpu=20)
    args.providers = args.providers or list(SWEEP if args.full else PEERS)
    if args.full and (graphs := [name for name in args.providers if "graphed" in name]):
        options.error(f"--full gives a layer other rows, which no graph takes, found {graphs[0]}")
    started, chosen = time.perf_counter(), list(groups(args, device))
    rows: list[Row] = []
    for index, group in enumerate(chosen):
        budget = None
        if args.full:
            ahead = sum(len(rows_of) for _, rows_of, _ in chosen[index:])
            left = args.budget_s - (time.perf_counter() - started)
            budget = Budget(left, 2 * len(args.providers) * ahead)
        rows += bench_group(group, args, device, budget)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    name = "lora_linear_full" if args.full else "lora_linear"
    return finish(name, rows, environment(device), args.output)


if __name__ == "__main__":
    sys.exit(main())
