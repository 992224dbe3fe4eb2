# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels behind ops/expert_route.py: one counts each expert's tokens in parts, the other places them.

A program takes PART choices. Choices of one expert keep their order: first those of earlier parts, then those of
the same part that come earlier.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lorakernels.kernels.triton.launch import launch, on_device
from lorakernels.numerics.groups import GROUP_ROWS

PART = 256
_CHUNK = tl.constexpr(16)  # parts whose counts are read at a time
_GROUP_ROWS = tl.constexpr(GROUP_ROWS)


@triton.jit
def _count_kernel(
    counts: tl.tensor,
    chosen: tl.tensor,
    C: tl.tensor,
    E: tl.tensor,
    PART: tl.constexpr,
    EXPERTS: tl.constexpr,
) -> None:
    part = tl.program_id(0)
    choice = part * PART + tl.arange(0, PART)
    expert = tl.load(chosen + choice, choice < C, other=E).to(tl.int32)
    index = tl.arange(0, EXPERTS)
    tl.store(
        counts + part * EXPERTS + index, tl.sum((expert[:, None] == index[None, :]).to(tl.int32), 0)
    )


@triton.jit
def _place_kernel(
    group_of: tl.tensor,
    starts: tl.tensor,
    ends: tl.tensor,
    source: tl.tensor,
    row_in_use: tl.tensor,
    place: tl.tensor,
    counts: tl.tensor,
    chosen: tl.tensor,
    C: tl.tensor,
    E: tl.tensor,
    J: tl.tensor,
    BLOCKS: tl.tensor,
    PART: tl.constexpr,
    EXPERTS: tl.constexpr,
) -> None:
    part, parts = tl.program_id(0), tl.num_programs(0)
    index = tl.arange(0, EXPERTS)
    total = tl.zeros((EXPERTS,), tl.int32)
    before = tl.zeros((EXPERTS,), tl.int32)
    for first in tl.range(0, parts, _CHUNK):
        p = first + tl.arange(0, _CHUNK)
        some = tl.load(
            counts + p[:, None] * EXPERTS + index[None, :], (p < parts)[:, None], other=0
        )
        total += tl.sum(some, 0)
        before += tl.sum(tl.where((p < part)[:, None], some, 0), 0)
    total = tl.where(index < E, total, 0)
    blocks = (total + _GROUP_ROWS - 1) // _GROUP_ROWS
    last = tl.cumsum(blocks, 0)
    start = (last - blocks) * _GROUP_ROWS
    end = start + total
    if part == 0:
        tl.store(starts + index, start, index < E)
        tl.store(ends + index, end, index < E)
    choice = part * PART + tl.arange(0, PART)
    expert = tl.load(chosen + choice, choice < C, other=E).to(tl.int32)
    is_each = expert[:, None] == index[None, :]
    i = tl.arange(0, PART)
    alike = (expert[:, None] == expert[None, :]) & (i[None, :] < i[:, None])
    row = tl.sum(alike.to(tl.int32), 1) + tl.sum(tl.where(is_each, (start + before)[None, :], 0), 1)
    there = (choice < C) & (expert < E)
    tl.store(place + choice, tl.where(there, row, -1), choice < C)
    tl.store(source + row, choice // J, there)
    tl.store(row_in_use + row, row, there)
    for block in tl.range(part, BLOCKS, parts):
        group = tl.sum((last <= block).to(tl.int32), 0)
        group = tl.where(group < E, group, -1)
        tl.store(group_of + block, group)
        rows = block * _GROUP_ROWS + tl.arange(0, _GROUP_ROWS)
        empty = rows >= tl.sum(tl.where(index == group, end, 0), 0)
        tl.store(source + rows, -1, empty)
        tl.store(row_in_use + rows, -1, empty)


def route(out: tuple[Tensor, ...], chosen: Tensor, experts: int) -> None:
    """Write group_of, starts, ends, source, row and place, as numerics/groups.py has them, of chosen [T, J]."""
    group_of, starts, ends, source, row_in_use, place = out
    choices = chosen.numel()
    parts, padded = triton.cdiv(choices, PART), triton.next_power_of_2(experts + 1)
    counts = place.new_empty((parts, padded))
    sizes = {"PART": PART, "EXPERTS": padded}
    with on_device(chosen):
        launch(_count_kernel, (parts,), counts, chosen, choices, experts, **sizes)
        launch(
            _place_kernel, (parts,), group_of, starts, ends, source, row_in_use, place, counts, chosen,
            choices, experts, chosen.shape[1], len(group_of), **sizes,
        )  # fmt: skip
