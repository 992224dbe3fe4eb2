# SPDX-License-Identifier: Apache-2.0
"""n ≥ 1 projections of one x with their adapters: what every node with a linear layer runs.

    W = [W_1; …; W_n] [ΣN, K]      A = [A_1; …; A_n] [ΣR, K]      B = diag(B_1, …, B_n) [ΣN, ΣR]

    forward    x8, s = quantize_lora_down(x, A)                    │  y = fp8_linear_lora(x8, W8, s, B, bias)  │
    backward   dy8, ds, dB = quantize_grad(dy, B, s)
               dA = lora_grad_a(ds, x8)                            │  dx = fp8_grad_input(dy8, W8, ds, A)      │

The bars are the places for communication between ranks, before and after each GEMM. The nodes of layers that are split
over ranks communicate there (parallel/tensor_nodes.py). Of the nodes with a linear layer, `project` alone multiplies by
W in forward, and `grad_x` in backward; linear_rows.py has them for some rows. Their arguments are what is sent before
the GEMM, and their results what is sent after it. The forward of a compiled layer is in compiled_plan.py.

`quantize_lora_down` draws the dropout mask. In backward, `quantize_grad` draws it again for the other two ops, if all
three can (`hands_mask_over`). Otherwise each of those two draws it. Over ranks a kernel of its own draws it for both.
dy B is computed first: it is rank-sized, so no [N, K] product is ever formed.

With one mask for all, n projections are one of rank ΣR. Each W_i keeps its own scale. Forward multiplies columns by
their own scale_inv [ΣN]. Backward takes dy'_i = m_i dy_i with m_i = scale_inv_i / max_j scale_inv_j. So one
scale_inv [1], the maximum, is enough:

    ds = scaling · dy' B',   B'_i = (ρ_i / m_i) B_i      dB_i = (ρ_i / m_i) scaling · dy'_iᵀ s_i      dx = dy' W + ds A

ρ_i = scaling_i / scaling. If masks differ by projection, there is still one GEMM over W. But s, dA and the term ds A
of dx are then computed one projection after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from lorakernels import ops
from lorakernels.autograd.linear_values import Adapter, Call, LoRASpec
from lorakernels.config import BlockScaling
from lorakernels.numerics.fp8 import E4M3
from lorakernels.numerics.segments import adapters_of, rows_times
from lorakernels.ops.quantize_grad import hands_mask_over, side_by_side
from lorakernels.values import Dropout, Scaled, Scaling, SideBySide, Up, Weight

Run = Callable[..., Any]


def through_dispatcher(op: Any, *arguments: Any) -> Any:
    """The `run` of eager nodes. Every `run(op, *arguments)` calls an op."""
    return op(*arguments)


class PlannedProjections(NamedTuple):
    """What plans take of Projections (decoder_plan.py).

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
        """As `scaling`, where no rank has to ask the others; else None."""

    def placed(self, to: Projections, rows: int) -> Projections:
        """`to` with masks at the place of this rank's x, which has so many rows."""

    def project(
        self,
        operand: Scaled,
        s: Tensor | None,
        to: Projections,
        stacked_B: Tensor | None,
        out_dtype: torch.dtype,
        residual: Tensor | None,
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
    ) -> Gradients:
        """As `gradients`, of which all are complete."""

    def complete(self, dbias: list[Tensor | None]) -> list[Tensor | None]:
        """Gradients of biases, from those of this rank's rows."""


