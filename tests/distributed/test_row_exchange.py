# SPDX-License-Identifier: Apache-2.0
"""Rows that ranks gather and sum, by each transport, beside float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lorakernels.parallel.row_exchange import CollectiveRows, PeerRows, RowExchange, row_exchange
from tests.processes import on_ranks

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
ROUNDING = {torch.float32: 2.0**-22, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
# rows of a rank, columns, rank of the adapter: the memory grows, and serves smaller ones again
SIZES = ((4, 24, 3), (1, 8, 1), (96, 512, 16), (0, 8, 2), (33, 40, 5), (7, 1, 1))


def drawn(rank: int, seed: int, shape: tuple[int, ...], device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(device)


def wrong_results(rows: RowExchange, device: torch.device, dtype: torch.dtype) -> list[str]:
    """What is not the gathered bytes, or further from the sum in float64 than the ranks' roundings are."""
    rank, world = dist.get_rank(), dist.get_world_size()
    wrong = []
    for seed, (m, n, r) in enumerate(SIZES):
        if device.type == "cuda" and (seed + rank) % world == 0:
            torch.cuda._sleep(20_000_000)  # this rank comes late
        bytes_ = (drawn(rank, seed, (m, n), device) * 50).to(torch.int8).view(torch.uint8)
        factor = drawn(rank, seed, (m, r), device).to(dtype)
        found = rows.gather(bytes_, factor)
        every = [(drawn(k, seed, (m, n), device) * 50).to(torch.int8) for k in range(world)]
        wrong += [] if found[0].equal(torch.cat(every).view(torch.uint8)) else [f"bytes {seed}"]
        every = [drawn(k, seed, (m, r), device).to(dtype) for k in range(world)]
        wrong += [] if found[1].equal(torch.cat(every)) else [f"factor {seed}"]

        own = slice(rank * m, (rank + 1) * m)
        parts = [drawn(k, seed, (world * m, n), device).to(dtype) for k in range(world)]
        factors = [drawn(k, seed, (world * m, r), device).to(dtype) for k in range(world)]
        added = drawn(9, seed, (m, n), device).to(dtype)
        y, s = rows.sum(parts[rank], factors[rank], added)
        assert s is not None and y.dtype == s.dtype == dtype
        wanted = sum(part.double()[own] for part in parts) + added.double()
        size = sum(part.double()[own].abs() for part in parts) + added.double().abs()
        bound = (world + 1) * ROUNDING.get(dtype, 2.0**-51)
        wrong += [] if ((y.double() - wanted).abs() <= bound * size).all() else [f"sum {seed}"]
        wanted = sum(part.double()[own] for part in factors)
        size = sum(part.double()[own].abs() for part in factors)
        bound = ROUNDING.get(dtype, 2.0**-22)  # summed in fp32, rounded once
        wrong += [] if ((s.double() - wanted).abs() <= bound * size).all() else [f"s {seed}"]
        alone, none = rows.sum(parts[rank])
        assert none is None
        wanted = sum(part.double()[own] for part in parts)
        wrong += [] if torch.allclose(alone.double(), wanted, 0.05, 0.1) else [f"alone {seed}"]
    return wrong


def by_collectives(rank: int, device: torch.device) -> list[str]:
    rows, why = row_exchange("auto", dist.group.WORLD, device)
    assert isinstance(rows, CollectiveRows) and rows.name == "gloo" and why
    return [f"{dtype} {w}" for dtype in DTYPES for w in wrong_results(rows, device, dtype)]


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_collectives_gather_bytes_and_sum_within_their_rounding(world: int) -> None:
    assert on_ranks(by_collectives, world, "gloo") == [[]] * world


def by_peers(rank: int, device: torch.device) -> list[str]:
    rows, why = row_exchange("auto", dist.group.WORLD, device)
    assert isinstance(rows, PeerRows), why
    wrong = [f"{dtype} {w}" for dtype in DTYPES for w in wrong_results(rows, device, dtype)]
    return wrong + [f"captured: {w}" for w in captured(rows, device)]


def captured(rows: Any, device: torch.device) -> list[str]:
    """A graph with exchanges, replayed on new values while one rank is late."""
    rank, world, m, n = dist.get_rank(), dist.get_world_size(), 64, 256
    x = torch.zeros(m, n, device=device)
    with pytest.raises(RuntimeError, match="run the step eagerly once"):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            rows.gather(torch.zeros(1 << 22, n, device=device))
    graph = torch.cuda.CUDAGraph()
    rows.sum(rows.gather(x)[0], None, x)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        (whole,) = rows.gather(x)
        y, _ = rows.sum(whole * (rank + 1), None, x)
    wrong = []
    for turn in range(20):
        x.fill_(turn + 100 * rank)
        if turn % world == rank:
            torch.cuda._sleep(5_000_000)
        graph.replay()
        expected = turn + 100 * rank
        total = expected * world * (world + 1) / 2 + expected
        wrong += [] if bool((y == total).all()) else [f"turn {turn}"]
    dist.barrier()
    return wrong


@pytest.mark.gpu
def test_peers_gather_bytes_and_sum_within_their_rounding() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    assert on_ranks(by_peers, 2, "nccl") == [[]] * 2
