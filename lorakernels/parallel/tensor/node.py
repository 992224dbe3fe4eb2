# SPDX-License-Identifier: Apache-2.0
"""The autograd nodes of a linear layer that T ranks hold together, and where they communicate.

    column   W_t [N/T, K], B_t [N/T, R], A whole       row   W_t [N, K/T], A_t [R, K/T], B whole

                 column                                       row
    forward      x8, s = quantize_lora_down(x, A)             x8_t, s_t = quantize_lora_down(x_t, A_t)
                 gather {x8, s}                    (1)        y = x8_t W_tᵀ + scaling · s_t Bᵀ
                 y_t = x8 W_tᵀ + scaling · s B_tᵀ + bias      sum {y, s}, then + bias           (2)
    backward     dy8_t, ds, dB_t = quantize_grad(dy_t, …)     dy8, ds, dB = quantize_grad(dy, B, s)
                 dx = dy8_t W_t + mask ⊙ (ds A)               gather {dy8, ds}                  (1)
                 sum {dx, ds}                      (2)        dx_t = dy8 W_t + mask ⊙ (ds A_t)
                 dA = dsᵀ D(x8)                    (3)        dA_t = dsᵀ D(x8_t);  sum dB       (3)

With sequence parallelism a rank has M/T of the M rows on the narrow side. Then (1) gathers rows: bytes and R-wide
factors, never a plain x or dy. (2) leaves the rank's own rows of the sum, and (3) sums over the ranks, because each saw
its own rows only. Without it (1) and (3) are nothing, and (2) sums whole tensors.

A mask is drawn at its place in the whole x: `row0` of the own rows, `col0` of the own columns. Sums of R-wide factors
are taken in fp32, because s and ds are rounded once more than on one GPU. y and dx are summed in their own dtype.

Under BlockScaling (1) gathers the scales of the rows, too. A part ends with a block, so that scales need no reduction.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lorakernels import ops
from lorakernels.autograd.linear import linear
from lorakernels.autograd.linear.projections import Projections
from lorakernels.autograd.linear.values import Adapter, Call, LoRASpec
from lorakernels.numerics.fp8 import E4M3
from lorakernels.parallel.ranks import comm
from lorakernels.parallel.ranks.group import Ranks
from lorakernels.parallel.ranks.scales import SharedScales
from lorakernels.values import Dropout, Scaled, Scaling, Up, Weight


class PartCall(NamedTuple):
    """What one call of a rank's part needs besides tensors of the layer.

    Attributes:
        spec: the layer's numbers. row0 is where the rows of all T ranks begin; col0 is not read.
        slot: int64 [2], equal on all ranks; None draws no mask.
        ranks: who holds the other parts.
        scales: where the FP8 scales come from; None over a plain base.
    """

    spec: LoRASpec
    slot: Tensor | None
    ranks: Ranks
    scales: SharedScales | None

    def scaling(self, part: Tensor, backward: bool = False) -> Scaling | None:
        if self.scales is None:
            return None
        return self.scales.of(part, self.spec.column, self.spec.delayed, backward)

    def mask(self, row0: int = 0, col0: int = 0) -> Dropout | None:
        found = self.spec.dropout(self.slot)
        return None if found is None else found._replace(row0=found.row0 + row0, col0=col0)

    def projections(
        self, weight: Weight, bias: Tensor | None, adapter: Adapter, mask: Dropout | None
    ) -> Projections:
        rows = weight.data.shape[0]
        to = Projections.single(weight, bias, adapter, rows, Call(self.spec))
        return to._replace(masks=(mask,) if to.adapted else ())

    def in_blocks(self, part: Tensor, fp8_dtype: torch.dtype) -> Scaled | None:
        """`part` with a scale for each 1 × 128, which no other rank's part changes; None without BlockScaling."""
        if self.spec.blocks is None:
            return None
        return Scaled(*ops.quantize_blocks(part, fp8_dtype, self.spec.blocks.power_2_scale))


def down(
    x: Tensor, lora_A: Tensor | None, call: PartCall, mask: Dropout | None
) -> tuple[Scaled, Tensor | None]:
    """(x8 and its scale_inv, or x over a plain base; s [M, R] or None) of this rank's x [M, K]."""
    scaling, operand = call.scaling(x), call.in_blocks(x, E4M3) or Scaled(x)
    if scaling is None and lora_A is None:
        return operand, None
    x8, scale_inv, s = ops.quantize_lora_down(x, lora_A, scaling, mask)
    operand = operand if scaling is None else Scaled(x8, scale_inv)
    return operand, None if lora_A is None else s