class Projections(NamedTuple):
    """n projections of one x.

    Attributes:
        weight: [ΣN, K], e4m3 bytes or plain.
        scale_inv: fp32 [ΣN] or [1]; None over a plain base.
        grad_scale_inv: fp32 [1], the largest of the scale_inv; None over a plain base.
        weight_t: [K, ΣN] or None.
        bias: [ΣN] or None.
        multiplier: fp32 [n], the m_i that dy' contains; ones for n = 1 or a plain base. For n = 1 there is one for each
            result that the projection packs, such as q, k and v. None if dy comes as it is.
        rows: N_i.
        ranks: R_i; 0 without an adapter.
        lora_A: [ΣR, K]; None without adapters, or in a backward that computes no dx.
        factors: fp32 [2, n], ρ_i and ρ_i / m_i; None for n = 1.
        masks: one for all adapters, or one for each.
        state_x, state_dy: `FP8State.forward` and `.backward`, or None.
        spec: scaling, and x's and dy's place in the state.
        weights: the W_i as parameters. They are saved for backward, so that autograd notices a write in between.
        blocks: the recipe of a block-scaled base, with scale_inv and grad_scale_inv [⌈ΣN/128⌉, ⌈K/128⌉]; else None.
            x and dy' are then quantized in front of their products.
        planned: what plans take of it; None where there are none.
        over: where ranks hold the projections together. Weights, A or B, and biases are this rank's parts then.
    """

    weight: Tensor
    scale_inv: Tensor | None
    grad_scale_inv: Tensor | None
    weight_t: Tensor | None
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
    blocks: BlockScaling | None = None
    planned: PlannedProjections | None = None
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
            weight.t,
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
            blocks=call.spec.blocks,
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
        return self.state_x is not None

    @property
    def side(self) -> SideBySide:
        return SideBySide(list(self.rows), list(self.ranks))

    @property
    def beside(self) -> SideBySide | None:
        """`side` if `quantize_grad` takes these projections side by side, with the B_i below each other; else None."""
        return self.diagonal if side_by_side(self.side) else None

    @property
    def diagonal(self) -> SideBySide | None:
        """`side` where the first result of `stack_B` has the B_i on its diagonal; else None."""
        stacks = self.adapted and self.factors is not None and not self.batched
        return self.side if stacks else None

    @property
    def grad_weight(self) -> Weight:
        """W with the scale_inv and the transposed copy that backward uses."""
        return Weight(self.weight, self.grad_scale_inv, self.weight_t)

    def scaling_x(self, x: Tensor) -> Scaling | None:
        """The scale of x; None over a plain base."""
        return (
            self.spec.of_state(self.state_x)
            if self.over is None
            else self.over.scaling(x, self.spec)
        )

    def scaling_ahead(self, backward: bool = False) -> Scaling | None:
        """The scale of an x (or dy) still to be made; None over a plain base, or while ranks must ask each other."""
        if self.over is not None:
            return self.over.known(self.spec, backward)
        return self.spec.of_state(self.state_dy if backward else self.state_x)

    def placed(self, rows: int) -> Projections:
        """These projections with masks at the place of an x of so many rows."""
        return self if self.over is None else self.over.placed(self, rows)

    def parts(self, matrix: Tensor, dim: int = -2) -> list[Tensor]:
        """Split the ΣR rows of `matrix` (with `dim=-1`, its columns) by adapter. For one adapter, it is `matrix`."""
        if self.adapters == 1:
            return [matrix]
        return list(matrix.split([r for r in self.ranks if r], dim))


def lora_down(x: Tensor, to: Projections) -> Tensor | None:
    """s = D(x) Aᵀ [M, ΣR] of x [M, K]; None without adapters."""
    if to.lora_A is None:
        return None
    if len(to.masks) == 1:
        return ops.quantize_lora_down(x, to.lora_A, None, to.masks[0])[2]
    parts = zip(to.parts(to.lora_A), to.masks, strict=True)
    return torch.cat([ops.quantize_lora_down(x, a, None, mask)[2] for a, mask in parts], 1)


def quantize_down(x: Tensor, to: Projections) -> tuple[Scaled, Tensor | None]:
    """(x8 and scale_inv, or x itself over a plain base; s) of x [M, K], which is read once if there is one mask.

    Over blocks x is read once more, for a scale of each 1 × 128.
    """
    one = len(to.masks) <= 1
    mask = to.masks[0] if to.masks and one else None
    operand, s = Scaled(x), None
    if to.quantized or (to.adapted and one):
        lora_A = to.lora_A if one else None
        x8, scale_inv, s = ops.quantize_lora_down(x, lora_A, to.scaling_x(x), mask)
        operand = Scaled(x8, scale_inv) if to.quantized else operand
    operand = quantize_in_blocks(operand, to.blocks)
    return operand, s if one and to.adapted else lora_down(x, to)


def quantize_in_blocks(
    x: Scaled, blocks: BlockScaling | None, fp8_dtype: torch.dtype = E4M3
) -> Scaled:
    """x8 [M, K] with a scale_inv fp32 [⌈K/128⌉, M], by the recipe `blocks`; x itself without one, or if it has scales.

    It may be traced.
    """
    if blocks is None or x.scale_inv is not None:
        return x
    return Scaled(*ops.quantize_blocks(x.data, fp8_dtype, blocks.power_2_scale))


