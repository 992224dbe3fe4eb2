# SPDX-License-Identifier: Apache-2.0
"""Over ranks that share rows each adapter draws its tokens' masks of one process, and casts them to the same bytes."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lorakernels import fuse
from lorakernels.numerics.dropout import dropout_keep
from lorakernels.parallel import context_parallel, parallelize
from lorakernels.parallel.context.attention import Chunks
from lorakernels.parallel.ranks.group import Ranks
from lorakernels.values import Dropout
from tests.distributed.context_models import (
    LENGTH,
    ROWS,
    Way,
    batch,
    loss_alone,
    loss_over_ranks,
    make,
)
from tests.fusion.fused_models import fp8_state
from tests.processes import on_ranks

pytestmark = pytest.mark.slow
FORWARD, BACKWARD = "quantize_lora_down", "lora_grad_a"
WAYS: dict[int, tuple[Way, ...]] = {
    2: (
        Way("layers", dropout=0.3),
        Way("FP8", dropout=0.3, fp8=True),
        Way("blocks", dropout=0.3, blocks=True, checkpoint=True),
        Way("fused, FP8", dropout=0.3, fp8=True, fused=True),
    ),
    4: (
        Way("four ranks, FP8", dropout=0.3, fp8=True),
        Way("2 x 2", dropout=0.3, vocabulary=False),
        Way("2 x 2, FP8", dropout=0.3, fp8=True, vocabulary=False),
        Way("2 x 2, fused, FP8", dropout=0.3, fp8=True, fused=True, vocabulary=False),
    ),
}


class Drawn(NamedTuple):
    """A mask that an op was given.

    Attributes:
        op: the op's name.
        key: what tells one draw from another: slot and site.
        keep: [M, K].
    """

    op: str
    key: tuple[int, ...]
    keep: Tensor


class Seen(TorchDispatchMode):
    """Notes every mask of the ops that read x, and in each step the first bytes: x8 of the first layer's q, k and v."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[Drawn] = []
        self.first: list[Tensor | None] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("lorakernels::")
        if name != func._schema.name and self.first[-1] is None:
            each = [t for t in tree_leaves(result) if isinstance(t, Tensor) and t.numel()]
            found = (t for t in each if t.dtype == torch.uint8)
            self.first[-1] = next((t.clone() for t in found), None)
        if name in (FORWARD, BACKWARD):
            names = [a.name for a in func._schema.arguments]
            defaults = {a.name: a.default_value for a in func._schema.arguments}
            given = defaults | dict(zip(names, args, strict=False)) | (kwargs or {})
            if given["slot"] is not None:
                fields = ("slot", "p", "site", "row0", "col0", "chunks")
                mask = Dropout(**{field: given[field] for field in fields})
                keep = dropout_keep(mask, *given["x"].shape)
                key = (*mask.slot.tolist(), mask.site)
                self.drawn.append(Drawn(name, key, keep))
        return result


def steps(model: nn.Module, way: Way, context: Any, device: torch.device) -> Seen:
    """Two steps without updates of parameters, the second with the scales of the first, and one of half the tokens."""
    torch.manual_seed(9)
    with Seen() as seen:
        for step in range(2):
            seen.first.append(None)
            tokens, labels = batch(step, device)
            if context is None:
                loss_alone(model, tokens, labels, way).backward()
            else:
                loss_over_ranks(context, tokens, labels, way).backward()
            if way.fp8:
                fp8_state(model).reduce_and_update()
        seen.first.append(None)
        tokens, labels = (x[:, : LENGTH // 2] for x in batch(2, device))
        if context is None:
            base: Any = model.base_model
            base(input_ids=tokens, use_cache=False).last_hidden_state.sum().backward()
        else:
            context.loss(labels, input_ids=tokens).backward()
    return seen


def own_part(whole: Tensor, shape: torch.Size, ranks: Ranks, tp: Ranks | None) -> Tensor:
    """A rank's rows and columns of [B S, K], where tensor parallelism may leave it a part of either."""
    rows = whole.unflatten(0, (ROWS, -1))
    own = Chunks.of(ranks, rows.shape[1] // ranks.size).own(rows).flatten(0, 1)
    for dim in (0, 1):
        if shape[dim] != own.shape[dim]:
            assert tp is not None and shape[dim] * tp.size == own.shape[dim]
            own = own.narrow(dim, tp.rank * shape[dim], shape[dim])
    return own


def compare(device: torch.device, way: Way, mesh: Any) -> dict[str, Any]:
    whole, model = make(way, device), make(way, device)
    if way.fused:
        for each in (whole, model):
            fuse(each, save=way.save)
    split = way.vocabulary is not None
    if split:
        parallelize(model, mesh["tp"], vocabulary=False)
    context = context_parallel(model, mesh["cp"])
    tp = Ranks(mesh["tp"].get_group()) if split else None
    alone, seen = steps(whole, way, None, device), steps(model, way, context, device)
    expected, found, wrong = {(d.op, d.key): d for d in alone.drawn}, seen.drawn, []
    for drawn in found:
        theirs = expected[FORWARD, drawn.key]
        if not torch.equal(drawn.keep, own_part(theirs.keep, drawn.keep.shape, context.ranks, tp)):
            wrong.append((drawn.op, drawn.key[2]))
    keys = {d.key for d in found if d.op == FORWARD}
    theirs8, x8 = alone.first[1], seen.first[1]
    assert (theirs8 is None) == (x8 is None) == (not way.fp8 and not way.blocks)
    return {
        "wrong": wrong,
        "all": keys == {key for op, key in expected if op == FORWARD},
        "backward": any(d.op == BACKWARD for d in found),
        "x8": x8 is None or torch.equal(x8, own_part(theirs8, x8.shape, context.ranks, tp)),
        "count": len(keys),
    }


def worker(rank: int, device: torch.device, ways: list[Way]) -> dict[str, Any]:
    world, found = dist.get_world_size(), {}
    for way in ways:
        tp = 1 if way.vocabulary is None else 2
        mesh = init_device_mesh(device.type, (world // tp, tp), mesh_dim_names=("cp", "tp"))
        found[str(way)] = compare(device, way, mesh)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("world", WAYS)
def test_masks_and_bytes_are_those_of_one_process(world: int) -> None:
    """x8 of the first layer's q, k and v, before any attention, is equal to the bit with the scales of one process."""
    for found in on_ranks(worker, world, "gloo", [*WAYS[world]]):
        for way in WAYS[world]:
            each = found[str(way)]
            assert each["wrong"] == [] and each["all"] and each["backward"], (str(way), each)
            assert each["count"] >= 24 and each["x8"], (str(way), each)
