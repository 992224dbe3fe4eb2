# SPDX-License-Identifier: Apache-2.0
"""linear_cross_entropy against float64, its peak, its determinism, capture, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from lorakernels import linear_cross_entropy, quantize_head
from lorakernels.values import LogitChange

IGNORE = -100
CHANGES = {"plain": None, "scaled": LogitChange(1 / 7), "capped": LogitChange(0.5, 4.0)}


def problem(
    m: int, v: int, k: int, ignored: int, dtype: torch.dtype, device: torch.device, bias: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """hidden, weight, bias, labels: logits of order 4."""
    hidden = (4 * torch.randn(m, k, device=device)).to(dtype)
    weight = (torch.randn(v, k, device=device) / k**0.5).to(dtype)
    labels = torch.randint(0, v, (m,), device=device)
    labels[torch.randperm(m)[:ignored]] = IGNORE
    return hidden, weight, torch.randn(v, device=device).to(dtype) if bias else None, labels


def changed(logits: Tensor, change: LogitChange | None) -> Tensor:
    """As transformers' models do it."""
    if change is not None:
        logits = logits * change.scale
        if change.cap is not None:
            logits = torch.tanh(logits / change.cap) * change.cap
    return logits


def exact(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    items: float,
    change: LogitChange | None = None,
) -> list[Tensor]:
    """Loss, dh, dW and db of the mean in float64."""
    leaves = [None if t is None else t.double().requires_grad_() for t in (hidden, weight, bias)]
    logits = changed(F.linear(*leaves), change)  # type: ignore[arg-type]
    loss = F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum") / items
    return [loss.detach(), *torch.autograd.grad(loss, [t for t in leaves if t is not None])]


