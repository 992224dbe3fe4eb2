# SPDX-License-Identifier: Apache-2.0
"""n ≥ 1 projections of one x as values: their tensors, their adapters, and the ranks that hold them together.

linear.py computes with them, and has the equations.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from lorakernels.autograd.linear.values import Adapter, Call, LoRASpec
from lorakernels.numerics.segments import adapters_of
from lorakernels.ops.quantize_grad import side_by_side
from lorakernels.values import Dropout, Scaled, Scaling, SideBySide, Weight


class Needs(NamedTuple):
    """Which gradients to compute. `bias` is for a node of one projection; `Wanted` (decoder/node.py) is for several."""

    x: bool
    A: bool
    B: bool
    bias: bool = False


class ProjectionGradients(NamedTuple):
    """dx, and dA_i and dB_i of each adapter; None for what is not needed."""

    x: Tensor | None
    A: list[Tensor | None]
    B: list[Tensor | None]


class Adapters(NamedTuple):
    """What backward reads of n projections' adapters.

    Attributes:
        s: [M, ΣR]; None if no dB is computed.
        dtype: of the A, and of dA; None without adapters.
        B: [N_i, R_i], one per adapter.
        stacked_B: the second result of `stack_B` in forward; None for one projection, whose B is not stacked.
    """

    s: Tensor | None
    dtype: torch.dtype | None
    B: Sequence[Tensor]
    stacked_B: Tensor | None = None


class RecordedProjections(NamedTuple):
    """What a recorded call takes of Projections (decoder/recorded.py).

    Attributes:
        kind: equal for Projections whose launches differ in addresses, columns and dropout sites only.
        tensors: all tensors but the masks' slots and the FP8 state.
        addresses: of the columns of x and of dy in the FP8 state, with `column_offset` added.
    """

    kind: Hashable
    tensors: list[Tensor]
    addresses: tuple[int, ...]


class OverRanks(Protocol):
    """How the ranks of a group hold projections together, each with a part, and communicate around their products."""

    def scaling(self, part: Tensor, spec: LoRASpec, backward: bool = False) -> Scaling | None:
        """The scale that all ranks have for their parts of x, or of dy; None over a plain base."""

    def known(self, spec: LoRASpec, backward: bool = False) -> Scaling | None:
        """As `scaling` if this rank has it without communication; else None."""

    def placed(self, to: Projections, rows: int) -> Projections:
        """`to` with masks at the position of this rank's x, which has `rows` rows."""

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
        """As `projected`."""

    def kept(self, s: Tensor | None) -> Tensor | None:
        """s as backward reads it."""

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
        """As `gradients`. All are complete."""

    def complete(self, dbias: list[Tensor | None]) -> list[Tensor | None]:
        """Gradients of biases, from the gradients over this rank's rows."""


