# SPDX-License-Identifier: Apache-2.0
"""out_t = Σ_j w_tj · y[place_tj]: the sum of each token's experts, and its gradients.

    dy[place_tj] = w_tj · dout_t          dw_tj = Σ_n dout_tn · y[place_tj, n]

y and dy [M, N], place int32 [T, J] with −1 for no expert, w [T, J], out and dout [T, N]. No two places are the same
row. Sums are fp32's and are rounded once. Rows of dy that have no place are not written.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from lorakernels.kernels.triton import grouped
from lorakernels.ops import checks
from lorakernels.ops.hardware import chosen_layer_kernel, why_not_layer_kernel
from lorakernels.ops.register import Implementation, define, empty, of_parameters


def reference(y: Tensor, place: Tensor, weights: Tensor | None) -> Tensor:
    """out [T, N] in y's dtype; without weights, each is 1.

    Raises:
        TypeError, ValueError: a dtype, shape or device does not fit.
    """
    check(y, place, weights)
    rows = y[place.clamp(min=0)].float()
    if weights is not None:
        rows = rows * weights.float()[..., None]
    return rows.masked_fill((place < 0)[..., None], 0.0).sum(1).to(y.dtype)


def fake(y: Tensor, place: Tensor, weights: Tensor | None) -> Tensor:
    return empty(y, place.shape[0], y.shape[1])


def check(y: Tensor, place: Tensor, weights: Tensor | None) -> None:
    """TypeError or ValueError unless y is a matrix of a dtype that is computed in, and place and weights fit it."""
    checks.matrix("y", y)
    checks.floats("y", y)
    checks.places(place, y.device)
    if weights is not None:
        checks.floats("weights", weights)
        if weights.shape != place.shape:
            raise ValueError(f"weights must be {list(place.shape)}, found {list(weights.shape)}")


def why_not_triton(y: Tensor, place: Tensor, weights: Tensor | None) -> str | None:
    """None if Triton's kernel takes these tensors; otherwise the reason why not."""
    return why_not_layer_kernel(y=y, place=place, weights=weights)


def by_triton(y: Tensor, place: Tensor, weights: Tensor | None) -> Tensor:
    """One read of each row."""
    out = fake(y, place, weights)
    grouped.weighted_sum(out, y, place, weights)
    return out


def reference_backward(
    dout: Tensor, y: Tensor, place: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """(dy [M, N], zeros where no place is, dw [T, J] in weights' dtype)."""
    check_backward(dout, y, place, weights)
    dy, there = torch.zeros_like(y), place >= 0
    rows = place[there].long()
    wide = dout.float()[:, None].expand(*place.shape, -1)
    dy[rows] = (wide * weights.float()[..., None])[there].to(y.dtype)
    dot = (wide * y[place.clamp(min=0)].float()).sum(-1)
    return dy, dot.masked_fill(~there, 0.0).to(weights.dtype)


def fake_backward(dout: Tensor, y: Tensor, place: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    return empty(y, *y.shape), empty(weights, *weights.shape)


def check_backward(dout: Tensor, y: Tensor, place: Tensor, weights: Tensor) -> None:
    """As `check`; dout is [T, N]."""
    check(y, place, weights)
    expected = (place.shape[0], y.shape[1])
    if dout.shape != expected:
        raise ValueError(f"dout must be {list(expected)}, found {list(dout.shape)}")


def why_not_triton_backward(dout: Tensor, y: Tensor, place: Tensor, weights: Tensor) -> str | None:
    """None if Triton's kernel takes these tensors; otherwise the reason why not."""
    return why_not_layer_kernel(dout=dout, y=y, place=place, weights=weights)


def by_triton_backward(
    dout: Tensor, y: Tensor, place: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """One read of each row of y."""
    out = fake_backward(dout, y, place, weights)
    grouped.spread(out, dout, y, place, weights)
    return out


_NOTE = "one read, for experts alone"

expert_sum = define(
    of_parameters(
        "expert_sum",
        reference,
        fake,
        check,
        (Implementation("triton", by_triton, why_not_triton), Implementation("torch", reference)),
        partial(chosen_layer_kernel, _NOTE),
    ),
    "(Tensor y, Tensor place, Tensor? weights) -> Tensor",
)

expert_sum_backward = define(
    of_parameters(
        "expert_sum_backward",
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
