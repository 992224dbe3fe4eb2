# SPDX-License-Identifier: Apache-2.0
"""kernels/triton/segments.py: every product is that of each segment with its own adapter, in float64."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from lorakernels.kernels.triton import segments
from lorakernels.values import Up
from tests.kernels.by_triton import interpret
from tests.ops.contract import FP16, FP32, UINT8

SCALE, ALPHA = 0.037, 0.7


class Sizes(NamedTuple):
    """J, the rows of each, columns and rank."""

    adapters: int
    rows: int
    columns: int
    rank: int


CASES = {
    "one": Sizes(1, 16, 8, 1),
    "ragged columns and ranks": Sizes(3, 48, 200, 5),
    "one part of the rows": Sizes(4, 64, 1032, 17),
    "many parts": Sizes(2, 320, 2056, 48),
    "tall": Sizes(2, 128, 520, 48),
}


def made(sizes: Sizes, device: str, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """wide, narrow, A, B and e4m3 bytes."""
    generator = torch.Generator().manual_seed(sum(sizes))
    j, t, c, r = sizes

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    bytes_ = torch.randint(0, 127, (j * t, c), dtype=UINT8, generator=generator)
    wide, narrow = randn(j * t, c).to(dtype), randn(j * t, r).to(dtype)
    return tuple(x.to(device) for x in (wide, narrow, randn(j, r, c), randn(j, c, r), bytes_))


def found(device: str, dtype: torch.dtype) -> dict[str, list[Tensor]]:
    results = {}
    for name, sizes in CASES.items():
        wide, narrow, a, b, bytes_ = made(sizes, device, dtype)
        scale = torch.full((1,), SCALE, device=device)
        of = [
            segments.down(wide, a, by_column=False),
            *segments.gradients(wide, Up(b, narrow, ALPHA)),
            segments.outer(bytes_, narrow, sizes.adapters, scale, FP32),
            segments.outer(wide, narrow, sizes.adapters, None, dtype),
        ]
        results[name] = [x.cpu() for x in of]
    return results


def compare(results: dict[str, list[Tensor]], dtype: torch.dtype) -> None:
    """Sums of n products in fp32, n roundings at worst, twice that on tensor cores; one rounding at the store."""
    for name, sizes in CASES.items():
        j, t, c, _ = sizes
        wide, narrow, a, b, bytes_ = made(sizes, "cpu", dtype)
        x, n = (m.double().unflatten(0, (j, t)) for m in (wide, narrow))
        x8 = SCALE * bytes_.view(torch.float8_e4m3fn).double().unflatten(0, (j, t))
        a, b = a.to(dtype).double().mT, b.to(dtype).double()
        exact = [
            (x, a, 1.0, c),
            (x, b, ALPHA, c),
            (x.mT, n, ALPHA, t),
            (n.mT, x8, 1.0, t),
            (n.mT, x, 1.0, t),
        ]
        for number, (one, (left, right, alpha, terms)) in enumerate(
            zip(results[name], exact, strict=True)
        ):
            expected, size = alpha * left @ right, alpha * left.abs() @ right.abs()
            allowed = torch.finfo(one.dtype).eps * expected.abs() + 2 * (terms + 4) * 2**-24 * size
            off = (one.double().view_as(expected) - expected).abs()
            least = torch.finfo(one.dtype).smallest_normal  # below it fp16 has a coarser grid
            assert (off <= allowed + least).all(), (name, number)


@pytest.mark.slow
def test_the_interpreter_computes_float64_s_products(tmp_path: Any) -> None:
    compare(interpret(__file__, tmp_path / "found"), FP16)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, FP16], ids=["bf16", "fp16"])
def test_the_gpu_computes_float64_s_products(dtype: torch.dtype) -> None:
    compare(found("cuda", dtype), dtype)


@pytest.mark.gpu
def test_the_gpu_s_sums_do_not_depend_on_the_run() -> None:
    first, second = (found("cuda", torch.bfloat16) for _ in range(2))
    for name in CASES:
        assert all(map(torch.equal, first[name], second[name])), name


if __name__ == "__main__":
    torch.save(found("cpu", FP16), sys.argv[1])
