# SPDX-License-Identifier: Apache-2.0
"""Cross-entropy of a language model's head without the logits of all tokens.

    z = c (h Wᵀ + b)   loss = f · Σ_t ( log Σ_v exp z_tv − z_t,label )       f = 1, or 1 / items for the mean
    dz = c f · (softmax(z) − onehot(label))     dh = dz W       dW = dzᵀ h       db = Σ_t dz

c is 1 in most models. The GEMM multiplies by it, and dz contains it. For a model with a cap C, z is replaced by
C tanh(z / C), and dz is multiplied by 1 − tanh²(z / C).

    h [M, K]   W [V, K]   b [V]   labels [M]; a token whose label is `ignore_index` does not count

Logits exist for `chunk` tokens at a time, in h's dtype. For each chunk, forward computes z. One kernel computes
the losses and writes dz over z, or with FP8 into e5m2 bytes of its own. Forward then computes dh, and dW and db if they
are trained. Only these gradients are kept for backward, which multiplies them by the incoming gradient.

Peak bytes in forward besides h and W, with b bytes per value of h:

    frozen head         b MK + b·chunk·V + 4 M
    a cap               + b·chunk·V, and with fp8 another b·chunk·V
    trained head        + 4 VK (dW in fp32) + 4 VK (its product)
    fp8                 + MK + chunk·V, and VK where W is not FP8 already

PyTorch's needs 4 MV (fp32 logits) + b MV + 4 MV. At M = 8192, V = 128256, K = 4096 in bf16 with chunk 2048, this
needs 0.6 GB and PyTorch's 10.5 GB.

On a GPU, the host never waits for the device: counts stay on the device, and a CUDA graph may capture all of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lorakernels import ops
from lorakernels.autograd.lent import whole
from lorakernels.numerics.autocast import autocast_dtype, without_autocast
from lorakernels.numerics.fp8 import E4M3
from lorakernels.ops.cross_entropy import GRAD_SCALE_INV
from lorakernels.ops.hardware import FLOATS
from lorakernels.recorded.once import once_differentiable
from lorakernels.values import LogitChange, Scaled, Scaling, Weight

_E5M2 = torch.float8_e5m2
_POWER = 2.0**15  # the largest power of two in e5m2. Values of at most 1 are multiplied by it
CHUNK = 2048


@dataclass(frozen=True)
class _How:
    chunk: int
    ignore_index: int
    # c f, where backward multiplies by it: in fp16 dh could underflow before a loss scale
    late: Tensor | None
    change: LogitChange

    @property
    def slope(self) -> float:
        """What the GEMM multiplies logits by: c, or c / C where the tanh of that comes next."""
        return self.change.scale / (self.change.cap or 1.0)


class _Cap:
    """C tanh(z) in the place of z, and its derivative. One buffer holds tanh(z) of a chunk."""

    def __init__(self, cap: float) -> None:
        self.cap = cap
        self._tanh: Tensor | None = None

    def bend_(self, z: Tensor) -> Tensor:
        torch.tanh(z, out=self._tanh_of(z))
        return torch.mul(self._tanh_of(z), self.cap, out=z)

    def chain_(self, dz: Tensor) -> Tensor:
        """dz times 1 − tanh², which fp32 computes and rounds once."""
        torch.ops.aten.tanh_backward.grad_input(dz, self._tanh_of(dz), grad_input=dz)
        return dz

    def _tanh_of(self, z: Tensor) -> Tensor:
        if self._tanh is None:
            self._tanh = torch.empty_like(z)
        return self._tanh[: len(z)]


class _Plain:
    """z = h Wᵀ + b and dh = dz W in h's dtype. All chunks use one buffer for z, and then for dz."""

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, factor: Tensor | None, how: _How
    ) -> None:
        self.hidden, self.weight, self.bias, self.factor = hidden, weight, bias, factor
        self._z = hidden.new_empty(min(how.chunk, len(hidden)), len(weight))
        self._ignore_index, self._slope = how.ignore_index, how.slope
        self._cap = None if how.change.cap is None else _Cap(how.change.cap)

    def logits(self, rows: slice) -> Tensor:
        h = self.hidden[rows]
        z = self._product(h, self._z[: len(h)])
        return z if self._cap is None else self._cap.bend_(z)

    def _product(self, h: Tensor, z: Tensor) -> Tensor:
        slope, weight_t = self._slope, self.weight.t()
        if self.bias is not None:
            return torch.addmm(self.bias, h, weight_t, beta=slope, alpha=slope, out=z)
        if slope != 1.0:
            return z.addmm_(h, weight_t, beta=0, alpha=slope)
        return torch.mm(h, weight_t, out=z)

    def losses(self, z: Tensor, labels: Tensor, gradient: bool) -> tuple[Tensor, Tensor]:
        """(losses, dz), which is z without a gradient."""
        losses = ops.cross_entropy_(z, labels, self.factor, self._ignore_index, gradient)
        return losses, z if self._cap is None or not gradient else self._cap.chain_(z)

    def grad(self, dz: Tensor, out: Tensor) -> None:
        torch.mm(dz, self.weight, out=out)


