# SPDX-License-Identifier: Apache-2.0
"""Attention over ranks beside float64: by collectives and by reading each other's memory, eager and replayed."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lorakernels.parallel.context.attention import Chunks, ContextAttention
from lorakernels.parallel.ranks.exchange import (
    CollectiveRows,
    PeerRows,
    RowExchange,
    row_exchange,
)
from lorakernels.parallel.ranks.group import Ranks
from tests.kernels.test_chunk_rows import Sizes
from tests.parallel.test_context_attention import visible
from tests.processes import backend_on_gpus, on_ranks

pytestmark = pytest.mark.slow
SCALE = 0.2


CASES = {
    "grouped": Sizes(1, 8, 2, 32, 128),
    "two rows": Sizes(2, 4, 2, 40, 64),
    "columns beyond a power of two": Sizes(1, 4, 4, 33, 96),
}


class Row(NamedTuple):
    """Whole rows, and what attention of them gives in float64."""

    given: tuple[
        Tensor, Tensor, Tensor, Tensor
    ]  # q, k, v and the gradient of out, [B, heads, S, D]
    starts: Tensor | None
    exact: tuple[Tensor, ...]  # out, dq, dk, dv


def drawn(sizes: Sizes, ranks: int, packed: bool, dtype: torch.dtype) -> Row:
    batch, heads, kv, size, dim = sizes
    length = 2 * ranks * size
    generator = torch.Generator().manual_seed(sum(sizes))
    given = tuple(
        torch.randn(batch, n, length, dim, generator=generator).to(dtype)
        for n in (heads, kv, kv, heads)
    )
    cuts = [round(batch * length * part) for part in (0, 0.03, 0.03, 0.4, 0.9, 1)]
    cuts = sorted({*cuts, *range(0, batch * length, length)}) if packed else []
    exact = [x.double().requires_grad_() for x in given[:3]]
    wide = [x.repeat_interleave(heads // x.shape[1], 1) for x in exact]
    scores = (wide[0] @ wide[1].transpose(2, 3)) * SCALE
    mask = visible(cuts, batch, length).view(batch, length, batch, length)
    mask = torch.stack([mask[i, :, i] for i in range(batch)])[:, None]
    out = scores.masked_fill(~mask, -torch.inf).softmax(-1) @ wide[2]
    gradients = torch.autograd.grad(out, exact, given[3].double())
    starts = torch.tensor(cuts, dtype=torch.int32) if packed else None
    return Row(given, starts, (out.detach(), *gradients))


def attended(attention: ContextAttention, own: list[Tensor], starts: Tensor | None) -> list[Tensor]:
    """out, dq, dk, dv of this rank's tokens."""
    leaves = [x.requires_grad_() for x in own[:3]]
    longest = 2 * attention.size * own[0].shape[2] * own[0].shape[0]
    out = attention.attend(leaves[0], leaves[1], leaves[2], (starts, longest), SCALE)
    return [out.detach(), *torch.autograd.grad(out, leaves, own[3])]


def replayed(attention: ContextAttention, own: list[Tensor], starts: Tensor | None) -> list[Tensor]:
    """The same by a graph, captured over other values."""
    held = [torch.zeros_like(x) for x in own]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        attended(attention, [x.detach() for x in held], starts)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = attended(attention, [x.detach() for x in held], starts)
    for place, x in zip(held, own, strict=True):
        place.detach().copy_(x.detach())
    if attention.ranks.rank == 0:
        torch.cuda._sleep(20_000_000)  # this rank comes late
    graph.replay()
    torch.cuda.synchronize()
    return [x.clone() for x in found]


def wrong(
    rank: int, device: torch.device, dtype: torch.dtype, packed: bool, exactly: bool
) -> list[str]:
    """What is too far from float64, or not the same bits by another way of exchange or by a graph.

    `exactly`: by deterministic algorithms, so that gradients have the same bits, too.
    """
    torch.use_deterministic_algorithms(exactly)
    ranks, said = Ranks(dist.group.WORLD), list[str]()
    collective = ranks.rows
    assert isinstance(collective, CollectiveRows)
    bound = {torch.float64: 1e-13, torch.float32: 2.0**-14}.get(dtype, 2.0**-7)
    for name, sizes in CASES.items():
        row = drawn(sizes, ranks.size, packed, dtype)
        chunks = Chunks(ranks.rank, ranks.size, sizes.size)

        def own(x: Tensor, chunks: Chunks = chunks) -> Tensor:
            return chunks.own(x.transpose(1, 2)).transpose(1, 2)

        part = [own(x).to(device) for x in row.given]
        starts = None if row.starts is None else row.starts.to(device)
        attention = ContextAttention(ranks, "auto", lambda tokens: None)
        ways: dict[str, tuple[RowExchange, Any]] = {}
        if dist.get_backend() == ("nccl" if device.type == "cuda" else "gloo"):
            ways["collective"] = collective, attended
        if device.type == "cuda":
            peers, why = row_exchange("peer", ranks.group, device)
            assert isinstance(peers, PeerRows), why
            ways |= {"peers": (peers, attended), "replayed": (peers, replayed)}
        first, by_collective = list[Tensor](), list[Tensor]()
        for way, (rows, run) in ways.items():
            ranks.rows = rows
            found = run(attention, [x.detach() for x in part], starts)
            first = first or found
            if way == "collective":
                by_collective = found
            results = zip(("out", "dq", "dk", "dv"), found, first, row.exact, strict=True)
            for what, ours, other, exact in results:
                here = own(exact).to(device)
                off = float((ours.double() - here).norm() / here.norm())
                said += [] if off <= bound else [f"{name}, {way}: {what} is {off:.2e} off"]
                # of three parts or more a collective may add in another order
                ordered = ranks.size == 2 or first is not by_collective
                same = not (what == "out" or (exactly and ordered)) or ours.equal(other)
                said += [] if same else [f"{name}, {way}: bits of {what}"]
                said += [] if ours.dtype == dtype else [f"{name}, {way}: {ours.dtype}"]
        dist.barrier()  # until the others have read this rank's memory
        ranks.rows = collective
    return said


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_collectives_give_float64_s_attention(world: int, packed: bool) -> None:
    assert on_ranks(wrong, world, "gloo", torch.float64, packed, True) == [[]] * world


WAYS = {
    "cuDNN": (torch.bfloat16, False, False),
    "whole": (torch.bfloat16, False, True),
    "packed": (torch.bfloat16, True, True),
    "packed, fp32": (torch.float32, True, True),
}
_on_gpus: dict[int, list[dict[str, list[str]]]] = {}


def each_way(rank: int, device: torch.device) -> dict[str, list[str]]:
    return {name: wrong(rank, device, *way) for name, way in WAYS.items()}


@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("world", [2, 4])
def test_peers_and_graphs_give_the_bits_of_collectives(world: int, way: str) -> None:
    """Attention in bf16 rounds P, dS and results to 2^-9; products of fp32 may be of TF32. cuDNN's gradients have other
    bits each time, and it does not run where algorithms are deterministic. Ranks that share a GPU have no collectives.
    """
    if world not in _on_gpus:
        _on_gpus[world] = on_ranks(each_way, world, backend_on_gpus(world))
    assert [found[way] for found in _on_gpus[world]] == [[]] * world
