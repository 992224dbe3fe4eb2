# SPDX-License-Identifier: Apache-2.0
"""Token losses of a chunk of logits, and the logits' gradient in their place.

    loss = log Σ_v exp z_v − z_label        dz = factor · (softmax(z) − onehot(label))

z are the logits, losses fp32 [M]. kernels/triton/cross_entropy.py reads the logits twice, the second time mostly from
L2, and writes dz over them. That moves 6MV bytes in bf16. PyTorch's fp32 log-softmax, its exponential and the one-hot
subtraction move 26MV bytes and hold 8MV.

`cross_entropy_fp8` also writes dz / factor, as e5m2 bytes, for a product in FP8: 5MV bytes. Their scale is
known beforehand, since no element of softmax(z) − onehot(label) is beyond ±1. So dz is read neither for its amax nor
to quantize it, which would move 5MV bytes more.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lorakernels.ops.hardware import FLOATS, LayerOnGPU
from lorakernels.ops.register import Implementation, Op, define, empty

GRAD_SCALE_INV = 1 / torch.finfo(torch.float8_e5m2).max  # of the bytes of cross_entropy_fp8
BLOCK = 8192  # logits a program holds at a time
WARPS = 16


class Loss(NamedTuple):
    """logits [M, V] are bf16, fp16, fp32 or fp64, labels int64 [M]; factor is one fp32 or fp64 value, 1 where None.

    With `gradient`, the logits become dz. A row with the label `ignore_index` has no loss and no gradient.
    """

    logits: Tensor
    labels: Tensor
    factor: Tensor | None
    ignore_index: int
    gradient: bool


def reference(a: Loss) -> Tensor:
    """Losses [M] = log Σ_v exp z_v − z_label, fp32 (fp64 of fp64), 0 where the label is `ignore_index`.

    `gradient`: logits become dz = factor · (softmax(z) − onehot(label)), 0 in ignored rows, whatever they held. A label
    outside of [0, V) makes loss and gradient of its row NaN.

    Raises:
        TypeError, ValueError: a dtype, shape or device does not fit.
    """
    check(a)
    logits, labels, factor, ignore_index, gradient = a
    ignored = labels == ignore_index
    valid = (labels >= 0) & (labels < logits.shape[1])
    target = torch.where(valid, labels, 0)[:, None]
    wide = torch.promote_types(logits.dtype, torch.float32)
    log_p = logits.to(wide).log_softmax(-1)
    losses = torch.where(valid, -log_p.gather(1, target)[:, 0], torch.nan)
    if gradient:
        dz = log_p.exp_()
        dz.scatter_add_(1, target, torch.full_like(dz[:, :1], -1.0))
        if factor is not None:
            dz *= factor
        dz.masked_fill_(~valid[:, None], torch.nan).masked_fill_(ignored[:, None], 0.0)
        logits.copy_(dz)
    return losses.masked_fill(ignored, 0.0)


class LossFP8(NamedTuple):
    """logits, labels and `ignore_index` are as in `Loss`."""

    logits: Tensor
    labels: Tensor
    ignore_index: int


def reference_fp8(a: LossFP8) -> tuple[Tensor, Tensor]:
    """(losses [M], dz8 [M, V]): `reference`'s losses, and e5m2 bytes as uint8.

    dz8 = (softmax(z) − onehot(label)) / GRAD_SCALE_INV, 0 in ignored rows, NaN where a label is outside of [0, V). The
    logits are left as they are.

    Raises:
        TypeError, ValueError: a dtype, shape or device does not fit.
    """
    check_fp8(a)
    dz = a.logits.to(torch.promote_types(a.logits.dtype, torch.float32), copy=True)
    losses = reference(Loss(dz, a.labels, None, a.ignore_index, True))
    return losses, (dz / GRAD_SCALE_INV).to(torch.float8_e5m2).view(torch.uint8)


def fake(a: Loss) -> Tensor:
    wide = torch.promote_types(a.logits.dtype, torch.float32)
    return empty(a.labels, *a.labels.shape, dtype=wide)


def fake_fp8(a: LossFP8) -> tuple[Tensor, Tensor]:
    losses = fake(Loss(a.logits, a.labels, None, a.ignore_index, True))
    return losses, empty(a.logits, *a.logits.shape, dtype=torch.uint8)


def check(a: Loss) -> None:
    """TypeError or ValueError unless logits are floating [M, V], labels int64 [M], factor one fp32 or fp64 value."""
    _check_operands(a.logits, a.labels)
    factor = a.factor
    if factor is None:
        return
    if factor.device != a.logits.device:
        raise ValueError(f"factor is on {factor.device}, logits on {a.logits.device}")
    if factor.numel() != 1 or factor.dtype.itemsize < 4:
        raise ValueError(
            f"factor must be one fp32 value, found {factor.dtype} {list(factor.shape)}"
        )


def check_fp8(a: LossFP8) -> None:
    """TypeError or ValueError unless logits are floating [M, V], labels int64 [M]."""
    _check_operands(a.logits, a.labels)


def _check_operands(logits: Tensor, labels: Tensor) -> None:
    if logits.dim() != 2 or logits.shape[1] == 0:
        raise ValueError(f"logits must be [M, V] with V ≥ 1, found {tuple(logits.shape)}")
    if logits.dtype not in (*FLOATS, torch.float64):
        raise TypeError(f"logits must be floating, found {logits.dtype}")
    if labels.shape != logits.shape[:1] or labels.dtype != torch.int64:
        raise ValueError(
            f"labels must be int64 [{logits.shape[0]}], found {labels.dtype} {list(labels.shape)}"
        )
    if labels.device != logits.device:
        raise ValueError(f"labels is on {labels.device}, logits on {logits.device}")


def why_not_triton(a: Loss | LossFP8) -> str | None:
    """None if Triton's kernel takes these logits; otherwise the reason why not."""
    return "logits are float64" if a.logits.dtype == torch.float64 else None


