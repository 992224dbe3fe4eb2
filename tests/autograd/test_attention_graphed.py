# SPDX-License-Identifier: Apache-2.0
"""cuDNN's graphs of attention: which tensors they take, what they are handed, and on a GPU what they compute."""

from __future__ import annotations

import re
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lorakernels.autograd.attention import choose as attention
from lorakernels.autograd.attention import graphed
from lorakernels.kernels.cudnn import attention as kernel
from lorakernels.kernels.cudnn import form as described

BF16 = torch.bfloat16
SCALE = 0.125
# N, lengths of documents: one, tile borders, empty ones in front, inside and behind
DOCUMENTS = {
    "one document": [300],
    "borders of tiles": [1, 63, 64, 65, 127, 128, 129],
    "without tokens": [0, 100, 0, 0, 29, 1, 0, 0, 0],
}


def heads(device, batch=1, tokens=64, q_heads=4, kv_heads=2, dim=64, dtype=BF16) -> list[Tensor]:
    """q, k, v as views of one qkv, as a fused layer has them."""
    counts = [q_heads, kv_heads, kv_heads]
    qkv = torch.randn(batch, tokens, sum(counts), dim, device=device, dtype=dtype)
    return [t.transpose(1, 2).requires_grad_() for t in qkv.split(counts, 2)]


def starts_of(lengths: list[int], device: Any = "cpu") -> Tensor:
    ends = torch.tensor([0, *lengths]).cumsum(0)
    return ends.to(device, torch.int32)


def reference(
    q: Tensor, k: Tensor, v: Tensor, lengths: list[int], dout: Tensor, wide: torch.dtype
) -> list[Tensor]:
    """out, dq, dk, dv document by document in `wide`."""
    given = [t.detach().to(wide).requires_grad_() for t in (q, k, v)]
    rows = [t.transpose(1, 2).flatten(0, 1).transpose(0, 1)[None] for t in given]
    outs, at = [], 0
    for length in lengths:
        if length:
            part = [t[:, :, at : at + length] for t in rows]
            outs.append(
                attention.attend("math" if q.is_cuda else "torch", *part, None, True, SCALE)
            )
        at += length
    out = torch.cat(outs, 2)[0].transpose(0, 1)
    out = out.view(q.shape[0], q.shape[2], *out.shape[1:]).transpose(1, 2)
    return [out, *torch.autograd.grad(out, given, dout.to(wide))]


# What cuDNN is handed, read as it reads it


def strided(x: Tensor, at: int, length: int, strides: tuple[int, ...], n: int, dim: int) -> Tensor:
    """[heads, length, D] from element `at` of x's memory, counted from x's first."""
    own = x.storage_offset() + at
    return x.as_strided((n, length, dim), (strides[1], strides[2], 1), own)


def emulated(form: described.Form, offsets: kernel.Offsets | None) -> list[tuple[list[int], int]]:
    """For each row or sequence: its first element in q, k and v, in out, in dk, in stats; and its tokens."""
    if offsets is None:
        n = form.longest
        steps = [form.strides[1][0], form.out[0], form.kv[0], form.heads * n]
        return [([i * s for s in steps], n) for i in range(form.rows)]
    assert offsets.elements.dtype == torch.int64 and offsets.lengths.dtype == torch.int32
    assert offsets.elements.shape == (4, form.rows + 1) and offsets.lengths.shape == (form.rows,)
    assert int(offsets.lengths.max()) <= form.longest
    at = offsets.elements[:, :-1].T.tolist()
    return list(zip(at, offsets.lengths.tolist(), strict=True))


