# SPDX-License-Identifier: Apache-2.0
"""dx = dy W + mask ⊙ (ds A) / (1 − p), against cuBLASLt's e5m2 × e4m3 product without LoRA on a ready transposed W.

    python benchmarks/ops/bench_fp8_grad_input.py --output DIR [--shapes 8192x8192x8192 …] [--ranks 16 64] [--p 0 0.1]

    2MNK + 2MKR operations; shapes are M x N x K, and N is what the product sums over

    cublaslt, fast · split   `torch._scaled_mm` with either accumulation, without LoRA
    pytorch                  "cublaslt, split" on a ready Wᵀ, then the LoRA product, the mask and the sum
    ours, single             our kernel on W as it lies. It draws the mask itself, as a layer does where dA is not
                             wanted
    …, mask given            the same, but it reads a mask of a bit an element. A layer's backward calls it so, as
                             `quantize_grad` has drawn the mask already

Every dx is compared with float64's before it is timed, on 64 rows and under the reference's mask. "error" is relative,
in the Frobenius norm. More than twice the error of "cublaslt, split" is WRONG and exit code 1; cuBLASLt's fast
accumulation is shown and not judged. An H200 under load lowers its clock within a second. So "÷ cublaslt" divides by
the mean of two runs of "cublaslt, split", one before and one after the provider.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor

from benchmarks.lib.op_bench import Bench, Call, Option, Setting, against_cublaslt, main, verdict
from benchmarks.lib.op_checks import exact_result, head, relative_error
from benchmarks.lib.rows import Row
from lorakernels import ops
from lorakernels.numerics.dropout import drawn_mask, dropped_bits, keep_scale
from lorakernels.numerics.fp8 import E4M3
from lorakernels.values import Dropout, Scaled, Weight

CHECKED_ROWS, SITE = 64, 5
E5M2 = torch.float8_e5m2


@dataclass
class Inputs:
    dy: Scaled
    weight: Weight
    transposed: Tensor  # of cuBLASLt
    ds: Tensor
    lora_A: Tensor
    dropout: Dropout | None
    given: Dropout | None  # with the mask, drawn already
    out_dtype: torch.dtype = torch.bfloat16


def make_inputs(shape: str, rank: int, p: float, device: torch.device) -> Inputs:
    m, n, k = map(int, shape.split("x"))
    generator = torch.Generator(device).manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=device)

    one = torch.ones(1, device=device)
    weight = normal(n, k).to(E4M3).view(torch.uint8)
    dropout = given = None
    if p > 0:
        dropout = Dropout(torch.tensor([12345, 678], device=device), p, SITE)
        given = dropout._replace(dropped=dropped_bits(drawn_mask(dropout, m, k)))
    return Inputs(
        dy=Scaled((normal(m, n) * 1024).to(E5M2).view(torch.uint8), one / 1024),
        weight=Weight(weight, one / n**0.5),
        transposed=weight.t().contiguous(),
        ds=normal(m, rank).bfloat16(),
        lora_A=normal(rank, k) / rank**0.5,
        dropout=dropout,
        given=given,
    )


def cublaslt(i: Inputs, fast: bool) -> Tensor:
    assert i.weight.scale_inv is not None and i.dy.scale_inv is not None
    return torch._scaled_mm(
        i.dy.data.view(E5M2),
        i.transposed.view(E4M3).t(),
        scale_a=i.dy.scale_inv,
        scale_b=i.weight.scale_inv,
        out_dtype=i.out_dtype,
        use_fast_accum=fast,
    )


def pytorch(i: Inputs) -> Tensor:
    dx, branch = cublaslt(i, False), i.ds @ i.lora_A.to(i.ds.dtype)
    if i.dropout is not None:
        keep = drawn_mask(i.dropout, *dx.shape)
        branch = torch.where(keep, branch, 0.0) * keep_scale(i.dropout.p)
    return dx.add_(branch)


def through_op(i: Inputs, given: bool = False) -> Tensor:
    dropout = i.given if given else i.dropout
    return ops.fp8_grad_input(i.dy, E5M2, i.weight, i.ds, i.lora_A, dropout, i.out_dtype)


PROVIDERS: dict[str, tuple[Callable[[Inputs], Tensor], bool]] = {  # and whether it has LoRA
    "cublaslt, split": (lambda i: cublaslt(i, False), False),
    "cublaslt, fast": (lambda i: cublaslt(i, True), False),
    "ours, single": (through_op, True),
    "ours, single, mask given": (lambda i: through_op(i, given=True), True),
    "pytorch": (pytorch, True),
}
NOT_JUDGED = ("cublaslt, fast",)
NEEDS_MASK = ("ours, single, mask given",)


def exact(i: Inputs, rows: int, lora: bool) -> Tensor:
    """float64, of the first `rows` rows."""
    dy, ds = head((i.dy, i.ds), rows)
    branch = (ds, i.lora_A, i.dropout) if lora else (None, None, None)
    return exact_result("fp8_grad_input", (dy, E5M2, i.weight, *branch, i.out_dtype, True))


OPTIONS = (
    Option(
        "shapes",
        [
            "4096x4096x4096",
            "8192x8192x8192",
            "8192x10240x8192",
            "2048x8192x8192",
            "8192x8192x28672",
            "8192x28672x8192",
        ],
        cpu=["32x64x128"],
        metavar="MxNxK",
    ),
    Option("ranks", [16, 64]),
    Option("p", [0.0, 0.1]),
    Option("providers", list(PROVIDERS), choices=PROVIDERS),
)


def check(name: str, expected: Tensor, allowed: float, dx: Tensor) -> Row:
    found = relative_error(dx, expected)
    ok = found <= allowed or (name in NOT_JUDGED and found < 0.1)
    return {**verdict("" if ok else f"error {found:.1e}"), "error": f"{found:.2e}"}


def rows(setting: Setting) -> Iterator[Row]:
    args = setting.args
    for shape, rank, p in product(args.shapes, args.ranks, args.p):
        m, n, k = map(int, shape.split("x"))
        i = make_inputs(shape, rank, p, setting.device)
        truth = {lora: exact(i, min(CHECKED_ROWS, m), lora) for lora in (False, True)}
        base = partial(cublaslt, i, False)
        allowed = 2 * relative_error(base(), truth[False])
        calls = {}
        for name in args.providers:
            run, lora = PROVIDERS[name]
            if name not in NEEDS_MASK or p != 0:
                operations = 2 * m * k * (n + lora * rank)
                right = partial(check, name, truth[lora], allowed)
                calls[name] = Call(partial(run, i), right, operations)
        case: Row = {"M x N x K": shape, "rank": rank, "p": p}
        yield from against_cublaslt(case, calls, base, setting, digits=3)


BENCH = Bench(
    "fp8_grad_input",
    "fp8_grad_input against cuBLASLt's base-only product",
    OPTIONS,
    rows,
    floor=False,
)

if __name__ == "__main__":
    sys.exit(main(BENCH))
