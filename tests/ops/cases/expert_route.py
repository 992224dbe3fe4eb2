# SPDX-License-Identifier: Apache-2.0
"""expert_route: cases, and where every choice has to lie, an expert after the other."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from lorakernels import ops
from tests.ops.contract import Arguments, Call, Case, Checked, Contract, Made, Refusal, same


def choices(experts: int, each: int, kind: str, m: Made) -> Arguments:
    """Of M tokens: "random" with some of no expert, "one" expert for all, or "none"."""
    made = torch.randint(0, experts + 1, (m.rows, each), device=m.device)
    if kind != "random":
        made.fill_(experts - 1 if kind == "one" else experts)
    return made, experts


def bound(call: Call) -> Iterator[Checked]:
    """Tokens in order behind each other, from the next multiple of 128 for every expert."""
    chosen, experts = call.before
    names = ("group_of", "starts", "ends", "source", "own", "place")
    found = dict(zip(names, call.results, strict=True))
    device = chosen.device
    row, starts, ends, group_of = 0, list[int](), list[int](), list[int]()
    source, own = (torch.full_like(found["source"], -1) for _ in range(2))
    place = torch.full_like(found["place"], -1)
    flat = chosen.flatten()
    for expert in range(experts):
        at = (flat == expert).nonzero().flatten()
        rows = torch.arange(row, row + len(at), device=device, dtype=torch.int32)
        place.view(-1)[at] = rows
        source[row : row + len(at)] = (at // chosen.shape[1]).int()
        own[row : row + len(at)] = rows
        starts.append(row)
        ends.append(row + len(at))
        blocks = -(-len(at) // 128)
        group_of += [expert] * blocks
        row += 128 * blocks
    group_of += [-1] * (len(found["group_of"]) - len(group_of))
    expected = [torch.tensor(t, dtype=torch.int32, device=device) for t in (group_of, starts, ends)]
    for name, right in zip(names, (*expected, source, own, place), strict=True):
        yield same(name, found[name], right)


CONTRACTS = (
    Contract(
        ops.expert_route,
        {
            "random": Case(partial(choices, 3, 2, "random"), 150),
            "one": Case(partial(choices, 5, 1, "one"), 300),
            "none": Case(partial(choices, 4, 2, "none"), 7),
        },
        bound,
        {
            "4096 of 128": Case(partial(choices, 128, 8, "random"), 4096),
            "4096 of 256, one": Case(partial(choices, 256, 8, "one"), 4096),
            "one token": Case(partial(choices, 64, 2, "random"), 1),
        },
        {"chosen": torch.zeros(3, 2, dtype=torch.int64), "experts": 4},
        {
            "floats": Refusal({"chosen": torch.zeros(3, 2)}, TypeError, "int32 or int64, found torch.float32"),
            "a vector": Refusal({"chosen": torch.zeros(3).long()}, ValueError, "chosen must be a matrix"),
            "experts": Refusal({"experts": 0}, ValueError, "experts must be at least 1, found 0"),
        },
    ),
)  # fmt: skip