def emulate(form, kept, dout, offsets) -> tuple[Tensor, list[Tensor]]:  # type: ignore[no-untyped-def]
    """out and the gradients, where the form says that they lie."""
    q, k, v = kept
    tokens = k.shape[0] * k.shape[2]
    lead = (tokens,) if form.tokens else (form.rows, form.longest)
    out = q.new_empty((*lead, form.heads, form.dim))
    dq = torch.empty_like(out)
    dk, dv = (q.new_empty((*lead, form.kv_heads, form.dim)) for _ in range(2))
    counts = (form.heads, form.kv_heads, form.kv_heads)
    for (own, at_out, at_kv, _), n in emulated(form, offsets):
        if not n:
            continue
        of_q = at_out if form.strides[0] == form.out else own
        given = [
            strided(x, at, n, s, c, form.dim).detach()[None].requires_grad_()
            for x, at, s, c in zip((q, k, v), (of_q, own, own), form.strides, counts, strict=True)
        ]
        with torch.enable_grad():
            part = attention.attend("torch", *given, None, True, form.scale)
        strided(out, at_out, n, form.out, form.heads, form.dim).copy_(part[0].detach())
        if dout is not None:
            d = strided(dout, at_out, n, form.out, form.heads, form.dim)[None]
            a, b, c = torch.autograd.grad(part, given, d)
            strided(dq, at_out, n, form.out, form.heads, form.dim).copy_(a[0])
            strided(dk, at_kv, n, form.kv, form.kv_heads, form.dim).copy_(b[0])
            strided(dv, at_kv, n, form.kv, form.kv_heads, form.dim).copy_(c[0])
    return out, [dq, dk, dv]


@pytest.fixture
def emulation(monkeypatch: pytest.MonkeyPatch) -> list[described.Form]:
    """cuDNN's part by torch on the CPU. Returns the forms that forward had."""
    forms: list[described.Form] = []

    def forward(form, q, k, v, offsets):  # type: ignore[no-untyped-def]
        forms.append(form)
        return emulate(form, (q, k, v), None, offsets)[0], torch.empty(1)

    def backward(form, kept, dout, offsets):  # type: ignore[no-untyped-def]
        assert dout.is_contiguous()
        if form.tokens:  # or cuDNN's sums of dq are another sequence's
            assert form.strides[0] == form.out and kept[0].is_contiguous()
        return tuple(emulate(form, kept[:3], dout, offsets)[1])

    monkeypatch.setattr(kernel, "prepare", lambda *_: None)
    monkeypatch.setattr(kernel, "forward", forward)
    monkeypatch.setattr(kernel, "backward", backward)
    return forms


@pytest.mark.parametrize("lengths", DOCUMENTS.values(), ids=DOCUMENTS)
def test_packed_sequences_are_handed_over(
    lengths: list[int], emulation: list[described.Form]
) -> None:
    """The offsets, strides and shapes are those of each document; out and the gradients come back in place."""
    q, k, v = heads("cpu", tokens=sum(lengths), dtype=torch.float32)
    dout = torch.randn_like(q)
    out = graphed.attend_sequences(q, k, v, starts_of(lengths), max(lengths), SCALE)
    found = [out, *torch.autograd.grad(out, (q, k, v), dout)]
    for a, b in zip(found, reference(q, k, v, lengths, dout, torch.float32), strict=True):
        assert a.shape == b.shape
        assert (a - b).norm() < 2.0**-18 * b.norm()  # fp32 sums in another order
    form = emulation[0]
    assert all(stride > 0 for strides in form.strides for stride in strides)
    assert form.rows >= len(lengths) and form.rows & (form.rows - 1) == 0
    assert form.tokens == kernel.many(sum(lengths)) >= form.longest >= max(lengths)


def test_rows_and_sequences_across_rows_are_handed_over(emulation: list[described.Form]) -> None:
    q, k, v = heads("cpu", batch=3, tokens=40, dtype=torch.float32)
    dout = torch.randn(3, 40, 4, 64).transpose(1, 2)
    for lengths, out in (
        ([40] * 3, graphed.attend_rows(q, k, v, SCALE)),
        ([50, 30, 40], graphed.attend_sequences(q, k, v, starts_of([50, 30, 40]), 50, SCALE)),
    ):
        found = [out, *torch.autograd.grad(out, (q, k, v), dout)]
        for a, b in zip(found, reference(q, k, v, lengths, dout, torch.float32), strict=True):
            assert (a - b).norm() < 2.0**-18 * b.norm()
    assert [form.tokens for form in emulation] == [0, 128]


