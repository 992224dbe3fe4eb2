# SPDX-License-Identifier: Apache-2.0
"""Whether what an op computed is what its equation says in float64, for the benchmarks of single ops.

The bounds count roundings. A result that misses one is a wrong kernel's, and is not timed.
"""

from __future__ import annotations

import torch
from torch import Tensor

FP8_STEP = {torch.float8_e4m3fn: (2.0**-3, 2.0**-9), torch.float8_e5m2: (2.0**-2, 2.0**-16)}


def beyond(found: Tensor, exact: Tensor, bound: Tensor) -> bool:
    """Whether an element of `found` is off by more than its `bound`; nan is."""
    return not bool(((found.double() - exact).abs() <= bound).all())


def off(found: Tensor, exact: Tensor, steps: float = 1.0) -> bool:
    """Somewhere by more than `steps` roundings to found's dtype and 2⁻¹⁷, for fp32's on the way."""
    bound = (steps * torch.finfo(found.dtype).eps / 2 + 2.0**-17) * exact.abs() + 2.0**-17
    return beyond(found, exact, bound)


def off_fp8(bytes_: Tensor, scale_inv: Tensor, dtype: torch.dtype, exact: Tensor) -> bool:
    """Somewhere by more than one rounding to 16 bits and one to FP8, beside saturation."""
    relative, smallest = FP8_STEP[dtype]
    scaled = exact / scale_inv.double()
    inside = scaled.abs() <= 0.99 * torch.finfo(dtype).max
    error = (bytes_.view(dtype).double() - scaled).abs()
    return not bool((error <= (relative / 2 + 2.0**-7) * scaled.abs() + smallest)[inside].all())


def off_product(
    found: Tensor, left: Tensor, right: Tensor, factor: float, eps: float | None = None
) -> bool:
    """`found` against factor · left @ right, float64: by an eps of the result and an fp32 one of each product.

    `eps` is that of found's dtype unless said: a result may be rounded twice.
    """
    exact, size = factor * left @ right, factor * left.abs() @ right.abs()
    rounding = torch.finfo(found.dtype).eps if eps is None else eps
    return beyond(found, exact, rounding * exact.abs() + 2.0**-20 * size)


def relative_error(found: Tensor, exact: Tensor) -> float:
    """In the Frobenius norm, of the rows that `exact` has."""
    return float((found[: exact.shape[0]].double() - exact).norm() / exact.norm())
