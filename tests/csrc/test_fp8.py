# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lorakernels import _C

FORMATS = {
    "e4m3fn": (torch.float8_e4m3fn, 448.0),
    "e5m2": (torch.float8_e5m2, 57344.0),
}


def encode(x: torch.Tensor, fmt: str) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=torch.uint8)
    _C.fp8_encode(x.data_ptr(), out.data_ptr(), x.numel(), fmt)
    return out


def decode(x: torch.Tensor, fmt: str) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=torch.float32)
    _C.fp8_decode(x.data_ptr(), out.data_ptr(), x.numel(), fmt)
    return out


def by_torch(x: torch.Tensor, fmt: str) -> torch.Tensor:
    dtype, largest = FORMATS[fmt]
    return x.clamp(-largest, largest).to(dtype).view(torch.uint8)


def floats(bits: torch.Tensor) -> torch.Tensor:
    return bits.to(torch.int32).view(torch.float32)


@pytest.fixture(params=FORMATS)
def fmt(request: pytest.FixtureRequest) -> str:
    return request.param


def test_every_byte_decodes_as_torch_does(fmt: str) -> None:
    every = torch.arange(256, dtype=torch.uint8)
    expected = every.view(FORMATS[fmt][0]).float()
    assert torch.equal(decode(every, fmt).nan_to_num(nan=-1.0), expected.nan_to_num(nan=-1.0))
    assert torch.equal(decode(every, fmt).isnan(), expected.isnan())


def test_every_finite_byte_survives_the_round_trip(fmt: str) -> None:
    every = torch.arange(256, dtype=torch.uint8)
    value = decode(every, fmt)
    finite = value.isfinite()
    assert torch.equal(encode(value, fmt)[finite], every[finite])


def test_every_bfloat16_pattern(fmt: str) -> None:
    # all signs and exponents, NaN payloads and infinities included
    x = floats(torch.arange(65536, dtype=torch.int64) << 16)
    assert torch.equal(encode(x, fmt), by_torch(x, fmt))


def test_ties_and_their_neighbours(fmt: str) -> None:
    values = decode(torch.arange(0x7F, dtype=torch.uint8), fmt)
    values = values[values.isfinite()].double()
    middle = ((values[1:] + values[:-1]) / 2).float()  # exact: one more mantissa bit
    around = (middle.view(torch.int32)[:, None] + torch.arange(-2, 3)).flatten()
    x = torch.cat((floats(around), -floats(around)))
    assert torch.equal(encode(x, fmt), by_torch(x, fmt))
    even = encode(middle, fmt) % 2 == 0
    assert even.all()


def test_random_float_patterns(fmt: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x = floats(torch.randint(0, 1 << 32, (1 << 20,), generator=generator, dtype=torch.int64))
    # most random patterns saturate or vanish, so half of them are moved into the format's range
    largest = FORMATS[fmt][1]
    near = (
        torch.randn(1 << 20, generator=generator)
        * largest
        * 2.0 ** torch.randint(-24, 1, (1 << 20,), generator=generator)
    )
    for batch in (x, near):
        assert torch.equal(encode(batch, fmt), by_torch(batch, fmt))


@settings(max_examples=300, deadline=None)
@given(value=st.floats(width=32))
def test_any_float(value: float) -> None:
    x = torch.tensor([value])
    for name in FORMATS:
        assert torch.equal(encode(x, name), by_torch(x, name))


def test_infinity_saturates_and_nan_stays() -> None:
    x = torch.tensor([float("inf"), float("-inf"), float("nan")])
    assert encode(x, "e4m3fn").tolist()[:2] == [0x7E, 0xFE]
    assert encode(x, "e5m2").tolist()[:2] == [0x7B, 0xFB]
    assert decode(encode(x, "e4m3fn"), "e4m3fn")[2].isnan()
    assert decode(encode(x, "e5m2"), "e5m2")[2].isnan()


def test_errors_name_the_argument() -> None:
    with pytest.raises(ValueError, match="format must be 'e4m3fn' or 'e5m2', got 'e8m0'"):
        _C.fp8_encode(0, 0, 0, "e8m0")
    with pytest.raises(ValueError, match="n must not be negative, got -3"):
        _C.fp8_decode(0, 0, -3, "e5m2")