def test_any_number_of_documents_takes_few_graphs(emulation: list[described.Form]) -> None:
    for n, tokens in ((6, 400), (7, 512), (8, 500)):
        q, k, v = heads("cpu", tokens=tokens, dtype=torch.float32)
        lengths = [tokens - 40 * (n - 1), *[40] * (n - 1)]
        graphed.attend_sequences(q, k, v, starts_of(lengths), max(lengths), SCALE)
    assert {(f.rows, f.longest, f.tokens) for f in emulation} == {(8, 256, 512), (8, 512, 512)}
    sizes = [kernel.many(n) for n in range(1, 2**15)]
    assert len(set(sizes)) < 60
    assert all(n <= m <= max(n + 127, n + n // 8) for n, m in enumerate(sizes, 1))


def test_graphs_are_not_built_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphed, "why_not_here", lambda _: "")
    monkeypatch.setattr(kernel, "built", lambda: graphed.MOST)
    assert "256 shapes are built already" in graphed.why_not(like(*Q), like(*K), like(*K), True)


def test_misaligned_views_are_refused() -> None:
    """cuDNN computes wrong values from them and says nothing (pytorch#194818)."""
    whole = torch.randn(64 * 4 * 64 + 4, dtype=BF16)
    q = whole[4:].view(1, 64, 4, 64).transpose(1, 2)
    with pytest.raises(ValueError, match="q begins 8 bytes behind a multiple of 16"):
        graphed.attend_rows(q, q, q, SCALE)


HERE = torch.device("cuda", 0)


def like(shape: tuple[int, ...], stride: tuple[int, ...] | None = None, dtype=BF16) -> Any:
    """What `why_not` reads of a tensor on a GPU."""
    meta = torch.empty(shape, dtype=dtype, device="meta")
    meta = meta if stride is None else meta.as_strided(shape, stride)
    return SimpleNamespace(
        shape=meta.shape, dtype=dtype, device=HERE, stride=meta.stride,
        element_size=meta.element_size, numel=meta.numel,
    )  # fmt: skip


ROW = 8 * 64  # of a qkv of 4 + 2 + 2 heads
Q, K = ((2, 4, 32, 64), (32 * ROW, 64, ROW, 1)), ((2, 2, 32, 64), (32 * ROW, 64, ROW, 1))


@pytest.mark.parametrize(
    ("q", "k", "packed", "said"),
    [
        (like(*Q), like(*K), True, ""),
        (like(*Q, torch.float32), like(*K, torch.float32), False, "q is torch.float32"),
        (like((2, 4, 32, 256)), like((2, 2, 32, 256)), False, "256 columns"),
        (like((2, 4, 32, 60)), like((2, 2, 32, 60)), False, "60 columns"),
        (like((2, 4, 32, 64)), like((2, 3, 32, 64)), False, "4 heads of q do not divide"),
        (like((2, 4, 32, 64)), like((2, 2, 31, 64)), False, "do not have q's rows"),
        (like((0, 4, 32, 64)), like((0, 2, 32, 64)), False, "no tokens"),
        (like((2, 4, 1, 64)), like((2, 2, 1, 64)), False, "rows have one token"),
        (like((2, 4, 32, 64), (32 * 260, 64, 260, 1)), like(*K), False, "q has strides .* 16 bytes"),
        (like((2, 4, 32, 64), (64 * ROW, 64, ROW, 1)), like(*K), True, "q's rows do not follow"),
        (like((2, 4, 32, 64), (8192, 64, 256, 1)), like(*K), True, "not columns of one matrix"),
        (like((2, 4, 32, 64), (8192, 64, 256, 1)), like(*K), False, ""),
    ],
)  # fmt: skip
def test_refusals_are_named(q, k, packed, said, monkeypatch) -> None:
    monkeypatch.setattr(graphed, "why_not_here", lambda _: "")
    found = graphed.why_not(q, k, k, packed)
    assert re.search(said, found) if said else not found


def test_a_deterministic_backward_has_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphed, "why_not_here", lambda _: "")
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    needed = 2 * 2 * 4 * 32 * 32
    properties = SimpleNamespace(total_memory=needed * graphed.BUDGET)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    assert graphed.why_not(like(*Q), like(*K), like(*K), False) == ""
    properties.total_memory -= graphed.BUDGET
    found = graphed.why_not(like(*Q), like(*K), like(*K), False)
    assert (
        f"takes {needed:,} bytes for 2 sequences of up to 32 tokens, more than {needed - 1:,}"
        in found
    )
    assert graphed.why_not(like(*Q), like(*K), like(*K), True) == ""  # their number is known later
    q, k, v = heads("cpu", 2, 32)
    with pytest.raises(ValueError, match="bytes for 2 sequences of up to 128 tokens, more than"):
        graphed.attend_sequences(q, k, v, starts_of([40, 24]), 40, SCALE)


