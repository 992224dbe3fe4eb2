# SPDX-License-Identifier: Apache-2.0
"""Fused layers over ranks multiply the bytes of the whole model, with its masks, and say that they run by the ops."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from lorakernels.autograd.linear import linear
from lorakernels.modules.marks import became
from lorakernels.numerics.dropout import drawn_mask, dropped_bits
from lorakernels.ops import checks
from lorakernels.parallel import parallelize
from lorakernels.parallel.ranks import comm
from lorakernels.parallel.ranks.exchange import CollectiveRows
from lorakernels.parallel.tensor import projections as tensor_fused
from lorakernels.recorded.routing import OVER_RANKS
from lorakernels.values import Dropout
from tests.distributed.tensor_models import Way, batch, in_pieces, loss_of, make
from tests.fusion.fused_models import FP32, difference
from tests.processes import on_ranks

pytestmark = pytest.mark.slow
# of two layers: before q, k, v and gate, up, and after o and down; the model's result once. In backward the other way
# round, and the dA of q, k, v, and of gate, up.
EXCHANGES = [{"gather": 5, "sum": 4}, {"gather": 4, "sum": 4, "total": 4}]


def products(model: nn.Module, device: torch.device) -> list[tuple[Tensor, Tensor | None]]:
    """x8 and s of each product over the base in one forward, in order."""
    found: list[tuple[Tensor, Tensor | None]] = []
    project = linear.project

    def watched(operand: Any, s: Tensor | None, *others: Any) -> Tensor:
        found.append((operand.data.clone(), None if s is None else s.clone()))
        return project(operand, s, *others)

    torch.manual_seed(9)
    with mock.patch.object(linear, "project", watched):
        loss_of(model, batch(0, device))
    return found


def exchanges(model: nn.Module, device: torch.device) -> list[dict[str, int]]:
    """How often ranks exchange rows in a forward, and in its backward, and sum gradients apart from that."""
    calls: list[str] = []
    gather, add, total = CollectiveRows.gather, CollectiveRows.sum, CollectiveRows.total

    def gathers(rows: CollectiveRows, *parts: Tensor, totals: Any = ()) -> list[Tensor]:
        calls.append("gather")
        return [*gather(rows, *parts), *total(rows, *totals)]

    def adds(rows: CollectiveRows, *args: Any) -> tuple[Tensor, Tensor | None]:
        calls.append("sum")
        return add(rows, *args)

    def totals(rows: CollectiveRows, *parts: Tensor) -> list[Tensor]:
        calls.extend(["total"] * bool(parts))
        return total(rows, *parts)

    watched = {"gather": gathers, "sum": adds, "total": totals}
    with mock.patch.multiple(CollectiveRows, **watched):
        loss = loss_of(model, batch(0, device))
        forward = Counter(calls)
        calls.clear()
        loss.backward()
    model.zero_grad()
    return [dict(forward), dict(Counter(calls))]


def stored(model: nn.Module) -> dict[str, Tensor]:
    return {n: m.stored.clone() for n, m in model.named_modules() if hasattr(m, "stored")}


def worker(rank: int, device: torch.device, world: int) -> list[str]:
    """What is not the whole model's. s has the mask in it.

    The first layer's q, k, v have no product before them. Products of fewer rows or columns may have another order of
    sums: that of fp32 for s, and for o's x8 roundings to e4m3 that turn, by 2^-3 of an element.
    """
    mesh = init_device_mesh(device.type, (world,), mesh_dim_names=("tp",))["tp"]
    wrong = []
    for sequence in (False, True):
        way = Way("fused", sequence, save="recompute")
        whole, model = make(way, device), make(way, device)
        parallelize(model, mesh, sequence_parallel=sequence)
        theirs = products(whole, device)
        with mock.patch.object(comm, "gather_rows", wraps=comm.gather_rows) as gather:
            ours = products(model, device)
        # x8 and s once for q, k, v and once for gate, up, in two layers; then all rows once
        wrong += (
            [] if gather.call_count == (9 if sequence else 0) else [f"{gather.call_count} gathers"]
        )
        found = exchanges(model, device)
        wrong += [] if found == (EXCHANGES if sequence else [{}, {}]) else [f"exchanges {found}"]
        (x8, s), (own8, own_s) = theirs[0], ours[0]
        assert s is not None and own_s is not None and s.abs().sum() > 0
        wrong += [] if x8.equal(own8) else [f"x8 of q, k, v, {sequence}"]
        wrong += [] if difference(own_s, s) <= FP32 else [f"s of q, k, v, {sequence}"]
        x8, own8 = (x.view(torch.float8_e4m3fn).float() for x in (theirs[1][0], ours[1][0]))
        o = difference(own8, x8.chunk(world, 1)[rank])
        wrong += [] if o <= 2.0**-3 else [f"x8 of o, {sequence}"]
        parts = stored(model)
        for name, weight in stored(whole).items():
            dim = int(parts[name].shape[0] == weight.shape[0])
            if not weight.chunk(world, dim)[rank].equal(parts[name]):
                wrong.append(f"W8 of {name}, {sequence}")
        groups = [g for m in model.modules() if (f := became(m).fused) for g in f.groups]
        ways = {way for group in groups for way in group.eager_ways({})}
        wrong += [] if ways == {OVER_RANKS} else [f"ways {ways}"]
    return wrong


@pytest.mark.parametrize("world", [2, 4])
def test_bytes_and_masks_are_the_whole_models(world: int) -> None:
    assert on_ranks(worker, world, "gloo", world) == [[]] * world


def drawn(device: torch.device, mesh: Any, sequence: bool, pieces: bool) -> dict[str, int]:
    """Of a backward: how many masks were drawn as bits, and how often ops were given right and wrong ones.

    Kernels of the CPU draw anew. So the bits that ops are given are compared with those of the place that they are for.
    """
    model = make(Way("fused", sequence, save="recompute"), device)
    parallelize(model, mesh, sequence_parallel=sequence)
    found: Counter[str] = Counter()

    def given(mask: Dropout | None, rows: int, cols: int, *others: Any) -> None:
        if mask is not None and mask.dropped is not None:
            own = dropped_bits(drawn_mask(mask._replace(dropped=None), rows, cols))
            found["right" if mask.dropped.equal(own) else "wrong"] += 1

    with (
        mock.patch.object(tensor_fused, "hands_mask_over", lambda *_: True),
        mock.patch.object(checks, "dropped", given),
        mock.patch.object(tensor_fused, "drawn_bits", wraps=tensor_fused.drawn_bits) as draws,
        in_pieces() if pieces else nullcontext(),
    ):
        loss_of(model, batch(0, device)).backward()
    return {"drawn": draws.call_count, **found}


def every_drawn(rank: int, device: torch.device, world: int) -> list[dict[str, int]]:
    mesh = init_device_mesh(device.type, (world,), mesh_dim_names=("tp",))["tp"]
    ways = ((False, False), (True, False), (True, True))
    return [drawn(device, mesh, sequence, pieces) for sequence, pieces in ways]


@pytest.mark.parametrize("world", [2, 4])
def test_a_mask_is_drawn_once_for_dx_and_dA_at_its_place(world: int) -> None:
    """Of q, k, v, of o, of gate and up, and of down in two layers; of the first q, k and v nobody asks for dx.

    dx is one product, or by row one of the rank's own rows, and one of those on each side.
    """
    for rank, found in enumerate(on_ranks(every_drawn, world, "gloo", world)):
        sides = 1 + (rank > 0) + (rank < world - 1)
        wanted = [{"drawn": 7, "right": 14}] * 2 + [{"drawn": 7, "right": 7 + 3 + 4 * sides}]
        assert found == wanted, rank
