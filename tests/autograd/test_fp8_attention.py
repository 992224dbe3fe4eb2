# SPDX-License-Identifier: Apache-2.0
"""Attention with FP8 forward and 16-bit backward: formulas, what is kept and refused, and what a GPU computes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lorakernels.autograd.attention import choose as attention
from lorakernels.autograd.attention import fp8, graphed
from lorakernels.kernels.cudnn import attention as kernel
from lorakernels.kernels.cudnn import form as described
from lorakernels.numerics import fp8_attention as plain
from lorakernels.numerics.fp8 import E4M3
from tests.fp8_attention import emulate

SCALE = 128**-0.5
BF16 = torch.bfloat16
ROUNDING = 2.0**-4  # e4m3 has three bits behind the point: half a step is 2^-4 of the number
STEP = 2.0**-10  # half a step of its subnormals


def heads(
    device: Any, batch: int, tokens: int, counts: tuple[int, int], dtype: torch.dtype = BF16
) -> list[Tensor]:
    """q, k, v as views of one qkv, as a fused layer has them; v is not centred, and k has a large column."""
    every = [counts[0], counts[1], counts[1]]
    qkv = torch.randn(batch, tokens, sum(every), 128, device=device)
    qkv[:, :, counts[0] : counts[0] + counts[1], 5] *= 6
    qkv[:, :, counts[0] + counts[1] :] += 0.3
    return [t.transpose(1, 2).requires_grad_() for t in qkv.to(dtype).split(every, 2)]


class Exact:
    """Attention in float64 over the values of quantized q, k and v, and how far FP8's may be from it.

    p = exp(S − max S). A product's sum of FP8 numbers on Hopper is cut off 13 bits below its largest part, once for 32
    numbers: S is off by ε = 4 · 2^-13 scale Σ |q̂ k̂| at most, P v̂ by T / 32 · 2^-13 of A = Σ p |v̂| / Σ p. Rounding p to
    e4m3 adds 2^-4 A, and for subnormals 2^-10 Σ |v̂| / (448 Σ p); ε adds 2 ε A, since it is in numerator and
    denominator. Together E. The result is rounded once more: 2^-4 (|o| + E), or 2^-10 / s_v.
    """

    def __init__(self, data: Tensor, factors: Tensor, count: int) -> None:
        self.q, self.k, self.v = plain.dequantize_heads(
            data, factors.double(), count, torch.float64
        )
        n = count // self.k.shape[1]
        k, v = (x.repeat_interleave(n, 1) for x in (self.k, self.v))
        later = torch.ones(len(k[0, 0]), len(k[0, 0]), dtype=torch.bool, device=k.device).triu(1)
        scores = (self.q @ k.transpose(2, 3) * SCALE).masked_fill(later, -torch.inf)
        size = (self.q.abs() @ k.abs().transpose(2, 3) * SCALE).masked_fill(later, 0.0)
        self.stats = scores.logsumexp(-1)
        p = (scores - scores.amax(-1, keepdim=True)).exp()
        total = p.sum(-1, keepdim=True)
        self.out = p @ v / total
        self.off = 4 * 2.0**-13 * size.amax(-1, keepdim=True)
        spread, tokens = p @ v.abs() / total, len(later)
        sums = ROUNDING + 2 * self.off + tokens / 32 * 2.0**-13
        small = STEP / 448 * (~later).double() @ v.abs() / total
        error = sums * spread + small
        s_v = factors[plain.TO_OUT, 0].double()
        self.bound = error + ROUNDING * (self.out.abs() + error) + STEP / s_v

    def check(self, out: Tensor, stats: Tensor) -> None:
        assert bool(((out.double() - self.out).abs() <= self.bound).all())
        # the fp32 exp and log of GPUs are within 2^-20 of their result; sums of rounded p would be off by up to 2^-5
        assert bool(((stats.double() - self.stats).abs() <= self.off[..., 0] + 2.0**-10).all())


@pytest.fixture
def emulation(monkeypatch: pytest.MonkeyPatch) -> list[described.Form]:
    """cuDNN's part by the plain formulas on the CPU. Returns the forms that it was handed."""
    return emulate(monkeypatch)


