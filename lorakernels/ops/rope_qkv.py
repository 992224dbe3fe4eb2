# SPDX-License-Identifier: Apache-2.0
"""RoPE: q's and k's heads turned by the angles of their token, and their gradients turned back.

    out₁ = x₁ cos₁ − x₂ sin₁      out₂ = x₂ cos₂ + x₁ sin₂      a head's halves, as in Transformers' `rotate_half`
    dx₁ = d₁ cos₁ + d₂ sin₂       dx₂ = d₂ cos₂ − d₁ sin₁

dqkv is [M, (H + 2 Hk) D]. The arithmetic is fp32's, with one rounding when a result is stored.

Each way is one kernel (kernels/triton/rope_qkv.py). Forward turns q and k in place and moves 4M(H + Hk)D bytes in bf16.
Backward gathers what attention's backward left, turns q and k back and multiplies by the ratios of the weights' scales.
It moves 4M(H + 2 Hk)D bytes; a transposition, a rotation, a concatenation and a product apart move four times that.
If it also writes the bytes of dqkv in blocks of 128, it moves M(H + 2 Hk)D bytes more. A pass apart moves three times
these.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from lorakernels.numerics.blocks import quantize_rows
from lorakernels.numerics.fp8 import FP8_MAX
from lorakernels.ops import checks
from lorakernels.ops.hardware import chosen_layer_kernel, why_not_layer_kernel
from lorakernels.ops.quantize_blocks import QuantizeBlocks
from lorakernels.ops.quantize_blocks import by_triton as quantize_blocks
from lorakernels.ops.register import Implementation, Op, define, empty, fake_quantized


class Rope(NamedTuple):
    """qkv is [M, (H + 2 Hk) D] for H = `num_heads` and Hk = `num_kv_heads`; cos and sin are [T, D], and T divides M."""

    qkv: Tensor
    cos: Tensor
    sin: Tensor
    num_heads: int
    num_kv_heads: int


def reference(a: Rope) -> None:
    """q's and k's columns of qkv turned in place; row m by cos and sin of row m mod T.

    Raises:
        TypeError, ValueError: a dtype, shape or device does not fit.
    """
    check(a)
    qkv, cos, sin, num_heads, num_kv_heads = a
    turned = num_heads + num_kv_heads
    heads = qkv.view(qkv.shape[0], turned + num_kv_heads, cos.shape[1])[:, :turned]
    c1, c2, s1, s2 = _angles(cos, sin, qkv.shape[0])
    x1, x2 = heads.float().chunk(2, -1)
    heads.copy_(torch.cat((x1 * c1 - x2 * s1, x2 * c2 + x1 * s2), -1))


def _angles(cos: Tensor, sin: Tensor, rows: int) -> tuple[Tensor, ...]:
    """cos₁, cos₂, sin₁, sin₂: fp32 [rows, 1, D / 2]."""
    row = torch.arange(rows, device=cos.device) % cos.shape[0]
    halves = (*cos.float().chunk(2, -1), *sin.float().chunk(2, -1))
    return tuple(half[row].unsqueeze(1) for half in halves)


def fake(a: Rope) -> None:
    return None


def check(a: Rope) -> None:
    """TypeError or ValueError unless qkv is [M, (H + 2 Hk) D] and cos, sin are [T, D] for a T that divides M."""
    qkv, cos, sin, num_heads, num_kv_heads = a
    checks.matrix("qkv", qkv)
    checks.floats("qkv", qkv)
    heads = num_heads + 2 * num_kv_heads
    if num_heads < 1 or num_kv_heads < 1 or qkv.shape[1] % heads:
        raise ValueError(
            f"qkv must have (num_heads + 2 num_kv_heads) D columns, found {qkv.shape[1]} for "
            f"num_heads = {num_heads}, num_kv_heads = {num_kv_heads}"
        )
    _check_angles(cos, sin, qkv.shape[0], qkv.shape[1] // heads, qkv.device)


def _check_angles(cos: Tensor, sin: Tensor, rows: int, dim: int, device: torch.device) -> None:
    for name, tensor in (("cos", cos), ("sin", sin)):
        checks.matrix(name, tensor)
        checks.floats(name, tensor)
        fits = tensor.shape[1] == dim and tensor.shape[0] > 0 and rows % tensor.shape[0] == 0
        if not fits or tensor.device != device:
            raise ValueError(
                f"{name} must be [T, {dim}] on {device} for a T that divides the {rows} tokens, "
                f"found {list(tensor.shape)} on {tensor.device}"
            )
    if sin.shape != cos.shape or sin.dtype != cos.dtype:
        raise ValueError(
            f"sin must be like cos, {cos.dtype} {tuple(cos.shape)}, found {sin.dtype} {tuple(sin.shape)}"
        )
    if dim % 2:
        raise ValueError(f"D must be even, found {dim}")


def why_not_triton(a: Rope) -> str | None:
    """None if Triton's kernel takes these tensors; otherwise the reason why not."""
    return why_not_layer_kernel(qkv=a.qkv, cos=a.cos, sin=a.sin)


