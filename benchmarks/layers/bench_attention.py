# SPDX-License-Identifier: Apache-2.0
"""Attention of fused layers: torch's backends and cuDNN's graphs, for rows and for documents packed into one row.

    python benchmarks/layers/bench_attention.py --output DIR [--shapes 4096x32x8x128 …] [--providers NAME …]

A shape is T × H × Hk × D, one row; q, k and v are views of one matrix. `documents` is "dense" for a causal row, else
the number of documents packed into it, of random lengths. `longest` is what attention is told: the longest document, or
the row, as `lorakernels finetune` says. Each provider is what a fused layer calls. It is checked against float64 before
it is timed. What does not take a case says why. Rows are printed as they are measured: a fault of a GPU ends them.

    passes      "forward", without gradients, and "both" with backward; TFLOP/s counts half of each document's T² pairs
    first ms    the first call of both passes, in which cuDNN builds its graphs
    peak MiB    memory of both passes beyond what is there before
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor

from benchmarks.lib.op_bench import Bench, Option, Setting, main
from benchmarks.lib.rows import Row
from benchmarks.lib.timing import NOT_TIMED
from lorakernels.autograd.attention.choose import attend, attend_packed, choose, choose_packed

GPU_SHAPES = ["4096x32x8x128", "8192x64x8x128", "4096x32x8x64", "8192x32x8x128"]
CPU_SHAPES = ["48x4x2x32"]
DOCUMENTS = ["dense", "1", "8", "64"]
# name → (backend, whether deterministic algorithms are asked for)
PROVIDERS = {
    "auto": ("auto", False),
    "flash": ("flash", False),
    "cudnn_graph": ("cudnn_graph", False),
    "fp8": ("fp8", False),
    "auto, deterministic": ("auto", True),
    "cudnn_graph, deterministic": ("cudnn_graph", True),
}
BOUND = 2.0**-6  # P and dP are rounded to bf16, as in tests/autograd/test_attention.py
FP8_BOUND = 0.2  # q, k, v, P and out are rounded to e4m3, each element by up to 2^-4 of itself


class Case(NamedTuple):
    """q [1, H, T, D], k and v [1, Hk, T, D], dout as q, and the documents' lengths; [T] and no starts if dense."""

    tensors: tuple[Tensor, Tensor, Tensor]
    dout: Tensor
    lengths: list[int]
    starts: Tensor | None
    longest: int

    @property
    def scale(self) -> float:
        return float(self.dout.shape[3] ** -0.5)

    @property
    def operations(self) -> float:
        """Floating point operations of forward; backward has 2.5 × as many."""
        return sum(2.0 * n * n for n in self.lengths) * self.dout.shape[1] * self.dout.shape[3]


def lengths_of(tokens: int, documents: int) -> list[int]:
    """Random lengths, of which none is nought if there are tokens enough."""
    weights = torch.rand(documents, generator=torch.Generator().manual_seed(documents)) + 0.25
    ends = (weights.cumsum(0) / weights.sum() * tokens).round().long().tolist()
    return [b - a for a, b in pairwise([0, *ends[:-1], tokens])]


def cases(shape: str, documents: str, device: torch.device) -> Iterator[tuple[str, Case]]:
    """(what attention is told of the longest document, the case)."""
    tokens, heads, kv_heads, dim = map(int, shape.split("x"))
    generator = torch.Generator(device).manual_seed(7)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    counts = [heads, kv_heads, kv_heads]
    size = (1, tokens, heads + sum(counts), dim)
    drawn = torch.randn(size, generator=generator, device=device).to(dtype)
    parts = drawn[:, :, : sum(counts)].contiguous().split(counts, 2)
    q, k, v = (t.transpose(1, 2).requires_grad_() for t in parts)
    dout = drawn[:, :, sum(counts) :].contiguous().transpose(1, 2)
    if documents == "dense":
        yield "row", Case((q, k, v), dout, [tokens], None, tokens)
        return
    lengths = lengths_of(tokens, int(documents))
    starts = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
    for name, longest in {"row": tokens, "document": max(lengths)}.items():
        if name == "row" or longest < tokens:
            yield name, Case((q, k, v), dout, lengths, starts, longest)


def forward(case: Case, backend: str) -> Tensor:
    q, k, v = case.tensors
    if case.starts is None:
        return attend(choose(backend, q, k, v, None, True), q, k, v, None, True, case.scale)
    name = choose_packed(backend, q, k, v)
    return attend_packed(name, q, k, v, case.starts, case.longest, case.scale)


def without_gradients(case: Case, backend: str) -> Tensor:
    with torch.no_grad():
        return forward(case, backend)