def by_triton(a: Loss) -> Tensor:
    """Losses and gradient by one kernel.

    Raises:
        ValueError: logits are not contiguous.
    """
    return _launched(a.logits, a.labels, a.factor, a.ignore_index, a.logits if a.gradient else None)


def by_triton_fp8(a: LossFP8) -> tuple[Tensor, Tensor]:
    """Losses and the gradient's bytes by one kernel.

    Raises:
        ValueError: logits are not contiguous.
    """
    dz8 = torch.empty_like(a.logits, dtype=torch.uint8)
    return _launched(a.logits, a.labels, None, a.ignore_index, dz8), dz8


def _launched(
    logits: Tensor,
    labels: Tensor,
    factor: Tensor | None,
    ignore_index: int,
    gradient: Tensor | None,
) -> Tensor:
    if not logits.is_contiguous():
        raise ValueError(f"logits must be contiguous, found strides {logits.stride()}")
    losses = torch.empty(labels.shape, dtype=torch.float32, device=logits.device)
    if labels.numel() == 0:
        return losses
    from lorakernels.kernels.triton.cross_entropy import launch

    with torch.cuda.device(logits.device):
        launch(losses, logits, labels, factor, ignore_index, gradient, BLOCK, WARPS)
    return losses


def chosen(place: LayerOnGPU) -> tuple[str, str]:
    return "triton", "two reads of a chunk's logits, gradient in their place; float64: PyTorch's"


def chosen_fp8(place: LayerOnGPU) -> tuple[str, str]:
    return "triton", "two reads of a chunk's logits, and e5m2 gradients; float64: PyTorch's"


cross_entropy_ = define(
    Op(
        "cross_entropy_",
        Loss,
        reference,
        fake,
        check,
        (
            Implementation("triton", by_triton, why_not_triton),
            Implementation("torch", reference),
        ),
        chosen,
    ),
    "(Tensor(a0!) logits, Tensor labels, Tensor? factor, SymInt ignore_index, bool gradient) -> Tensor",
)
cross_entropy_fp8 = define(
    Op(
        "cross_entropy_fp8",
        LossFP8,
        reference_fp8,
        fake_fp8,
        check_fp8,
        (
            Implementation("triton", by_triton_fp8, why_not_triton),
            Implementation("torch", reference_fp8),
        ),
        chosen_fp8,
    ),
    "(Tensor logits, Tensor labels, SymInt ignore_index) -> (Tensor, Tensor)",
)