@settings(max_examples=60, deadline=None)
@given(
    m=st.integers(1, 23),
    v=st.integers(1, 40),
    chunk=st.integers(1, 30),
    ignored=st.integers(0, 23),
    bias=st.booleans(),
    trained=st.booleans(),
    items=st.sampled_from([None, 7, 2.5, "tensor"]),
    change=st.sampled_from(sorted(CHANGES)),
)
def test_loss_and_gradients_equal_float64(m, v, chunk, ignored, bias, trained, items, change):
    torch.manual_seed(31 * m + v)
    cpu = torch.device("cpu")
    hidden, weight, b, labels = problem(m, v, 8, ignored, torch.float64, cpu, bias)
    leaves = [hidden.requires_grad_()]
    leaves += [t.requires_grad_() for t in (weight, b) if trained and t is not None]
    given_items = torch.tensor([3.0]) if items == "tensor" else items
    options = {"bias": b, "chunk": chunk, "num_items": given_items, "change": CHANGES[change]}
    loss = linear_cross_entropy(hidden, weight, labels, **options)
    count = max(1, int((labels != IGNORE).sum())) if items is None else float(given_items)
    expected = exact(
        hidden.detach(),
        weight.detach(),
        None if b is None else b.detach(),
        labels,
        count,
        CHANGES[change],
    )
    found = [loss, *torch.autograd.grad(3 * loss, leaves)]
    assert loss.shape == () and loss.dtype == torch.float64
    for index, (one, other) in enumerate(zip(found, expected, strict=False)):
        torch.testing.assert_close(one, other * (3 if index else 1), rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize(
    ("m", "v", "k", "chunk"),
    [(300, 1000, 64, 128), (64, 33, 48, 64), (7, 20011, 32, 4)],
    ids=["ragged chunks", "one chunk, odd vocabulary", "several blocks a row"],
)
@pytest.mark.parametrize(
    ("dtype", "change"),
    [
        *((dtype, "plain") for dtype in (torch.bfloat16, torch.float16, torch.float32)),
        *((torch.bfloat16, change) for change in ("scaled", "capped")),
        (torch.float16, "scaled"),
    ],
    ids=str,
)
@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
def test_as_exact_as_pytorch_in_the_same_dtype(device, m, v, k, chunk, dtype, trained, change):
    """Against float64: at most twice the error of logits in that dtype with PyTorch's fp32 cross-entropy, and one
    rounding."""
    hidden, weight, bias, labels = problem(m, v, k, m // 7, dtype, device, True)
    items = int((labels != IGNORE).sum())
    expected = exact(hidden, weight, bias, labels, items, CHANGES[change])
    leaves = [t.clone().requires_grad_() for t in (hidden, weight, bias)][: 3 if trained else 1]
    tensors = [*leaves, *(hidden, weight, bias)[len(leaves) :]]
    logits = changed(F.linear(*tensors), CHANGES[change])
    peer_loss = F.cross_entropy(logits.float(), labels, ignore_index=IGNORE)
    peer = [peer_loss.detach(), *torch.autograd.grad(peer_loss, leaves)]
    options = {"bias": tensors[2], "chunk": chunk, "change": CHANGES[change]}
    loss = linear_cross_entropy(tensors[0], tensors[1], labels, **options)
    ours = [loss.detach(), *torch.autograd.grad(loss, leaves)]
    assert loss.dtype == torch.float32
    for name, one, theirs, truth in zip(
        ("loss", "dh", "dW", "db"), ours, peer, expected, strict=False
    ):
        truth = truth.to(device)
        error = (one.double() - truth).norm()
        allowed = 2 * (theirs.double() - truth).norm() + torch.finfo(dtype).eps * truth.norm()
        assert error <= allowed, f"{name}: {error:.3g}, allowed {allowed:.3g}"


def test_fp16_gradients_of_many_items_survive_until_the_loss_scale(device):
    """1 / items is multiplied in after the loss scale: p / items is 2e-8 here, half of fp16's smallest number."""
    hidden, weight, _, labels = problem(16, 1000, 32, 0, torch.float16, device, False)
    hidden, items, scale = hidden / 16, 2**16, 2.0**16
    expected = exact(hidden, weight, None, labels, items)
    hidden.requires_grad_()
    loss = linear_cross_entropy(hidden, weight, labels, num_items=items)
    (d_hidden,) = torch.autograd.grad(loss * scale, hidden)
    truth = scale * expected[1].to(device)
    # fp16 twice: of p, whose mean is 1e-3 and which has 2^-25 / 1e-3 of it to lose as well, and of dh
    assert (d_hidden.double() - truth).norm() <= 4 * 2.0**-11 * truth.norm()


def test_a_trained_head_s_gradient_is_not_rounded_between_chunks(device):
    hidden, weight, _, labels = problem(512, 64, 32, 0, torch.bfloat16, device, False)
    expected = exact(hidden, weight, None, labels, 512)[2].to(device)
    weight.requires_grad_()
    errors = {}
    for chunk in (512, 1):
        loss = linear_cross_entropy(hidden, weight, labels, chunk=chunk)
        (d_weight,) = torch.autograd.grad(loss, weight)
        errors[chunk] = float((d_weight.double() - expected).norm() / expected.norm())
    assert errors[1] <= 1.1 * errors[512], errors  # the same roundings of dz and of dW


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("given_as", ["bf16", "e4m3"])
def test_fp8_head(device, given_as, change):
    """e4m3 keeps 3 bits (2.6 % rms of a value), e5m2 2 (5.2 %). So z, of order 4, is off by 4 · √2 · 2.6 % = 0.15 rms,
    which moves a softmax by 15 % of itself and its mean loss by 0.15 / √items and, as it is convex, 0.15² / 2."""
    hidden, weight, _, labels = problem(256, 512, 128, 30, torch.bfloat16, device, False)
    items = int((labels != IGNORE).sum())
    change = CHANGES[change]
    expected = exact(hidden, weight, None, labels, items, change)
    hidden.requires_grad_()
    given = {"weight": weight, "change": change}
    if given_as == "e4m3":
        w8, scale_inv = quantize_head(weight)
        given = {"weight": w8, "weight_scale_inv": scale_inv, "change": change}
    loss = linear_cross_entropy(hidden, labels=labels, chunk=100, fp8=True, **given)
    (d_hidden,) = torch.autograd.grad(loss, hidden)
    assert abs(loss.item() - float(expected[0])) < 3 * 0.15 / items**0.5 + 0.15**2
    error = (d_hidden.double() - expected[1].to(device)).norm() / expected[1].norm()
    # of |dz| ≈ √(1 + Σ p²), dominated by the one-hot, which has no error of its own
    assert error < (0.15**2 / 4 + 0.052**2 + 0.026**2) ** 0.5


def test_a_head_that_is_quantized_once_gives_the_same_bits(device):
    hidden, weight, bias, labels = problem(64, 256, 128, 9, torch.bfloat16, device, True)
    hidden.requires_grad_()
    w8, scale_inv = quantize_head(weight)
    assert w8.dtype == torch.float8_e4m3fn and w8.shape == weight.shape and scale_inv.shape == (1,)

    def run(**head: Tensor) -> tuple[Tensor, Tensor]:
        loss = linear_cross_entropy(hidden, labels=labels, bias=bias, chunk=40, fp8=True, **head)
        return loss.detach(), *torch.autograd.grad(loss, hidden)

    once, each_time = run(weight=w8, weight_scale_inv=scale_inv), run(weight=weight)
    assert all(torch.equal(a, b) for a, b in zip(once, each_time, strict=True))


def test_fp8_gradients_of_many_items_keep_their_bits(device):
    """dz's bytes are those of softmax − onehot; 1 / items is in their scale alone, so that nothing underflows."""
    hidden, weight, _, labels = problem(32, 512, 128, 0, torch.bfloat16, device, False)
    hidden.requires_grad_()
    found = []
    for items in (1, 2**40):
        loss = linear_cross_entropy(hidden, weight, labels, num_items=items, fp8=True)
        found += torch.autograd.grad(loss * items, hidden)
    assert torch.equal(*found) and found[0].any()


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_ignored_may_be_nan(device, change):
    hidden, weight, _, labels = problem(9, 50, 8, 0, torch.float32, device, False)
    labels[[2, 5]] = IGNORE
    hidden[[2, 5]] = float("nan")
    hidden.requires_grad_()
    loss = linear_cross_entropy(hidden, weight, labels, chunk=4, change=CHANGES[change])
    (d_hidden,) = torch.autograd.grad(loss, hidden)
    assert loss.isfinite() and d_hidden.isfinite().all() and not d_hidden[[2, 5]].any()


def test_minus_infinity_is_no_probability(device):
    """A masked vocabulary, its first whole block and more."""
    weight = torch.zeros(20000, 2, device=device)
    bias = torch.zeros(20000, device=device)
    bias[:17000] = -float("inf")
    labels = torch.tensor([19999], device=device)
    hidden = torch.ones(1, 2, device=device)
    loss = linear_cross_entropy(hidden, weight, labels, bias=bias)
    torch.testing.assert_close(float(loss), float(torch.tensor(3000.0).log()), rtol=1e-6, atol=0)


def test_nothing_to_train_on_is_a_loss_of_zero(device):
    hidden = torch.randn(4, 8, device=device, requires_grad=True)
    labels = torch.full((4,), IGNORE, device=device)
    loss = linear_cross_entropy(hidden, torch.randn(5, 8, device=device), labels)
    (d_hidden,) = torch.autograd.grad(loss, hidden)
    assert loss.item() == 0 and not d_hidden.any()
    empty = linear_cross_entropy(hidden[:0], torch.randn(5, 8, device=device), labels[:0])
    assert empty.item() == 0


def test_leading_dimensions_and_another_ignored_label(device):
    hidden = torch.randn(2, 3, 8, device=device)
    weight, labels = torch.randn(5, 8, device=device), torch.randint(0, 5, (2, 3), device=device)
    labels[1, 2] = 77
    found = linear_cross_entropy(hidden, weight, labels, ignore_index=77, reduction="sum", chunk=2)
    logits = (hidden @ weight.t()).flatten(0, 1)
    expected = F.cross_entropy(logits, labels.flatten(), ignore_index=77, reduction="sum")
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


class Largest(TorchDispatchMode):
    """Element count of the largest tensor that comes out of any op, and the ops seen."""

    def __init__(self) -> None:
        super().__init__()
        self.numel, self.ops = 0, set[str]()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        self.ops.add(func.name())
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, Tensor):
                self.numel = max(self.numel, tensor.numel())
        return out


def test_never_more_logits_than_a_chunk():
    """64 tokens, 1000 words, chunks of 8: nothing larger than the weight exists, forward or backward."""
    weight, labels = torch.randn(1000, 16), torch.randint(0, 1000, (64,))
    hidden = torch.randn(64, 16, requires_grad=True)
    with Largest() as seen:
        linear_cross_entropy(hidden, weight, labels, chunk=8).backward()
    assert 8 * 1000 <= seen.numel <= 16 * 1000
    with torch.no_grad(), Largest() as without:
        linear_cross_entropy(hidden, weight, labels, chunk=8)
    assert "aten::zeros_like" not in without.ops and len(without.ops) < len(seen.ops)


def test_deterministic_and_chunks_change_the_loss_not_at_all(device):
    """Every row's arithmetic is its own; only the GEMM may differ by its tile. On the CPU in fp64, where it does not
    show."""
    dtype = torch.float64 if device.type == "cpu" else torch.bfloat16
    hidden, weight, _, labels = problem(100, 300, 32, 9, dtype, device, False)
    hidden.requires_grad_()

    def run(chunk: int) -> tuple[Tensor, Tensor]:
        loss = linear_cross_entropy(hidden, weight, labels, chunk=chunk)
        return loss.detach(), *torch.autograd.grad(loss, hidden)

    first, second = run(16), run(16)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    torch.testing.assert_close(
        run(100)[0], first[0], rtol=1e-3 if dtype != torch.float64 else 1e-12, atol=0
    )


def test_autocast_takes_its_dtype(device):
    hidden, weight, bias, labels = problem(20, 30, 16, 3, torch.float32, device, True)
    with torch.autocast(device.type, torch.bfloat16):
        found = linear_cross_entropy(hidden, weight, labels, bias=bias)
    args = [t.bfloat16() for t in (hidden, weight)]
    expected = linear_cross_entropy(*args, labels, bias=bias.bfloat16())
    assert torch.equal(found, expected) and found.dtype == torch.float32


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"labels": torch.zeros(4, 1, dtype=torch.int64)}, "labels must be int64 [4]"),
        ({"labels": torch.zeros(4, dtype=torch.int32)}, "found torch.int32 [4]"),
        ({"labels": torch.full((4,), 9)}, "in [0, 5), found 9 to 9"),
        ({"weight": torch.zeros(5, 7)}, "(4, 8) and (5, 7)"),
        ({"weight": torch.zeros(5, 8).bfloat16()}, "weight must have hidden's dtype torch.float32"),
        ({"bias": torch.zeros(4)}, "bias must be torch.float32 [5]"),
        ({"chunk": 0}, "chunk must be at least 1"),
        ({"reduction": "none"}, "found 'none'"),
        ({"num_items": 0}, "num_items must be positive"),
        ({"num_items": 2, "reduction": "sum"}, "divides a mean"),
        ({"change": LogitChange(0.0)}, "positive scale and cap, found LogitChange(scale=0.0"),
        ({"change": LogitChange(cap=-1.0)}, "positive scale and cap"),
        ({"weight_scale_inv": torch.ones(1)}, "belongs to an e4m3 weight"),
        ({"weight": torch.zeros(5, 8, requires_grad=True), "fp8": True}, "['weight'] trained"),
    ],
    ids=lambda value: value if isinstance(value, str) else ",".join(value),
)
def test_refusals_say_what_was_found(changed, message):
    arguments = {
        "hidden": torch.zeros(4, 8),
        "weight": torch.zeros(5, 8),
        "labels": torch.zeros(4, dtype=torch.int64),
        **changed,
    }
    with pytest.raises((TypeError, ValueError)) as caught:
        linear_cross_entropy(**arguments)
    assert message in str(caught.value)