def both(case: Case, backend: str) -> list[Tensor]:
    out = forward(case, backend)
    return [out.detach(), *torch.autograd.grad(out, case.tensors, case.dout)]


def expected(case: Case) -> list[Tensor]:
    """In float64, document by document and by heads of k, out and the gradients in the tensors' shapes."""
    q, k, v = (t.detach() for t in case.tensors)
    n = q.shape[1] // k.shape[1]
    found = [torch.empty_like(t, dtype=torch.float64) for t in (q, q, k, v)]
    at = 0
    for length in case.lengths:
        for head in range(k.shape[1]):
            rows, of_q = slice(at, at + length), slice(head * n, head * n + n)
            own = [x[0, of_q if x is q else slice(head, head + 1), rows] for x in (q, k, v)]
            wide = [x.double().requires_grad_() for x in own]
            future = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
            scores = (wide[0] @ wide[1].mT * case.scale).masked_fill(future, float("-inf"))
            out = scores.softmax(-1) @ wide[2]
            grads = torch.autograd.grad(out, wide, case.dout[0, of_q, rows].double())
            of = (of_q, of_q, slice(head, head + 1), slice(head, head + 1))
            for whole, which, part in zip(found, of, (out.detach(), *grads), strict=True):
                whole[0, which, rows] = part
        at += length
    return found


def fault(found: list[Tensor], right: list[Tensor], bound: float = BOUND) -> str:
    """What is wrong, "" if nothing is."""
    for name, a, b in zip(("out", "dq", "dk", "dv"), found, right, strict=True):
        error = float((a.double() - b).norm() / b.norm())
        if not error < bound:
            return f"{name} is {error:.1e} from float64"
    return ""


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    memory = torch.utils.deterministic
    fill, before = memory.fill_uninitialized_memory, torch.are_deterministic_algorithms_enabled()
    memory.fill_uninitialized_memory = False
    torch.use_deterministic_algorithms(wanted)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        memory.fill_uninitialized_memory = fill


def measured(case: Case, backend: str, right: list[Tensor], setting: Setting) -> Iterator[Row]:
    """A row for each pass, or one that says what is wrong."""
    on_gpu = setting.device.type == "cuda"
    nothing: Row = {
        "passes": "",
        "check": "",
        **NOT_TIMED,
        "TFLOP/s": "",
        "first ms": "",
        "peak MiB": "",
    }
    before = 0
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    start = time.perf_counter()
    try:
        found = both(case, backend)
        first = round((_done(setting.device) - start) * 1e3, 1)
    except (ValueError, RuntimeError) as error:
        yield {**nothing, "check": f"not taken: {' '.join(str(error).split())[:300]}"}
        return
    peak: object = (torch.cuda.max_memory_allocated() - before) >> 20 if on_gpu else ""
    if wrong := fault(found, right, FP8_BOUND if backend == "fp8" else BOUND):
        yield {**nothing, "check": f"WRONG: {wrong}"}
        return
    del found
    passes: dict[str, tuple[Callable[[Case, str], object], float]] = {
        "forward": (without_gradients, 1.0),
        "both": (both, 3.5),
    }
    for name, (step, times) in passes.items():
        columns = setting.time(partial(step, case, backend))
        ms = columns["ms"]
        rate: object = (
            round(case.operations * times / ms / 1e9, 1) if isinstance(ms, float) and ms else ""
        )
        own: Row = {"TFLOP/s": rate, "first ms": first, "peak MiB": peak}
        yield {"passes": name, "check": "ok", **columns, **own}


def _done(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def rows(setting: Setting) -> Iterator[Row]:
    args = setting.args
    until = time.perf_counter() + args.seconds
    for shape in args.shapes:
        for documents in args.documents:
            right: list[Tensor] = []
            for longest, case in cases(shape, documents, setting.device):
                right = right or expected(case)
                for provider in args.providers:
                    if time.perf_counter() > until:
                        return
                    backend, exact = PROVIDERS[provider]
                    named: Row = {"shape": shape, "documents": documents, "longest": longest}
                    with deterministic(exact):
                        for row in measured(case, backend, right, setting):
                            print(*named.values(), provider, *row.values(), flush=True)
                            yield {**named, "provider": provider, **row}


BENCH = Bench(
    "attention",
    "Attention of fused layers: torch's backends and cuDNN's graphs",
    (
        Option("shapes", GPU_SHAPES, CPU_SHAPES, metavar="TxHxHkxD"),
        Option("documents", DOCUMENTS, ["dense", "1", "3"], metavar="N|dense"),
        Option("providers", list(PROVIDERS), choices=PROVIDERS),
        Option("seconds", 600.0, help="after which no row begins"),
    ),
    rows,
    floor=False,
)

if __name__ == "__main__":
    sys.exit(main(BENCH))
