# SPDX-License-Identifier: Apache-2.0
"""Which tokens each rank has of a row, and attention of each rank's tokens to all keys, without ranks."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

from lorakernels.autograd.attention import graphed
from lorakernels.autograd.attention.choose import (
    Segments,
    attend_segments,
    choose_segments,
    segments_mask,
)
from lorakernels.autograd.attention.chunk import ChunkCall, attend_chunks, chunk_gradients
from lorakernels.kernels.cudnn import attention as kernel
from lorakernels.kernels.triton.chunk_rows import MOST_RANGES
from lorakernels.parallel.context import attention as context_attention
from lorakernels.parallel.context.attention import Chunks, ContextAttention

LAYOUTS = st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 5))  # ranks, B, C


def visible(starts: list[int], rows: int, length: int) -> Tensor:
    """bool [B S, B S]: whether a token attends to another: of its document and its row, and not behind it."""
    tokens = rows * length
    begins = {*starts, *range(0, tokens, length)}
    document = torch.tensor([i in begins for i in range(tokens)]).cumsum(0)
    at = torch.arange(tokens)
    return (document[:, None] == document) & (at[:, None] >= at)


@given(LAYOUTS)
def test_each_token_is_on_one_rank_and_comes_back_to_its_place(
    layout: tuple[int, int, int],
) -> None:
    ranks, rows, size = layout
    whole = torch.arange(rows * 2 * ranks * size * 3).view(rows, -1, 3)
    each = [Chunks(rank, ranks, size) for rank in range(ranks)]
    parts = torch.cat([chunks.own(whole) for chunks in each])
    assert torch.equal(each[0].by_rank(whole), parts)
    assert torch.equal(each[-1].in_order(parts), whole)


@given(LAYOUTS, st.lists(st.integers(0, 120), max_size=6))
def test_segments_say_what_a_row_of_documents_says(
    layout: tuple[int, int, int], cuts: list[int]
) -> None:
    """Equal starts, which are documents without tokens, among them."""
    ranks, rows, size = layout
    length = 2 * ranks * size
    starts = [0, *sorted(min(cut, rows * length) for cut in cuts), rows * length]
    longest = max(b - a for a, b in pairwise(starts))
    expected = visible(starts, rows, length).view(rows, length, -1)
    for rank in range(ranks):
        chunks = Chunks(rank, ranks, size)
        for begin in chunks.begins:
            at = torch.tensor(starts, dtype=torch.int32)
            segments = chunks.segments(at, rows, begin, longest)
            mask = segments_mask(segments, rows * size, rows * length)[0, 0]
            assert torch.equal(mask, expected[:, begin : begin + size].flatten(0, 1))
            assert segments.q.dtype == segments.k.dtype == torch.int32
            assert (segments.q.diff() >= 0).all() and segments.q[-1] == rows * size
            assert int(segments.q.diff().max()) <= segments.longest_q
            assert int(segments.k.diff().max()) <= segments.longest_k


@pytest.mark.parametrize("wanted", ["auto", "cudnn_graph"])
@pytest.mark.parametrize("size", [36, 150])
def test_chunks_of_all_ranks_attend_as_whole_rows(
    wanted: str, size: int, device: torch.device
) -> None:
    """Two rows of documents, grouped heads: values and gradients beside float64's. Some documents have no queries in a
    chunk, and some no tokens.

    On a CPU in float64. On a GPU in bf16 by cuDNN's graphs or FlashAttention-2, which round P, dS and results to 2^-9.
    """
    ranks, rows, heads, kv_heads, dim = 2, 2, 4, 2, 64
    length, on_gpu = 2 * ranks * size, device.type == "cuda"
    dtype, bound = (torch.bfloat16, 2.0**-7) if on_gpu else (torch.float64, 1e-13)
    if wanted == "cudnn_graph" and (why := graphed.why_not_here(device)):
        pytest.skip(why)
    at = [round(part * length) for part in (0, 0.04, 0.04, 0.7, 1, 1.05, 2)]
    starts = torch.tensor(at, dtype=torch.int32, device=device)
    q, k, v = (
        torch.randn(rows, n, length, dim, device=device).to(dtype).requires_grad_()
        for n in (heads, kv_heads, kv_heads)
    )
    leaves = q, k, v
    exact = [x.detach().double().requires_grad_() for x in leaves]
    mask = visible(at, rows, length).to(device)

    def whole(x: Tensor, repeats: int = 1) -> Tensor:
        return x.transpose(1, 2).flatten(0, 1).transpose(0, 1).repeat_interleave(repeats, 0)

    scores = whole(exact[0]) @ whole(exact[1], 2).transpose(1, 2) * 0.3
    out = scores.masked_fill(~mask, -torch.inf).softmax(-1) @ whole(exact[2], 2)
    expected = out.transpose(0, 1).reshape(rows, length, heads, dim)
    grad = torch.randn_like(expected).to(dtype)
    gradients = torch.autograd.grad(expected, exact, grad.double())

    k, v = (  # columns of one matrix, as they are gathered
        x.transpose(1, 2)
        for x in torch.cat((k, v), 1).transpose(1, 2).contiguous().split(kv_heads, 2)
    )
    name = choose_segments(wanted, q[:, :, :size], k, v)
    assert name == (wanted if wanted != "auto" else "packed" if on_gpu else "torch")
    parts = {}
    for rank in range(ranks):
        chunks = Chunks(rank, ranks, size)
        for begin in chunks.begins:
            segments = chunks.segments(starts, rows, begin, length)
            here = q[:, :, begin : begin + size]
            parts[begin] = attend_segments(name, here, k, v, segments, 0.3).transpose(1, 2)
    found = torch.cat([parts[begin] for begin in sorted(parts)], 1)
    pairs = zip((found, *torch.autograd.grad(found, leaves, grad)), (expected, *gradients), strict=True)  # fmt: skip
    for ours, theirs in pairs:
        theirs = theirs.detach()
        assert float((ours.detach().double() - theirs).norm() / theirs.norm()) <= bound


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_chunks_in_squares_and_rectangles_attend_as_whole_rows(
    ranks: int, rows: int, device: torch.device
) -> None:
    """Each rank's two chunks of rows that are one document each, beside float64's.

    All ranks attend to as many keys: a causal square of 2C queries and rectangles, in which each key is once.
    On a CPU in float64. On a GPU in bf16 by cuDNN, which rounds P, dS and results to 2^-9; merged once or twice more.
    """
    size, heads, dim = 32, 4, 64
    length, on_gpu = 2 * ranks * size, device.type == "cuda"
    dtype, bound = (torch.bfloat16, 2.0**-7) if on_gpu else (torch.float64, 1e-13)
    kv_heads, name = 2, "cudnn" if on_gpu else "torch"
    if on_gpu and torch.cuda.get_device_capability(device) < (9, 0):
        pytest.skip("cuDNN's attention is taken on Hopper")
    q, k, v = (
        (torch.randn(rows, n, length, dim, device=device) * 2).to(dtype)
        for n in (heads, kv_heads, kv_heads)
    )
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    mask = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    wide = [x.repeat_interleave(heads // x.shape[1], 1) for x in exact]
    scores = (wide[0] @ wide[1].transpose(-1, -2) * 0.3).masked_fill(~mask, -torch.inf)
    expected = scores.softmax(-1) @ wide[2]
    grad = torch.randn_like(expected).to(dtype)
    gradients = torch.autograd.grad(expected, exact, grad.double())
    found = torch.empty_like(expected, dtype=dtype)
    totals = [torch.zeros_like(x, dtype=torch.float64) for x in (q, k, v)]
    for rank in range(ranks):
        chunks = Chunks(rank, ranks, size)
        at = torch.cat([torch.arange(b, b + size, device=device) for b in chunks.begins])
        call, here = ChunkCall(name, chunks.begins, 0.3), q[:, :, at]
        own, whole = (k[:, :, at], v[:, :, at]), (k, v)
        with torch.no_grad():
            attended = attend_chunks(call, here, own, whole)
            dq, parts = chunk_gradients(call, grad[:, :, at], here, own, whole, attended)
        for result in (attended.out, dq):
            assert result.transpose(1, 2).is_contiguous()
        calls = 1 + (rank > 0) + (rank < ranks - 1)  # of a kernel
        assert len(attended.rest) == calls and len(parts) == 1 + calls <= MOST_RANGES
        ranges = sorted((p.begin, p.begin + p.dk.shape[2]) for p in parts)
        assert ranges[0][0] == 0 and all(a[1] == b[0] for a, b in pairwise(ranges))
        found[:, :, at] = attended.out
        totals[0][:, :, at] += dq
        for begin, *each in parts:
            for total, d in zip(totals[1:], each, strict=True):
                total[:, :, begin : begin + d.shape[2]] += d
    for ours, theirs in zip((found, *totals), (expected.detach(), *gradients), strict=True):
        assert float((ours.double() - theirs).norm() / theirs.norm()) <= bound


def test_a_backend_that_does_not_take_them_is_refused() -> None:
    q = torch.zeros(1, 2, 4, 64)
    with pytest.raises(ValueError, match="'fp8' does not take a part of the queries"):
        choose_segments("fp8", q, q, q)
    with pytest.raises(
        ValueError, match="'cudnn_graph' does not take these rows: cuDNN needs a GPU"
    ):
        choose_segments("cudnn_graph", q, q, q)


def test_a_segment_without_queries_gives_its_keys_nothing() -> None:
    k = torch.randn(1, 1, 6, 8, requires_grad=True)
    segments = Segments(*torch.tensor([[0, 0, 2, 2], [0, 2, 5, 6]], dtype=torch.int32), 2, 3)
    out = attend_segments("torch", torch.randn(1, 1, 2, 8), k, k, segments, 1.0)
    out.sum().backward()
    assert k.grad is not None
    assert (k.grad[0, 0].abs().sum(-1) > 0).tolist() == [False, False, True, True, True, False]


class OneRow:
    """The exchange of a rank that is alone."""

    def gather(self, x: Tensor) -> list[Tensor]:
        return [x]

    def lay_down(self, shape: torch.Size, dtype: torch.dtype, write: Any) -> None:
        return None


class FirstOfFour(OneRow):
    """The exchange of a rank whose tokens the three others have, too. They add `others` to sums."""

    def __init__(self) -> None:
        self.others: list[Tensor] = []

    def gather(self, x: Tensor) -> list[Tensor]:
        return [torch.cat([x] * 4)]

    def sum(self, whole: Tensor) -> tuple[Tensor, None]:
        total = whole.chunk(4)[0].clone()
        for other in self.others:
            total += other.to(whole.dtype)  # as a collective of that dtype does
        return total, None


@pytest.mark.parametrize("packed", [False, True], ids=["whole rows", "packed"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gradients_of_all_ranks_are_added_in_fp32_and_rounded_once(
    dtype: torch.dtype, packed: bool
) -> None:
    heads, own, dim = 2, 6, 16  # of heads that share keys a CPU gives fp32
    rows = FirstOfFour()
    ranks: Any = SimpleNamespace(rank=0, size=4, rows=rows)
    leaves = [torch.randn(1, heads, own, dim).to(dtype).requires_grad_() for _ in range(3)]
    starts = torch.tensor([0, 5, 4 * own], dtype=torch.int32) if packed else None
    attention = ContextAttention(ranks, "auto", lambda tokens: None)
    grad = torch.randn(1, heads, own, dim).to(dtype)

    def gradients() -> Tensor:
        """dk and dv [1, 2C, 2 Hk, D]."""
        out = attention.attend(*leaves, (starts, 4 * own), 0.25)
        _, dk, dv = torch.autograd.grad(out, leaves, grad)
        assert dk.dtype == dv.dtype == dtype
        return torch.cat((dk, dv), 1).transpose(1, 2)

    mine = gradients()
    rows.others = [torch.randn(mine.shape).to(dtype) for _ in range(3)]
    terms = torch.stack([mine, *rows.others]).double()
    half = torch.finfo(dtype).eps / 2  # of a value; below them, three roundings of fp32 sums
    allowed = terms.sum(0).abs() * half + terms.abs().sum(0) * 3 * 2.0**-24
    error = (gradients().double() - terms.sum(0)).abs()
    assert bool((error <= allowed * (1 + half)).all())


def test_the_backend_is_chosen_anew_under_deterministic_algorithms(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was chosen before may add in any order."""
    asked = []

    def choose(*arguments: object) -> str:
        asked.append(torch.are_deterministic_algorithms_enabled())
        return "torch"

    monkeypatch.setattr(context_attention, "choose", choose)
    alone: Any = SimpleNamespace(rank=0, size=1, rows=OneRow())
    attention = ContextAttention(alone, "auto", lambda tokens: None)
    q = torch.randn(1, 2, 8, 16)
    before = torch.are_deterministic_algorithms_enabled()
    try:
        for exact in (False, True, True, False):
            torch.use_deterministic_algorithms(exact)
            attention.attend(q, q, q, (None, 8), 0.25)
    finally:
        torch.use_deterministic_algorithms(before)
    assert asked == [False, True]


