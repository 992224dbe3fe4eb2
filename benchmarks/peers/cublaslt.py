# SPDX-License-Identifier: Apache-2.0
"""The two FP8 products alone, by cuBLASLt: what nothing that calls cuBLASLt can be faster than."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.peers.base import Case, Peer, need_gpu
from lorakernels.numerics.fp8 import FP8_MAX, amax_of, quantize_fp8, scale_of


class CublasltGemms(Peer):
    """x8 W8ᵀ + bias (fast accumulation) and dy8 W8 on a ready transposed copy (split), as TE does them.

    x8, dy8, W8 and the copy exist before the clock starts: no quantization, no LoRA.
    """

    has_lora = False
    eager = False

    def __init__(self, case: Case) -> None:
        need_gpu(case)
        super().__init__(case)
        self.w8, self.w_inv = _quantized(case.weight, torch.float8_e4m3fn)
        self.wt8 = self.w8.t().contiguous()
        self.take(case)

    def take(self, case: Case) -> None:
        super().take(case)
        self.x8, self.x_inv = _quantized(case.x, torch.float8_e4m3fn)
        self.dy8, self.dy_inv = _quantized(case.dy, torch.float8_e5m2)

    def forward_only(self) -> Tensor:
        return torch._scaled_mm(
            self.x8,
            self.w8.t(),
            scale_a=self.x_inv,
            scale_b=self.w_inv,
            bias=self.case.bias,
            out_dtype=self.case.x.dtype,
            use_fast_accum=True,
        )

    def step(self) -> tuple[Tensor, ...]:
        y = self.forward_only()
        dx = torch._scaled_mm(
            self.dy8,
            self.wt8.t(),
            scale_a=self.dy_inv,
            scale_b=self.w_inv,
            out_dtype=self.case.x.dtype,
            use_fast_accum=False,
        )
        return y, dx


def _quantized(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    scale = scale_of(amax_of(x), FP8_MAX[dtype])
    return quantize_fp8(x, scale, dtype), 1.0 / scale
