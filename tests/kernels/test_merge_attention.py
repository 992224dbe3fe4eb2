# SPDX-License-Identifier: Apache-2.0
"""kernels/triton/merge_attention.py beside float64."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lorakernels.kernels.triton.merge_attention import merge_attention
from tests.kernels.by_triton import interpret

# B, H, C, D, and by how much the logsumexps differ
CASES = [
    (1, 2, 16, 64, 1.0),
    (3, 5, 33, 96, 4.0),  # D is no power of two
    (2, 4, 65, 128, 20.0),
    (1, 1, 1, 8, 0.0),
    (2, 3, 40, 64, 200.0),  # one weight is 0 in fp32
]
MEAN = 300.0  # exp of it overflows


def errors(device: str, dtype: torch.dtype) -> list[tuple[float, float]]:
    """Of each case, how far out is from float64 in roundings, and how far the logsumexp is."""
    found = []
    for number, (batch, heads, tokens, dim, apart) in enumerate(CASES):
        generator = torch.Generator().manual_seed(number)

        def randn(*shape: int, generator: torch.Generator = generator) -> Tensor:
            return torch.randn(shape, generator=generator)

        shape = batch, 2 * tokens, heads, dim
        out = torch.full(shape, torch.nan, dtype=dtype, device=device)
        place = out.transpose(1, 2)[:, :, tokens:]
        one = place.copy_(randn(batch, heads, tokens, dim)).clone()
        two = randn(batch, heads, tokens, dim).to(device, dtype)
        l1, l2 = ((randn(batch, heads, tokens) * apart + MEAN).to(device) for _ in range(2))
        sums = torch.full((batch, heads, 2 * tokens), torch.nan, device=device)
        lse = sums[:, :, tokens:].copy_(l1)
        merge_attention(place, lse, two, l2)
        l1, l2, lse = (x.unsqueeze(-1) for x in (l1, l2, lse))
        exact = torch.logaddexp(l1.double(), l2.double())
        wanted = sum(x.double() * (w.double() - exact).exp() for x, w in ((one, l1), (two, l2)))
        size = sum(x.double().abs() * (w.double() - exact).exp() for x, w in ((one, l1), (two, l2)))
        # one rounding to the dtype; a weight is e^x / sum, with x rounded to 2^-24 |x|, and a few roundings in fp32
        unit = torch.finfo(dtype).eps / 2 * wanted.abs() + (16 + 2 * apart) * 2.0**-24 * size
        unit += torch.finfo(dtype).tiny * 2.0**-10
        off = float(((place.double() - wanted).abs() / unit).max())
        assert out[:, :tokens].isnan().all() and sums[:, :, :tokens].isnan().all()
        found.append((off, float((lse.double() - exact).abs().max() / exact.abs().max())))
    return found


def compare(found: list[tuple[float, float]]) -> None:
    for case, (off, of_sum) in zip(CASES, found, strict=True):
        assert off <= 1.0, (case, off)
        assert of_sum <= 2.0**-23, (case, of_sum)


@pytest.mark.slow
def test_the_interpreter_rounds_once(tmp_path: Path) -> None:
    compare(interpret(__file__, tmp_path / "found"))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_gpu_rounds_once(dtype: torch.dtype) -> None:
    compare(errors("cuda", dtype))


if __name__ == "__main__":
    torch.save(errors("cpu", torch.float16), sys.argv[1])