def test_packed_sequences_prefer_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it does not take is refused with the reason, and goes to the next backend."""
    monkeypatch.setattr(graphed, "why_not_here", lambda _: "")
    q, k, v = heads("cpu", 2, 32)
    assert attention.choose("auto", q, k, v, None, True) == "torch"
    assert attention.choose_packed("auto", q, k, v) == "cudnn_graph"
    assert attention.choose_packed("auto", q, k, v, short=True) == "torch"
    assert attention.choose_packed("auto", q.float(), k.float(), v.float()) == "torch"
    with monkeypatch.context() as changed:
        changed.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
        assert attention.choose_packed("auto", q, k, v) == "torch"
    assert attention.choose("cudnn_graph", q, k, v, None, True) == "cudnn_graph"
    assert attention.choose_packed("cudnn_graph", q, k, v) == "cudnn_graph"
    with pytest.raises(
        ValueError, match=r"attention='cudnn_graph' does not take these rows: .* no mask"
    ):
        attention.choose("cudnn_graph", q, k, v, torch.ones(2, 1, 32, 32), False)
    monkeypatch.setattr(attention, "cudnn_folders", lambda: ["/a", "/b"])
    with pytest.raises(RuntimeError, match=r"cudnn_graph.*parts of cuDNN from /a and /b"):
        attention.choose_packed("cudnn_graph", q, k, v)


def test_what_is_slower_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "capability_of", lambda _: (9, 0))
    monkeypatch.setattr(graphed, "why_not_here", lambda _: "no package")
    q = like((2, 4, 256, 64))
    q.is_cuda = True
    for longest in (129, None):
        assert attention.why_not_graph("flash", q, q, q, longest) == "no package"
        assert attention.why_not_graph("cudnn", q, q, q, longest) == ""
    assert "longer than 128 tokens" in attention.why_not_graph("packed", q, q, q, 128)
    monkeypatch.setattr(attention, "capability_of", lambda _: (8, 0))
    assert attention.why_not_graph("flash", q, q, q, 256) == ""


def test_attend_sends_the_backend_its_rows(emulation: list[described.Form]) -> None:
    q, k, v = heads("cpu", 2, 32, dtype=torch.float32)
    attention.attend("cudnn_graph", q, k, v, None, True, SCALE)
    attention.attend_packed("cudnn_graph", q, k, v, starts_of([40, 24]), 40, SCALE)
    assert [(f.rows, f.longest, f.tokens) for f in emulation] == [(2, 32, 0), (2, 128, 128)]


def test_without_a_gpu_or_the_package_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert graphed.why_not_here(torch.device("cpu")) == "cuDNN needs a GPU"
    monkeypatch.setattr(graphed, "capability_of", lambda _: (8, 0))
    assert "Hopper" in graphed.why_not_here(HERE)
    monkeypatch.setattr(graphed, "capability_of", lambda _: (9, 0))
    monkeypatch.setattr(described, "frontend", lambda: import_module("no_such_package"))
    graphed.why_not_installed.cache_clear()
    assert "is not installed: pip install lorakernels[cudnn]" in graphed.why_not_here(HERE)
    graphed.why_not_installed.cache_clear()


@pytest.mark.parametrize(
    ("package", "cudnn", "why"),
    [
        ("1.28.0", 91900, ""),
        ("1.26.0", 91900, "1.26.0 was not tried"),
        ("1.28.0", 91002, "91002 is older"),
    ],
)
def test_versions_that_were_not_tried_are_refused(
    monkeypatch: pytest.MonkeyPatch, package: str, cudnn: int, why: str
) -> None:
    found = SimpleNamespace(__version__=package, backend_version=lambda: cudnn)
    monkeypatch.setattr(described, "frontend", lambda: found)
    graphed.why_not_installed.cache_clear()
    said = graphed.why_not_installed()
    graphed.why_not_installed.cache_clear()
    assert (why in said) if why else said == ""


@pytest.mark.parametrize("exact", [False, True], ids=["any order", "deterministic"])
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("tokens", [0, 4096, -4096], ids=["rows", "sequences", "more keys"])
def test_cudnn_takes_the_description(tokens: int, backward: bool, exact: bool) -> None:
    """cuDNN checks a graph for Hopper before it needs a GPU: that the layouts and options fit together."""
    pytest.importorskip("cudnn", reason="nvidia-cudnn-frontend is not installed")
    try:
        described.frontend().backend_version()
    except RuntimeError as why:
        pytest.skip(f"no cuDNN: {why}")
    row = 48 * 128
    strides = ((512 * row, 128, row),) * 3
    form = described.Form(8, 512, abs(tokens), 32, 8, 128, strides, BF16, SCALE, exact)
    if tokens < 0:
        form = form._replace(strides=(form.out, *strides[1:]), longest_kv=1024, tokens_kv=8192)
    described.operation(form, backward, sm_version=90)
    with pytest.raises(
        Exception, match=r"(?i)head|group|h_q|not supported"
    ):  # so its checks are not empty
        described.operation(form._replace(kv_heads=5), backward, sm_version=90)


def test_offsets_of_queries_and_of_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """q, out and stats begin by the queries before a segment, k, v and their gradients by the keys."""
    monkeypatch.setattr(kernel, "prepare", lambda *_: None)
    given = 4, 128, 128, 4, 2, 64, ((0, 64, 256), (0, 64, 1000), (0, 64, 1000)), BF16, SCALE, False
    form = described.Form(*given, longest_kv=128, tokens_kv=128)
    starts = torch.tensor([[0, 0, 2, 2], [0, 3, 5, 6]], dtype=torch.int32)
    found = kernel.offsets_of(form, starts)
    assert found.lengths.tolist() == [[0, 2, 0, 0], [3, 2, 1, 0]]
    q, k = torch.tensor([0, 0, 2, 2, 2]), torch.tensor([0, 3, 5, 6, 6])
    assert torch.equal(found.elements, torch.stack((k * 1000, q * 256, k * 128, q * 4)))


def test_the_package_has_what_is_called() -> None:
    """Without a GPU nothing is executed here. nvidia-cudnn-frontend 1.28 lost a name that 1.23 had."""
    cudnn = pytest.importorskip("cudnn", reason="nvidia-cudnn-frontend is not installed")
    called = (
        "create_execution_plans",
        "check_support",
        "build_plans",
        "get_workspace_size",
        "execute",
    )
    assert not [name for name in called if not hasattr(cudnn.pygraph, name)]
    assert not [
        name for name in ("create_handle", "set_stream", "heur_mode") if not hasattr(cudnn, name)
    ]


# On a GPU

NEEDS = pytest.mark.gpu
SIZES = [(8, 2, 128), (4, 4, 64), (8, 1, 64)]  # H, Hk, D


def taken(q: Tensor, k: Tensor, v: Tensor, packed: bool) -> None:
    if why := graphed.why_not(q, k, v, packed):
        pytest.skip(why)


def close(found: list[Tensor], expected: list[Tensor]) -> None:
    """Within 2^-6 of float64's: P and dP are rounded to bf16, as in every backend (test_attention.py)."""
    for name, a, b in zip(("out", "dq", "dk", "dv"), found, expected, strict=True):
        assert a.shape == b.shape, name
        assert (a.double() - b).norm() <= 2.0**-6 * b.norm() + 1e-6, name


