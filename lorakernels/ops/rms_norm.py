# SPDX-License-Identifier: Apache-2.0
"""RMSNorm with the quantization of its result, and its gradient.

    rstd = 1 / √(mean(x²) + ε)      normed = weight ⊙ (x · rstd)      x8 = sat(normed · scale)
    dx = dresidual + rstd · (g − h · mean(g ⊙ h))      g = dnormed ⊙ weight      h = x · rstd
    dweight = Σ_rows dnormed ⊙ h

normed and dx are [M, K] of x's dtype, dweight is fp32 [K], x8 [M, K] e4m3 bytes. The arithmetic is fp32's, with one
rounding when a result is stored. Forward also rounds h before it multiplies by the weight, as Transformers'
LlamaRMSNorm does. The quantized values are those of normed as stored, kept or not.

Forward is one kernel (kernels/triton/rms_norm.py), which reads x once and writes the requested results. In bf16 that is
3MK bytes for x8 alone and 5MK with normed; a norm and a quantization after it move 7MK. A second kernel in front takes
the amax where the state has no scale yet, and in evaluation.

On request a row's blocks of 128 get scales of their own in the same read. A block's columns are in one warp, which
finds their amax by itself.

The kernel is compiled for each choice of stored results (`keep`, a scaling). Between two such kernels a row's sum may
differ in the last bit, and so may rstd and normed. Equal arguments give equal bits, as in a checkpoint's
recomputation.

Backward is one kernel, which reads dnormed, x and dresidual once and writes dx: 8MK bytes in bf16. dweight, where the
norm is trained, takes two more kernels and another 4MK bytes.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from lorakernels.kernels.tune_layer import MAX_NORM_COLUMNS
from lorakernels.numerics.blocks import quantize_by
from lorakernels.numerics.fp8 import E4M3
from lorakernels.ops import checks
from lorakernels.ops.hardware import chosen_layer_kernel, why_not_layer_kernel
from lorakernels.ops.register import Implementation, Op, define, empty, fake_quantized
from lorakernels.values import Scaling

Results = tuple[Tensor, Tensor, Tensor, Tensor]


class Norm(NamedTuple):
    """x is [M, K] in fp32, bf16 or fp16, weight [K]. `keep`: normed is a result, too.

    `power_of_two`, given without a scaling, has scale_inv [⌈K/128⌉, M] for each 1 × 128, as `quantize_blocks` has it.
    """

    x: Tensor
    weight: Tensor
    eps: float
    scaling: Scaling | None
    keep: bool
    power_of_two: bool | None = None


def reference(a: Norm) -> Results:
    """(normed [M, K] or empty unless `keep`, x8 [M, K] and scale_inv [1] or empty without a scaling, rstd fp32 [M]).

    Raises:
        TypeError, ValueError: a dtype, shape or device does not fit.
    """
    check(a)
    x = a.x
    wide = x.float()
    rstd = torch.rsqrt(wide.square().mean(1, keepdim=True) + a.eps)
    h = (wide * rstd).to(x.dtype)
    normed = (a.weight.float() * h.float()).to(x.dtype).contiguous()
    x8, scale_inv = quantize_by(normed, a.scaling, E4M3, a.power_of_two)
    return normed if a.keep else x.new_empty(0), x8, scale_inv, rstd.view(-1)


def fake(a: Norm) -> Results:
    x = a.x
    normed = empty(x, *(x.shape if a.keep else (0,)))
    rstd = empty(x, x.shape[0], dtype=torch.float32)
    return normed, *fake_quantized(x, a.scaling, a.power_of_two), rstd


def check(a: Norm) -> None:
    """TypeError or ValueError unless x is [M, K] and weight [K], on one device, of dtypes that are computed in."""
    _check_operands(a.x, a.weight)
    checks.state(a.scaling, a.x.device)
    checks.one_recipe(a.scaling, a.power_of_two)


def _check_operands(x: Tensor, weight: Tensor) -> None:
    checks.matrix("x", x)
    checks.floats("x", x)
    checks.vector("weight", weight, x.shape[1], x.device)


def why_not_triton(a: Norm) -> str | None:
    """None if Triton's kernel takes these tensors; otherwise the reason why not."""
    return _why_not_columns(a.x) or why_not_layer_kernel(x=a.x, weight=a.weight)


