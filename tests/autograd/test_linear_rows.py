# SPDX-License-Identifier: Apache-2.0
"""What a product in pieces of its rows costs beside the whole one."""

from __future__ import annotations

import pytest
import torch

from lorakernels.autograd.linear.projections import Projections
from lorakernels.autograd.linear.rows import masks_at, slower_in_pieces
from lorakernels.autograd.linear.values import Adapter, Call, LoRASpec
from lorakernels.kernels import tune
from lorakernels.values import Dropout, Weight


def projections(n: int, k: int, mask: Dropout | None = None) -> Projections:
    weight = Weight(torch.empty(n, k, dtype=torch.uint8, device="meta"), torch.ones(1))
    adapter = Adapter(torch.empty(4, k), torch.empty(n, 4))
    to = Projections.single(weight, None, adapter, n, Call(LoRASpec(scaling=1.0)))
    return to._replace(masks=(mask,))


@pytest.mark.parametrize(
    ("n", "k", "backward", "microseconds"),
    [
        (5120, 8192, False, 0),  # 1280 tiles of 128 × 256 take 10 rounds of 132, and twice 640 take 2 · 5
        (28672, 8192, False, 70),  # 55 rounds, and 2 · 28: one more of 1.71 · 8192 · 5 ns
        (28672, 8192, True, 198),  # 21 rounds of 192 × 128, and 2 · 11: one more of 1.38 · 28672 · 5 ns
    ],
)  # fmt: skip
def test_halves_take_the_rounds_of_tiles_that_they_leave_part_empty(
    n: int, k: int, backward: bool, microseconds: float
) -> None:
    found = slower_in_pieces(projections(n, k), [4096, 4096], 132, backward)
    assert found * 1e6 == pytest.approx(microseconds, abs=1)


def test_one_piece_costs_nothing_and_small_ones_a_round_each() -> None:
    to = projections(256, 512)
    assert slower_in_pieces(to, [8192], 132) == 0
    one = tune.csrc_tile(128, 256, "fast", 132)[1] * 512 * 5e-9
    assert slower_in_pieces(to, [128] * 4, 132) == pytest.approx(3 * one)


def test_masks_of_a_piece_begin_at_its_rows_and_have_their_bits() -> None:
    mask = Dropout(torch.zeros(2, dtype=torch.int64), 0.1, 3, row0=100, col0=7)
    to, rows = projections(8, 8, mask), slice(50, 60)
    assert masks_at(to, rows).masks == (mask._replace(row0=150),)
    assert masks_at(to._replace(masks=(None,)), rows).masks == (None,)
    bits = torch.arange(4 * 64, dtype=torch.int32).view(64, 4)
    (found,) = masks_at(to._replace(masks=(mask._replace(dropped=bits),)), rows).masks
    assert found is not None and found.dropped is not None
    assert found.row0 == 150 and found.dropped.equal(bits[50:60])