def test_long_documents_are_attended_to_by_graphs_and_short_ones_by_flash(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By max_length_q, which the host knows; a row bounds it. Rows of one document are as long as a row."""
    asked = []

    def choose_segments(wanted: str, q: Tensor, k: Tensor, v: Tensor, long: bool) -> str:
        asked.append((wanted, long))
        return "torch"

    monkeypatch.setattr(context_attention, "choose_segments", choose_segments)
    monkeypatch.setattr(context_attention, "LONG", 8)
    alone: Any = SimpleNamespace(rank=0, size=1, rows=OneRow())
    attention = ContextAttention(alone, "flash", lambda tokens: None)
    starts = torch.tensor([0, 3, 8], dtype=torch.int32)
    for tokens, longest in ((8, 7), (8, 9), (8, 8), (8, 7)):
        q = torch.randn(1, 2, tokens, 16)
        attention.attend(q, q, q, (starts, longest), 0.25)
    attention.attend(q, q, q, (None, 1), 0.25)
    assert asked == [("flash", False), ("flash", True), ("flash", True)]


def test_segments_get_another_backend_where_no_more_graphs_are_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A choice is for rows of any length, and graphs are for few lengths each. Those that are built serve on."""
    taken: list[str] = []
    built: set[Any] = set()

    def attend(name: str, q: Tensor, *rest: Any) -> Tensor:
        taken.append(name)
        if name == "cudnn_graph":
            built.add(kernel.many(q.shape[2]))
        return q

    monkeypatch.setattr(graphed, "why_not_here", lambda _: "")
    monkeypatch.setattr(graphed, "MOST", 2)
    monkeypatch.setattr(kernel, "built", lambda: len(built))
    monkeypatch.setattr(kernel, "is_built", lambda form, _: form.tokens in built)
    monkeypatch.setattr(context_attention, "attend_segments", attend)
    alone: Any = SimpleNamespace(rank=0, size=1, rows=OneRow())

    def run(attention: ContextAttention, tokens: int) -> list[str]:
        taken.clear()
        starts = torch.tensor([0, 3, tokens], dtype=torch.int32)
        q = torch.randn(1, 2, tokens, 64, dtype=torch.bfloat16)
        attention.attend(q, q, q, (starts, tokens), 0.25)
        return [*taken]

    attention = ContextAttention(alone, "cudnn_graph", lambda tokens: None)
    for tokens in (256, 512):
        assert run(attention, tokens) == ["cudnn_graph"] * 2
    with pytest.raises(ValueError, match="graphs for 1 shapes are built already; try 'auto'"):
        run(attention, 1024)
    attention.attention = "auto"
    assert run(attention, 1024) == ["torch"] * 2
    assert run(attention, 512) == ["cudnn_graph"] * 2


@pytest.mark.parametrize(
    ("wanted", "long", "takes", "found"),
    [
        ("auto", True, True, "cudnn_graph"),
        ("auto", True, False, "torch"),
        ("auto", False, True, "torch"),
        ("cudnn_graph", False, True, "cudnn_graph"),
        ("math", True, True, "math"),
    ],
)
def test_graphs_are_taken_where_segments_are_long_or_they_are_wanted(
    wanted: str, long: bool, takes: bool, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphed, "why_not_segments", lambda *_: "" if takes else "no GPU")
    q = torch.zeros(1, 2, 4, 64)
    assert choose_segments(wanted, q, q, q, long) == found
