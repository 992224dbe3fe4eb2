# SPDX-License-Identifier: Apache-2.0
"""dA = dsᵀ D(x) on CUDA, in PyTorch's kernels.

ds [M, R], x [M, K] (e4m3 bytes with their scale_inv, or plain), dA [R, K]. e4m3 values are exact in bf16, so the
product runs on them in ds's dtype with fp32 accumulation and scale_inv is applied to its rank-sized result. In
fp16, whose range ends at 65504, the unscaled sum could overflow: there it runs in fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lorakernels import reference
from lorakernels.kernels.product import product


def lora_grad_a(
    ds: Tensor,
    x: Tensor,
    x_scale_inv: Tensor | None,
    slot: Tensor | None,
    p: float,
    site: int,
    out_dtype: torch.dtype,
    row0: int = 0,
    col0: int = 0,
) -> Tensor:
    """`reference.lora_grad_a`."""
    if ds.dtype == torch.float16:
        return reference.lora_grad_a(ds, x, x_scale_inv, slot, p, site, out_dtype, row0, col0)
    values = (x if x_scale_inv is None else x.view(reference.E4M3)).to(ds.dtype)
    xd, factor = reference.masked(values, slot, p, site, row0, col0)
    dA = product(ds.t(), xd, factor)
    return (dA if x_scale_inv is None else dA * x_scale_inv).to(out_dtype)