@NEEDS
@pytest.mark.parametrize("exact", [False, True], ids=["any order", "deterministic"])
@pytest.mark.parametrize("size", SIZES, ids=lambda s: "x".join(map(str, s)))
@pytest.mark.parametrize("lengths", DOCUMENTS.values(), ids=DOCUMENTS)
def test_sequences_agree_with_float64(
    lengths: list[int], size: tuple[int, ...], exact: bool
) -> None:
    """Forward and backward, from views of qkv as from copies; deterministic ones have the same bits each time."""
    q, k, v = heads("cuda", 1, sum(lengths), *size)
    taken(q, k, v, True)
    starts, dout = starts_of(lengths, "cuda"), torch.randn_like(q)

    def run(*given: Tensor) -> list[Tensor]:
        out = graphed.attend_sequences(*given, starts, max(lengths), SCALE)
        return [out, *torch.autograd.grad(out, given, dout)]

    torch.use_deterministic_algorithms(exact)
    try:
        found = run(q, k, v)
        again = [run(q, k, v) for _ in range(100 if exact else 1)]
    finally:
        torch.use_deterministic_algorithms(False)
    close(found, reference(q, k, v, lengths, dout, torch.float64))
    assert all(torch.equal(a, found[0]) for a, *_ in again)
    if exact:
        assert all(torch.equal(a, b) for one in again for a, b in zip(one, found, strict=True))


