# SPDX-License-Identifier: Apache-2.0
"""Where a recording's memory lies: what is needed at one time does not overlap."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lorakernels import LoRAConfig, LoRALinear
from lorakernels.recorded.node import RECORDINGS
from lorakernels.recorded.recording import ALIGNMENT, by_lifetime
from lorakernels.recorded.stand_in import Memory
from tests.dry_cuda import dry_cuda

LIVES = st.tuples(st.integers(1, 2000), st.integers(0, 6), st.integers(0, 6) | st.none())


@given(st.lists(LIVES, max_size=9))
def test_memories_that_live_at_one_time_are_apart(lives: list[tuple[int, int, int | None]]) -> None:
    memories = []
    for index, (nbytes, born, length) in enumerate(lives):
        memory = Memory(index, nbytes, born)
        memory.died = None if length is None else born + length
        memories.append(memory)
    offsets, size = by_lifetime(memories)
    for memory in memories:
        assert offsets[memory.index] % ALIGNMENT == 0
        assert offsets[memory.index] + memory.nbytes <= size
    for a, b in itertools.combinations(memories, 2):
        ends = [1 << 30 if m.died is None else m.died for m in (a, b)]
        if max(a.born, b.born) < min(ends):  # some launch comes while both live
            first, second = sorted((a, b), key=lambda m: offsets[m.index])
            assert offsets[first.index] + first.nbytes <= offsets[second.index]


def test_a_launch_uses_what_lives_then_and_kept_memory_is_its_own() -> None:
    """Of a layer whose forward and backward have five launches."""
    base = nn.Linear(256, 384, bias=False, dtype=torch.bfloat16)
    layer = LoRALinear.from_linear(base, LoRAConfig(r=16, lora_alpha=32, lora_dropout=0.1))
    x = torch.randn(64, 256, dtype=torch.bfloat16, requires_grad=True)
    with dry_cuda():
        y = layer(x)
        (node,) = RECORDINGS.values()
        assert node is not None
        used_by = [_used(arguments) for _, _, arguments in node.forward.launches.recorded]
        for number, used in enumerate(used_by):
            for index in used:
                memory = node._recorder.memories[index]
                assert memory.born <= number and (memory.died is None or memory.died > number)
        ends = sorted(
            (at, at + node._recorder.memories[i].nbytes) for i, at in node._kept.offsets.items()
        )
        assert len(ends) == 3  # x8, its scale_inv, s
        assert all(first[1] <= second[0] for first, second in itertools.pairwise(ends))
        assert ends[-1][1] <= node._kept.size
        y.backward(torch.ones_like(y))
        (backward,) = node._backwards.values()
        assert len(used_by) + len(backward.launches.recorded) == 5


def _used(arguments: dict[str, object]) -> set[int]:
    return {(v >> 48) - 1 for v in arguments.values() if type(v) is int and v >= 1 << 48}