def project(
    operand: Scaled,
    s: Tensor | None,
    to: Projections,
    stacked_B: Tensor | None,
    out_dtype: torch.dtype,
    residual: Tensor | None = None,
) -> Tensor:
    """y [M, ΣN] = x Wᵀ + bias + scaling · s Bᵀ + residual. `stacked_B` is the first result of `stack_B`."""
    up = None if stacked_B is None else Up(stacked_B, s, to.spec.scaling)
    weight = Weight(to.weight, to.scale_inv)
    if to.blocks is not None:
        x = quantize_in_blocks(operand, to.blocks)
        return ops.fp8_block_linear(x, weight, to.bias, up, out_dtype, residual, to.diagonal)
    return ops.fp8_linear_lora(
        operand, weight, to.bias, up, out_dtype, to.spec.split_fprop, residual, to.diagonal
    )


def projected(
    operand: Scaled,
    s: Tensor | None,
    to: Projections,
    stacked_B: Tensor | None,
    out_dtype: torch.dtype,
    residual: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """(y as of `project`, s as backward reads it), also over ranks."""
    if to.over is not None:
        return to.over.project(operand, s, to, stacked_B, out_dtype, residual)
    return project(operand, s, to, stacked_B, out_dtype, residual), s


class Needs(NamedTuple):
    """Which gradients to compute. `bias` is for a node of one projection; `fused_node.Wanted` has those of several."""

    x: bool
    A: bool
    B: bool
    bias: bool = False


class Gradients(NamedTuple):
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


def gradients(
    to: Projections,
    dy: Tensor,
    dy8: Scaled | None,
    operand: Callable[[], Scaled],
    adapters: Adapters,
    needs: Needs,
    dtype: torch.dtype | None = None,
    run: Run = through_dispatcher,
) -> Gradients:
    """Gradients of `project`.

    Args:
        to: the projections.
        dy: dy' [M, ΣN], which contains the factors `to.multiplier`. With `dy8` and no adapters it may be empty.
        dy8: the bytes of dy' and their scale_inv, or None to quantize dy here.
        operand: returns x, or x8 and its scale_inv. It is called if dA is needed.
        adapters: what forward kept.
        needs: which gradients to compute; the others are None.
        dtype: of dx; None takes dy's.
        run: calls an op.
    """
    if to.over is not None:
        return to.over.gradients(to, dy, dy8, operand, adapters, needs, dtype or dy.dtype)
    s, dtype_A, lora_B, stacked_B = adapters
    block = (lora_B[0] if stacked_B is None else stacked_B) if to.adapted else None
    ds = dB = dropped = None
    state = to.state_dy if dy8 is None else None
    if state is not None or block is not None:
        found8, scale_inv, ds, dB, dropped = _quantize(
            to, dy, block, s if needs.B else None, state, needs, run
        )
        dy8 = dy8 if state is None else Scaled(found8, scale_inv)
    dy8 = dy8 or Scaled(dy)
    dA: list[Tensor | None] = [None] * len(lora_B)
    if needs.A and ds is not None and dtype_A is not None:
        each = adapters_of(lora_B[0])
        dA = [*grad_A(to, ds, operand(), (dtype_A, each), dropped, run)]
    dx = grad_x(to, dy8, ds, dtype or dy.dtype, run, dropped) if needs.x else None
    unstacked = unstack_B(to, dB, len(lora_B)) if needs.B and dB is not None else None
    return Gradients(dx, dA, unstacked or [None] * len(lora_B))


def _quantize(
    to: Projections,
    dy: Tensor,
    block: Tensor | None,
    s: Tensor | None,
    state: Tensor | None,
    needs: Needs,
    run: Run,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """(dy8, its scale_inv, ds, dB, the mask's bits if `lora_grad_a` and `fp8_grad_input` will read them)."""
    spec, side = to.spec, to.beside
    up = None if block is None else Up(block, s, spec.scaling)
    scaling = spec.of_state(state)
    if up is not None and needs.A and needs.x and len(to.masks) == 1:
        mask = to.masks[0]
        if hands_mask_over(dy, up, mask, to.grad_weight, side):
            assert mask is not None
            found: tuple[Tensor, Tensor, Tensor, Tensor, Tensor] = run(
                ops.quantize_grad_and_mask,
                dy,
                up,
                scaling,
                spec.backward_dtype,
                mask,
                to.weight.shape[1],
                side,
            )
            return found
    return *run(ops.quantize_grad, dy, up, scaling, spec.backward_dtype, side), None


def grad_A(
    to: Projections,
    ds: Tensor,
    x: Scaled,
    of: tuple[torch.dtype, int],
    dropped: Tensor | None = None,
    run: Run = through_dispatcher,
) -> list[Tensor]:
    """dA_i = ds_iᵀ D(x) of each adapter. `of`: their dtype, and J of adapters in one batch, else 0."""
    if len(to.masks) > 1:
        pieces = zip(to.parts(ds, -1), to.masks, strict=True)
        return [run(ops.lora_grad_a, d.contiguous(), x, mask, *of) for d, mask in pieces]
    mask = _handed_over(to.masks[0], dropped)
    return to.parts(run(ops.lora_grad_a, ds, x, mask, *of))


def _handed_over(mask: Dropout | None, dropped: Tensor | None) -> Dropout | None:
    return mask if mask is None or dropped is None else mask._replace(dropped=dropped)


def grad_x(
    to: Projections,
    dy8: Scaled,
    ds: Tensor | None,
    dtype: torch.dtype,
    run: Run = through_dispatcher,
    dropped: Tensor | None = None,
) -> Tensor:
    """dx [M, K] in `dtype` = dy' W + mask ⊙ (ds A) / (1 − p), ds [M, ΣR]. `dropped`: the mask's bits, if drawn."""
    several = len(to.masks) > 1
    mask = _handed_over(to.masks[0], dropped) if to.masks else None
    lora_A = to.lora_A
    d, a = ds if lora_A is not None else None, lora_A
    if several and ds is not None and lora_A is not None:
        d, a = to.parts(ds, -1)[0].contiguous(), to.parts(lora_A)[0].contiguous()
    dx: Tensor
    if to.blocks is not None:
        fp8_dtype = to.blocks.backward_dtype
        if dy8.scale_inv is None:
            power = to.blocks.power_2_scale
            dy8 = Scaled(*run(ops.quantize_blocks, dy8.data, fp8_dtype, power))
        dx = run(ops.fp8_block_grad_input, dy8, fp8_dtype, to.grad_weight, d, a, mask, dtype)
    else:
        fp8_dtype, split = to.spec.backward_dtype, to.spec.split_dgrad
        dx = run(ops.fp8_grad_input, dy8, fp8_dtype, to.grad_weight, d, a, mask, dtype, split)
    if several and ds is not None and lora_A is not None:
        rest = zip(to.parts(ds, -1)[1:], to.parts(lora_A)[1:], to.masks[1:], strict=True)
        for d, a, mask in rest:
            branch = rows_times(d, a.to(d.dtype))
            dx = run(ops.bias_dropout_add, branch, None, dx, mask)
    return dx


def stack_B(to: Projections, lora_B: Sequence[Tensor]) -> tuple[Tensor | None, Tensor | None]:
    """diag(f_i B_i) [ΣN, ΣR] for forward (f_i = ρ_i) and for backward (f_i = ρ_i / m_i), in one launch.

    If `to.beside` is set, the second has the f_i B_i below each other: [ΣN, R]. Of J adapters in one batch, all lead
    with J. Returns (B itself, None) for one projection, and (None, None) without adapters.
    """
    if not to.adapted:
        return None, None
    if to.factors is None:
        return lora_B[0], None
    first, second = ops.block_diagonal(list(lora_B), to.side, to.factors, to.beside is not None)
    return first, second


def unstack_B(to: Projections, dB: Tensor, count: int) -> list[Tensor | None]:
    """dB_i of each adapter, from that of the second result of `stack_B`."""
    if to.factors is None:
        return [dB]
    assert count == sum(1 for rank in to.ranks if rank)
    compact = to.beside is not None
    return [*ops.block_diagonal_parts(dB, to.side, to.factors[1], compact)]


def bias_gradients(
    to: Projections, dy: Tensor, dtypes: Sequence[torch.dtype | None]
) -> list[Tensor | None]:
    """Σ_rows dy_i [N_i] for each projection with a dtype in `dtypes`, else None. m_i is divided out of dy' [M, ΣN]."""
    found: list[Tensor | None] = [None] * len(dtypes)
    for i, dtype in enumerate(dtypes):
        if dtype is not None:
            total = dy.split(list(to.rows), 1)[i].float().sum(0)
            found[i] = (total if to.multiplier is None else total / to.multiplier[i]).to(dtype)
    return found if to.over is None else to.over.complete(found)
