# SPDX-License-Identifier: Apache-2.0
"""out = residual + mask ⊙ (x + bias) / (1 − p), as a transformer layer does after attention and after its MLP.

csrc/ops/bias_dropout_add takes one pass over tensors of one dtype. Forward reads x and residual once and writes out:
6MN bytes in bf16. Backward draws the mask again, reads dout and writes dx: 4MN bytes. dbias is summed on the way, in an
order that depends on shape and GPU alone. Arithmetic is fp32, with one rounding at the store. PyTorch's kernels write
the sum, the mask and the product to memory as well.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lorakernels.device import capability_of, extension, multiprocessors_of, why_not_csrc
from lorakernels.kernels.arguments import name, where
from lorakernels.numerics.dropout import drops, masked
from lorakernels.ops import checks
from lorakernels.ops.hardware import FLOATS, LayerOnGPU, chosen_csrc
from lorakernels.ops.register import Implementation, Op, define, empty
from lorakernels.values import Dropout, Sizes


class Add(NamedTuple):
    """x and residual are [M, N] of fp32, bf16 or fp16, bias is [N]."""

    x: Tensor
    bias: Tensor | None
    residual: Tensor | None
    dropout: Dropout | None


class AddInPlace(NamedTuple):
    """As `Add`; the result is written over `residual`."""

    x: Tensor
    bias: Tensor | None
    residual: Tensor
    dropout: Dropout | None


class AddBackward(NamedTuple):
    """dout is [M, N]; `bias_dtype` is None where no dbias is needed."""

    dout: Tensor
    dropout: Dropout | None
    bias_dtype: torch.dtype | None


def reference(a: Add) -> Tensor:
    """residual + mask ⊙ (x + bias) / (1 − p) [M, N] in x's dtype; residual and bias may have another one.

    Raises:
        TypeError, ValueError: a dtype, shape or device does not fit.
    """
    check(a)
    x, bias, residual, dropout = a
    xb = x.float() if bias is None else x.float() + bias.float()
    dropped, factor = masked(xb, dropout)
    out = dropped * factor
    return (out if residual is None else out + residual.float()).to(x.dtype)


def reference_in_place(a: AddInPlace) -> None:
    """The same, written over `residual`."""
    a.residual.copy_(reference(Add(*a)))


def reference_backward(a: AddBackward) -> tuple[Tensor, Tensor]:
    """dx = mask ⊙ dout / (1 − p) [M, N] and dbias = Σ_rows dx [N].

    dx is empty where nothing is dropped: then it is dout. dbias is empty when `bias_dtype` is None.

    Raises:
        ValueError: the slot does not fit.
    """
    check_backward(a)
    dout, dropout, bias_dtype = a
    dropped, factor = masked(dout.float(), dropout)
    dx = dropped * factor
    dbias = dx.new_empty(0) if bias_dtype is None else dx.sum(0).to(bias_dtype)
    return (dx.to(dout.dtype) if drops(dropout) else dout.new_empty(0)), dbias


def fake(a: Add) -> Tensor:
    return torch.empty_like(a.x)


def fake_in_place(a: AddInPlace) -> None:
    return None


def fake_backward(a: AddBackward) -> tuple[Tensor, Tensor]:
    dout, dropout, bias_dtype = a
    columns = 0 if bias_dtype is None else dout.shape[1]
    dbias = empty(dout, columns, dtype=bias_dtype or torch.float32)
    return torch.empty_like(dout) if drops(dropout) else empty(dout, 0), dbias


def check(a: Add | AddInPlace) -> None:
    """TypeError or ValueError if a dtype, shape, device, probability or slot does not fit."""
    x, bias, residual, dropout = a
    check_operands(x, bias, residual, 0.0 if dropout is None else dropout.p)
    checks.mask(dropout, x.shape[0], x.device)


def check_operands(x: Tensor, bias: Tensor | None, residual: Tensor | None, p: float) -> None:
    """TypeError or ValueError if a dtype, shape, device or probability does not fit; x may be [..., N]."""
    for label, tensor in (("x", x), ("bias", bias), ("residual", residual)):
        if tensor is None:
            continue
        if tensor.dtype not in FLOATS:
            raise TypeError(f"{label} must be float32, bfloat16 or float16, found {tensor.dtype}")
        if tensor.device != x.device:
            raise ValueError(
                f"{label} is on {tensor.device}, x on {x.device}; they must be the same"
            )
    if x.dim() == 0:
        raise ValueError("x must have shape [..., N], found a scalar")
    if bias is not None and bias.shape != x.shape[-1:]:
        raise ValueError(f"bias must have shape [{x.shape[-1]}], found {tuple(bias.shape)}")
    if residual is not None and residual.shape != x.shape:
        raise ValueError(
            f"residual must have x's shape {tuple(x.shape)}, found {tuple(residual.shape)}"
        )
    if not 0.0 <= p < 1.0:
        raise ValueError(f"p must be in [0, 1), found {p}")


def check_backward(a: AddBackward) -> None:
    """ValueError if the slot does not fit."""
    checks.mask(a.dropout, a.dout.shape[0], a.dout.device)


def why_not_csrc_kernel(a: Add | AddInPlace) -> str | None:
    """None if csrc's kernels run on the device of x; otherwise the reason why not."""
    return why_not_csrc(capability_of(a.x.device))