def check_attention(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Forward within its bound; backward near float64's over the same q̂, k̂, v̂, ô and stats."""
    count, dout = q.shape[1], torch.randn_like(q)
    found = fp8.attend_rows(q, k, v, SCALE)
    data, factors, _, stats = found.out.grad_fn.saved_tensors  # type: ignore[union-attr]
    exact = Exact(data, factors, count)
    exact.check(found.out, stats)
    # a token that sees only itself has the bytes of its v: P is 1, and both have one scale
    first = exact.v[:, :, 0].repeat_interleave(count // k.shape[1], 1)
    assert torch.equal(found.out[:, :, 0].double(), first)
    values = found.bytes_.data.view(E4M3).double() * found.bytes_.scale_inv
    assert torch.equal(values, found.out.transpose(1, 2).flatten(2).flatten(0, 1).double())
    grads = torch.autograd.grad(found.out, (q, k, v), dout)
    out, d = found.out.detach().double(), dout.double()
    expected = plain.attention_backward(exact.q, exact.k, exact.v, out, stats.double(), d, SCALE)
    for name, a, b in zip("qkv", grads, expected, strict=True):
        assert a.shape == b.shape
        # 16-bit backwards round P and dS to bf16, 2^-9 each of what is added up (tests/autograd/test_attention.py)
        assert (a.double() - b).norm() <= 2.0**-6 * b.norm(), name


@pytest.mark.parametrize("counts", [(4, 2), (3, 3), (4, 1)], ids=["grouped", "each", "one"])
def test_it_agrees_with_float64(counts: tuple[int, int], emulation: list[described.Form]) -> None:
    check_attention(*heads("cpu", 2, 65, counts))
    assert [form.dtype for form in emulation] == [E4M3, BF16]


def test_the_backward_is_that_of_attention() -> None:
    """Over exact out and stats its formula has the gradients of autograd."""
    q, k, v = heads("cpu", 2, 19, (4, 2), torch.float64)
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=True, scale=SCALE
    )
    dout = torch.randn_like(out)
    stats = plain._scores(q, k, SCALE).logsumexp(-1).detach()
    given = (t.detach() for t in (q, k, v, out))
    found = plain.attention_backward(*given, stats, dout, SCALE)
    for a, b in zip(found, torch.autograd.grad(out, (q, k, v), dout), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_one_byte_is_kept(emulation: list[described.Form]) -> None:
    q, k, v = heads("cpu", 2, 40, (4, 2))
    kept: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        fp8.attend_rows(q, k, v, SCALE)
    elements = q.numel() * 2 + k.numel() * 2
    assert sum(kept.values()) == elements + 4 * q.numel() // 128 + 16 * plain.FACTORS


@pytest.mark.parametrize("which", range(3), ids=["q", "k", "v"])
@pytest.mark.parametrize("value", [torch.inf, torch.nan], ids=["inf", "nan"])
def test_what_is_not_finite_shows(
    which: int, value: float, emulation: list[described.Form]
) -> None:
    given = [t.detach().clone() for t in heads("cpu", 1, 9, (2, 1))]
    given[which][0, 0, 3, 7] = value
    assert bool(fp8.attend_rows(*given, SCALE).out.isnan().all())


def like(shape: tuple[int, ...], dtype: torch.dtype = BF16) -> Any:
    """What `why_not` reads of a tensor on a GPU."""
    meta = torch.empty(shape, dtype=dtype, device="meta")
    return SimpleNamespace(
        shape=meta.shape,
        dtype=dtype,
        device=torch.device("cuda", 0),
        stride=meta.stride,
        numel=meta.numel,
    )


Q, K = (1, 4, fp8.LEAST, 128), (1, 2, fp8.LEAST, 128)


@pytest.mark.parametrize(
    ("q", "k", "said"),
    [
        (like(Q), like(K), ""),
        (like((1, 4, fp8.LEAST, 64)), like((1, 2, fp8.LEAST, 64)), "heads have 64 columns"),
        (like((1, 4, fp8.LEAST - 1, 128)), like((1, 2, fp8.LEAST - 1, 128)), f"from {fp8.LEAST} on"),
        (like(Q, torch.float32), like(K, torch.float32), "q is torch.float32"),
        (like(Q), like((1, 3, fp8.LEAST, 128)), "4 heads of q do not divide among 3"),
    ],
    ids=["taken", "64 columns", "short rows", "fp32", "odd groups"],
)  # fmt: skip
def test_refusals_are_named(q: Any, k: Any, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphed, "why_not_here", lambda _: "")
    monkeypatch.setattr(fp8, "_why_not_package", lambda: "")
    found = fp8.why_not(q, k, k)
    assert said in found if said else not found


def test_it_raises_where_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = heads("cpu", 1, 8, (4, 2))
    refused = pytest.raises(
        ValueError, match=r"attention='fp8' does not take .*: cuDNN needs a GPU"
    )
    with refused:
        attention.choose("fp8", q, k, v, None, True)
    with pytest.raises(
        ValueError, match=r"no packed sequences on Hopper: .*--no-isolate-documents"
    ):
        attention.choose_packed("fp8", q, k, v)
    monkeypatch.setattr(fp8, "why_not", lambda *_: "")
    with pytest.raises(ValueError, match="it is causal and takes no mask"):
        attention.choose("fp8", q, k, v, torch.ones(1, 1, 8, 8), False)
    assert attention.choose("fp8", q, k, v, None, True) == "fp8"
    monkeypatch.setattr(attention, "cudnn_folders", lambda: ["/a", "/b"])
    with pytest.raises(RuntimeError, match=r"attention='fp8': .*parts of cuDNN from /a and /b"):
        attention.choose("fp8", q, k, v, None, True)


def test_auto_never_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not any(
        "fp8" in attention.preference(capability, masked)
        for capability in (None, (8, 0), (9, 0), (10, 0))
        for masked in (False, True)
    )


def test_another_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphed, "why_not_here", lambda _: "")
    monkeypatch.setattr(described, "frontend", lambda: SimpleNamespace(__version__="1.23.0"))
    here = torch.device("cuda", 0)
    assert "1.23.0 was not tried with FP8: take 1.28.0" in fp8.why_not_here(here, 128)


def test_cudnn_is_handed_each_factor(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its name, and at an address that is a multiple of 16 bytes, as those of q, k, v and out are."""
    handed: dict[described.TensorId, Tensor] = {}
    monkeypatch.setattr(kernel, "_execute", lambda *given: handed.update(given[3]))
    q, k, v = heads("cpu", 2, 24, (4, 2))
    data, factors = plain.quantize_heads(q, k, v)
    factors[:, 0] = torch.arange(1.0, plain.FACTORS + 1)  # so that no two are equal
    kernel.forward_fp8(fp8._form(q, 2, SCALE, E4M3), data, factors)
    found = {at.name: float(t.reshape(-1)[0]) for at, t in handed.items() if len(t) == 4}
    assert {name: found[name] - 1 for name in found if "SCALE" in name} == {
        "DESCALE_Q": plain.OF_Q,
        "DESCALE_K": plain.OF_K,
        "DESCALE_V": plain.OF_V,
        "DESCALE_S": plain.OF_P,
        "SCALE_S": plain.TO_P,
        "SCALE_O": plain.TO_OUT,
    }
    assert not [at.name for at, t in handed.items() if t.data_ptr() % 16]
    assert torch.equal(handed[described.TensorId.K], data[:, :, 4:6])
    assert torch.equal(handed[described.TensorId.V], data[:, :, 6:])


def test_cudnn_takes_the_description() -> None:
    """cuDNN checks a graph for Hopper before it needs a GPU."""
    pytest.importorskip("cudnn", reason="nvidia-cudnn-frontend is not installed")
    try:
        described.frontend().backend_version()
    except RuntimeError as why:
        pytest.skip(f"no cuDNN: {why}")
    form = fp8._form(torch.empty(1, 32, 512, 128, device="meta"), 8, SCALE, E4M3)
    described.operation(form, False, sm_version=90)


# On a GPU


def taken(monkeypatch: pytest.MonkeyPatch, *given: Tensor) -> None:
    """Rows of any length, which are computed right, though not faster."""
    monkeypatch.setattr(fp8, "LEAST", 2)
    if why := fp8.why_not(*given):
        pytest.skip(why)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("tokens", [2, 63, 128, 129, 700])
@pytest.mark.parametrize("counts", [(8, 2), (4, 4), (8, 1)], ids=["grouped", "each", "one"])
def test_the_gpu_agrees_with_float64(
    counts: tuple[int, int], tokens: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = heads("cuda", 2, tokens, counts, dtype)
    taken(monkeypatch, q, k, v)
    check_attention(q, k, v)


@pytest.mark.gpu
def test_deterministic_ones_have_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = heads("cuda", 1, 1000, (8, 2))
    taken(monkeypatch, q, k, v)
    dout = torch.randn_like(q)

    def run() -> list[Tensor]:
        out = fp8.attend_rows(q, k, v, SCALE).out
        return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]

    torch.use_deterministic_algorithms(True)
    try:
        first, *others = [run() for _ in range(20)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for one in others for a, b in zip(one, first, strict=True))


@pytest.mark.gpu
def test_a_captured_graph_scales_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay over other values has the bits of an eager call: no scale went through the host."""
    given = heads("cuda", 1, 512, (8, 2))
    taken(monkeypatch, *given)
    q, k, v = (t.detach().clone().requires_grad_() for t in given)
    dout = torch.randn_like(q)

    def run() -> list[Tensor]:
        found = fp8.attend_rows(q, k, v, SCALE)
        return [found.out.detach(), *torch.autograd.grad(found.out, (q, k, v), dout)]

    torch.use_deterministic_algorithms(True)
    try:
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            run()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            captured = run()
        for factor in (1.0, 37.0, 1e-3):
            with torch.no_grad():
                q.copy_(torch.randn_like(q))
                v.copy_(torch.randn_like(v) * factor)
            graph.replay()
            replayed = [t.clone() for t in captured]
            assert all(torch.equal(a, b) for a, b in zip(replayed, run(), strict=True))
    finally:
        torch.use_deterministic_algorithms(False)
