# SPDX-License-Identifier: Apache-2.0
"""Rows of tokens sorted by a mixture's experts. Each expert's rows begin at a multiple of 128.

Every size follows from the numbers of tokens and experts alone, so that the host asks the device for nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from lorakernels.values import Groups

GROUP_ROWS = 128  # a group begins at a multiple of it


class Routing(NamedTuple):
    """Which row holds which token.

    Attributes:
        groups: the experts' rows.
        source: int32 [M], the token whose copy a row is; −1 for none.
        row: int32 [M], the row itself; −1 for none.
        place: int32 [T, J], the row of each token's j-th expert; −1 for no expert.
    """

    groups: Groups
    source: Tensor
    row: Tensor
    place: Tensor


def rows_of(choices: int, experts: int) -> int:
    """M, enough for every way in which `choices` tokens fall on `experts`: a multiple of 128."""
    most = choices + min(choices, experts) * (GROUP_ROWS - 1)
    return most // GROUP_ROWS * GROUP_ROWS


def route(chosen: Tensor, experts: int) -> Routing:
    """Lay out the tokens of `chosen` [T, J], integers; `experts` stands for no expert. Tokens keep their order."""
    tokens, per_token = chosen.shape
    device, flat = chosen.device, chosen.reshape(-1)
    rows = rows_of(flat.numel(), experts)
    sorted_, order = flat.sort(stable=True)
    edges = torch.searchsorted(sorted_, torch.arange(experts + 1, device=device, dtype=flat.dtype))
    counts = edges.diff()
    blocks = (counts + GROUP_ROWS - 1) // GROUP_ROWS
    last = blocks.cumsum(0)
    starts = (last - blocks) * GROUP_ROWS
    of = sorted_.clamp(max=experts - 1)
    row = starts[of] + torch.arange(flat.numel(), device=device) - edges[of]
    # with a place behind the last, for choices of no expert
    row = torch.where(sorted_ < experts, row, rows)
    place = torch.empty_like(row).scatter_(0, order, row)
    source = row.new_full((rows + 1,), -1).scatter_(0, row, order // per_token)[:rows]
    block = torch.arange(rows // GROUP_ROWS, device=device)
    group_of = torch.searchsorted(last, block, right=True)
    group_of = torch.where(group_of < experts, group_of, -1)
    groups = Groups(group_of.int(), starts.int(), (starts + counts).int())
    place = torch.where(place < rows, place, -1)
    rows_in_use = torch.where(source >= 0, torch.arange(rows, device=device), -1)
    return Routing(groups, source.int(), rows_in_use.int(), place.view(tokens, per_token).int())


def spans(groups: Groups) -> Iterator[tuple[int, slice]]:
    """(g, its rows) of each group, which the host reads."""
    pairs = zip(groups.starts.tolist(), groups.ends.tolist(), strict=True)
    return ((g, slice(start, end)) for g, (start, end) in enumerate(pairs))
