# SPDX-License-Identifier: Apache-2.0
"""Shared by the autograd nodes of a decoder layer: parameters, kept tensors, and which gradients to compute."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lorakernels import ops
from lorakernels.autograd.linear.projections import (
    Adapters,
    Needs,
    ProjectionGradients,
    Projections,
)
from lorakernels.autograd.linear.saved import ByName
from lorakernels.values import Scaled


class Trained(NamedTuple):
    """Parameters of `Projections`: A and B of each adapter, and each projection's bias, or None if it is frozen."""

    A: list[Any]
    B: list[Any]
    bias: list[Any]

    @classmethod
    def of(cls, to: Projections, flat: Sequence[Any]) -> Trained:
        """From autograd's flat arguments: all A, all B, all biases."""
        n = to.adapters
        return cls(list(flat[:n]), list(flat[n : 2 * n]), list(flat[2 * n : 2 * n + len(to.rows)]))

    @property
    def length(self) -> int:
        return len(self.A) + len(self.B) + len(self.bias)


class Wanted(NamedTuple):
    """Which gradients a node computes for one `Projections`: of x, A, B, and each bias with a dtype in `bias`."""

    needs: Needs
    bias: tuple[torch.dtype | None, ...]

    @classmethod
    def of(cls, x: bool, flags: Sequence[bool], trained: Trained) -> Wanted:
        """From autograd's `needs_input_grad` of the flat arguments."""
        n = len(trained.A)
        biases = zip(trained.bias, flags[2 * n : trained.length], strict=True)
        dtypes = tuple(bias.dtype if flag else None for bias, flag in biases)
        return cls(Needs(x, any(flags[:n]), any(flags[n : 2 * n])), dtypes)

    @property
    def adapters(self) -> bool:
        return self.needs.A or self.needs.B

    def __bool__(self) -> bool:
        return any(self.needs) or any(dtype is not None for dtype in self.bias)


def adapter_tensors(
    prefix: str, trained: Trained, s: Tensor | None, operand: Scaled | None, wanted: Wanted
) -> ByName:
    """The tensors of adapters that backward reads, by name: s [M, ΣR], x8 if kept, and the parameters.

    Parameters are saved by reference, so that autograd notices a change before backward.
    """
    by_name: ByName = {f"{prefix}s": s if wanted.needs.B else None}
    for i, (a, b) in enumerate(zip(trained.A, trained.B, strict=True)):
        by_name |= {f"{prefix}A{i}": a, f"{prefix}B{i}": b} if wanted else {}
    x8, scale_inv = operand if operand is not None and wanted.needs.A else (None, None)
    return {**by_name, f"{prefix}x8": x8, f"{prefix}x_scale_inv": scale_inv}


def weights(prefix: str, to: Projections, wanted: Wanted) -> ByName:
    """The W_i by name. They are saved by reference, so that autograd notices a change before backward."""
    return {f"{prefix}W{i}": w for i, w in enumerate(to.weights)} if wanted.needs.x else {}


def adapters(
    prefix: str, saved: ByName, to: Projections, stacked_B: Tensor | None = None
) -> Adapters:
    """The Adapters of the tensors that `adapter_tensors` named."""
    lora_B = [saved[f"{prefix}B{i}"] for i in range(to.adapters)]
    dtype = saved[f"{prefix}A0"].dtype if lora_B else None
    return Adapters(saved[f"{prefix}s"], dtype, lora_B, stacked_B)


def no_gradients(to: Projections) -> tuple[ProjectionGradients, list[Tensor | None]]:
    n = to.adapters
    return ProjectionGradients(None, [None] * n, [None] * n), [None] * len(to.rows)


def flat(x: Tensor) -> Tensor:
    """[..., N] → [M, N], contiguous."""
    return x.reshape(x.shape[:-1].numel(), x.shape[-1]).contiguous()


def rms_norm(h: Tensor, norm: Tensor, eps: float) -> Tensor:
    return ops.rms_norm_quantize(h, norm, eps, None, True)[0]


def rms_norm_backward(
    saved: ByName, dnormed: Tensor | None, dresidual: Tensor | None, need_weight: bool
) -> tuple[Tensor | None, Tensor | None]:
    """(h's gradient [M, K] with `dresidual` added, dweight [K] or None), from the kept `h`, `norm` and `rstd`.

    Without a norm, `dnormed` is the gradient of h itself.
    """
    if dnormed is None:
        return dresidual, None
    norm = saved["norm"]
    if norm is None:
        return dnormed if dresidual is None else dnormed + dresidual, None
    dx, dweight = ops.rms_norm_backward(
        dnormed, saved["h"], norm, saved["rstd"], dresidual, need_weight
    )
    return dx, dweight.to(norm.dtype) if need_weight else None
