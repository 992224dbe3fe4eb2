# SPDX-License-Identifier: Apache-2.0
"""What no training step over FP8 falls below on this GPU: the libraries' matrix products and attention, and no more.

    python benchmarks/models/bench_floor.py --output DIR [--models 1b 8b 70b] [--seconds S]

The sizes are those of bench_end_to_end.py. A step's products run in one CUDA graph, layer after layer, with random
operands that exist before the clock starts. Nothing is quantized, normed or added up, and there is no LoRA:

    FP8 GEMMs            y of q, k, v together, of o, of gate and up together, of down, by cuBLASLt with fast
                         accumulation; dx of each on a ready Wᵀ, split
    attention            torch's cuDNN, causal, forward and backward, bf16
    head, bf16           logits and dh of all tokens, by cuBLAS
    head, FP8            the same in FP8, by cuBLASLt
    together, …          the GEMMs, attention and one of the heads, as many times as a step has them

All layers share one set of weights, which a layer reads whole and L2 does not hold. Each FP8
product is compared with float64's on 64 rows first; one that is off ends the run. Columns: ms, J and W of steps that
follow each other for some seconds, so that the GPU's power limit acts as in training; "tokens/s ≤" is what these times
allow.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.lib.energy import joules, shown
from benchmarks.lib.rows import Row, arguments, environment, finish, parser
from benchmarks.lib.timing import synchronize
from benchmarks.peers.models import SPECS, Spec

MODELS = ("1b", "8b", "70b")
CHECKED = 64  # rows
ALLOWED = 2**-7  # a rounding to bf16, 2⁻⁹, and what fast accumulation leaves out
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
Work = Callable[[], Any]


class Shape(NamedTuple):
    """Of one FP8 product pair: y [M, N] = x [M, K] Wᵀ, dx [M, K] = dy W."""

    m: int
    n: int
    k: int


def random(device: torch.device, *size: int, dtype: torch.dtype) -> Tensor:
    made = torch.empty(size, dtype=dtype, device=device)
    for part in made.split(4096):  # normal_ knows no FP8
        part.copy_(torch.randn(part.shape, device=device))
    return made


def products(shape: Shape, device: torch.device) -> Work:
    """Both FP8 products of a layer's linear, by cuBLASLt."""
    m, n, k = shape
    one = torch.ones((), device=device)
    x, dy = random(device, m, k, dtype=E4M3), random(device, m, n, dtype=E5M2)
    w = random(device, n, k, dtype=E4M3)
    wt = w.t().contiguous()
    y, dx = (torch.empty(m, size, dtype=torch.bfloat16, device=device) for size in (n, k))

    def run() -> None:
        scales = {"scale_a": one, "scale_b": one, "out_dtype": torch.bfloat16}
        torch._scaled_mm(x, w.t(), **scales, use_fast_accum=True, out=y)
        torch._scaled_mm(dy, wt.t(), **scales, use_fast_accum=False, out=dx)

    run()
    check(y, x[:CHECKED].double() @ w.double().t())
    check(dx, dy[:CHECKED].double() @ w.double())
    return run


def check(found: Tensor, expected: Tensor) -> None:
    """That what is timed multiplies these operands."""
    error = float((found[:CHECKED].double() - expected).norm() / expected.norm())
    if not error <= ALLOWED:
        raise RuntimeError(f"a product is off by {error:.2g} of its norm, allowed {ALLOWED:.2g}")


def head_bf16(m: int, vocabulary: int, hidden: int, device: torch.device) -> Work:
    h = random(device, m, hidden, dtype=torch.bfloat16)
    w = random(device, vocabulary, hidden, dtype=torch.bfloat16)
    z, dh = torch.empty(m, vocabulary, dtype=h.dtype, device=device), torch.empty_like(h)

    def run() -> None:
        torch.mm(h, w.t(), out=z)
        torch.mm(z, w, out=dh)

    return run


def attention(spec: Spec, device: torch.device) -> Work:
    s = spec.shape
    heads, kv, hidden = s["num_attention_heads"], s["num_key_value_heads"], s["hidden_size"]
    dim = hidden // heads
    q, k, v = (
        random(device, spec.batch * spec.length, h * dim, dtype=torch.bfloat16)
        .view(spec.batch, spec.length, h, dim)
        .transpose(1, 2)
        .requires_grad_()
        for h in (heads, kv, kv)
    )
    dout = torch.randn_like(q)

    def run() -> None:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        torch.autograd.grad(out, (q, k, v), dout)

    return run


def parts(spec: Spec, device: torch.device) -> dict[str, Work]:
    s, m = spec.shape, spec.batch * spec.length
    hidden, ffn, layers = s["hidden_size"], s["intermediate_size"], s["num_hidden_layers"]
    qkv = hidden + 2 * s["num_key_value_heads"] * (hidden // s["num_attention_heads"])
    sizes = [(qkv, hidden), (hidden, hidden), (2 * ffn, hidden), (hidden, ffn)]
    linears = [products(Shape(m, n, k), device) for n, k in sizes]
    attend = attention(spec, device)
    bf16 = head_bf16(m, s["vocab_size"], hidden, device)
    fp8 = products(Shape(m, s["vocab_size"], hidden), device)

    def gemms() -> None:
        for _ in range(layers):
            for linear in linears:
                linear()

    def attentions() -> None:
        for _ in range(layers):
            attend()

    def together(head: Work) -> Work:
        def run() -> None:
            for _ in range(layers):
                for linear in linears:
                    linear()
                attend()
            head()

        return run

    return {
        "FP8 GEMMs": gemms,
        "attention": attentions,
        "head, bf16": bf16,
        "head, FP8": fp8,
        "together, head in bf16": together(bf16),
        "together, head in FP8": together(fp8),
    }


def captured(work: Work) -> Work:
    for _ in range(2):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def measured(step: Work, device: torch.device, seconds: float) -> tuple[float, float]:
    """(seconds, joules) of a step among steps that follow each other; the first half of the time is not counted."""
    counted = 0
    for warm in (True, False):
        begun, before, counted = time.perf_counter(), joules(device), 0
        while time.perf_counter() - begun < seconds:
            step()
            counted += 1
            if warm or counted % 4 == 0:
                synchronize(device)
        synchronize(device)
    took = time.perf_counter() - begun
    return took / counted, (joules(device) - before) / counted


def rows_of(model: str, device: torch.device, seconds: float) -> list[Row]:
    spec, found = SPECS[model], []
    tokens = spec.batch * spec.length
    for name, work in parts(spec, device).items():
        took, energy = measured(captured(work), device, seconds)
        row: Row = {"model": spec.name, "tokens": f"{spec.batch}x{spec.length}", "part": name}
        row["check"] = "ok"
        row |= {"ms": round(took * 1e3, 2), "J": shown(energy, 2), "W": shown(energy / took, 0)}
        row["tokens/s ≤"] = round(tokens / took) if name.startswith("together") else ""
        found.append(row)
    return found


def main() -> int:
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    options.add_argument("--seconds", type=float, default=1.5, help="of each part, twice")
    args, device = arguments(options)
    if device.type != "cuda":
        options.error(f"--device must be a GPU with FP8 tensor cores, found {device}")
    rows = [row for model in args.models for row in rows_of(model, device, args.seconds)]
    return finish("floor", rows, environment(device), args.output)


if __name__ == "__main__":
    raise SystemExit(main())