def by_triton(a: Rope) -> None:
    """One kernel; the reference's bits but for fused multiply-adds."""
    from lorakernels.kernels.triton import rope_qkv

    with torch.cuda.device(a.qkv.device):
        rope_qkv.rope_qkv_(*a)


rope_qkv_ = define(
    Op(
        "rope_qkv_",
        Rope,
        reference,
        fake,
        check,
        (Implementation("triton", by_triton, why_not_triton), Implementation("torch", reference)),
        partial(chosen_layer_kernel, "one pass, forward and backward"),
    ),
    "(Tensor(a0!) qkv, Tensor cos, Tensor sin, SymInt num_heads, SymInt num_kv_heads) -> ()",
)


class RopeBackward(NamedTuple):
    """dq is [B, H, T, D], dk and dv are [B, Hk, T, D], cos and sin [T, D], multiplier is fp32 [3].

    dq, dk and dv may have any strides, if the last one is 1.
    """

    dq: Tensor
    dk: Tensor
    dv: Tensor
    cos: Tensor
    sin: Tensor
    multiplier: Tensor


def reference_backward(a: RopeBackward) -> Tensor:
    """dqkv [M, (H + 2 Hk) D] of dq, dk and dv: turned back, times multiplier. M = B T.

    Raises:
        TypeError, ValueError: a dtype, shape, stride or device does not fit.
    """
    check_backward(a)
    dq = a.dq
    rows, dim = dq.shape[0] * dq.shape[2], dq.shape[3]
    c1, c2, s1, s2 = _angles(a.cos, a.sin, rows)
    parts = [d.transpose(1, 2).reshape(rows, d.shape[1], dim).float() for d in (dq, a.dk, a.dv)]
    for i in range(2):
        d1, d2 = parts[i].chunk(2, -1)
        parts[i] = torch.cat((d1 * c1 + d2 * s2, d2 * c2 - d1 * s1), -1)
    scaled = [part * factor for part, factor in zip(parts, a.multiplier, strict=True)]
    return torch.cat(scaled, 1).flatten(1).to(dq.dtype)


def fake_backward(a: RopeBackward) -> Tensor:
    batch, heads, tokens, dim = a.dq.shape
    return empty(a.dq, batch * tokens, (heads + 2 * a.dk.shape[1]) * dim)


def check_backward(a: RopeBackward) -> None:
    """TypeError or ValueError unless dq, dk and dv are of one dtype, their last dimension contiguous, and all fits."""
    dq, dk, dv, cos, sin, multiplier = a
    for name, tensor in (("dq", dq), ("dk", dk), ("dv", dv)):
        _check_grad(name, tensor, dq)
    batch, _, tokens, dim = dq.shape
    expected = (batch, dk.shape[1], tokens, dim)
    for name, tensor in (("dk", dk), ("dv", dv)):
        if tensor.shape != expected:
            raise ValueError(f"{name} must be {expected}, found {tuple(tensor.shape)}")
    _check_angles(cos, sin, batch * tokens, dim, dq.device)
    checks.vector("multiplier", multiplier, 3, dq.device, torch.float32)


def _check_grad(name: str, tensor: Tensor, dq: Tensor) -> None:
    if tensor.dim() != 4:
        raise ValueError(f"{name} must be [B, heads, T, D], found {tuple(tensor.shape)}")
    checks.floats(name, tensor)
    if tensor.dtype != dq.dtype or tensor.device != dq.device:
        raise TypeError(
            f"{name} must be {dq.dtype} on {dq.device} like dq, found {tensor.dtype} on {tensor.device}"
        )
    if tensor.numel() and tensor.shape[3] > 1 and tensor.stride(3) != 1:
        raise ValueError(
            f"{name} must have a contiguous last dimension, found strides {tensor.stride()}"
        )


