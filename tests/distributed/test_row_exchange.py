# SPDX-License-Identifier: Apache-2.0
"""Rows that ranks gather and sum, by each transport and beside products, next to float64."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from torch import Tensor

from lorakernels.parallel.ranks import comm
from lorakernels.parallel.ranks import exchange as row_exchange_module
from lorakernels.parallel.ranks.exchange import (
    Branch,
    CollectiveRows,
    PeerRows,
    RowExchange,
    row_exchange,
)
from tests.processes import backend_on_gpus, on_ranks

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


def wrong_totals(rows: RowExchange, device: torch.device, dtype: torch.dtype) -> list[str]:
    """Totals alone and with a gather that are not the float64 sum, rounded once, or not equal on all ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    wrong = []
    for seed, shapes in enumerate((((16, 40),), ((3, 5), (7, 8), (1,)), ((0, 4), (2, 3)))):
        every = [
            [drawn(k, 10 * seed + i, shape, device).to(dtype) for i, shape in enumerate(shapes)]
            for k in range(world)
        ]
        x = drawn(rank, seed, (8, 4), device).to(dtype)
        whole, *beside = rows.gather(x, totals=every[rank])
        wanted = [drawn(k, seed, (8, 4), device).to(dtype) for k in range(world)]
        wrong += [] if whole.equal(torch.cat(wanted)) else [f"gathered beside totals {seed}"]
        for found in (rows.total(*every[rank]), beside):
            assert [f.shape for f in found] == [*map(torch.Size, shapes)]
            for index, total in enumerate(found):
                assert total.dtype == dtype
                parts = [part[index].double() for part in every]
                size = sum(part.abs() for part in parts)
                bound = ROUNDING.get(dtype, 2.0**-22) * size
                near = ((total.double() - sum(parts)).abs() <= bound).all()
                wrong += [] if near else [f"total {seed}, {index}"]
            told: list[Any] = [None] * world
            dist.all_gather_object(told, [f.cpu() for f in found])
            equal = all(a.equal(b) for other in told for a, b in zip(other, told[0], strict=True))
            wrong += [] if equal else [f"totals {seed} differ"]
    mixed = rows.total(torch.ones(3, device=device), torch.ones(2, device=device, dtype=dtype))
    assert [m.dtype for m in mixed] == [torch.float32, dtype]
    wrong += [] if all(bool((m == world).all()) for m in mixed) else ["mixed totals"]
    assert rows.total() == []
    return wrong


def by_collectives(rank: int, device: torch.device) -> list[str]:
    rows, why = row_exchange("auto", dist.group.WORLD, device)
    assert isinstance(rows, CollectiveRows) and rows.name == "gloo" and why
    with pytest.raises(ValueError, match=r"overlap=True needs ranks .* found transport 'gloo'"):
        row_exchange("auto", dist.group.WORLD, device, overlap=True)
    beside, _ = row_exchange("auto", dist.group.WORLD, device, overlap=None)
    assert isinstance(beside, CollectiveRows)
    return [
        f"{dtype} {w}"
        for dtype in DTYPES
        for w in [*wrong_results(rows, device, dtype), *wrong_totals(rows, device, dtype)]
    ]


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_collectives_gather_bytes_and_sum_within_their_rounding(world: int) -> None:
    assert on_ranks(by_collectives, world, "gloo") == [[]] * world