def _why_not_columns(x: Tensor) -> str | None:
    too_many = x.shape[1] > MAX_NORM_COLUMNS
    return f"K = {x.shape[1]} is above {MAX_NORM_COLUMNS}" if too_many else None


def by_triton(a: Norm) -> Results:
    """One read of x. rstd's sum is in another, fixed order than the reference's; x8 is normed's, bit for bit."""
    from lorakernels.kernels.triton import rms_norm

    with torch.cuda.device(a.x.device):
        return rms_norm.rms_norm_quantize(*a)


chosen = partial(chosen_layer_kernel, f"one read, K ≤ {MAX_NORM_COLUMNS}; else PyTorch's")

rms_norm_quantize = define(
    Op(
        "rms_norm_quantize",
        Norm,
        reference,
        fake,
        check,
        (Implementation("triton", by_triton, why_not_triton), Implementation("torch", reference)),
        chosen,
    ),
    "(Tensor x, Tensor weight, float eps, Tensor(a3!)? state, SymInt column, bool delayed, bool keep,"
    " bool? power_of_two=None) -> (Tensor, Tensor, Tensor, Tensor)",
)


class NormBackward(NamedTuple):
    """dnormed, x and dresidual are [M, K] of one dtype, weight is [K], rstd fp32 [M]."""

    dnormed: Tensor
    x: Tensor
    weight: Tensor
    rstd: Tensor
    dresidual: Tensor | None
    weight_grad: bool


def reference_backward(a: NormBackward) -> tuple[Tensor, Tensor]:
    """(dx [M, K] in x's dtype, dweight fp32 [K] or empty).

    Raises:
        TypeError, ValueError: a dtype, shape or device does not fit.
    """
    check_backward(a)
    x = a.x
    wide = a.dnormed.float()
    h = x.float() * a.rstd.view(-1, 1)
    g = wide * a.weight.float()
    dx = a.rstd.view(-1, 1) * (g - h * (g * h).mean(1, keepdim=True))
    if a.dresidual is not None:
        dx = dx + a.dresidual.float()
    dweight = (wide * h).sum(0) if a.weight_grad else torch.empty(0, device=x.device)
    return dx.to(x.dtype).contiguous(), dweight


def fake_backward(a: NormBackward) -> tuple[Tensor, Tensor]:
    x = a.x
    return empty(x, *x.shape), empty(x, x.shape[1] if a.weight_grad else 0, dtype=torch.float32)


def check_backward(a: NormBackward) -> None:
    """TypeError or ValueError unless dnormed and dresidual are like x [M, K], weight is [K] and rstd float32 [M]."""
    x = a.x
    _check_operands(x, a.weight)
    for name, tensor in (("dnormed", a.dnormed), ("dresidual", a.dresidual)):
        if tensor is not None:
            _check_like_x(name, tensor, x)
    checks.vector("rstd", a.rstd, x.shape[0], x.device, torch.float32)


def _check_like_x(name: str, tensor: Tensor, x: Tensor) -> None:
    form = (tuple(tensor.shape), tensor.dtype, tensor.device)
    if form != (tuple(x.shape), x.dtype, x.device):
        raise ValueError(
            f"{name} must be like x, {tuple(x.shape)} {x.dtype} on {x.device}, "
            f"found {form[0]} {form[1]} on {form[2]}"
        )


def why_not_triton_backward(a: NormBackward) -> str | None:
    """None if Triton's kernels take these tensors; otherwise the reason why not."""
    dnormed, x, weight, rstd, dresidual, _ = a
    return _why_not_columns(x) or why_not_layer_kernel(
        x=x, dnormed=dnormed, weight=weight, rstd=rstd, dresidual=dresidual
    )


def by_triton_backward(a: NormBackward) -> tuple[Tensor, Tensor]:
    """One read of each. The order in which dweight is summed depends on the shape and the GPU alone."""
    from lorakernels.kernels.triton import rms_norm

    with torch.cuda.device(a.x.device):
        return rms_norm.rms_norm_backward(*a)


rms_norm_backward = define(
    Op(
        "rms_norm_backward",
        NormBackward,
        reference_backward,
        fake_backward,
        check_backward,
        (
            Implementation("triton", by_triton_backward, why_not_triton_backward),
            Implementation("torch", reference_backward),
        ),
        chosen,
    ),
    "(Tensor dnormed, Tensor x, Tensor weight, Tensor rstd, Tensor? dresidual, bool weight_grad) -> (Tensor, Tensor)",
)
