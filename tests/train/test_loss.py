# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from lorakernels.train.data.packing import IGNORE
from lorakernels.train.model.loss import changed, chunked_cross_entropy
from lorakernels.values import LogitChange


class Wrapped(nn.Module):
    """A head that is not a plain nn.Linear, so it takes the checkpointed path."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(0, 23),
    chunk=st.integers(1, 30),
    ignored=st.integers(0, 23),
    bias=st.booleans(),
    plain=st.booleans(),
    trained=st.booleans(),
    change=st.sampled_from([None, LogitChange(0.3), LogitChange(1.0, 2.0)]),
)
def test_value_and_gradients_equal_cross_entropy(
    tokens: int, chunk: int, ignored: int, bias: bool, plain: bool, trained: bool,
    change: LogitChange | None,
) -> None:  # fmt: skip
    torch.manual_seed(tokens * 31 + chunk)
    linear = nn.Linear(8, 13, bias=bias).requires_grad_(trained)
    hidden = (4 * torch.randn(tokens, 8)).requires_grad_()
    labels = torch.randint(0, 13, (tokens,))
    labels[:ignored] = IGNORE
    watched = [hidden, *([*linear.parameters()] if trained else [])]

    head = linear if plain else Wrapped(linear)
    loss = chunked_cross_entropy(hidden, head, labels, chunk, change=change)
    logits = changed(linear(hidden).double(), change)
    exact = F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum")
    torch.testing.assert_close(
        loss.double(), exact, rtol=1e-5, atol=1e-5
    )  # fp32 sums of up to 23 terms
    if tokens == 0:
        return
    found = torch.autograd.grad(loss / 7, watched)
    expected = torch.autograd.grad(exact / 7, watched)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("plain", [True, False], ids=["linear", "any-head"])
def test_items_divide_the_value_and_the_gradient(plain: bool) -> None:
    """Of the tokens of the whole step, more than this microbatch has."""
    torch.manual_seed(5)
    linear = nn.Linear(8, 13).requires_grad_(False)
    hidden = torch.randn(6, 8, requires_grad=True)
    labels = torch.randint(0, 13, (6,))
    items = torch.tensor(17.0)
    loss = chunked_cross_entropy(hidden, linear if plain else Wrapped(linear), labels, 4, items)
    exact = F.cross_entropy(linear(hidden).double(), labels, reduction="sum") / 17
    torch.testing.assert_close(loss.double(), exact, rtol=1e-5, atol=0)
    found, expected = (torch.autograd.grad(x, hidden)[0] for x in (loss, exact))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-7)


def test_ignored_tokens_may_be_nan() -> None:
    """As in F.cross_entropy: what is not asked cannot spoil the sum."""
    head = nn.Linear(4, 5).requires_grad_(False)
    hidden = torch.randn(3, 4)
    hidden[1] = float("nan")
    hidden.requires_grad_()
    loss = chunked_cross_entropy(hidden, head, torch.tensor([1, IGNORE, 2]), 2)
    (gradient,) = torch.autograd.grad(loss, hidden)
    assert loss.isfinite() and gradient[[0, 2]].isfinite().all()


class LargestTensor(TorchDispatchMode):
    numel = 0

    def __init__(self) -> None:
        super().__init__()
        self.ops: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        self.ops.add(func.name())
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())
        return out


@pytest.mark.parametrize("plain", [True, False], ids=["linear", "any-head"])
def test_never_more_logits_than_a_chunk(plain: bool) -> None:
    """64 tokens, 1000 words, chunks of 8: nothing larger than 8000 numbers exists, forward or backward."""
    head = nn.Linear(16, 1000, bias=False).requires_grad_(False)
    hidden = torch.randn(64, 16, requires_grad=True)
    labels = torch.randint(0, 1000, (64,))
    with LargestTensor() as seen:
        chunked_cross_entropy(hidden, head if plain else Wrapped(head), labels, 8).backward()
    assert 8 * 1000 <= seen.numel <= 16 * 1000  # the weight itself is 16 000


def test_bf16_head_has_fp32_loss() -> None:
    head = nn.Linear(8, 50, dtype=torch.bfloat16).requires_grad_(False)
    hidden = torch.randn(9, 8, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(0, 50, (9,))
    loss = chunked_cross_entropy(hidden, head, labels, 4)
    exact = F.cross_entropy(head(hidden).float(), labels, reduction="sum")
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, exact, rtol=1e-6, atol=0)
    (gradient,) = torch.autograd.grad(loss, hidden)
    assert gradient.dtype == torch.bfloat16


def test_wrong_shapes_are_named() -> None:
    with pytest.raises(ValueError, match=r"got \(2, 3, 4\), \(6,\)"):
        chunked_cross_entropy(
            torch.zeros(2, 3, 4), nn.Linear(4, 5), torch.zeros(6, dtype=torch.long), 2
        )