def test_tensors_in_the_ranks_memory_are_kept_for_the_last_exchanges_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows of any length may come: what is kept for each must not add up."""
    monkeypatch.setattr(row_exchange_module, "MOST_VIEWS", 3)
    made: list[int] = []

    class Memory:
        def get_buffer(self, rank: int, shape: torch.Size, dtype: torch.dtype, at: int) -> Tensor:
            made.append(shape.numel())
            return torch.empty(shape, dtype=dtype)

    rows = PeerRows.__new__(PeerRows)
    rows._size, rows._capacity, rows._handle, rows._views = 2, 1 << 20, Memory(), {}

    def memory(length: int) -> list[list[Tensor]]:
        return rows._memory([(torch.Size([length]), torch.float32)])

    first = memory(1)
    for length in (2, 1, 3, 1, 4):  # 1 is used between the others, 2 is the oldest when 4 comes
        memory(length)
    assert len(rows._views) == 3 and memory(1) is first
    assert made == [1, 1, 2, 2, 3, 3, 4, 4], "each once for both ranks"
    memory(2)
    assert made[8:] == [2, 2] and len(rows._views) == 3


def one_of_two(done: list[str], monkeypatch: pytest.MonkeyPatch) -> tuple[PeerRows, Any]:
    """PeerRows of rank 0 of 2 without a GPU, and its exchanges beside products; `done` gets what it would launch."""

    class Handle:
        def get_buffer(self, rank: int, shape: torch.Size, dtype: torch.dtype, at: int) -> Tensor:
            return torch.zeros(shape, dtype=dtype)

        def barrier(self, **_: Any) -> None:
            done.append("barrier")

    rows = PeerRows.__new__(PeerRows)
    rows._rank, rows._size, rows._others, rows._milliseconds = 0, 2, [1], 1
    rows._capacity, rows._handle, rows._views = 1 << 20, Handle(), {}
    kind = row_exchange_module._PeersBeside
    monkeypatch.setattr(kind, "_send", lambda self, copies: done.append("send"))
    monkeypatch.setattr(kind, "_join", lambda self: done.append("join"))
    return rows, kind(rows)


@pytest.mark.parametrize("capturing", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("way", ["gather", "sum", "sum, at first", "sum with"])
def test_an_exchange_that_breaks_off_is_the_last(
    way: str, capturing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its copies are waited for. The next one's first barrier would be the second one of the others."""
    done: list[str] = []
    rows, beside = one_of_two(done, monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(row_exchange_module, "sum_rows", lambda parts, added, dtype: sum(parts))
    x = torch.ones(4, 8)

    def product(at: slice, pieces: Any = None) -> Tensor:
        if way == "sum, at first" or at.start == 0:
            raise MemoryError("no memory for y")
        return x[at]

    with pytest.raises(MemoryError, match="no memory for y"):
        if way == "gather":
            beside.gather(product, [x])
        elif way == "sum with":
            beside.sum_with(product, 4, Branch(x, lambda factor: [], None))
        else:
            beside.sum(product, 4)
    before = {"sum, at first": [], "sum with": ["barrier", "send", "barrier"]}
    assert done == [*before.get(way, ["barrier", "send"]), "join"]
    exchanges = (
        lambda: rows.gather(x),
        lambda: rows.sum(x),
        lambda: rows.total(x),
        lambda: beside.gather(lambda at, pieces: None, [x]),
        lambda: beside.sum(lambda at: x[at], 4),
    )
    for exchange in exchanges:
        done.clear()
        if capturing:
            exchange()
            assert done.count("barrier") == 2
        else:
            with pytest.raises(RuntimeError, match=r"broke off on this rank \(no memory for y\)"):
                exchange()
            assert not done
    if not capturing:  # which a collective would add
        with pytest.raises(RuntimeError, match="broke off on this rank"):
            rows.sum(x.double())


@pytest.mark.parametrize("capturing", [False, True], ids=["eager", "captured"])
def test_what_fails_to_lay_down_is_the_last(
    capturing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others wait a second time. Of this rank they would take the next exchange's first wait for it."""
    done: list[str] = []
    rows, _ = one_of_two(done, monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    form = torch.Size([4, 8]), torch.float32
    with pytest.raises(MemoryError):
        rows.lay_down(*form, mock.Mock(side_effect=MemoryError("no memory for dk")))
    assert done == ["barrier"]
    done.clear()
    if capturing:
        rows.lay_down(*form, lambda place: None)
        assert done == ["barrier"] * 2
        return
    for exchange in (
        lambda: rows.lay_down(*form, lambda place: None),
        lambda: rows.gather(torch.ones(4, 8)),
    ):
        with pytest.raises(RuntimeError, match=r"broke off on this rank \(no memory for dk\)"):
            exchange()
    assert not done


def test_ranks_have_memory_to_wait_by_where_the_first_rows_are_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows, made = PeerRows.__new__(PeerRows), list[int]()
    rows._size, rows._capacity, rows._handle, rows._views, rows._held = 2, 0, None, {}, []
    rows._device, rows._group = torch.device("cpu"), mock.Mock()
    monkeypatch.setattr(row_exchange_module.comm, "peer_memory", lambda size, _: made.append(size))
    monkeypatch.setattr(symmetric, "rendezvous", lambda memory, name: mock.Mock())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for _ in range(2):
        rows._memory([(torch.Size([0, 8]), torch.float32)])
    assert made == [row_exchange_module.LEAST] and rows._handle is not None


@pytest.mark.parametrize(
    ("others", "overlap", "said"),
    [
        ((120, ""), None, "overlapped with GEMMs of fused FP8 layers"),
        ((120, ""), True, "overlapped with GEMMs of fused FP8 layers"),
        ((108, "no wgmma"), None, "no overlap: rank 1: no wgmma"),
        ((108, "no wgmma"), True, None),
    ],
    ids=["Hopper", "Hopper, needed", "another GPU", "another GPU, needed"],
)
def test_all_ranks_exchange_beside_products_or_none(
    others: tuple[int, str], overlap: bool | None, said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else one rank would read rows where another did not write them."""
    module, mine = row_exchange_module, (132, "")
    monkeypatch.setattr(module.comm, "choose", lambda *_: ("peer", "peers"))
    monkeypatch.setattr(module.comm, "agree", lambda group, own: [own, others])
    monkeypatch.setattr(module.comm, "timeout_of", lambda *_: timedelta(seconds=1))
    monkeypatch.setattr(module, "multiprocessors_of", lambda index: mine[0])
    monkeypatch.setattr(module, "why_not_wgmma", lambda capability: mine[1] or None)
    monkeypatch.setattr(module, "capability_of", lambda device: (9, 0))
    monkeypatch.setattr(dist, "get_rank", lambda group: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    device = torch.device("cuda", 0)
    if said is None:
        with pytest.raises(ValueError, match=r"overlap=True needs Hopper's kernels .* rank 1: no"):
            row_exchange("auto", None, device, overlap)
        return
    rows, why = row_exchange("auto", None, device, overlap)
    assert why == f"peers; {said}"
    asked: list[int] = []
    assert rows.beside(1.0, lambda count: asked.append(count) or 2.0) is None
    assert asked == ([120] if said.startswith("overlapped") else [])


def by_peers(rank: int, device: torch.device, what: str) -> list[str]:
    rows, why = row_exchange("auto", dist.group.WORLD, device, overlap=True)
    assert isinstance(rows, PeerRows), why
    if what == "rows":
        return [f"{d} {w}" for d in DTYPES for w in wrong_results(rows, device, d)]
    if what == "totals":
        return [f"{d} {w}" for d in DTYPES for w in wrong_totals(rows, device, d)]
    if what == "captured":
        return captured(rows, device)
    plain, _ = row_exchange("auto", dist.group.WORLD, device)
    assert plain.beside(1.0, lambda count: 0.0) is None
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    assert rows.beside(1e-5, lambda count: 0.0) is None
    assert rows.beside(1e-4, lambda count: 9e-5) is None
    beside = rows.beside(1e-4, lambda count: 7e-5 if count == multiprocessors else 1.0)
    assert beside is not None
    return wrong_beside(rows, beside, device)


def wrong_beside(rows: PeerRows, beside: Any, device: torch.device) -> list[str]:
    """Exchanges beside products that differ from those after them, eager and replayed, while one rank is late."""
    rank, world, m, k, n, r = dist.get_rank(), dist.get_world_size(), 1024, 2048, 1024, 16
    torch.manual_seed(rank)
    x = torch.zeros(m, k, device=device, dtype=torch.bfloat16)
    z = torch.zeros(world * m, k, device=device, dtype=torch.bfloat16)
    s, t = torch.zeros_like(x[:, :r]).contiguous(), torch.zeros(world * m, r, device=device)
    partial, residual = torch.zeros(r, n, device=device), torch.zeros(m, n, device=device)
    w = torch.randn(k, n, device=device, dtype=torch.bfloat16)
    a = 20 * torch.randn(r, n, device=device)  # so that factor @ a is as large as a product with w
    form = torch.Size([r * n]), torch.float32
    given = (x, z, s, t, partial, residual)

    def exchange(beside: Any) -> list[Tensor]:
        if beside is None:
            whole, factor, total = rows.gather(x, s, totals=[partial])
            y = whole @ w
            added, _ = rows.sum(z @ w)
            summed = rows.sum(z @ w, t, residual)
            assert summed[1] is not None
            added = added + summed[1] @ a
            outer = rows.total(summed[1].t() @ residual)
            return [y, factor, total, *summed, added, *outer, added]
        y = torch.empty(world * m, n, device=device, dtype=x.dtype)

        def product(at: slice, pieces: list[Tensor]) -> None:
            torch.mm(pieces[0], w, out=y[at])
            assert pieces[1].shape == (at.stop - at.start, r)

        factor, total = beside.gather(product, [x, s], [partial])
        summed = beside.sum(lambda at: z[at] @ w, world * m, t, residual)

        def both(at: slice, factor: Tensor | None) -> Tensor:
            own = at.start == rank * m
            assert own == (factor is not None)
            return z[at] @ w if factor is None else (z[at] @ w + factor @ a).to(z.dtype)

        branch = Branch(t, lambda factor: [factor.t() @ residual], form)
        added, (outer,) = beside.sum_with(both, world * m, branch)
        alone, none = beside.sum_with(both, world * m, Branch(t, lambda factor: [], None))
        assert none == []
        return [y, factor, total, *summed, added, outer, alone]

    def differ(name: str, found: list[Tensor], wanted: list[Tensor]) -> list[str]:
        # a product of some rows may add in another order than that of all
        return [
            f"{name}, result {i}"
            for i, (f, e) in enumerate(zip(found, wanted, strict=True))
            if not torch.allclose(f.float(), e.float(), 2.0**-6, 2.0**-6 * float(e.abs().max()))
        ]

    def renew(turn: int) -> None:
        for tensor in given:
            tensor.copy_(torch.randn_like(tensor))
        if turn % world == rank:
            torch.cuda._sleep(20_000_000)

    wrong = []
    for turn in range(4):
        renew(turn)
        wrong += differ(f"eager {turn}", exchange(beside), exchange(None))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = exchange(beside)
    for turn in range(10):
        renew(turn)
        graph.replay()
        if turn % 2:
            graph.replay()  # at once behind the first
        wrong += differ(f"replayed {turn}", found, exchange(None))
    dist.barrier()
    return wrong


def captured(rows: Any, device: torch.device) -> list[str]:
    """A graph with exchanges, replayed on new values while one rank is late."""
    rank, world, m, n = dist.get_rank(), dist.get_world_size(), 64, 256
    x = torch.zeros(m, n, device=device)
    with pytest.raises(RuntimeError, match="run the step eagerly once"):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            rows.gather(torch.zeros(m, n, device=device))
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
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("what", ["rows", "totals", "captured", "beside products"])
def test_peers_gather_bytes_and_sum_within_their_rounding(what: str, world: int) -> None:
    """With more than two, rows behind a rank's own and those before it are two pieces."""
    assert on_ranks(by_peers, world, backend_on_gpus(world), what) == [[]] * world


def growing(rank: int, device: torch.device) -> list[str]:
    """Exchanges whose memory grows while the last rank's GPU has more to do than the others'."""
    world, wrong = dist.get_world_size(), list[str]()
    rows = PeerRows(dist.group.WORLD, device)
    rows._milliseconds = 20_000  # a lost signal is an error by then
    for megabytes in (1, 2, 4, 8):
        x = torch.full((megabytes << 20, 1), rank, dtype=torch.uint8, device=device)
        torch.cuda.synchronize(device)
        if rank == world - 1:
            torch.cuda._sleep(400_000_000)
        (whole,) = rows.gather(x)
        expected = torch.arange(world, device=device)[:, None]
        wrong += [] if bool((whole.view(world, -1) == expected).all()) else [f"{megabytes} MB"]
    dist.barrier()
    return wrong


@pytest.mark.gpu
def test_memory_grows_while_one_ranks_gpu_is_late() -> None:
    """Two processes on one GPU show it, too."""
    assert on_ranks(growing, 2, "cuda:shared") == [[]] * 2


def test_others_see_memory_once_the_device_has_zeroed_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch zeroes it later, with its signals: what others had written there would be lost."""
    order = list[str]()
    monkeypatch.setattr(symmetric, "empty", lambda n, **_: order.append("empty") or torch.zeros(n))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: order.append("wait"))
    monkeypatch.setattr(symmetric, "rendezvous", lambda *_: order.append("rendezvous"))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(comm, "timeout_of", lambda *_: timedelta(seconds=1))
    group = mock.Mock(group_name="0")
    with mock.patch.multiple(dist, get_rank=lambda _: 0, get_world_size=lambda _: 2):
        rows = PeerRows(group, torch.device("cuda", 0))
    rows._grow(5)
    assert order == ["empty", "wait", "rendezvous"]