def quantized_grad(
    dy: Tensor, lora_B: Tensor | None, s: Tensor | None, call: PartCall
) -> tuple[Scaled, Tensor | None, Tensor | None]:
    """(dy8 and its scale_inv, or dy over a plain base; ds [M, R]; dB [N, R] if there is an s)."""
    scaling = call.scaling(dy, backward=True)
    up = None if lora_B is None else Up(lora_B, s, call.spec.scaling)
    fp8_dtype = call.spec.backward_dtype
    found = call.in_blocks(dy, fp8_dtype) or Scaled(dy)
    if scaling is None and up is None:
        return found, None, None
    dy8, scale_inv, ds, dB, _ = ops.quantize_grad(dy, up, scaling, fp8_dtype)
    found = found if scaling is None else Scaled(dy8, scale_inv)
    return found, None if up is None else ds, None if s is None else dB


def gathered(
    ranks: Ranks, part: Scaled, factor: Tensor | None, partial: Tensor | None = None
) -> tuple[Scaled, Tensor | None, Tensor | None]:
    """All rows of an operand and of its R-wide factor; `summed_over_rows` of `partial`, which travels with them.

    As they are without sequence parallelism.
    """
    if not ranks.sequence:
        return part, factor, partial
    in_blocks = part.scale_inv is not None and part.scale_inv.dim() == 2  # [blocks, M]
    sent = [part.data, part.scale_inv.t() if in_blocks else None, factor]  # type: ignore[union-attr]
    totals = [] if partial is None else [partial]
    found = iter(ranks.rows.gather(*(t for t in sent if t is not None), totals=totals))
    whole = part._replace(data=next(found))
    if in_blocks:
        whole = whole._replace(scale_inv=next(found).t().contiguous())
    return whole, None if factor is None else next(found), next(found, None)


