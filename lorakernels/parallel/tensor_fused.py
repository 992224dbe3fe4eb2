# SPDX-License-Identifier: Apache-2.0
"""Fused layers over the ranks of a tensor-parallel group: the projections of one x communicate once for all of them.

It is what tensor_nodes.py does for one linear layer, in the places that autograd/linear.py has for it. q, k and v
gather one x8 and one s together, and so do gate and up. Many rows travel while their product is computed in pieces:

    column       forward: multiply the own rows while the others' x8 comes, then those
                 backward: dx of each other rank's rows, which go there while that of the own rows is computed; then sum
    row          forward as column's backward, of y; backward as column's forward, of dy8
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from lorakernels import ops
from lorakernels.autograd import linear
from lorakernels.autograd.linear import Adapters, Gradients, Needs, Projections
from lorakernels.autograd.linear_rows import (
    grad_rows,
    masks_at,
    project_rows,
    slower_in_pieces,
)
from lorakernels.autograd.linear_values import LoRASpec
from lorakernels.device import capability_of
from lorakernels.fusion.layer import Parts
from lorakernels.ops.hardware import why_not_wgmma_gemm
from lorakernels.parallel import comm
from lorakernels.parallel.row_exchange import GATHERED, SUMMED, Beside
from lorakernels.parallel.tensor_nodes import gathered, summed, summed_factor, summed_over_rows
from lorakernels.parallel.tensor_ranks import Ranks, SharedScales
from lorakernels.values import Scaled, Scaling, Up


@dataclass(frozen=True)
class Split:
    """The projections of one x, by column or by row. It is an `OverRanks` of autograd/linear.py.

    Attributes:
        by: "column" or "row".
        ranks: who hold the other parts.
        scales: the FP8 scales that they share; None over a plain base.
    """

    by: str
    ranks: Ranks
    scales: SharedScales | None

    @property
    def spread(self) -> int:
        """How many times the rows between split layers all rows are."""
        return self.ranks.size if self.ranks.sequence else 1

    @property
    def flat(self) -> bool:
        return self.ranks.sequence

    def check(self, h: Tensor) -> None:
        """Refuse what split layers do not have yet.

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
    ) -> tuple[Tensor, Tensor | None]:
        if self.by == "column":
            beside = self._beside_gather(to, operand.data) if residual is None else None
            if beside is None:
                whole, s, _ = gathered(self.ranks, operand, s)
                return linear.project(whole, s, to, stacked_B, out_dtype, residual), s
            rows = operand.data.shape[0] * self.ranks.size
            y = operand.data.new_empty((rows, to.weight.shape[0]), dtype=out_dtype)

            def product(at: slice, pieces: list[Tensor]) -> None:
                x, s = operand._replace(data=pieces[0]), None if len(pieces) == 1 else pieces[1]
                project_rows(y, at, x, s, to, stacked_B)

            factors = beside.gather(product, [operand.data, *_given(s)])
            return y, None if s is None else factors[0]
        own, (rows, cols) = to._replace(bias=None), (operand.data.shape[0], to.weight.shape[0])
        beside = self._beside_sum(to, (rows, cols), out_dtype)
        if beside is None:
            partial = linear.project(operand, s, own, stacked_B, out_dtype)
            y, s = summed(self.ranks, partial, s, residual)
        else:

            def part(at: slice) -> Tensor:
                x, factor = operand._replace(data=operand.data[at]), None if s is None else s[at]
                return linear.project(x, factor, own, stacked_B, out_dtype)

            y, s = beside.sum(part, rows, s, residual)
        return y if to.bias is None else y.add_(to.bias), s

    def _beside_gather(
        self, to: Projections, part: Tensor, backward: bool = False
    ) -> Beside | None:
        """How the rows of `part` are gathered while a product of all is computed; None if before it."""
        size, rows = self.ranks.size, part.shape[0]
        if not self._in_pieces(to) or len(to.masks) > 1:
            return None

        def slower(multiprocessors: int) -> float:
            every = [
                [r for r in (rows, own * rows, (size - 1 - own) * rows) if r] for own in range(size)
            ]
            return max(slower_in_pieces(to, each, multiprocessors, backward) for each in every)

        sent = (size - 1) * part.numel() * part.element_size()
        return self.ranks.rows.beside(sent / GATHERED, slower)

    def _beside_sum(
        self, to: Projections, shape: tuple[int, int], dtype: torch.dtype, backward: bool = False
    ) -> Beside | None:
        """How a product of this `shape` is summed while it is computed; None if after it."""
        size, (rows, cols) = self.ranks.size, shape
        if not self._in_pieces(to):
            return None

        def slower(multiprocessors: int) -> float:
            return slower_in_pieces(to, [rows // size] * size, multiprocessors, backward)

        sent = (size - 1) * (rows // size) * cols * dtype.itemsize
        return self.ranks.rows.beside(sent / SUMMED, slower)

    def _in_pieces(self, to: Projections) -> bool:
        """Whether rows may be multiplied in pieces: those of csrc's FP8 kernels, with one scale for all rows."""
        if not self.ranks.sequence or not to.quantized or to.blocks is not None or to.batched:
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
    ) -> Gradients:
        s, dtype_A, lora_B, stacked_B = adapters
        block = lora_B[0] if to.adapted and stacked_B is None else stacked_B
        dy8, ds, dB = self._quantized(to, dy, dy8, block, s if needs.B else None)
        if self.by == "row":
            if to.blocks is not None:  # bytes are less to send
                dy8 = linear.quantize_in_blocks(dy8, to.blocks, to.blocks.backward_dtype)
            here = self.placed(to, dy.shape[0])
            dx, ds, dB = self._gathered_grad(here, dy8, ds, dB, dtype if needs.x else None)
        else:
            dx, needed = None, ds if needs.A else None
            if needs.x:
                dx, ds = self._summed_grad(to, dy8, ds, needed, dtype)
            else:
                ds = summed_factor(self.ranks, needed)
            here = to if ds is None else self.placed(to, ds.shape[0])
        dA: list[Tensor | None] = [None] * len(lora_B)
        if needs.A and ds is not None and dtype_A is not None:
            found = linear.grad_A(here, ds, operand(), (dtype_A, 0))
            dA = [*(found if self.by == "row" else summed_over_rows(self.ranks, *found))]
        if dB is None:
            return Gradients(dx, dA, [None] * len(lora_B))
        return Gradients(dx, dA, linear.unstack_B(to, dB, len(lora_B)))

    def _gathered_grad(
        self,
        to: Projections,
        dy8: Scaled,
        ds: Tensor | None,
        dB: Tensor | None,
        dtype: torch.dtype | None,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """(dx of all rows if it has a `dtype`; ds of all rows; dB, summed) of this rank's rows."""
        beside = None if dtype is None else self._beside_gather(to, dy8.data, backward=True)
        if beside is None or dtype is None:
            dy8, ds, dB = gathered(self.ranks, dy8, ds, dB)
            return None if dtype is None else linear.grad_x(to, dy8, ds, dtype), ds, dB
        rows = dy8.data.shape[0] * self.ranks.size
        dx = dy8.data.new_empty((rows, to.weight.shape[1]), dtype=dtype)

        def product(at: slice, pieces: list[Tensor]) -> None:
            d, factor = dy8._replace(data=pieces[0]), None if len(pieces) == 1 else pieces[1]
            grad_rows(dx, at, d, factor, to)

        found = iter(beside.gather(product, [dy8.data, *_given(ds)], _given(dB)))
        ds = None if ds is None else next(found)
        return dx, ds, next(found, None)

    def _summed_grad(
        self,
        to: Projections,
        dy8: Scaled,
        ds: Tensor | None,
        needed: Tensor | None,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor | None]:
        """(this rank's rows of dx; of ds, if `needed`), summed over the ranks."""
        rows, cols = dy8.data.shape[0], to.weight.shape[1]
        beside = self._beside_sum(to, (rows, cols), dtype, backward=True)
        if beside is None:
            return summed(self.ranks, linear.grad_x(to, dy8, ds, dtype), needed)

        def part(at: slice) -> Tensor:
            d, factor = dy8._replace(data=dy8.data[at]), None if ds is None else ds[at]
            return linear.grad_x(masks_at(to, at.start), d, factor, dtype)

        return beside.sum(part, rows, needed)

    def _quantized(
        self,
        to: Projections,
        dy: Tensor,
        dy8: Scaled | None,
        block: Tensor | None,
        s: Tensor | None,
    ) -> tuple[Scaled, Tensor | None, Tensor | None]:
        """(dy8 and its scale_inv, or dy over a plain base; ds; if there is an s, dB of `stack_B`'s second result)."""
        spec = to.spec
        scaling = None if dy8 is not None else self.scaling(dy, spec, backward=True)
        up = None if block is None else Up(block, s, spec.scaling)
        if up is None and scaling is None:
            return dy8 or Scaled(dy), None, None
        data, scale_inv, ds, dB = ops.quantize_grad(dy, up, scaling, spec.backward_dtype, to.beside)
        if dy8 is None:
            dy8 = Scaled(dy) if scaling is None else Scaled(data, scale_inv)
        return dy8, None if up is None else ds, None if s is None else dB

    def complete(self, dbias: list[Tensor | None]) -> list[Tensor | None]:
        if self.by == "column":
            return dbias
        found = iter(summed_over_rows(self.ranks, *(d for d in dbias if d is not None)))
        return [None if d is None else next(found) for d in dbias]


def _given(x: Tensor | None) -> list[Tensor]:
    return [] if x is None else [x]


def split_parts(parts: Parts, ranks: Ranks) -> None:
    """Let a fused layer, whose linear layers were cut, run over the ranks."""
    for group in parts.groups:
        by = "column" if group in (parts.qkv, parts.gate_up) else "row"
        group.rows = tuple(member.out_features for member in group.members)
        group.over = Split(by, ranks, getattr(group.first, "scales", None))
    heads = parts.heads
    parts.heads = heads._replace(query=heads.query // ranks.size, key=heads.key // ranks.size)
