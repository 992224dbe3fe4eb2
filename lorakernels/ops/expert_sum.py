# SPDX-License-Identifier: Apache-2.0
"""out_t = Σ_j w_tj · y[place_tj]: the sum of each token's experts, and its gradients.

    dy[place_tj] = w_tj · dout_t          dw_tj = Σ_n dout_tn · y[place_tj, n]

dy is [M, N], dw [T, J], out [T, N]. No two places are the same row. Sums are fp32's and are rounded once. Rows of dy
that have no place are not written.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from lorakernels.kernels.triton import grouped
from lorakernels.ops import checks
from lorakernels.ops.hardware import chosen_layer_kernel, why_not_layer_kernel
from lorakernels.ops.register import Implementation, Op, define, empty


class Sum(NamedTuple):
    """y is [M, N], place int32 [T, J] with −1 for no expert. Without weights [T, J], each is 1."""

    y: Tensor
    place: Tensor
    weights: Tensor | None


def reference(a: Sum) -> Tensor:
    """out [T, N] in y's dtype.

    Raises:
        TypeError, ValueError: a dtype, shape or device does not fit.
    """
    check(a)
    y, place, weights = a
    rows = y[place.clamp(min=0)].float()
    if weights is not None:
        rows = rows * weights.float()[..., None]
    return rows.masked_fill((place < 0)[..., None], 0.0).sum(1).to(y.dtype)


def fake(a: Sum) -> Tensor:
    return empty(a.y, a.place.shape[0], a.y.shape[1])


def check(a: Sum) -> None:
    """TypeError or ValueError unless y is a matrix of a dtype that is computed in, and place and weights fit it."""
    y, place, weights = a
    checks.matrix("y", y)
    checks.floats("y", y)
    checks.places(place, y.device)
    if weights is not None:
        checks.floats("weights", weights)
        if weights.shape != place.shape:
            raise ValueError(f"weights must be {list(place.shape)}, found {list(weights.shape)}")


def why_not_triton(a: Sum) -> str | None:
    """None if Triton's kernel takes these tensors; otherwise the reason why not."""
    return why_not_layer_kernel(y=a.y, place=a.place, weights=a.weights)


def by_triton(a: Sum) -> Tensor:
    """One read of each row."""
    out = fake(a)
    grouped.weighted_sum(out, *a)
    return out


class SumBackward(NamedTuple):
    """dout is [T, N]; the rest as in `Sum`."""

    dout: Tensor
    y: Tensor
    place: Tensor
    weights: Tensor


def reference_backward(a: SumBackward) -> tuple[Tensor, Tensor]:
    """(dy [M, N], zeros where no place is, dw [T, J] in weights' dtype)."""
    check_backward(a)
    dout, y, place, weights = a
    dy, there = torch.zeros_like(y), place >= 0
    rows = place[there].long()
    wide = dout.float()[:, None].expand(*place.shape, -1)
    dy[rows] = (wide * weights.float()[..., None])[there].to(y.dtype)
    dot = (wide * y[place.clamp(min=0)].float()).sum(-1)
    return dy, dot.masked_fill(~there, 0.0).to(weights.dtype)


def fake_backward(a: SumBackward) -> tuple[Tensor, Tensor]:
    return empty(a.y, *a.y.shape), empty(a.weights, *a.weights.shape)


def check_backward(a: SumBackward) -> None:
    """As `check`; dout is [T, N]."""
    dout, y, place, weights = a
    check(Sum(y, place, weights))
    expected = (place.shape[0], y.shape[1])
    if dout.shape != expected:
        raise ValueError(f"dout must be {list(expected)}, found {list(dout.shape)}")


def why_not_triton_backward(a: SumBackward) -> str | None:
    """None if Triton's kernel takes these tensors; otherwise the reason why not."""
    return why_not_layer_kernel(dout=a.dout, y=a.y, place=a.place, weights=a.weights)


def by_triton_backward(a: SumBackward) -> tuple[Tensor, Tensor]:
    """One read of each row of y."""
    out = fake_backward(a)
    grouped.spread(out, *a)
    return out


_NOTE = "one read, for experts alone"

expert_sum = define(
    Op(
        "expert_sum",
        Sum,
        reference,
        fake,
        check,
        (Implementation("triton", by_triton, why_not_triton), Implementation("torch", reference)),
        partial(chosen_layer_kernel, _NOTE),
    ),
    "(Tensor y, Tensor place, Tensor? weights) -> Tensor",
)

expert_sum_backward = define(
    Op(
        "expert_sum_backward",
        SumBackward,
        reference_backward,
        fake_backward,
        check_backward,
        (
            Implementation("triton", by_triton_backward, why_not_triton_backward),
            Implementation("torch", reference_backward),
        ),
        partial(chosen_layer_kernel, _NOTE),
    ),
    "(Tensor dout, Tensor y, Tensor place, Tensor weights) -> (Tensor, Tensor)",
)
