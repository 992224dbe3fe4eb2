# SPDX-License-Identifier: Apache-2.0
"""The kernels that quantize q, k and v for FP8 attention against numerics/fp8_attention.py, bit for bit."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from lorakernels.kernels.triton import quantize_heads as kernels
from lorakernels.numerics import fp8_attention as numerics
from lorakernels.numerics.fp8 import E4M3
from tests.kernels.by_triton import interpret, sm90_code, spills

HEADS, KV_HEADS = 4, 2
# what is put into q, k or v, and where: (tensor, value)
CASES: dict[str, tuple[tuple[int, float], ...]] = {
    "random": (),
    "a power of two": ((0, 512.0), (1, 2.0**-9)),
    "448 and next to it": ((0, 448.0), (1, 448.5), (2, 447.5)),
    "nan in k": ((1, torch.nan),),
    "inf in v": ((2, -torch.inf),),
}


def heads(device: str, dtype: torch.dtype, tokens: int, case: str) -> list[Tensor]:
    """q, k, v as views of one qkv; k is 0 in "a power of two" but for one element."""
    generator = torch.Generator().manual_seed(len(case))
    counts = [HEADS, KV_HEADS, KV_HEADS]
    qkv = torch.randn(2, tokens, sum(counts), 128, generator=generator) * 3
    q, k, v = (part.transpose(1, 2) for part in qkv.to(device, dtype).split(counts, 2))
    if case == "a power of two":
        k.zero_()
    for which, value in CASES[case]:
        (q, k, v)[which][-1, -1, tokens // 2, 7] = value
    return [q, k, v]


def found(device: str, dtype: torch.dtype, which: Any) -> dict[str, list[Tensor]]:
    """For each case bytes, factors, q̂, k̂, v̂ and ô."""
    results = {}
    for case in CASES:
        q, k, v = heads(device, dtype, 67, case)
        data, factors = which.quantize_heads(q, k, v)
        back = which.dequantize_heads(data, factors, HEADS, dtype)
        out = which.dequantize_out(data, factors, dtype)
        results[case] = [t.cpu() for t in (data.view(E4M3).float(), factors[:, 0], *back, out)]
    return results


def compare(results: dict[str, list[Tensor]], dtype: torch.dtype) -> None:
    for case, one in found("cpu", dtype, numerics).items():
        for name, a, b in zip(
            ("bytes", "factors", "q", "k", "v", "out"), results[case], one, strict=True
        ):
            assert torch.equal(a.isnan(), b.isnan()), (case, name)
            assert torch.equal(a.nan_to_num(), b.nan_to_num()), (case, name)


@pytest.mark.slow
def test_the_interpreter_agrees_with_the_reference(tmp_path: Any) -> None:
    compare(interpret(__file__, tmp_path / "found"), torch.float16)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_the_gpu_agrees_with_the_reference(dtype: torch.dtype) -> None:
    compare(found("cuda", dtype, kernels), dtype)


@pytest.mark.parametrize(
    ("amax", "scale"),
    [
        (448.0, 1.0),
        (448.00003, 0.5),
        (1.75, 256.0),
        (1.0, 256.0),
        (0.0, 1.0),
        (2.0**-140, 2.0**126),
        (3.4e38, 2.0**-120),
        (torch.inf, 1.0),
        (torch.nan, 1.0),
    ],
)
def test_scales_are_the_largest_powers_of_two(amax: float, scale: float) -> None:
    assert numerics.power_of_two_scale(torch.tensor([amax])).item() == scale


STRIDES = {f"{x}_{of}": "i32" for x in "qkv" for of in ("batch", "head", "token")}
THREE = {"q": "*bf16", "k": "*bf16", "v": "*bf16", "M": "i32", "T": "i32", **STRIDES}
SIZES = {"HEADS": 64, "KV_HEADS": 8, "D": 128, "TOKENS": kernels.TOKENS}
OF_OUT = {"FIRST": numerics.OF_OUT, "Q_END": 64, "K_END": 64}


@pytest.mark.parametrize(
    ("kernel", "types", "constants"),
    [
        (kernels._amax_kernel, {"amaxes": "*fp32", **THREE}, SIZES),
        (
            kernels._quantize_kernel,
            {"data": "*u8", "factors": "*fp32", "amaxes": "*fp32", **THREE},
            {**SIZES, "NATIVE": True},
        ),
        (
            kernels._dequantize_kernel,
            {"to": "*bf16", "data": "*u8", "factors": "*fp32", "M": "i32"},
            {**OF_OUT, "HEADS": 64, "D": 128, "TOKENS": kernels.TOKENS, "NATIVE": True},
        ),
    ],
    ids=["amax", "quantize", "dequantize"],
)
def test_hopper_code_spills_nothing(
    kernel: Any, types: dict[str, str], constants: dict[str, object], tmp_path: Any
) -> None:
    assert not spills(Counter(sm90_code(kernel, types, constants, kernels.WARPS, tmp_path)))


if __name__ == "__main__":
    torch.save(found("cpu", torch.float16, kernels), sys.argv[1])
