# SPDX-License-Identifier: Apache-2.0
"""transpose_fp8's dtypes and the binding's refusals; tests/ops/cases/transpose_fp8.py has the rest."""

from __future__ import annotations

import pytest
import torch

from lorakernels import _C, ops


def test_fp8_dtypes_keep_theirs(device):
    w = torch.arange(96, dtype=torch.uint8, device=device).view(12, 8)
    found = ops.transpose_fp8(w.view(torch.float8_e4m3fn))
    assert found.dtype == torch.float8_e4m3fn and torch.equal(found.view(torch.uint8), w.t())


@pytest.mark.parametrize("size", ["rows", "cols"])
def test_the_binding_refuses_a_negative_size(size):
    sizes = {"rows": 16, "cols": 16, size: -1}
    with pytest.raises(ValueError, match=f"{size} must not be negative, got -1"):
        _C.transpose_fp8(0, 0, tuple(sizes.values()), (0, -1))


def test_the_binding_refuses_what_no_grid_holds():
    with pytest.raises(ValueError, match="got rows 2147480000, cols 2147480000"):
        _C.transpose_fp8(0, 0, (2147480000, 2147480000), (0, -1))
