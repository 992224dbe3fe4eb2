# SPDX-License-Identifier: Apache-2.0
"""RMSNorm with the quantization of its result, and its gradient.

    rstd = 1 / √(mean(x²) + ε)      normed = weight ⊙ (x · rstd)      x8 = sat(normed · scale)
    dx = dresidual + rstd · (g − h · mean(g ⊙ h))      g = dnormed ⊙ weight      h = x · rstd
    dweight = Σ_rows dnormed ⊙ h

x, normed, dnormed, dresidual and dx [M, K] are of one dtype. weight is [K], rstd fp32 [M], dweight fp32 [K]. x8 [M, K]
is e4m3 bytes. The arithmetic is fp32's, with one rounding when a result is stored. Forward also rounds h before it
multiplies by the weight, as Transformers' LlamaRMSNorm does. What is quantized is normed as stored, kept or not.

Forward is one kernel (kernels/triton/rms_norm.py), which reads x once and writes what is asked for. In bf16 that is 3MK
bytes for x8 alone and 5MK with normed; a norm and a quantization after it move 7MK. A second kernel in front takes the
amax where the state has no scale yet, and in evaluation.

A row's blocks of 128 have scales of their own, where they are asked for, in the same read. A block's columns are in one
warp, which finds their amax by itself.

The kernel is compiled anew for each choice of what is stored (`keep`, a scaling). Between two such kernels a row's sum
may differ in the last bit, and so may rstd and normed. Equal arguments give equal bits, as in a checkpoint's
recomputation.

Backward is one kernel, which reads dnormed, x and dresidual once and writes dx: 8MK bytes in bf16. dweight, where the
norm is trained, takes two more kernels and another 4MK bytes.
"""

from __future__ import annotations

from functools import partial

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


def reference(
    x: Tensor,
    weight: Tensor,
    eps: float,
    scaling: Scaling | None,
    keep: bool,
    power_of_two: bool | None = None,
) -> Results:
    """(normed [M, K] or empty unless `keep`, x8 [M, K] and scale_inv [1] or empty without a scaling, rstd fp32 [M]).

    `power_of_two`, given without a scaling, has scale_inv [⌈K/128⌉, M] for each 1 × 128, as `quantize_blocks` has it.

    Raises:
        TypeError, ValueError: a dtype, shape or device does not fit.
    """
    check(x, weight, eps, scaling, keep, power_of_two)
    wide = x.float()
    rstd = torch.rsqrt(wide.square().mean(1, keepdim=True) + eps)
    h = (wide * rstd).to(x.dtype)
    normed = (weight.float() * h.float()).to(x.dtype).contiguous()
    x8, scale_inv = quantize_by(normed, scaling, E4M3, power_of_two)
    return normed if keep else x.new_empty(0), x8, scale_inv, rstd.view(-1)


def fake(
    x: Tensor,
    weight: Tensor,
    eps: float,
    scaling: Scaling | None,
    keep: bool,
    power_of_two: bool | None = None,
) -> Results:
    normed = empty(x, *(x.shape if keep else (0,)))
    rstd = empty(x, x.shape[0], dtype=torch.float32)
    return normed, *fake_quantized(x, scaling, power_of_two), rstd


def check(
    x: Tensor,
    weight: Tensor,
    eps: float,
    scaling: Scaling | None,
    keep: bool,
    power_of_two: bool | None = None,
) -> None:
    """TypeError or ValueError unless x is [M, K] and weight [K], on one device, of dtypes that are computed in."""
    _check_operands(x, weight)
    checks.state(scaling, x.device)
    checks.one_recipe(scaling, power_of_two)


def _check_operands(x: Tensor, weight: Tensor) -> None:
    checks.matrix("x", x)
    checks.floats("x", x)
    checks.vector("weight", weight, x.shape[1], x.device)


def why_not_triton(
    x: Tensor,
    weight: Tensor,
    eps: float,
    scaling: Scaling | None,
    keep: bool,
    power_of_two: bool | None = None,
) -> str | None:
    """None if Triton's kernel takes these tensors; otherwise the reason why not."""
    return _why_not_columns(x) or why_not_layer_kernel(x=x, weight=weight)


def _why_not_columns(x: Tensor) -> str | None:
    too_many = x.shape[1] > MAX_NORM_COLUMNS
    return f"K = {x.shape[1]} is above {MAX_NORM_COLUMNS}" if too_many else None


