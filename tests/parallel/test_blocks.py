# SPDX-License-Identifier: Apache-2.0
"""Blocks over ranks: in equal parts, and over two ranks by whole groups of weights, which a rank reads in place."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lorakernels.parallel.base.stores import in_place
from lorakernels.parallel.ranks.blocks import ALIGN, Block, Shape, lay_out
from lorakernels.parallel.ranks.comm import Peer
from lorakernels.parallel.ranks.shards import Shards

Group = list[tuple[str, Shape]]
SHAPE = st.tuples(st.integers(1, 9), st.integers(1, 40))
LAYERS = st.lists(
    st.lists(st.lists(SHAPE, min_size=1, max_size=3), min_size=2, max_size=4),
    min_size=1,
    max_size=3,
)
LLAMA_405B = [
    [("q", (16384, 16384)), ("k", (1024, 16384)), ("v", (1024, 16384))],
    [("o", (16384, 16384))],
    [("gate", (53248, 16384)), ("up", (53248, 16384))],
    [("down", (16384, 53248))],
]
LLAMA_70B = [  # [N, K] of the groups of one input
    [("q", (8192, 8192)), ("k", (1024, 8192)), ("v", (1024, 8192))],
    [("o", (8192, 8192))],
    [("gate", (28672, 8192)), ("up", (28672, 8192))],
    [("down", (8192, 28672))],
]


def named(layer: list[list[Shape]]) -> list[Group]:
    return [[(f"{g}.{i}", shape) for i, shape in enumerate(group)] for g, group in enumerate(layer)]


def over(blocks: list[Block], ranks: int) -> tuple[list[Shards], list[dict[str, Tensor]]]:
    """Shards of every rank, written with random bytes, and these bytes by weight for each layer."""
    size = Shards.bytes_of(blocks, ranks)
    shards = [Shards(blocks, r, ranks, torch.zeros(size, dtype=torch.uint8)) for r in range(ranks)]
    weights = []
    for layer, block in enumerate(blocks):
        of_layer = {}
        for entry in block.entries:
            of_layer[entry.name] = torch.randint(256, entry.shape, dtype=torch.uint8)
            for shard in shards:
                shard.write(layer, entry, of_layer[entry.name])
        weights.append(of_layer)
    return shards, weights


def reader(shards: list[Shards], rank: int) -> Peer:
    """What `rank` copies with, as if it had mapped the others' memory."""
    peer = Peer.__new__(Peer)
    peer._shards, peer._peers = shards[rank], [(r, s.memory) for r, s in enumerate(shards)]
    return peer


@given(LAYERS, st.booleans())
def test_both_ranks_read_every_weight(layers: list[list[list[Shape]]], whole: bool) -> None:
    """From the slot, and in place what a rank holds. Nothing but the other's part is copied then."""
    groups = [named(layer) for layer in layers]
    blocks = in_place(groups) if whole else [lay_out(g, 2) for g in groups]
    shards, weights = over(blocks, 2)
    for layer, block in enumerate(blocks):
        for rank in range(2):
            slot = torch.full((block.size,), 7, dtype=torch.uint8)
            reader(shards, rank).gather(layer, slot)
            for entry in block.entries:
                home = shards[rank].home(layer, entry)
                assert whole or home is None
                found = slot[entry.offset : entry.end] if home is None else home
                assert torch.equal(found.view(entry.shape), weights[layer][entry.name])
                if home is not None:
                    assert (slot[entry.offset : entry.end] == 7).all(), "its own part was copied"


@given(LAYERS)
def test_a_group_is_of_one_rank_and_joined(layers: list[list[list[Shape]]]) -> None:
    groups = [named(layer) for layer in layers]
    for of_layer, block in zip(groups, in_place(groups), strict=True):
        entries = {entry.name: entry for entry in block.entries}
        assert len(entries) == sum(map(len, of_layer))
        for group in of_layer:
            mine = [entries[name] for name, _ in group]
            assert mine[0].offset % ALIGN == 0
            assert all(a.end == b.offset for a, b in itertools.pairwise(mine))
            inside = [mine[0].offset >= block.bounds[1], mine[-1].end > block.bounds[1]]
            assert inside in ([False, False], [True, True])


def test_llama_70b_over_two_ranks_alternates() -> None:
    """gate, up are 55 % of a layer: each rank has them in every other layer, and half of all bytes."""
    blocks = in_place([LLAMA_70B] * 80)
    parts = [[block.part(rank) for rank in range(2)] for block in blocks[:2]]
    assert parts[0] == parts[1][::-1] and max(parts[0]) == 2 * 28672 * 8192
    assert 2 * Shards.bytes_of(blocks, 2) == sum(block.size for block in blocks)


def test_a_layer_of_one_group_is_not_divided() -> None:
    assert in_place([LLAMA_70B, LLAMA_70B[1:2]]) == []


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_equal_parts_hold_all_bytes(ranks: int) -> None:
    block = lay_out(named([[(3, 50), (1, 7)], [(5, 5)]]), ranks)
    assert len({block.part(rank) for rank in range(ranks)}) == 1 and block.bounds[0] == 0
    assert block.size % (ALIGN * ranks) == 0 and block.size >= block.entries[-1].end


@pytest.mark.parametrize("ranks", [4, 8])
def test_405b_s_blocks_pass_what_32_bits_count(ranks: int) -> None:
    """A block of 3.2 GB, shards of 100 and 50: the parts hold all bytes of each weight, and a gather fits the slot."""
    block = lay_out(LLAMA_405B, ranks)
    blocks, size = [block] * 126, 126 * block.size // ranks
    assert block.size > 2**31 and Shards.bytes_of(blocks, ranks) == size > 2**35
    shards = [
        Shards(blocks, r, ranks, torch.empty(size, dtype=torch.uint8, device="meta"))
        for r in range(ranks)
    ]
    taken = 0
    for entry in block.entries:
        weight = torch.empty(entry.shape, dtype=torch.uint8, device="meta")
        for rank, each in enumerate(shards):
            each.write(125, entry, weight)  # on "meta" too, slices of other lengths raise
            low, high = block.bounds[rank : rank + 2]
            taken += max(0, min(high, entry.end) - max(low, entry.offset))
    assert taken == sum(n * k for group in LLAMA_405B for _, (n, k) in group)
    last = shards[-1].part(125)
    assert last.storage_offset() == 125 * block.part(0) and last.numel() == block.part(0)
    gathering = reader(shards, ranks - 1)
    gathering.gather(125, torch.empty(block.size, dtype=torch.uint8, device="meta"))
