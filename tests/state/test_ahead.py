# SPDX-License-Identifier: Apache-2.0
"""Slots of a GPU's generator that are computed ahead on the host: torch.randint's numbers, and its effect."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lorakernels import _C
from lorakernels.state import ahead
from lorakernels.state.philox import default_slot
from tests.dry_cuda import dry_cuda

MOST = 2**63 - 1
GPU = torch.device("cuda", 0)


class Generator:
    """A CUDA generator's seed and offset."""

    def __init__(self) -> None:
        self.seed, self.offset = 1234, 0

    def initial_seed(self) -> int:
        return self.seed

    def get_offset(self) -> int:
        return self.offset

    def set_offset(self, offset: int) -> None:
        assert offset % 4 == 0  # as torch's refuses
        self.offset = offset


@pytest.fixture
def generator(monkeypatch: pytest.MonkeyPatch) -> Any:
    with dry_cuda():
        made = Generator()
        monkeypatch.setattr(torch.cuda, "default_generators", (made,))
        monkeypatch.setattr(ahead, "_tables", {})
        yield made
        monkeypatch.undo()


def drawn(seed: int, offset: int) -> list[int]:
    """A row of the table, from Philox itself."""
    key, found = [seed % 2**32, seed >> 32], []
    for thread in range(2):
        high, low, *_ = _C.philox4x32_10([offset // 4 % 2**32, offset // 4 >> 32, thread, 0], key)
        found.append((high << 32 | low) % (2 * MOST) - MOST)
    return found


@pytest.mark.parametrize("seed", [0, 1234, 2**64 - 7], ids=str)
@pytest.mark.parametrize("offset", [0, 4, 2**34 - 8, 2**63], ids=str)
def test_a_table_has_a_row_for_each_draw(seed: int, offset: int) -> None:
    found = torch.empty((4, 2), dtype=torch.int64)
    _C.torch_slots_host(found.data_ptr(), 4, seed, offset)
    assert found.tolist() == [drawn(seed, offset + 4 * i) for i in range(4)]


def test_a_slot_is_the_generators_next_and_moves_it(generator: Generator) -> None:
    for i in range(2 * ahead.AHEAD + 3):
        assert default_slot(GPU).tolist() == drawn(1234, 4 * i)
        assert generator.offset == 4 * (i + 1)


def test_a_generator_that_is_set_back_repeats(generator: Generator) -> None:
    slots = [default_slot(GPU) for _ in range(5)]
    generator.offset = 4 * 2  # as torch.utils.checkpoint does
    assert [default_slot(GPU).tolist() for _ in range(3)] == [slot.tolist() for slot in slots[2:]]
    generator.offset += 4 * 1000  # draws of other shapes, beyond the table
    assert default_slot(GPU).tolist() == drawn(1234, 4 * 1005)
    generator.offset = 0  # in front of the new table
    assert default_slot(GPU).tolist() == slots[0].tolist()
    generator.seed = 5
    assert default_slot(GPU).tolist() == drawn(5, 4)


def test_each_stream_has_a_table(generator: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    streams = iter([1, 2, *range(3, 3 + ahead.MOST_TABLES)])
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: next(streams))
    first, second = default_slot(GPU), default_slot(GPU)
    assert first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()
    assert [first.tolist(), second.tolist()] == [drawn(1234, 0), drawn(1234, 4)]
    for _ in range(ahead.MOST_TABLES):
        default_slot(GPU)
    assert len(ahead._tables) <= ahead.MOST_TABLES


def test_a_slot_drawn_in_inference_mode_may_be_saved_later(generator: Generator) -> None:
    with torch.inference_mode():
        default_slot(GPU)
    assert not default_slot(GPU).is_inference()


def test_a_captured_or_traced_draw_is_torchs(
    generator: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    default_slot(GPU)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert generator.offset == 0
    default_slot(GPU)
    assert generator.offset == 4


@pytest.mark.gpu
@pytest.mark.parametrize("seed", [0, 1234, 2**63 + 7], ids=str)
def test_the_numbers_and_the_effect_are_those_of_randint(seed: int) -> None:
    torch.manual_seed(seed)
    state = torch.cuda.get_rng_state()
    expected = []
    for _ in range(3):
        expected.append(torch.randint(-MOST, MOST, (2,), dtype=torch.int64, device="cuda"))
        torch.rand(7, device="cuda")
    after = torch.cuda.get_rng_state()
    torch.cuda.set_rng_state(state)
    found = []
    for _ in range(3):
        found.append(default_slot(GPU))
        torch.rand(7, device="cuda")
    assert torch.equal(torch.stack(found), torch.stack(expected))
    assert torch.equal(torch.cuda.get_rng_state(), after)


@pytest.mark.gpu
def test_no_slot_waits_for_the_device() -> None:
    default_slot(GPU)
    torch.cuda.set_sync_debug_mode("error")
    try:
        slots = [default_slot(GPU) for _ in range(2 * ahead.AHEAD)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len({tuple(slot.tolist()) for slot in slots}) == len(slots)