def summed(
    ranks: Ranks, partial: Tensor, factor: Tensor | None = None, added: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """The sums over the ranks of `partial` [M, …] + `added`, and of `factor` (s or ds) [M, R].

    The factor's sum is taken in fp32 and rounded once. With sequence parallelism the results, and `added`, have this
    rank's rows alone.
    """
    if ranks.sequence:
        return ranks.rows.sum(partial, factor, added)
    total = _reduced(ranks, partial.contiguous())
    if added is not None:
        total.add_(added)
    return total, None if factor is None else _reduced(ranks, factor.float()).to(factor.dtype)


def summed_factor(ranks: Ranks, factor: Tensor | None) -> Tensor | None:
    """`summed` of s or ds alone."""
    if factor is None:
        return None
    return summed(ranks, factor.float())[0].to(factor.dtype)


def _reduced(ranks: Ranks, partial: Tensor) -> Tensor:
    comm.all_reduce(ranks.group, partial)
    return partial


def summed_over_rows(ranks: Ranks, *partials: Tensor) -> list[Tensor]:
    """Gradients of parameters that all ranks hold, from each rank's sums over its own rows, in one exchange."""
    return ranks.rows.total(*partials) if ranks.sequence else [*partials]


def bias_gradient(ctx: Any, dy: Tensor) -> Tensor | None:
    return dy.float().sum(0).to(ctx.dtype_bias) if ctx.needs_input_grad[1] else None


def _save(ctx: Any, operand: Scaled, s: Tensor | None, adapter: Adapter, weight: Weight) -> None:
    """Keep what backward reads."""
    x, _, need_A, need_B = ctx.needs_input_grad[:4]
    adapted = x or need_A or need_B
    ctx.save_for_backward(
        *(weight if x else (None, None)),
        adapter.A if x else None,
        adapter.B if adapted else None,
        ctx.call.slot if x or need_A else None,
        *(operand if need_A else (None, None)),
        s if need_B else None,
    )
    ctx.dtype_A = None if adapter.A is None else adapter.A.dtype


class _Saved(NamedTuple):
    weight: Weight
    adapter: Adapter
    operand: Scaled
    s: Tensor | None
    call: PartCall

    @classmethod
    def of(cls, ctx: Any) -> _Saved:
        data, scale_inv, lora_A, lora_B, slot, x8, x_scale_inv, s = ctx.saved_tensors
        call, operand = ctx.call._replace(slot=slot), Scaled(x8, x_scale_inv)
        return cls(Weight(data, scale_inv), Adapter(lora_A, lora_B), operand, s, call)

    def grad_x(
        self, dy8: Scaled, ds: Tensor | None, mask: Dropout | None, dtype: torch.dtype
    ) -> Tensor:
        return linear.grad_x(
            self.call.projections(self.weight, None, self.adapter, mask), dy8, ds, dtype
        )

    def grad_A(
        self, ds: Tensor | None, mask: Dropout | None, dtype: torch.dtype | None
    ) -> Tensor | None:
        """[R, K] in the dtype of A; None without an adapter, or if A is not trained."""
        if ds is None or dtype is None or self.operand.data is None:
            return None
        found: Tensor = ops.lora_grad_a(ds, self.operand, mask, dtype)
        return found


class ColumnNode(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bias: Tensor | None,
        lora_A: Tensor | None,
        lora_B: Tensor | None,
        weight: Weight,
        call: PartCall,
    ) -> Tensor:
        """y_t [M, N/T] of x [M, K]. With sequence parallelism, x has this rank's M/T rows."""
        ranks, adapter = call.ranks, Adapter(lora_A, lora_B)
        ctx.call, ctx.dtype_bias = call, None if bias is None else bias.dtype
        ctx.row0 = ranks.rank * x.shape[0] if ranks.sequence else 0
        own, s = down(x, lora_A, call, call.mask(row0=ctx.row0))
        whole, s, _ = gathered(ranks, own, s)
        _save(ctx, own, s, adapter, weight)
        return linear.project(
            whole, s, call.projections(weight, bias, adapter, None), lora_B, x.dtype
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        saved, need_x = _Saved.of(ctx), ctx.needs_input_grad[0]
        dy, ranks, call = dy.contiguous(), ctx.call.ranks, saved.call
        dy8, ds, dB = quantized_grad(dy, saved.adapter.B, saved.s, call)
        dx, needed = None, ds if ctx.needs_input_grad[2] else None
        if need_x:
            dx, ds = summed(ranks, saved.grad_x(dy8, ds, call.mask(), dy.dtype), needed)
        else:
            ds = summed_factor(ranks, needed)
        dA = saved.grad_A(ds, call.mask(row0=ctx.row0), ctx.dtype_A)
        if dA is not None:
            (dA,) = summed_over_rows(ranks, dA)
        return dx, bias_gradient(ctx, dy), dA, dB, None, None


class RowNode(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bias: Tensor | None,
        lora_A: Tensor | None,
        lora_B: Tensor | None,
        weight: Weight,
        call: PartCall,
    ) -> Tensor:
        """y [M, N] of x_t [M, K/T]; with sequence parallelism this rank's M/T rows of it."""
        ranks, adapter = call.ranks, Adapter(lora_A, lora_B)
        ctx.call, ctx.dtype_bias = call, None if bias is None else bias.dtype
        ctx.col0 = ranks.rank * x.shape[1]
        operand, s = down(x, lora_A, call, call.mask(col0=ctx.col0))
        y = linear.project(
            operand, s, call.projections(weight, None, adapter, None), lora_B, x.dtype
        )
        y, s = summed(ranks, y, s if ctx.needs_input_grad[3] else None)
        _save(ctx, operand, s, adapter, weight)
        return y if bias is None else y.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        saved, need_x = _Saved.of(ctx), ctx.needs_input_grad[0]
        dy, ranks, call = dy.contiguous(), ctx.call.ranks, saved.call
        own, ds, dB = quantized_grad(dy, saved.adapter.B, saved.s, call)
        dy8, ds, dB = gathered(ranks, own, ds, dB)
        mask = call.mask(col0=ctx.col0)
        dx = saved.grad_x(dy8, ds, mask, dy.dtype) if need_x else None
        dA = saved.grad_A(ds, mask, ctx.dtype_A)
        dbias = bias_gradient(ctx, dy)
        if dbias is not None:
            (dbias,) = summed_over_rows(ranks, dbias)
        return dx, dbias, dA, dB, None, None