class _FP8:
    """As _Plain, with e4m3 h and W and e5m2 dz. h and W are scaled by their amax, dz by its bound.

    Under a cap dz is computed in h's dtype and then rounded to e5m2, with a power of two for its scale.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Weight,
        bias: Tensor | None,
        factor: Tensor | None,
        how: _How,
    ) -> None:
        self.dtype, self.weight, self.bias = hidden.dtype, weight, bias
        self._steep = weight
        if how.slope != 1.0:
            assert weight.scale_inv is not None
            self._steep = weight._replace(scale_inv=weight.scale_inv * how.slope)
            self.bias = None if bias is None else bias * how.slope
        self._cap = None if how.change.cap is None else _Cap(how.change.cap)
        self.hidden = Scaled(*_quantized(hidden))
        unit = GRAD_SCALE_INV if self._cap is None else 1 / _POWER
        self._dz_inv = torch.full((1,), unit, device=hidden.device)
        if factor is not None:
            self._dz_inv *= factor
        self._ignore_index = how.ignore_index

    def logits(self, rows: slice) -> Tensor:
        hidden = self.hidden._replace(data=self.hidden.data[rows])
        z = ops.fp8_linear_lora(hidden, self._steep, self.bias, None, self.dtype)
        return z if self._cap is None else self._cap.bend_(z)

    def losses(self, z: Tensor, labels: Tensor, gradient: bool) -> tuple[Tensor, Tensor]:
        """(losses, dz's bytes), which are z without a gradient."""
        if gradient and self._cap is None:
            return ops.cross_entropy_fp8(z, labels, self._ignore_index)
        losses = ops.cross_entropy_(z, labels, None, self._ignore_index, gradient)
        if not gradient or self._cap is None:
            return losses, z
        return losses, self._cap.chain_(z).mul_(_POWER).to(_E5M2).view(torch.uint8)

    def grad(self, dz: Tensor, out: Tensor) -> None:
        scaled = Scaled(dz, self._dz_inv)
        out.copy_(ops.fp8_grad_input(scaled, _E5M2, self.weight, None, None, None, self.dtype))


def quantize_head(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(W in e4m3 [V, K], scale_inv fp32 [1]), which `linear_cross_entropy` takes with `fp8=True`.

    A frozen head that is quantized once is not quantized at every call: at V = 128256, K = 4096 that moves 2.6 GB. The
    result takes VK bytes, and W may be dropped if nothing else needs it. W's amax becomes e4m3's largest number.
    """
    w8, scale_inv = _quantized(whole(weight).detach())
    return w8.view(E4M3), scale_inv


def _quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    scaling = Scaling(torch.zeros(2, 1, device=x.device), 0, False)
    x8, inv, _ = ops.quantize_lora_down(x, None, scaling, None)
    return x8, inv


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        factor: Tensor | None,
        head: _Plain | _FP8,
        how: _How,
    ) -> Tensor:
        needs = need_h, need_w, need_b = ctx.needs_input_grad[:3]
        d_hidden = torch.empty_like(hidden) if need_h else None
        wide = torch.promote_types(hidden.dtype, torch.float32)
        d_weight = torch.zeros_like(weight, dtype=wide) if need_w else None
        d_bias = torch.zeros_like(bias, dtype=wide) if need_b and bias is not None else None
        losses = torch.empty(labels.shape, dtype=wide, device=hidden.device)
        for first in range(0, len(hidden), how.chunk):
            rows = slice(first, first + how.chunk)
            z = head.logits(rows)
            losses[rows], dz = head.losses(z, labels[rows], any(needs))
            if d_hidden is not None:
                head.grad(dz, d_hidden[rows])
            if d_weight is not None:
                _add_outer(d_weight, dz, hidden[rows])
            if d_bias is not None:
                d_bias += dz.sum(0, dtype=wide)
            del z, dz
        ctx.save_for_backward(d_hidden, d_weight, d_bias, how.late)
        ctx.dtypes = (weight.dtype, None if bias is None else bias.dtype)
        loss = losses.sum()
        return loss if factor is None else loss * factor

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden, d_weight, d_bias, factor = ctx.saved_tensors
        weight_dtype, bias_dtype = ctx.dtypes
        scale = grads[0] if factor is None else grads[0] * factor
        return (
            None if d_hidden is None else d_hidden * scale,
            None if d_weight is None else (d_weight * scale).to(weight_dtype),
            None if d_bias is None else (d_bias * scale).to(bias_dtype),
            *(None,) * 4,
        )


def _add_outer(total: Tensor, dz: Tensor, hidden: Tensor) -> None:
    """total += dzᵀ h, summed in fp32."""
    if dz.dtype == total.dtype:
        total.addmm_(dz.t(), hidden)
    elif dz.is_cuda:
        total += torch.mm(dz.t(), hidden, out_dtype=total.dtype)
    else:
        total.addmm_(dz.t().to(total.dtype), hidden.to(total.dtype))


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    chunk: int = CHUNK,
    reduction: str = "mean",
    num_items: int | float | Tensor | None = None,
    fp8: bool = False,
    weight_scale_inv: Tensor | None = None,
    change: LogitChange | None = None,
) -> Tensor:
    """Cross-entropy of `hidden` Wᵀ + bias against `labels`. The logits of all tokens never exist at once.

    Args:
        hidden: [..., K], of W's dtype unless W is e4m3. Under autocast, all but an e4m3 W are cast to its dtype.
        weight: [V, K], frozen or trained; e4m3 with `weight_scale_inv` and `fp8=True`. A head of a sharded base is
            gathered.
        labels: int64 [...], shifted by the caller. A label outside of [0, V) raises on the CPU. On a GPU, where the
            host does not wait to see it, it makes loss and gradient NaN.
        bias: [V], of hidden's dtype, or None.
        ignore_index: the label of tokens that are left out.
        chunk: number of tokens whose logits exist at the same time.
        reduction: "mean" divides by `num_items`, "sum" does not.
        num_items: the divisor of "mean", e.g. the tokens of all microbatches and ranks. A CUDA graph freezes a number,
            but not a tensor of one value. None counts the labels that are not ignored; if there are none, the loss
            is 0.
        fp8: multiply in FP8, e4m3 × e4m3 in forward and e5m2 × e4m3 in backward. The head must be frozen. A W that is
            not FP8 is quantized at each call, which moves 5 VK bytes of a 16-bit W. `quantize_head` does it once.
        weight_scale_inv: fp32 [1], of an e4m3 `weight`.
        change: what the model does to its logits, as `change_of_logits(config)` returns it; None for nothing.

    Returns:
        An fp32 scalar (fp64 if hidden is fp64).

    Raises:
        TypeError, ValueError: an argument does not fit. Nothing has been computed then.
    """
    weight = whole(weight)
    if (dtype := autocast_dtype(hidden.device.type)) is not None:
        hidden, bias = hidden.to(dtype), None if bias is None else bias.to(dtype)
        weight = weight if weight.dtype == E4M3 else weight.to(dtype)
    _check(hidden, weight, bias, labels, fp8, weight_scale_inv)
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1, found {chunk}")
    if reduction not in ("mean", "sum"):
        raise ValueError(f'reduction must be "mean" or "sum", found {reduction!r}')
    if num_items is not None and reduction == "sum":
        raise ValueError(f'num_items = {num_items} divides a mean: reduction must be "mean"')
    change = change or LogitChange()
    if not 0 < change.scale < math.inf or not (change.cap is None or 0 < change.cap < math.inf):
        raise ValueError(f"change must have a positive scale and cap, found {change}")
    labels = labels.reshape(-1)
    _check_range(labels, ignore_index, len(weight))
    rows = hidden.reshape(-1, hidden.shape[-1])
    factor = _factor(labels, ignore_index, num_items, rows) if reduction == "mean" else None
    tensors: tuple[Tensor | None, ...] = (rows, weight, bias)
    if not torch.is_grad_enabled():  # needs_input_grad does not know about no_grad
        tensors = tuple(None if t is None else t.detach() for t in tensors)
    with without_autocast(hidden.device.type):
        h, w, b = rows.detach(), weight.detach(), None if bias is None else bias.detach()
        # NaN of an ignored token would meet its gradient, 0, in the cap's derivative
        if change.cap is not None:
            h = h.masked_fill((labels == ignore_index)[:, None], 0.0)
        slope = _times(factor, change.scale, h)
        early, late = (None, slope) if h.dtype == torch.float16 else (slope, None)
        how = _How(chunk, ignore_index, late, change)
        if fp8:
            head: _Plain | _FP8 = _FP8(h, _frozen(w, weight_scale_inv), b, early, how)
        else:
            head = _Plain(h, w, b, early, how)
        loss: Tensor = _LinearCrossEntropy.apply(*tensors, labels, factor, head, how)
    return loss


def _frozen(weight: Tensor, scale_inv: Tensor | None) -> Weight:
    if scale_inv is None:
        return Weight(*_quantized(weight))
    return Weight(weight.view(torch.uint8), scale_inv)


def _factor(
    labels: Tensor, ignore_index: int, num_items: int | float | Tensor | None, like: Tensor
) -> Tensor:
    """f = 1 / items, a scalar on the device. ValueError if `num_items` is a number that is not positive."""
    dtype = torch.promote_types(like.dtype, torch.float32)
    if num_items is None:
        num_items = (labels != ignore_index).sum().clamp(min=1)
    if isinstance(num_items, Tensor):
        return num_items.to(like.device, dtype, non_blocking=True).reshape(()).reciprocal()
    if not num_items > 0:
        raise ValueError(f"num_items must be positive, found {num_items}")
    return torch.full((), 1.0 / num_items, dtype=dtype, device=like.device)


def _times(factor: Tensor | None, scale: float, like: Tensor) -> Tensor | None:
    """c f, or None where it is 1."""
    if scale == 1.0:
        return factor
    if factor is not None:
        return factor * scale
    dtype = torch.promote_types(like.dtype, torch.float32)
    return torch.full((), scale, dtype=dtype, device=like.device)


def _check_range(labels: Tensor, ignore_index: int, vocabulary: int) -> None:
    if labels.is_cuda or labels.is_meta or labels.numel() == 0:
        return
    counted = labels[labels != ignore_index]
    if counted.numel() and (int(counted.min()) < 0 or int(counted.max()) >= vocabulary):
        raise ValueError(
            f"labels must be {ignore_index} or in [0, {vocabulary}), found {int(counted.min())} to {int(counted.max())}"
        )


def _check(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    fp8: bool,
    weight_scale_inv: Tensor | None,
) -> None:
    """Raise TypeError or ValueError, naming the argument, for what `linear_cross_entropy` does not take."""
    is_fp8 = weight.dtype == E4M3
    if hidden.dim() == 0 or weight.dim() != 2 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"expected hidden [..., K] and weight [V, K], found {tuple(hidden.shape)} and {tuple(weight.shape)}"
        )
    if labels.shape != hidden.shape[:-1] or labels.dtype != torch.int64:
        raise ValueError(
            f"labels must be int64 {list(hidden.shape[:-1])}, hidden's leading dimensions, found {labels.dtype} "
            f"{list(labels.shape)}"
        )
    if hidden.dtype not in (*FLOATS, torch.float64):
        raise TypeError(f"hidden must be floating, found {hidden.dtype}")
    if not fp8 and weight.dtype != hidden.dtype:
        hint = ": pass fp8=True and weight_scale_inv" if is_fp8 else ""
        raise TypeError(
            f"weight must have hidden's dtype {hidden.dtype}, found {weight.dtype}{hint}"
        )
    if bias is not None and (bias.shape != weight.shape[:1] or bias.dtype != hidden.dtype):
        raise ValueError(
            f"bias must be {hidden.dtype} [{weight.shape[0]}], found {bias.dtype} {list(bias.shape)}"
        )
    for name, tensor in (("weight", weight), ("bias", bias), ("labels", labels)):
        if tensor is not None and tensor.device != hidden.device:
            raise ValueError(f"{name} is on {tensor.device}, hidden on {hidden.device}")
    if (weight_scale_inv is not None) != (is_fp8 and fp8):
        raise ValueError(
            f"weight_scale_inv belongs to an e4m3 weight with fp8=True, found {weight_scale_inv!r} with fp8={fp8} "
            f"and a weight of {weight.dtype}"
        )
    trained = [
        n for n, t in (("weight", weight), ("bias", bias)) if t is not None and t.requires_grad
    ]
    if fp8 and trained:
        raise ValueError(f"fp8=True multiplies by a frozen head, found {trained} trained")
