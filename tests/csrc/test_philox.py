# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch

from lorakernels import _C
from lorakernels.numerics.dropout import dropout_keep, dropout_threshold, keep_scale
from lorakernels.values import Dropout

# Random123's kat_vectors, philox4x32 10 rounds: counter, key, output.
KNOWN_ANSWERS = {
    "zeros": ("00000000" * 4, "00000000" * 2, "6627e8d5e169c58dbc57ac4c9b00dbd8"),
    "ones": ("ffffffff" * 4, "ffffffff" * 2, "408f276d41c83b0ea20bc7c66d5451fd"),
    "pi": (
        "243f6a8885a308d313198a2e03707344",
        "a4093822299f31d0",
        "d16cfe0994fdcceb5001e42024126ea1",
    ),
}


def words(digits: str) -> list[int]:
    return [int(digits[i : i + 8], 16) for i in range(0, len(digits), 8)]


@pytest.mark.parametrize("name", KNOWN_ANSWERS)
def test_known_answers(name: str) -> None:
    counter, key, expected = map(words, KNOWN_ANSWERS[name])
    assert _C.philox4x32_10(counter, key) == expected


def mask(rows: int, cols: int, dropout: Dropout) -> torch.Tensor:
    out = torch.full((rows, cols), 7, dtype=torch.uint8)
    _C.dropout_mask_host(out, (rows, cols), dropout)
    return out


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 2**-17, 0.999999])
def test_threshold_and_scale_equal_the_reference(p: float) -> None:
    threshold = _C.dropout_threshold(p)
    assert threshold == dropout_threshold(p)
    assert _C.dropout_survivor_scale(threshold) == float(
        torch.tensor(keep_scale(p), dtype=torch.float32)
    )


def test_threshold_steps_where_the_reference_does() -> None:
    # k + 1/2 is exact, so each of these sits on a rounding boundary, and its neighbours one ulp beside it
    for k in (0, 1, 2, 6553, 32767, 65534):
        edge = torch.tensor((k + 0.5) / 65536, dtype=torch.float64)
        for p in (edge, torch.nextafter(edge, edge.new_zeros(())), torch.nextafter(edge, edge + 1)):
            assert _C.dropout_threshold(float(p)) == dropout_threshold(float(p))


@pytest.mark.parametrize("p", [-0.1, 1.0, float("nan")])
def test_threshold_refuses_p_outside_0_1(p: float) -> None:
    with pytest.raises(ValueError, match=r"p must be in \[0, 1\)"):
        _C.dropout_threshold(p)


@pytest.mark.parametrize(
    "seed", [0, 1, (1 << 64) - 1, 0x8000000000000001], ids=["0", "1", "max", "high-bit"]
)
def test_mask_equals_the_reference(seed: int) -> None:
    offset, site, p = 0x1_2345_6789, 3, 0.3  # the offset's high half must not matter
    signed = seed - (1 << 64) if seed >> 63 else seed
    slot = torch.tensor([signed, offset], dtype=torch.int64)
    expected = dropout_keep(Dropout(slot, p, site), 13, 27)
    threshold = _C.dropout_threshold(p)
    assert torch.equal(mask(13, 27, Dropout(slot, p, site)).bool(), expected)
    low = torch.tensor([signed, offset & 0xFFFFFFFF], dtype=torch.int64)
    assert torch.equal(mask(13, 27, Dropout(low, p, site)).bool(), expected)
    assert bool(expected[5, 19]) == _C.dropout_keep(5, 19, seed, offset, site, threshold)


def test_a_window_is_a_cut_of_the_whole_mask() -> None:
    dropout = Dropout(torch.tensor([42, 9]), 0.5, 1)
    whole = mask(20, 50, dropout)
    window = mask(7, 22, dropout._replace(row0=11, col0=13))
    assert torch.equal(window, whole[11:18, 13:35])


def test_a_lane_equal_to_the_threshold_is_kept() -> None:
    lane = int(KNOWN_ANSWERS["zeros"][2][4:8], 16)  # element (0, 0) of seed, offset and site 0
    slot = torch.zeros(2, dtype=torch.int64)
    for threshold, kept in ((lane, True), (lane + 1, False)):
        dropout = Dropout(slot, threshold / 65536, 0)
        assert bool(mask(1, 1, dropout)) == kept
        assert bool(dropout_keep(dropout, 1, 1)) == kept


def test_mask_of_nothing_writes_nothing() -> None:
    dropout = Dropout(torch.tensor([1, 2]), 0.1, 3)
    _C.dropout_mask_host(None, (0, 5), dropout)
    with pytest.raises(ValueError, match="rows must not be negative, got -1"):
        _C.dropout_mask_host(None, (-1, 5), dropout)
    with pytest.raises(ValueError, match=r"p must be in \[0, 1\)"):
        _C.dropout_mask_host(None, (0, 5), dropout._replace(p=1.0))
    with pytest.raises(ValueError, match="slot must be given where p > 0"):
        _C.dropout_mask_host(None, (0, 5), (None, *dropout[1:]))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "cols"), [(1, 1), (13, 27), (64, 256), (3, 8193), (4096, 1032)], ids=str
)
def test_the_gpu_draws_the_same_mask_and_writes_nothing_else(rows: int, cols: int) -> None:
    slot = torch.tensor([-5, 0x1_2345_6789], device="cuda")
    guarded = torch.full((rows * cols + 64,), 7, dtype=torch.uint8, device="cuda")
    where = (torch.cuda.current_stream().cuda_stream, -1)
    _C.dropout_mask(guarded, (rows, cols), Dropout(slot, 0.3, 3), where)
    expected = dropout_keep(Dropout(slot.cpu(), 0.3, 3), rows, cols)
    assert torch.equal(guarded[: rows * cols].view(rows, cols).cpu().bool(), expected)
    assert bool((guarded[rows * cols :] == 7).all())