def why_not_triton_backward(a: RopeBackward) -> str | None:
    """None if Triton's kernel takes these tensors; otherwise the reason why not."""
    if a.dq.numel() == 0:
        return "dq has no elements"
    return why_not_layer_kernel(cos=a.cos, sin=a.sin, multiplier=a.multiplier)


def by_triton_backward(a: RopeBackward) -> Tensor:
    """One kernel; the reference's bits but for fused multiply-adds."""
    from lorakernels.kernels.triton import rope_qkv

    with torch.cuda.device(a.dq.device):
        return rope_qkv.rope_qkv_backward(*a)


rope_qkv_backward = define(
    Op(
        "rope_qkv_backward",
        RopeBackward,
        reference_backward,
        fake_backward,
        check_backward,
        (
            Implementation("triton", by_triton_backward, why_not_triton_backward),
            Implementation("torch", reference_backward),
        ),
    ),
    "(Tensor dq, Tensor dk, Tensor dv, Tensor cos, Tensor sin, Tensor multiplier) -> Tensor",
)


class RopeBackwardQuantize(NamedTuple):
    """As `RopeBackward`; `fp8_dtype` is e4m3 or e5m2, and with `power_of_two` scales are powers of two."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    cos: Tensor
    sin: Tensor
    multiplier: Tensor
    fp8_dtype: torch.dtype
    power_of_two: bool


def reference_quantize(a: RopeBackwardQuantize) -> tuple[Tensor, Tensor, Tensor]:
    """(dqkv as `rope_qkv_backward` has it, its bytes and scale_inv as `quantize_blocks` has them).

    Raises:
        TypeError, ValueError: a dtype, shape, stride or device does not fit.
    """
    check_quantize(a)
    dqkv = reference_backward(_alone(a))
    d8, scale_inv = quantize_rows(dqkv, a.fp8_dtype, a.power_of_two)
    assert scale_inv is not None
    return dqkv, d8, scale_inv


def _alone(a: RopeBackwardQuantize) -> RopeBackward:
    return RopeBackward(*a[:6])


def fake_quantize(a: RopeBackwardQuantize) -> tuple[Tensor, Tensor, Tensor]:
    dqkv = fake_backward(_alone(a))
    return dqkv, *fake_quantized(dqkv, None, a.power_of_two)


def check_quantize(a: RopeBackwardQuantize) -> None:
    """As `check_backward`; TypeError unless `fp8_dtype` is e4m3 or e5m2."""
    check_backward(_alone(a))
    if a.fp8_dtype not in FP8_MAX:
        raise TypeError(f"fp8_dtype must be float8_e4m3fn or float8_e5m2, found {a.fp8_dtype}")


def why_not_triton_quantize(a: RopeBackwardQuantize) -> str | None:
    """None if Triton's kernel takes these tensors; otherwise the reason why not."""
    return why_not_triton_backward(_alone(a))


def by_triton_quantize(a: RopeBackwardQuantize) -> tuple[Tensor, Tensor, Tensor]:
    """As `by_triton_backward`, with the bytes of its dqkv, bit for bit. Heads that share blocks take a kernel more."""
    from lorakernels.kernels.triton import rope_qkv

    _, heads, _, dim = a.dq.shape
    with torch.cuda.device(a.dq.device):
        if rope_qkv.has_whole_blocks(dim, heads, a.dk.shape[1]):
            return rope_qkv.rope_qkv_backward_quantize(*a)
        dqkv = rope_qkv.rope_qkv_backward(*_alone(a))
    return dqkv, *quantize_blocks(QuantizeBlocks(dqkv, a.fp8_dtype, a.power_of_two))


rope_qkv_backward_quantize = define(
    Op(
        "rope_qkv_backward_quantize",
        RopeBackwardQuantize,
        reference_quantize,
        fake_quantize,
        check_quantize,
        (
            Implementation("triton", by_triton_quantize, why_not_triton_quantize),
            Implementation("torch", reference_quantize),
        ),
    ),
    "(Tensor dq, Tensor dk, Tensor dv, Tensor cos, Tensor sin, Tensor multiplier, ScalarType fp8_dtype,"
    " bool power_of_two) -> (Tensor, Tensor, Tensor)",
)
