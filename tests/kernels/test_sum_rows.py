# SPDX-License-Identifier: Apache-2.0
"""kernels/triton/sum_rows.py beside float64."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lorakernels.kernels.triton.sum_rows import MOST_PARTS, sum_rows
from tests.kernels.by_triton import interpret

CASES = [
    (parts, adds, shape)
    for parts in (1, 2, 3, MOST_PARTS)
    for adds in (False, True)
    for shape in ((3, 5), (2, 4096), (1, 2049))
]


def errors(device: str, dtype: torch.dtype) -> list[float]:
    """The largest distance from float64 in each case, in roundings of the largest magnitude."""
    found = []
    for parts, adds, shape in CASES:
        generator = torch.Generator().manual_seed(parts)
        given: list[Tensor] = [
            torch.randn(shape, generator=generator).to(device, dtype) for _ in range(parts + adds)
        ]
        out = sum_rows(given[:parts], given[parts] if adds else None, dtype)
        exact = sum(t.double() for t in given)
        unit = torch.finfo(dtype).eps / 2 * exact.abs() + parts * 2.0**-23
        found.append(float(((out.double() - exact).abs() / unit).max()))
    return found


@pytest.mark.slow
def test_the_interpreter_rounds_once(tmp_path: Path) -> None:
    assert max(interpret(__file__, tmp_path / "found")) <= 1.01


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_gpu_rounds_once(dtype: torch.dtype) -> None:
    slack = 2.0 * MOST_PARTS if dtype == torch.float32 else 1.01  # each of fp32's sums rounds
    assert max(errors("cuda", dtype)) <= slack


if __name__ == "__main__":
    torch.save(errors("cpu", torch.float16), sys.argv[1])