def by_triton(
    x: Tensor,
    weight: Tensor,
    eps: float,
    scaling: Scaling | None,
    keep: bool,
    power_of_two: bool | None = None,
) -> Results:
    """One read of x. rstd's sum is in another, fixed order than the reference's; x8 is normed's, bit for bit."""
    from lorakernels.kernels.triton import rms_norm

    with torch.cuda.device(x.device):
        return rms_norm.rms_norm_quantize(x, weight, eps, scaling, keep, power_of_two)


chosen = partial(chosen_layer_kernel, f"one read, K ≤ {MAX_NORM_COLUMNS}; else PyTorch's")

rms_norm_quantize = define(
    Op(
        "rms_norm_quantize",
        reference,
        fake,
        check,
        (Implementation("triton", by_triton, why_not_triton), Implementation("torch", reference)),
        chosen,
    ),
    "(Tensor x, Tensor weight, float eps, Tensor(a3!)? state, SymInt column, bool delayed, bool keep,"
    " bool? power_of_two=None) -> (Tensor, Tensor, Tensor, Tensor)",
)


def reference_backward(
    dnormed: Tensor,
    x: Tensor,
    weight: Tensor,
    rstd: Tensor,
    dresidual: Tensor | None,
    weight_grad: bool,
) -> tuple[Tensor, Tensor]:
    """(dx [M, K] in x's dtype, dweight fp32 [K] or empty).

    Raises:
        TypeError, ValueError: a dtype, shape or device does not fit.
    """
    check_backward(dnormed, x, weight, rstd, dresidual, weight_grad)
    wide = dnormed.float()
    h = x.float() * rstd.view(-1, 1)
    g = wide * weight.float()
    dx = rstd.view(-1, 1) * (g - h * (g * h).mean(1, keepdim=True))
    if dresidual is not None:
        dx = dx + dresidual.float()
    dweight = (wide * h).sum(0) if weight_grad else torch.empty(0, device=x.device)
    return dx.to(x.dtype).contiguous(), dweight


def fake_backward(
    dnormed: Tensor,
    x: Tensor,
    weight: Tensor,
    rstd: Tensor,
    dresidual: Tensor | None,
    weight_grad: bool,
) -> tuple[Tensor, Tensor]:
    return empty(x, *x.shape), empty(x, x.shape[1] if weight_grad else 0, dtype=torch.float32)


def check_backward(
    dnormed: Tensor,
    x: Tensor,
    weight: Tensor,
    rstd: Tensor,
    dresidual: Tensor | None,
    weight_grad: bool,
) -> None:
    """TypeError or ValueError unless dnormed and dresidual are like x [M, K], weight is [K] and rstd float32 [M]."""
    _check_operands(x, weight)
    for name, tensor in (("dnormed", dnormed), ("dresidual", dresidual)):
        if tensor is not None:
            _check_like_x(name, tensor, x)
    checks.vector("rstd", rstd, x.shape[0], x.device, torch.float32)


def _check_like_x(name: str, tensor: Tensor, x: Tensor) -> None:
    found = (tuple(tensor.shape), tensor.dtype, tensor.device)
    if found != (tuple(x.shape), x.dtype, x.device):
        raise ValueError(
            f"{name} must be like x, {tuple(x.shape)} {x.dtype} on {x.device}, "
            f"found {found[0]} {found[1]} on {found[2]}"
        )


def why_not_triton_backward(
    dnormed: Tensor,
    x: Tensor,
    weight: Tensor,
    rstd: Tensor,
    dresidual: Tensor | None,
    weight_grad: bool,
) -> str | None:
    """None if Triton's kernels take these tensors; otherwise the reason why not."""
    tensors = {"x": x, "dnormed": dnormed, "weight": weight, "rstd": rstd, "dresidual": dresidual}
    return _why_not_columns(x) or why_not_layer_kernel(**tensors)


def by_triton_backward(
    dnormed: Tensor,
    x: Tensor,
    weight: Tensor,
    rstd: Tensor,
    dresidual: Tensor | None,
    weight_grad: bool,
) -> tuple[Tensor, Tensor]:
    """One read of each. The order in which dweight is summed depends on the shape and the GPU alone."""
    from lorakernels.kernels.triton import rms_norm

    with torch.cuda.device(x.device):
        return rms_norm.rms_norm_backward(dnormed, x, weight, rstd, dresidual, weight_grad)


rms_norm_backward = define(
    Op(
        "rms_norm_backward",
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
