# SPDX-License-Identifier: Apache-2.0
"""dx = dy W + mask ⊙ (ds A) / (1 − p), against cuBLASLt's e5m2 × e4m3 product without LoRA on a ready transposed W.

    python benchmarks/ops/bench_fp8_grad_input.py --output DIR [--shapes 8192x8192x8192 …] [--ranks 16 64] [--p 0 0.1]

    2MNK + 2MKR operations; shapes are M x N x K, and N is what the product sums over

"cublaslt, fast" and ", split" are `torch._scaled_mm` with either accumulation and no LoRA; "pytorch" is the split one
on a ready Wᵀ, then the LoRA product, the mask and the sum. "ours, single" has one copy of W, "ours, both" Wᵀ beside
it. Every dx is compared with float64's on 64 rows, under reference.py's mask, before it is timed: "error" is
relative, in the Frobenius norm, and more than twice that of "cublaslt, split" is WRONG and exit code 1 (cuBLASLt's
fast accumulation is shown, not judged). An H200 under load lowers its clock within a second: "÷ cublaslt" divides by
the mean of two runs of "cublaslt, split", one before and one after the provider.

"mask given" is what a layer's backward does: `quantize_grad_and_mask` has drawn the mask already, a bit an element,
which is read here. "ours, single" and "ours, both" draw it themselves, as where dA is not wanted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor

from benchmarks.lib.common import (
    NOT_TIMED,
    Row,
    arguments,
    environment,
    finish,
    heat,
    parser,
    ratio,
    time_of,
)
from lorakernels import ops, reference

GPU_SHAPES = [
    "4096x4096x4096",
    "8192x8192x8192",
    "8192x10240x8192",
    "2048x8192x8192",
    "8192x8192x28672",
    "8192x28672x8192",
]
CPU_SHAPES = ["32x64x128"]
CHECKED_ROWS, SITE = 64, 5
E5M2 = torch.float8_e5m2


@dataclass
class Inputs:
    dy: Tensor
    dy_scale_inv: Tensor
    weight: Tensor
    weight_t: Tensor
    weight_scale_inv: Tensor
    ds: Tensor
    lora_A: Tensor
    slot: Tensor | None
    p: float
    dropped: Tensor | None = None
    out_dtype: torch.dtype = torch.bfloat16


def make_inputs(shape: str, rank: int, p: float, device: torch.device) -> Inputs:
    m, n, k = map(int, shape.split("x"))
    generator = torch.Generator(device).manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=device)

    one = torch.ones(1, device=device)
    weight = normal(n, k).to(reference.E4M3).view(torch.uint8)
    i = Inputs(
        dy=(normal(m, n) * 1024).to(E5M2).view(torch.uint8),
        dy_scale_inv=one / 1024,
        weight=weight,
        weight_t=weight.t().contiguous(),
        weight_scale_inv=one / n**0.5,
        ds=normal(m, rank).bfloat16(),
        lora_A=normal(rank, k) / rank**0.5,
        slot=torch.tensor([12345, 678], device=device) if p > 0 else None,
        p=p,
    )
    if p > 0:
        i.dropped = reference.dropped_bits(reference.drawn_mask(i.slot, p, SITE, m, k))
    return i


def cublaslt(i: Inputs, fast: bool) -> Tensor:
    return torch._scaled_mm(
        i.dy.view(E5M2),
        i.weight_t.view(reference.E4M3).t(),
        scale_a=i.dy_scale_inv,
        scale_b=i.weight_scale_inv,
        out_dtype=i.out_dtype,
        use_fast_accum=fast,
    )


def pytorch(i: Inputs) -> Tensor:
    dx, branch = cublaslt(i, False), i.ds @ i.lora_A.to(i.ds.dtype)
    if i.slot is not None:
        keep = reference.drawn_mask(i.slot, i.p, SITE, *dx.shape)
        branch = torch.where(keep, branch, 0.0) * reference.keep_scale(i.p)
    return dx.add_(branch)


def through_op(i: Inputs, both: bool, given: bool = False) -> Tensor:
    return ops.fp8_grad_input(
        i.dy,
        i.dy_scale_inv,
        E5M2,
        i.weight,
        i.weight_scale_inv,
        i.weight_t if both else None,
        i.ds,
        i.lora_A,
        i.slot,
        i.p,
        SITE,
        i.out_dtype,
        dropped=i.dropped if given else None,
    )


PROVIDERS: dict[str, tuple[Callable[[Inputs], Tensor], bool]] = {  # and whether it has LoRA
    "cublaslt, split": (lambda i: cublaslt(i, False), False),
    "cublaslt, fast": (lambda i: cublaslt(i, True), False),
    "ours, single": (lambda i: through_op(i, False), True),
    "ours, both": (lambda i: through_op(i, True), True),
    "ours, single, mask given": (lambda i: through_op(i, False, given=True), True),
    "ours, both, mask given": (lambda i: through_op(i, True, given=True), True),
    "pytorch": (pytorch, True),
}
NOT_JUDGED = ("cublaslt, fast",)
NEEDS_MASK = ("ours, single, mask given", "ours, both, mask given")


def exact(i: Inputs, rows: int, lora: bool) -> Tensor:
    """float64, of the first `rows` rows."""
    dy, w = i.dy[:rows].view(E5M2).double(), i.weight.view(reference.E4M3).double()
    dx = (dy @ w) * i.dy_scale_inv.double() * i.weight_scale_inv.double()
    if lora:
        branch = i.ds[:rows].double() @ i.lora_A.to(i.ds.dtype).double()
        if i.slot is not None:
            keep = reference.drawn_mask(i.slot, i.p, SITE, i.ds.shape[0], w.shape[1])[:rows]
            branch = torch.where(keep, branch, 0.0) * reference.keep_scale(i.p)
        dx += branch
    return dx


def error(dx: Tensor, expected: Tensor) -> float:
    return float((dx[: expected.shape[0]].double() - expected).norm() / expected.norm())


def bench_case(case: Row, i: Inputs, args: argparse.Namespace, device: torch.device) -> list[Row]:
    m, n, k = map(int, str(case["M x N x K"]).split("x"))
    truth = {lora: exact(i, min(CHECKED_ROWS, m), lora) for lora in (False, True)}
    allowed = 2 * error(cublaslt(i, False), truth[False])

    def base_ms() -> object:
        return time_of(lambda: cublaslt(i, False), device, args.repetitions).columns()["ms"]

    rows: list[Row] = []
    heat(device)
    before = base_ms()
    for name in args.providers:
        run, lora = PROVIDERS[name]
        if name in NEEDS_MASK and case["p"] == 0:
            continue
        found = error(run(i), truth[lora])
        ok = found <= allowed or (name in NOT_JUDGED and found < 0.1)
        columns, after = NOT_TIMED, before
        if ok:
            columns = time_of(lambda: run(i), device, args.repetitions).columns()  # noqa: B023
            after = base_ms()
        ms = columns["ms"]
        both = isinstance(before, float) and isinstance(after, float)
        flops = 2 * m * k * (n + lora * i.lora_A.shape[0])
        rows.append(
            {
                **case,
                "provider": name,
                "check": "ok" if ok else f"WRONG: error {found:.1e}",
                "error": f"{found:.2e}",
                **columns,
                "TFLOP/s": ratio(flops / 1e9, ms),
                "÷ cublaslt": ratio(ms, (before + after) / 2 if both else before),  # type: ignore[operator]
            }
        )
        before = after
    return rows


def main() -> int:
    options = parser("fp8_grad_input against cuBLASLt's base-only product")
    options.add_argument("--shapes", nargs="+", metavar="MxNxK")
    options.add_argument("--ranks", nargs="+", type=int, default=[16, 64])
    options.add_argument("--p", nargs="+", type=float, default=[0.0, 0.1])
    options.add_argument("--providers", nargs="+", choices=PROVIDERS, default=list(PROVIDERS))
    args, device = arguments(options)
    rows: list[Row] = []
    for shape in args.shapes or (GPU_SHAPES if device.type == "cuda" else CPU_SHAPES):
        for rank in args.ranks:
            for p in args.p:
                case: Row = {"M x N x K": shape, "rank": rank, "p": p}
                rows += bench_case(case, make_inputs(shape, rank, p, device), args, device)
    return finish("fp8_grad_input", rows, environment(device), args.output)


if __name__ == "__main__":
    sys.exit(main())
