# SPDX-License-Identifier: Apache-2.0
"""Projections of one x over the ranks of a tensor-parallel group, which communicate once for all of them.

A linear layer alone is one projection. In a fused layer q, k and v gather one x8 and one s together, and so do gate and
up. exchange.py lists what is sent. Many rows travel while their product is computed in pieces:

    column       forward: multiply the own rows while x8 of other ranks arrives, then multiply that
                 backward: dx of each other rank's rows, sent there while dx of the own rows is computed; then sum
    row          forward as the backward of a column, with y; backward as its forward, with dy8

A column's ds is then sent before dx. So each rank adds mask ⊙ (ds A) to its own rows alone, with the ds of all ranks,
and its dA travels with dx. Where dx and dA both read a mask, its bits are drawn once, before them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from lorakernels import ops
from lorakernels.autograd.linear import linear
from lorakernels.autograd.linear.projections import (
    Adapters,
    Needs,
    ProjectionGradients,
    Projections,
)
from lorakernels.autograd.linear.rows import (
    grad_rows,
    masks_at,
    project_rows,
    slower_in_pieces,
)
from lorakernels.autograd.linear.values import LoRASpec
from lorakernels.device import capability_of
from lorakernels.fusion.parts import Parts
from lorakernels.ops.hardware import why_not_wgmma_gemm
from lorakernels.ops.mask_bits import drawn_bits
from lorakernels.ops.quantize_grad import hands_mask_over
from lorakernels.parallel.ranks import comm
from lorakernels.parallel.ranks.exchange import GATHERED, SUMMED
from lorakernels.parallel.ranks.group import Ranks
from lorakernels.parallel.ranks.rows import Beside, Branch
from lorakernels.parallel.ranks.scales import SharedScales
from lorakernels.parallel.tensor.exchange import (
    gathered,
    summed,
    summed_factor,
    summed_over_rows,
)
from lorakernels.values import Scaled, Scaling, Up


@dataclass(frozen=True)
class Split:
    """The projections of one x, by column or by row. It is an `OverRanks` of autograd/linear/projections.py.

    Attributes:
        by: "column" or "row".
        ranks: the group that holds the parts.
        scales: the FP8 scales that they share; None over a plain base.
        overlaps: whether rows may travel while their product is computed. It was measured for fused layers alone.
    """

    by: str
    ranks: Ranks
    scales: SharedScales | None
    overlaps: bool = False

    @property
    def spread(self) -> int:
        """The number of all rows over the number of rows that a rank has between split layers."""
        return self.ranks.size if self.ranks.sequence else 1

    @property
    def flat(self) -> bool:
        return self.ranks.sequence

    def check(self, h: Tensor) -> None:
        """Refuse dtypes that split layers do not support yet.

        Raises:
            TypeError: float16.
        """
        if h.dtype == torch.float16:
            raise TypeError("x must be float32 or bfloat16 over ranks, found torch.float16")

    def together(self) -> AbstractContextManager[None]:
        return comm.together(self.ranks.group)

    def scaling(self, part: Tensor, spec: LoRASpec, backward: bool = False) -> Scaling | None:
        if self.scales is None:
            return None
        return self.scales.of(part, spec.column, spec.delayed, backward)

    def known(self, spec: LoRASpec, backward: bool = False) -> Scaling | None:
        if self.scales is None:
            return None
        return self.scales.known(spec.column, spec.delayed, backward)

    def placed(self, to: Projections, rows: int) -> Projections:
        row0 = self.ranks.rank * rows if self.by == "column" and self.ranks.sequence else 0
        col0 = self.ranks.rank * to.weight.shape[1] if self.by == "row" else 0
        masks = [m and m._replace(row0=m.row0 + row0, col0=m.col0 + col0) for m in to.masks]
        return to._replace(masks=tuple(masks))

    def project(
        self,
        operand: Scaled,
        s: Tensor | None,
        to: Projections,
        stacked_B: Tensor | None,
        out_dtype: torch.dtype,
        residual: Tensor | None,
        keeps_s: bool,
    ) -> tuple[Tensor, Tensor | None]:
        if self.by == "column":
            beside = self._beside_gather(to, operand.data) if residual is None else None
            if beside is None:
                whole, s, _ = gathered(self.ranks, operand, s)
                return linear.project(whole, s, to, stacked_B, out_dtype, residual), s
            rows_of_all = operand.data.shape[0] * self.ranks.size
            y = operand.data.new_empty((rows_of_all, to.weight.shape[0]), dtype=out_dtype)

            def product(rows: slice, pieces: list[Tensor]) -> None:
                x, s = operand._replace(data=pieces[0]), None if len(pieces) == 1 else pieces[1]
                project_rows(y, rows, x, s, to, stacked_B)

            factors = beside.gather(product, [operand.data, *_as_list(s)])
            return y, None if s is None else factors[0]
        unbiased, rows_of_all = to._replace(bias=None), operand.data.shape[0]
        beside = self._beside_sum(to, (rows_of_all, to.weight.shape[0]), out_dtype)
        if beside is None:
            partial = linear.project(operand, s, unbiased, stacked_B, out_dtype)
            y, s = summed(self.ranks, partial, s if keeps_s else None, residual)
        else:
            s_here = s

            def part(rows: slice) -> Tensor:
                x = operand._replace(data=operand.data[rows])
                factor = None if s_here is None else s_here[rows]
                return linear.project(x, factor, unbiased, stacked_B, out_dtype)

            y, s = beside.sum(part, rows_of_all, s if keeps_s else None, residual)
        return y if to.bias is None else y.add_(to.bias), s

    def _beside_gather(
        self, to: Projections, part: Tensor, backward: bool = False
    ) -> Beside | None:
        """How to gather the rows of `part` while a product of all is computed; None to gather first."""
        size, rows = self.ranks.size, part.shape[0]
        if not self._in_pieces(to) or len(to.masks) > 1:
            return None

        def slower(multiprocessors: int) -> float:
            below_and_above = ((rank * rows, (size - 1 - rank) * rows) for rank in range(size))
            pieces = [[n for n in (rows, *others) if n] for others in below_and_above]
            return max(slower_in_pieces(to, p, multiprocessors, backward) for p in pieces)

        sent = (size - 1) * part.numel() * part.element_size()
        return self.ranks.rows.beside(sent / GATHERED, slower)

    def _beside_sum(
        self, to: Projections, shape: tuple[int, int], dtype: torch.dtype, backward: bool = False
    ) -> Beside | None:
        """How to sum a product of this `shape` while it is computed; None to sum afterwards."""
        size, (rows, cols) = self.ranks.size, shape
        if not self._in_pieces(to):
            return None

        def slower(multiprocessors: int) -> float:
            return slower_in_pieces(to, [rows // size] * size, multiprocessors, backward)

        sent = (size - 1) * (rows // size) * cols * dtype.itemsize
        return self.ranks.rows.beside(sent / SUMMED, slower)

    def _in_pieces(self, to: Projections) -> bool:
        """Whether a product may be computed in pieces: by csrc's FP8 kernels, with one scale for all rows."""
        if not self.overlaps or not self.ranks.sequence or not to.quantized or to.batched:
            return False
        device = to.weight.device
        return device.type != "cuda" or not why_not_wgmma_gemm(
            capability_of(device), *to.weight.shape
        )

    def kept(self, s: Tensor | None) -> Tensor | None:
        return s if self.by == "column" else summed_factor(self.ranks, s)

    def gradients(
        self,
        to: Projections,
        dy: Tensor,
        dy8: Scaled | None,
        operand: Callable[[], Scaled],
        adapters: Adapters,
        needs: Needs,
        dtype: torch.dtype,
    ) -> ProjectionGradients:
        s, dtype_A, lora_B, stacked_B = adapters
        block = lora_B[0] if to.adapted and stacked_B is None else stacked_B
        up = None if block is None else Up(block, s if needs.B else None, to.spec.scaling)
        dy8, ds, dB = self._quantized(to, dy, dy8, up)
        of_A, of_x = dtype_A if needs.A else None, dtype if needs.x else None

        def drawn(to: Projections, rows: int) -> Projections:
            return to if of_A is None or of_x is None else _with_bits(to, rows, dy, up)

        if self.by == "row" or needs.x:  # a row layer sends bytes
            dy8 = linear.quantize_in_blocks(dy8, to.spec.power_of_two, to.spec.backward_dtype)
        if self.by == "row":
            rows = dy.shape[0]
            here = drawn(self.placed(to, rows), rows * self.spread)
            dx, ds, dB = self._gathered_grad(here, dy8, ds, dB, of_x)
            dA = [] if ds is None or of_A is None else linear.grad_A(here, ds, operand(), of_A)
        else:
            dx, dA = self._column_grads(to, dy8, ds, operand, drawn, (of_x, of_A))
        none: list[Tensor | None] = [None] * len(lora_B)
        dB_of_each = linear.unstack_B(to, dB, len(lora_B)) if dB is not None else none
        return ProjectionGradients(dx, [*dA] or none, dB_of_each)

    def _gathered_grad(
        self,
        to: Projections,
        dy8: Scaled,
        ds: Tensor | None,
        dB: Tensor | None,
        dtype: torch.dtype | None,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """(dx of all rows if it has a `dtype`; ds of all rows; dB, summed), from this rank's rows."""
        beside = None if dtype is None else self._beside_gather(to, dy8.data, backward=True)
        if beside is None or dtype is None:
            dy8, ds, dB = gathered(self.ranks, dy8, ds, dB)
            return None if dtype is None else linear.grad_x(to, dy8, ds, dtype), ds, dB
        rows_of_all = dy8.data.shape[0] * self.ranks.size
        dx = dy8.data.new_empty((rows_of_all, to.weight.shape[1]), dtype=dtype)

        def product(rows: slice, pieces: list[Tensor]) -> None:
            d, factor = dy8._replace(data=pieces[0]), None if len(pieces) == 1 else pieces[1]
            grad_rows(dx, rows, d, factor, to)

        received = iter(beside.gather(product, [dy8.data, *_as_list(ds)], _as_list(dB)))
        ds = None if ds is None else next(received)
        return dx, ds, next(received, None)

    def _column_grads(
        self,
        to: Projections,
        dy8: Scaled,
        ds: Tensor | None,
        operand: Callable[[], Scaled],
        drawn: Callable[[Projections, int], Projections],
        dtypes: tuple[torch.dtype | None, torch.dtype | None],
    ) -> tuple[Tensor | None, list[Tensor]]:
        """(this rank's rows of dx; every dA), summed over the ranks, where they have a dtype in `dtypes`.

        `drawn` is `_with_bits` of so many rows.
        """
        dtype, of_A = dtypes
        rows, cols = dy8.data.shape[0], to.weight.shape[1]
        own_rows = self.ranks.share(rows) if self.ranks.sequence else slice(0, rows)

        def grads_A(here: Projections, ds: Tensor) -> list[Tensor]:
            return [] if of_A is None else linear.grad_A(here, ds, operand(), of_A)

        if dtype is None:
            needed = None if of_A is None else summed_factor(self.ranks, ds)
            dA = [] if needed is None else grads_A(masks_at(to, own_rows), needed)
            return None, summed_over_rows(self.ranks, *dA)
        beside = self._beside_sum(to, (rows, cols), dtype, backward=True)
        if beside is None:
            to = drawn(to, rows)
            dx = linear.grad_x(to, dy8, ds, dtype)
            dx, needed = summed(self.ranks, dx, None if of_A is None else ds)
            dA = [] if needed is None else grads_A(masks_at(to, own_rows), needed)
            return dx, summed_over_rows(self.ranks, *dA)
        here = drawn(masks_at(to, own_rows), own_rows.stop - own_rows.start)
        frozen = to._replace(lora_A=None, masks=())

        def part(rows: slice, factor: Tensor | None = None) -> Tensor:
            d = dy8._replace(data=dy8.data[rows])
            return linear.grad_x(frozen if factor is None else here, d, factor, dtype)

        if ds is None:
            return beside.sum(part, rows)[0], []
        form = None if of_A is None else (torch.Size([ds.shape[1] * cols]), of_A)
        return beside.sum_with(part, rows, Branch(ds, lambda ds: grads_A(here, ds), form))

    def _quantized(
        self, to: Projections, dy: Tensor, dy8: Scaled | None, up: Up | None
    ) -> tuple[Scaled, Tensor | None, Tensor | None]:
        """(dy8 and its scale_inv, or dy over a plain base; ds; if `up` has an s, dB of `stack_B`'s second result)."""
        spec = to.spec
        scaling = None if dy8 is not None else self.scaling(dy, spec, backward=True)
        if up is None and scaling is None:
            return dy8 or Scaled(dy), None, None
        data, scale_inv, ds, dB, _ = ops.quantize_grad(
            dy, up, scaling, spec.backward_dtype, to.stacked_side
        )
        if dy8 is None:
            dy8 = Scaled(dy) if scaling is None else Scaled(data, scale_inv)
        if up is None:
            return dy8, None, None
        return dy8, ds, None if up.s is None else dB

    def complete(self, dbias: list[Tensor | None]) -> list[Tensor | None]:
        if self.by == "column":
            return dbias
        totals = iter(summed_over_rows(self.ranks, *(d for d in dbias if d is not None)))
        return [None if d is None else next(totals) for d in dbias]


def _with_bits(to: Projections, rows: int, dy: Tensor, up: Up | None) -> Projections:
    """`to` with its mask of so many rows drawn, where kernels of both dx and dA can read it."""
    mask = to.masks[0] if len(to.masks) == 1 else None
    if (
        mask is None
        or up is None
        or not hands_mask_over(dy, up, mask, to.grad_weight, to.stacked_side)
    ):
        return to
    bits = drawn_bits(mask, rows, to.weight.shape[1])
    return to._replace(masks=(mask._replace(dropped=bits),))


def _as_list(x: Tensor | None) -> list[Tensor]:
    return [] if x is None else [x]


def split_parts(parts: Parts, ranks: Ranks) -> None:
    """Let a fused layer, whose linear layers were cut, run over the ranks."""
    for group in parts.groups:
        by = "column" if group in (parts.qkv, parts.gate_up) else "row"
        group.rows = tuple(member.out_features for member in group.members)
        split = getattr(group.first, "over", None)
        group.over = Split(by, ranks, None if split is None else split.scales, overlaps=True)
    heads = parts.heads
    parts.heads = heads._replace(query=heads.query // ranks.size, key=heads.key // ranks.size)
