# SPDX-License-Identifier: Apache-2.0
"""FP8 bytes inside Triton kernels against numerics/fp8.py, bit for bit: interpreted, and by the GPU's instructions."""

from __future__ import annotations

import sys

import pytest
import torch
import triton
import triton.language as tl

from lorakernels.kernels.triton import quantize as module
from lorakernels.kernels.triton.quantize import PARTIALS, decode_e4m3, encode, scale_to_use
from lorakernels.numerics.fp8 import E4M3, FLT_MAX, quantize_fp8, scale_of
from tests.kernels.by_triton import interpret
from tests.ops.contract import same_bytes

AMAXES = [0.0, 2.0**-149, 1e-38, 1e-36, 0.3, 448.0, FLT_MAX, torch.inf, torch.nan]
FORMATS = {False: torch.float8_e4m3fn, True: torch.float8_e5m2}


@triton.jit
def _encode_kernel(out, x, n, E5M2: tl.constexpr, NATIVE: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, encode(tl.load(x + i, i < n, other=0.0), E5M2, NATIVE), i < n)


@triton.jit
def _decode_kernel(out, x, NATIVE: tl.constexpr):
    i = tl.arange(0, 256)
    tl.store(out + i, decode_e4m3(tl.load(x + i), NATIVE))


@triton.jit
def _scale_kernel(out, kept, partials, measured, PARTIALS: tl.constexpr):
    tl.store(out, scale_to_use(tl.load(kept), partials, measured, 448.0, PARTIALS, False))


def scales(device: str) -> torch.Tensor:
    """Of each amax, found in the last of three parts, before parts of another use; then of a kept scale."""
    found = []
    for kept, amax in (*((0.0, amax) for amax in AMAXES), (3.0, 7.0)):
        parts = torch.full((PARTIALS,), 1e30, device=device)
        parts[:3] = torch.tensor([0.0, 0.0, amax])
        out = torch.zeros(1, device=device)
        state = torch.tensor([kept], device=device)
        _scale_kernel[(1,)](out, state, parts.view(torch.int32), 3, PARTIALS)
        found.append(out)
    return torch.cat(found)


def values(device: str) -> torch.Tensor:
    """Every fp16 value, ties and subnormals of both formats among them, and 2¹⁶ numbers of every magnitude."""
    generator = torch.Generator().manual_seed(0)
    halves = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    spread = torch.randn(2**16, generator=generator) * 2.0 ** torch.randint(
        -140, 40, (2**16,), generator=generator
    )
    return torch.cat((halves, spread)).to(device)


def encoded(e5m2: bool, native: bool, device: str) -> torch.Tensor:
    x = values(device)
    out = torch.zeros(x.shape, dtype=torch.uint8, device=device)
    _encode_kernel[(triton.cdiv(len(x), 4096),)](out, x, len(x), e5m2, native, 4096)
    return out


def decoded(native: bool, device: str) -> torch.Tensor:
    out = torch.zeros(256, device=device)
    _decode_kernel[(1,)](out, torch.arange(256, dtype=torch.uint8, device=device), native)
    return out


def assert_like_reference(
    bytes_: dict[bool, torch.Tensor], floats: torch.Tensor, found: torch.Tensor
) -> None:
    device = str(floats.device)
    one = torch.ones(1, device=device)
    for e5m2, dtype in FORMATS.items():
        expected = quantize_fp8(values(device), one, dtype).view(torch.uint8)
        assert same_bytes("", bytes_[e5m2], expected, dtype).is_right()
    every = torch.arange(256, dtype=torch.uint8, device=device).view(E4M3).float()
    assert torch.equal(floats.nan_to_num(-1.0), every.nan_to_num(-1.0))
    expected = scale_of(torch.tensor(AMAXES, device=device), 448.0)
    assert torch.equal(found, torch.cat((expected, torch.tensor([3.0], device=device))))


@pytest.mark.slow
def test_interpreted(tmp_path):
    assert_like_reference(*interpret(__file__, tmp_path / "bytes.pt"))


@pytest.mark.gpu
@pytest.mark.parametrize("native", [True, False], ids=["instructions", "integers"])
def test_on_the_gpu(native):
    bytes_ = {e: encoded(e, native, "cuda") for e in FORMATS}
    assert_like_reference(bytes_, decoded(native, "cuda"), scales("cuda"))


def test_in_blocks_no_launch_is_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "overlaps", lambda device: True)
    x = torch.zeros(2, 128)
    assert module.quantized((2, 128), x, None, E4M3, False).options == {}
    assert module.quantized((2, 128), x, None, E4M3).options == {"launch_pdl": True}


if __name__ == "__main__":
    everything = (
        {e: encoded(e, False, "cpu") for e in FORMATS},
        decoded(False, "cpu"),
        scales("cpu"),
    )
    torch.save(everything, sys.argv[1])
