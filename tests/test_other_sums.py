# SPDX-License-Identifier: Apache-2.0
"""Other sums are the same products, in an order that fewer rows do not have."""

from __future__ import annotations

import pytest
import torch

from tests.other_sums import addmm, bmm, mm

TERMS = 64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products_are_right_and_rows_have_other_bits_among_fewer(dtype: torch.dtype) -> None:
    a, b, c = (torch.randn(size, dtype=dtype) for size in ((48, TERMS), (TERMS, 40), (40,)))
    exact, sizes = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    # TERMS roundings of fp32, and one to bf16
    bound = TERMS * 2.0**-24 * sizes + (2.0**-8 * exact.abs() if dtype == torch.bfloat16 else 0)
    for product in (mm(a, b), bmm(a[None], b[None])[0]):
        assert ((product.double() - exact).abs() <= bound).all()
    assert torch.equal(mm(a, b), mm(a, b))
    if dtype == torch.float32:
        assert not torch.equal(mm(a, b)[:5], mm(a[:5], b))
        torch.testing.assert_close(addmm(c, a, b, alpha=2), c + 2 * mm(a, b), rtol=1e-6, atol=1e-5)
    assert mm(a[:, :0], b[:0]).count_nonzero() == 0