class Projections(NamedTuple):
    """n projections of one x.

    Attributes:
        weight: [ΣN, K], e4m3 bytes or plain.
        scale_inv: fp32 [ΣN] or [1], or [⌈ΣN/128⌉, ⌈K/128⌉] of blocks; None over a plain base.
        grad_scale_inv: fp32 [1], the largest scale_inv, or the scales of blocks; None over a plain base.
        bias: [ΣN] or None.
        multiplier: fp32 [n], the m_i that dy' contains; ones for n = 1 or a plain base. For n = 1 there is one for each
            result that the projection packs, such as q, k and v. None if dy comes as it is.
        rows: N_i.
        ranks: R_i; 0 without an adapter.
        lora_A: [ΣR, K]; None without adapters, or in a backward that computes no dx.
        factors: fp32 [2, n], ρ_i and ρ_i / m_i; None for n = 1.
        masks: one for all adapters, or one for each.
        state_x, state_dy: `FP8State.forward` and `.backward`, or None.
        spec: scaling, and how x and dy are quantized.
        weights: the W_i as parameters. They are saved for backward, so that autograd notices a write in between.
        recorded: what a recorded call takes of it; None where there is no such call.
        over: where ranks hold the projections together. Weights, A or B, and biases are this rank's parts then.
    """

    weight: Tensor
    scale_inv: Tensor | None
    grad_scale_inv: Tensor | None
    bias: Tensor | None
    multiplier: Tensor | None
    rows: tuple[int, ...]
    ranks: tuple[int, ...]
    lora_A: Tensor | None
    factors: Tensor | None
    masks: tuple[Dropout | None, ...]
    state_x: Tensor | None
    state_dy: Tensor | None
    spec: LoRASpec
    weights: tuple[Tensor, ...] = ()
    recorded: RecordedProjections | None = None
    over: OverRanks | None = None

    @classmethod
    def single(
        cls, weight: Weight, bias: Tensor | None, adapter: Adapter, rows: int, call: Call
    ) -> Projections:
        """The one projection of a LoRALinear or a FrozenFP8Linear of `rows` rows."""
        lora_A, lora_B, _ = adapter
        return cls(
            weight.data,
            weight.scale_inv,
            weight.scale_inv,
            bias,
            multiplier=None,
            rows=(rows,),
            ranks=(0 if lora_B is None else lora_B.shape[-1],),
            lora_A=lora_A,
            factors=None,
            masks=() if lora_B is None else (call.dropout,),
            state_x=call.state_x,
            state_dy=call.state_dy,
            spec=call.spec,
            over=call.over,
        )

    @property
    def adapted(self) -> bool:
        return any(self.ranks)

    @property
    def adapters(self) -> int:
        return sum(1 for rank in self.ranks if rank)

    @property
    def batched(self) -> bool:
        """Whether the adapters are several in one batch (numerics/segments.py): A is [J, ΣR, K]."""
        return adapters_of(self.lora_A) > 0

    @property
    def quantized(self) -> bool:
        """Whether x and dy have one scale each, of an FP8 state."""
        return self.state_dy is not None

    @property
    def in_fp8(self) -> bool:
        """Whether x is multiplied in FP8, with one scale or one for each block."""
        return self.quantized or self.spec.power_of_two is not None

    @property
    def side(self) -> SideBySide:
        return SideBySide(list(self.rows), list(self.ranks))

    @property
    def stacked_side(self) -> SideBySide | None:
        """`side` if `quantize_grad` takes these projections side by side, with the B_i stacked; else None."""
        return self.diagonal if side_by_side(self.side) else None

    @property
    def diagonal(self) -> SideBySide | None:
        """`side` where the first result of `stack_B` has the B_i on its diagonal; else None."""
        stacks = self.adapted and self.factors is not None and not self.batched
        return self.side if stacks else None

    @property
    def grad_weight(self) -> Weight:
        """W with the scale_inv that backward uses."""
        return Weight(self.weight, self.grad_scale_inv)

    def scaling_x(self, x: Tensor) -> Scaling | None:
        """The scale of x; None over a plain base."""
        return (
            self.spec.of_state(self.state_x)
            if self.over is None
            else self.over.scaling(x, self.spec)
        )

    def scaling_ahead(self, backward: bool = False) -> Scaling | None:
        """The scale of an x (or dy) still to be made; None over a plain base, or if ranks must communicate for it."""
        if self.over is not None:
            return self.over.known(self.spec, backward)
        return self.spec.of_state(self.state_dy if backward else self.state_x)

    def placed(self, rows: int) -> Projections:
        """These projections with masks at the position of an x of `rows` rows."""
        return self if self.over is None else self.over.placed(self, rows)

    def parts(self, matrix: Tensor, dim: int = -2) -> list[Tensor]:
        """Split the ΣR rows of `matrix` (with `dim=-1`, its columns) by adapter. For one adapter, it is `matrix`."""
        if self.adapters == 1:
            return [matrix]
        return list(matrix.split([r for r in self.ranks if r], dim))
