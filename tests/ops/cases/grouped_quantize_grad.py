# SPDX-License-Identifier: Apache-2.0
"""grouped_quantize_grad: cases, bytes, scales and amaxes bit for bit, and bounds of ds and dB from float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from lorakernels import ops
from lorakernels.numerics.fp8 import scale_that_tells
from lorakernels.numerics.groups import spans
from lorakernels.ops import Scaling, Up
from tests.ops.cases.grouped_quantize_lora_down import NONE, of_groups, scaling_of
from tests.ops.contract import (
    BF16,
    E4M3,
    E5M2,
    FP16,
    FP32,
    Arguments,
    Call,
    Case,
    Checked,
    Contract,
    Made,
    Refusal,
    near,
    same,
)


class Grad(NamedTuple):
    """dy [M, N] of three groups; rank 0: no adapter."""

    n: int
    rank: int
    dtype: torch.dtype = BF16
    b: torch.dtype = FP32
    fp8: torch.dtype = E5M2
    kind: str = "kept"
    trains_b: bool = True

    def __call__(self, m: Made) -> Arguments:
        dy = m.randn(m.rows, self.n, dtype=self.dtype)
        up = None
        if self.rank:
            s = m.randn(m.rows, self.rank, dtype=self.dtype) if self.trains_b else None
            up = Up(m.randn(3, self.n, self.rank, dtype=self.b), s, 0.7)
        return dy, m.groups()[0], up, scaling_of(m, self.kind), self.fp8


def bound(call: Call) -> Iterator[Checked]:
    """ds and dB: one rounding at the store, and fp32 sums of n products and of two factors."""
    dy, groups, up, scaling, fp8 = call.before
    dy8, scale_inv, ds, dB = call.results
    tells = scale_inv.clone()
    for g, own in spans(groups):  # of fp16 alone; told by NaN
        told = scale_that_tells(dy[own], scale_inv[g : g + 1])
        yield same("scale_inv", scale_inv[g : g + 1].isnan(), told.isnan())
        if bool(told.isnan()) and dy.dtype == FP16:
            return
    yield from of_groups("dy8", dy, groups, (dy8, tells), (scaling, call.after[3]), fp8)
    if up is None:
        yield same("ds", ds, ds.new_empty(0))
        return
    lora_B, s, factor = up
    exact, size = (torch.zeros(ds.shape, dtype=torch.float64, device=ds.device) for _ in range(2))
    for g, own in spans(groups):
        d, b = dy[own].double(), lora_B[g].to(dy.dtype).double()
        exact[own], size[own] = factor * d @ b, factor * d.abs() @ b.abs()
        if s is not None:
            t = s[own].double()
            of_b, size_b = factor * d.t() @ t, factor * d.abs().t() @ t.abs()
            yield near("dB", dB[g], of_b, size_b, len(d) + 4)
    yield near("ds", ds, exact, size, dy.shape[1] + 4)
    if s is None:
        yield same("dB", dB, dB.new_empty(0))


CONTRACTS = (
    Contract(
        ops.grouped_quantize_grad,
        {
            "fp8": Case(Grad(48, 3), 256),
            "e4m3, bf16 B": Case(Grad(80, 5, b=BF16, fp8=E4M3, kind="mixed"), 256),
            "base only": Case(Grad(48, 0), 256),
            "frozen B, eval": Case(Grad(48, 16, kind="eval", trains_b=False), 256),
            "fp16": Case(Grad(48, 3, FP16), 256, why_not="dy is torch.float16", is_traced=False),
            "fp32": Case(Grad(48, 3, FP32), 256, why_not="dy is torch.float32"),
        },
        bound,
        {
            "1024x4096 r16": Case(Grad(4096, 16), 1024),
            "512x8200 r64": Case(Grad(8200, 64, kind="mixed"), 512),
            "384x264 r128": Case(Grad(264, 128, kind="eval"), 384),
        },
        {
            "dy": torch.zeros(0, 8),
            "groups": NONE,
            "up": None,
            "scaling": Scaling(torch.zeros(3, 4), 0, True),
            "fp8_dtype": E5M2,
        },
        {
            "rows": Refusal({"dy": torch.zeros(100, 8)}, ValueError, "a multiple of 128, found 100"),
            "lora_B": Refusal(
                {"up": Up(torch.zeros(3, 8, 2), torch.zeros(0, 3), 1.0)},
                ValueError,
                r"lora_B must be \[3, 8, 3\] on cpu, found \[3, 8, 2\]",
            ),
            "fp8_dtype": Refusal({"fp8_dtype": BF16}, TypeError, "fp8_dtype must be float8_e4m3fn or float8_e5m2"),
        },
    ),
)  # fmt: skip