@pytest.mark.gpu
def test_a_wrong_label_is_a_nan_on_a_gpu():
    hidden = torch.randn(3, 8, device="cuda", requires_grad=True)
    labels = torch.tensor([0, 99, 1], device="cuda")
    loss = linear_cross_entropy(hidden, torch.randn(5, 8, device="cuda"), labels)
    (d_hidden,) = torch.autograd.grad(loss, hidden)
    assert loss.isnan() and d_hidden.isnan().any(-1).tolist() == [False, True, False]


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("change", CHANGES)
def test_captured_and_replayed_with_other_tokens(fp8, change):
    """Loss, gradient and the count of what is not ignored follow the inputs of each replay."""
    device = torch.device("cuda")
    hidden, weight, _, labels = problem(512, 1024, 128, 50, torch.bfloat16, device, False)
    hidden.requires_grad_()

    def step() -> tuple[Tensor, Tensor]:
        options = {"chunk": 200, "fp8": fp8, "change": CHANGES[change]}
        loss = linear_cross_entropy(hidden, weight, labels, **options)
        return loss.detach(), *torch.autograd.grad(loss, hidden)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for seed in range(3):
        other = problem(512, 1024, 128, 10 * seed, torch.bfloat16, device, False)
        with torch.no_grad():
            hidden.copy_(other[0])
        labels.copy_(other[3])
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(captured, step(), strict=True))


@pytest.mark.gpu
def test_peak_memory_is_the_docstring_s():
    """b MK + b chunk V + 4 M, and what the last product's workspace takes (32 MiB at most)."""
    m, v, k, chunk = 4096, 32000, 1024, 512
    hidden = torch.randn(m, k, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(v, k, device="cuda", dtype=torch.bfloat16)
    labels = torch.randint(0, v, (m,), device="cuda")
    linear_cross_entropy(hidden[:8], weight, labels[:8])
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    linear_cross_entropy(hidden, weight, labels, chunk=chunk)
    peak = torch.cuda.max_memory_allocated() - before
    predicted = 2 * m * k + 2 * chunk * v + 4 * m
    assert predicted <= peak <= predicted + (33 << 20)