@NEEDS
@pytest.mark.parametrize("exact", [False, True], ids=["any order", "deterministic"])
@pytest.mark.parametrize("tokens", [63, 64, 65, 300])
def test_rows_agree_with_float64(tokens: int, exact: bool) -> None:
    q, k, v = heads("cuda", 2, tokens, 8, 2, 128)
    taken(q, k, v, False)
    dout = torch.randn_like(q)
    torch.use_deterministic_algorithms(exact)
    try:
        out = graphed.attend_rows(q, k, v, SCALE)
        found = [out, *torch.autograd.grad(out, (q, k, v), dout)]
    finally:
        torch.use_deterministic_algorithms(False)
    close(found, reference(q, k, v, [tokens] * 2, dout, torch.float64))


@NEEDS
def test_a_captured_graph_follows_the_documents() -> None:
    """Forward and backward are captured once; over other documents a replay has the bits of eager calls."""
    torch.use_deterministic_algorithms(True)
    try:
        q, k, v = heads("cuda", 1, 512, 8, 2, 128)
        torch.use_deterministic_algorithms(False)
        taken(q, k, v, True)
        torch.use_deterministic_algorithms(True)
        dout, starts = torch.randn_like(q), starts_of([512] + [0] * 7, "cuda")

        def run() -> list[Tensor]:
            out = graphed.attend_sequences(q, k, v, starts, 512, SCALE)
            return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]

        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.stream(stream):
            run()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            found = run()
        for lengths in ([64] * 8, [1, 2, 3, 250, 0, 0, 200, 56], [0] * 7 + [512]):
            starts.copy_(starts_of(lengths, "cuda"))
            graph.replay()
            replayed = [t.clone() for t in found]
            assert all(torch.equal(a, b) for a, b in zip(replayed, run(), strict=True))
            torch.use_deterministic_algorithms(False)  # cuBLAS' products in float64 are none
            close(replayed, reference(q, k, v, lengths, dout, torch.float64))
            torch.use_deterministic_algorithms(True)
    finally:
        torch.use_deterministic_algorithms(False)


@NEEDS
def test_a_graph_of_cudnn_is_not_built_in_a_capture() -> None:
    q, k, v = (t.detach() for t in heads("cuda", 1, 136, 8, 2, 128))
    taken(q, k, v, True)
    starts = starts_of([136], "cuda")
    refused = pytest.raises(RuntimeError, match="before this stream was captured")
    with refused, torch.cuda.graph(torch.cuda.CUDAGraph()):
        graphed.attend_sequences(q, k, v, starts, 136, 0.7)