def why_not_csrc_backward(a: AddBackward) -> str | None:
    """None if csrc's kernel runs on the device of dout; otherwise the reason why not."""
    return why_not_csrc(capability_of(a.dout.device))


def by_csrc(a: Add) -> Tensor:
    """The reference bit for bit."""
    out = torch.empty_like(a.x)
    _launch(out, a)
    return out


def by_csrc_in_place(a: AddInPlace) -> None:
    """The reference bit for bit."""
    _launch(a.residual, a)


def _launch(out: Tensor, a: Add | AddInPlace) -> None:
    x, bias, residual, dropout = a
    _check_matrices(x=x, residual=residual)
    if bias is not None:
        bias = bias.to(_bias_dtype(bias.dtype, x.dtype)).contiguous()
    extension().bias_dropout_add(
        out,
        x,
        bias,
        residual,
        Sizes(*x.shape),
        (name(x.dtype), name(x.dtype if bias is None else bias.dtype)),
        dropout,
        where(x),
    )


def by_csrc_backward(a: AddBackward) -> tuple[Tensor, Tensor]:
    """dx bit for bit the reference's; dbias summed in another order, the same in every run."""
    dout, dropout, bias_dtype = a
    _check_matrices(dout=dout)
    rows, cols = dout.shape
    some_drop = drops(dropout)
    dx = torch.empty_like(dout) if some_drop else dout.new_empty(0)
    if bias_dtype is None:
        dbias = partial = torch.empty(0, device=dout.device)
    else:
        dbias = torch.empty(cols, dtype=_bias_dtype(bias_dtype, dout.dtype), device=dout.device)
        col0 = 0 if dropout is None else dropout.col0
        multiprocessors = multiprocessors_of(dout.get_device())
        chunks = extension().bias_grad_chunks(rows, cols, multiprocessors, col0)
        partial = torch.empty(chunks, cols, device=dout.device)
    if some_drop or bias_dtype is not None:
        extension().bias_dropout_add_backward(
            dx,
            dbias,
            partial,
            dout,
            Sizes(rows, cols),
            (name(dout.dtype), name(dbias.dtype)),
            dropout,
            where(dout),
        )
    return dx, dbias if bias_dtype is None else dbias.to(bias_dtype)


def _bias_dtype(dtype: torch.dtype, x_dtype: torch.dtype) -> torch.dtype:
    """What the kernel reads and writes a bias of `dtype` in: x's dtype or fp32."""
    return dtype if dtype == x_dtype else torch.float32


def _check_matrices(**tensors: Tensor | None) -> None:
    """What csrc's kernels assume beyond `check`: matrices [M, N] of the first one's dtype, without gaps."""
    first, like = next((label, tensor) for label, tensor in tensors.items() if tensor is not None)
    if like.dim() != 2:
        raise ValueError(f"{first} must be [M, N], found {tuple(like.shape)}")
    for label, tensor in tensors.items():
        if tensor is None:
            continue
        if tensor.dtype != like.dtype:
            raise TypeError(f"{label} must have {first}'s dtype {like.dtype}, found {tensor.dtype}")
        if not tensor.is_contiguous():
            raise ValueError(f"{label} must be contiguous, found strides {tensor.stride()}")


def chosen(place: LayerOnGPU) -> tuple[str, str]:
    return chosen_csrc("one pass, forward and backward", place)


bias_dropout_add = define(
    Op(
        "bias_dropout_add",
        Add,
        reference,
        fake,
        check,
        (
            Implementation("csrc", by_csrc, why_not_csrc_kernel),
            Implementation("torch", reference),
        ),
        chosen,
    ),
    "(Tensor x, Tensor? bias, Tensor? residual, Tensor? slot, float p, SymInt site, SymInt row0=0, SymInt col0=0,"
    " SymInt[] chunks=[]) -> Tensor",
)

bias_dropout_add_ = define(
    Op(
        "bias_dropout_add_",
        AddInPlace,
        reference_in_place,
        fake_in_place,
        check,
        (
            Implementation("csrc", by_csrc_in_place, why_not_csrc_kernel),
            Implementation("torch", reference_in_place),
        ),
    ),
    "(Tensor x, Tensor? bias, Tensor(a2!) residual, Tensor? slot, float p, SymInt site, SymInt row0=0, SymInt col0=0,"
    " SymInt[] chunks=[]) -> ()",
)

bias_dropout_add_backward = define(
    Op(
        "bias_dropout_add_backward",
        AddBackward,
        reference_backward,
        fake_backward,
        check_backward,
        (
            Implementation("csrc", by_csrc_backward, why_not_csrc_backward),
            Implementation("torch", reference_backward),
        ),
    ),
    "(Tensor dout, Tensor? slot, float p, SymInt site, ScalarType? bias_dtype, SymInt row0=0, SymInt col0=0,"
    " SymInt[] chunks=[]) -> (Tensor, Tensor)",
)
