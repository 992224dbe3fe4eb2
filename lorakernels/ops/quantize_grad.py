# SPDX-License-Identifier: Apache-2.0
"""dy8 = sat(dy · scale), ds = scaling · dy B, dB = scaling · dyᵀ s: a linear layer's output gradient, read once.

dy8 [M, N] is FP8 bytes, B lora_B, ds [M, R], dB [N, R]. csrc/ops/quantize_grad reads dy once and writes dy8: 3MN bytes.
It keeps the sums in registers and shared memory, and adds them up in an order that depends on the shape alone.
PyTorch's kernels read dy once for its amax, once to quantize it and once for each product.

A scale for each 1 × 128 of dy costs no other pass on Hopper: each block's amax is found where its bytes are made.
Elsewhere, and where N % 16 is 8, `quantize_blocks` reads dy once more.

Both products have dy's dtype, fp32 accumulation and one rounding. PyTorch's kernels round dB to dy's dtype first. They
sum an fp16 dB in fp32, because loss scaling may take it past 65504, where fp16 ends.

Several projections of one x have their dy side by side in dy [M, ΣN]:

    ds_i = scaling · dy_i B_i      dB_i = scaling · dy_iᵀ s_i

B and dB are [ΣN, R], the projections stacked. s and ds are [M, ΣR], side by side. Each R_i is R, or 0 without an
adapter; then B_i is not read and dB_i is 0.

The adapters of one batch (numerics/segments.py) are not taken side by side.

The op also draws the dropout mask of the layer's input [M, K], a bit an element, if it is given one. csrc's kernel
draws while it waits for memory. Then lora_grad_a and fp8_grad_input read MK / 8 bytes each instead of drawing the mask
again.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lorakernels.device import capability_of, extension, multiprocessors_of
from lorakernels.kernels.arguments import format_of, name, scale_of, where
from lorakernels.kernels.triton import segments as segment_kernels
from lorakernels.numerics.blocks import quantize_by
from lorakernels.numerics.dropout import drawn_mask, dropped_bits, dropped_words
from lorakernels.numerics.fp8 import FP8_MAX, scale_that_tells
from lorakernels.numerics.products import adapter_places
from lorakernels.numerics.segments import (
    adapters_of,
    check_segments,
    rows_times,
    sum_over_rows,
)
from lorakernels.ops import checks
from lorakernels.ops.hardware import (
    FLOATS,
    SEVERAL,
    LayerOnGPU,
    why_not_batched,
    why_not_wgmma,
    why_not_wgmma_gemm,
)
from lorakernels.ops.lora_grad_a import MAX_RANK as MAX_GRAD_A_RANK
from lorakernels.ops.lora_grad_a import why_not_sizes as why_not_lora_grad_a
from lorakernels.ops.mask_bits import drawn_bits, drawn_by_csrc
from lorakernels.ops.quantize_blocks import quantize_blocks
from lorakernels.ops.register import Implementation, Op, define, empty, fake_quantized
from lorakernels.values import Dropout, Scaling, SideBySide, Up, Weight

MULTIPLE = 8  # of N, for csrc
BLOCK_MULTIPLE = 16  # of N, for csrc to find the scales of blocks
MAX_RANK = 128  # for csrc
MAX_DRAWN_RANK = 64  # above, another kernel of csrc draws the mask
MAX_PROJECTIONS = 4  # side by side, for csrc
PROJECTION_MULTIPLE = 128  # of the columns of each projection but the last, for csrc
Results = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


class Grad(NamedTuple):
    """dy is [M, N] in fp32, bf16 or fp16. `up` has s [M, R] and lora_B [N, R], or [J, N, R] of J adapters in one batch.

    `fp8_dtype` is the type of dy8's bytes. `side` says where the projections of dy are. `power_of_two`, given without a
    scaling, has scale_inv [⌈N/128⌉, M] for each 1 × 128, as `quantize_blocks` has it. `dropout` is the mask to draw, of
    the layer's input [M, K]: K = `cols`.
    """

    dy: Tensor
    up: Up | None
    scaling: Scaling | None
    fp8_dtype: torch.dtype
    side: SideBySide | None = None
    power_of_two: bool | None = None
    dropout: Dropout | None = None
    cols: int = 0


def reference(a: Grad) -> Results:
    """(dy8 [M, N], scale_inv fp32 [1], ds [M, R], dB [N, R], the mask's `dropped_bits` int32 [M, dropped_words(K)]).

    dy8 and scale_inv are empty without a scaling, ds and dB without `up`, dB without its s, the bits without `dropout`.
    The scale_inv of an fp16 dy that holds inf or NaN is NaN (`scale_that_tells`).

    Raises:
        ValueError: `side` does not fit dy and `up`; a scaling is given with `power_of_two`; the slot does not fit.
    """
    check(a)
    dy, up, scaling, fp8_dtype, side, power_of_two, dropout, cols = a
    dropped = _no_bits(dy) if dropout is None else dropped_bits(drawn_mask(dropout, len(dy), cols))
    dy8, scale_inv = quantize_by(dy, scaling, fp8_dtype, power_of_two)
    if power_of_two is None:  # else each block shows it by itself
        scale_inv = scale_that_tells(dy, scale_inv)
    if up is None:
        return dy8, scale_inv, dy.new_empty(0), dy.new_empty(0), dropped
    places = adapter_places(side)
    b = up.lora_B.to(dy.dtype).float()
    adapters = adapters_of(b)
    ds = torch.cat([rows_times(dy[:, rows].float(), b[..., rows, :]) for _, (rows, _) in places], 1)
    ds = (up.scaling * ds).to(dy.dtype)
    if up.s is None:
        return dy8, scale_inv, ds, dy.new_empty(0), dropped
    dB = torch.zeros_like(up.lora_B)
    for _, (rows, window) in places:
        dB_i = sum_over_rows(dy[:, rows].float(), up.s[:, window].float(), adapters)
        dB[..., rows, :] = (up.scaling * dB_i).to(dB.dtype)
    return dy8, scale_inv, ds, dB, dropped


def fake(a: Grad) -> Results:
    dy, up, dropped = a.dy, a.up, _fake_bits(a)
    dy8, scale_inv = fake_quantized(dy, a.scaling, a.power_of_two)
    if up is None:
        return dy8, scale_inv, empty(dy, 0), empty(dy, 0), dropped
    dB = empty(dy, 0) if up.s is None else torch.empty_like(up.lora_B)
    return dy8, scale_inv, empty(dy, dy.shape[0], columns(up, a.side)), dB, dropped


def _fake_bits(a: Grad) -> Tensor:
    if a.dropout is None:
        return _no_bits(a.dy)
    return empty(a.dy, a.dy.shape[0], dropped_words(a.cols), dtype=torch.int32)


def _no_bits(dy: Tensor) -> Tensor:
    return empty(dy, 0, dtype=torch.int32)


def columns(up: Up, side: SideBySide | None) -> int:
    """How many columns s and ds have."""
    return up.lora_B.shape[-1] if side is None else sum(side.ranks)


def check(a: Grad) -> None:
    """ValueError if projections side by side, the adapters of a batch, two recipes, or the slot do not fit."""
    dy, up, side = a.dy, a.up, a.side
    checks.one_recipe(a.scaling, a.power_of_two)
    checks.mask(a.dropout, dy.shape[0], dy.device)
    if up is not None:
        check_segments("lora_B", up.lora_B, dy.shape[0])
    if side is None:
        return
    rows, ranks = list(side.rows or ()), list(side.ranks or ())
    if len(rows) != len(ranks):
        raise ValueError(f"rows and ranks must be of one length, found {rows} and {ranks}")
    if sum(rows) != dy.shape[1] or min(rows, default=0) < 0:
        raise ValueError(f"rows must sum to dy's {dy.shape[1]} columns, found {rows}")
    if up is None:
        return
    if len({*ranks} - {0}) != 1 or min(ranks) < 0:
        raise ValueError(f"ranks must be one rank R > 0, or 0 without an adapter, found {ranks}")
    lora_B, s, _ = up
    expected = {"lora_B": (lora_B, [dy.shape[1], max(ranks)]), "s": (s, [len(dy), sum(ranks)])}
    for label, (tensor, shape) in expected.items():
        if tensor is not None and list(tensor.shape) != shape:
            raise ValueError(
                f"{label} must be {shape} with rows {rows}, ranks {ranks}, found {list(tensor.shape)}"
            )


def why_not_csrc_kernel(a: Grad) -> str | None:
    """None if csrc's kernel takes these tensors, and draws the mask too; otherwise the reason why not."""
    if why_not := why_not_csrc_operands(a.dy, a.up, a.side):
        return why_not
    return None if a.dropout is None else _why_not_drawn(a.up, a.dropout)


def _why_not_drawn(up: Up | None, dropout: Dropout) -> str | None:
    rank = 0 if up is None else up.lora_B.shape[1]
    if not 0 < rank <= MAX_DRAWN_RANK:
        return f"rank {rank} is not in 1 to {MAX_DRAWN_RANK}, for which csrc draws a mask as well"
    if not drawn_by_csrc(dropout):
        return f"csrc draws no mask of p = {dropout.p} at col0 = {dropout.col0}"
    return None


def why_not_mask_apart(a: Grad) -> str | None:
    """None if csrc's kernel takes these tensors, and the mask is drawn apart; otherwise the reason why not."""
    if a.dropout is None:
        return "there is no mask"
    return why_not_csrc_operands(a.dy, a.up, a.side)


def why_not_csrc_operands(dy: Tensor, up: Up | None, side: SideBySide | None = None) -> str | None:
    """As `why_not_csrc_kernel`, from the facts that it depends on."""
    if why_not := why_not_wgmma(capability_of(dy.device)):
        return why_not
    if dy.dtype not in (torch.bfloat16, torch.float16):
        return f"dy is {dy.dtype}, not bfloat16 or float16"
    if dy.shape[1] % MULTIPLE or dy.shape[1] == 0:
        return f"N = {dy.shape[1]} must be a positive multiple of {MULTIPLE}"
    if dy.data_ptr() % 16 or not dy.is_contiguous():
        return f"dy must be contiguous and 16-byte aligned, found strides {dy.stride()}"
    if up is None:
        return None
    return (_why_not_projections(side) if side else None) or _why_not_adapter(dy, up)


def _why_not_projections(side: SideBySide) -> str | None:
    if len(side.rows) > MAX_PROJECTIONS:
        return f"{len(side.rows)} projections are more than {MAX_PROJECTIONS}"
    if not _aligned(side):
        return f"rows {list(side.rows)} before the last must be multiples of {PROJECTION_MULTIPLE}"
    return None


def _aligned(side: SideBySide) -> bool:
    return not any(n % PROJECTION_MULTIPLE for n in side.rows[:-1])


def _why_not_adapter(dy: Tensor, up: Up) -> str | None:
    lora_B, s, _ = up
    if adapters_of(lora_B):
        return SEVERAL
    if not 0 < lora_B.shape[1] <= MAX_RANK:
        return f"rank {lora_B.shape[1]} is not in 1 to {MAX_RANK}"
    if lora_B.dtype not in FLOATS:
        return f"lora_B is {lora_B.dtype}"
    if s is not None and s.dtype != dy.dtype:
        return f"s is {s.dtype}, dy {dy.dtype}"
    if not all(t is None or t.is_contiguous() for t in (lora_B, s)):
        return "lora_B and s must be contiguous"
    return None


def side_by_side(side: SideBySide) -> bool:
    """Whether csrc's kernel takes such projections side by side; otherwise their B is stacked diagonally."""
    few = len(side.rows) <= MAX_PROJECTIONS
    return few and _aligned(side) and len({*side.ranks} - {0}) == 1


def hands_mask_over(
    dy: Tensor, up: Up, dropout: Dropout | None, weight: Weight, side: SideBySide | None = None
) -> bool:
    """Whether `quantize_grad` draws the mask that `lora_grad_a` and `fp8_grad_input` then read.

    It does over an FP8 base where all three are kernels of csrc that can. The bits live as long as one backward. In a
    trace, where tensors have no addresses, dtypes and ranks decide. On a GPU without these kernels, such a trace draws
    the mask once more, and dA and dx are the same.
    """
    if weight.scale_inv is None or dropout is None or not dy.is_cuda or dy.dtype == torch.float32:
        return False
    if adapters_of(up.lora_B):
        return False
    if not drawn_by_csrc(dropout) or columns(up, side) > MAX_GRAD_A_RANK:
        return False
    if torch.compiler.is_compiling():
        return True
    capability, (n, k) = capability_of(dy.device), weight.data.shape
    readers = why_not_lora_grad_a(capability, k, True) or why_not_wgmma_gemm(capability, n, k)
    return not (readers or why_not_csrc_operands(dy, up, side))


def by_csrc(a: Grad) -> Results:
    """One read of dy, by csrc's kernel, which also draws the mask."""
    dropped = _fake_bits(a)
    mask = a.dropout and a.dropout._replace(dropped=dropped)
    return *_launch_csrc(a, mask), dropped


def by_csrc_mask_apart(a: Grad) -> Results:
    """csrc's kernel, and another one for the mask."""
    return *_launch_csrc(a, None), _bits(a)


def _bits(a: Grad) -> Tensor:
    if a.dropout is None:
        return _no_bits(a.dy)
    return drawn_bits(a.dropout, len(a.dy), a.cols)


def _launch_csrc(a: Grad, mask: Dropout | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """All results but the bits, which are drawn into `mask.dropped`."""
    dy, up, scaling, fp8_dtype, side, power_of_two, _, cols = a
    rows, n = dy.shape
    if power_of_two is not None and n % BLOCK_MULTIPLE:
        _, _, ds, dB = _launch_csrc(a._replace(power_of_two=None), mask)
        return *quantize_blocks.run(dy, fp8_dtype, power_of_two), ds, dB
    ext, in_blocks = extension(), power_of_two is not None
    lora_B, s, _ = (None, None, 1.0) if up is None else up
    rank = 0 if lora_B is None else lora_B.shape[1]
    projections = [] if up is None or side is None else [*zip(*side, strict=True)]
    dy8, scale_inv = fake_quantized(dy, scaling, power_of_two)
    ds_shape = 0 if up is None else (rows, columns(up, side))
    ds = dy.new_empty(ds_shape)
    dB = dy.new_empty(0) if lora_B is None or s is None else torch.empty_like(lora_B)
    floats = ext.quantize_grad_workspace(
        rows, n, rank, s is not None, multiprocessors_of(dy.get_device()), projections
    )
    scratch = dy.new_empty(ext.AMAX_PARTIALS + floats, dtype=torch.float32)
    ext.quantize_grad(
        (dy8, scale_inv, ds, dB, scratch.data_ptr() + 4 * ext.AMAX_PARTIALS),
        dy,
        up,
        scale_of(scaling, scratch),
        (rows, n, rank, projections),
        (
            name(dy.dtype),
            name(dy.dtype if lora_B is None else lora_B.dtype),
            format_of(fp8_dtype),
            FP8_MAX[fp8_dtype],
            power_of_two,
        ),
        None if mask is None else (mask, cols),
        where(dy),
    )
    return dy8, scale_inv if in_blocks else scale_that_tells(dy, scale_inv), ds, dB


def why_not_segments(a: Grad) -> str | None:
    """None if Triton's kernels take the adapters of a batch; otherwise the reason why not."""
    dy, up = a.dy, a.up
    if up is None or not adapters_of(up.lora_B):
        return "lora_B is of one adapter"
    if a.side is not None:
        return "adapters in one batch are not taken side by side"
    if why_not := why_not_csrc_operands(dy, None):
        return why_not
    if up.s is not None and (up.s.dtype != dy.dtype or not up.s.is_contiguous()):
        return f"s must be contiguous in {dy.dtype}, found {up.s.dtype}"
    return why_not_batched(dy, up.lora_B, up.lora_B.shape[2])


def by_segments(a: Grad) -> Results:
    """csrc's kernel for dy8, and Triton's of ds and of dB for all adapters."""
    assert a.up is not None
    dy8, scale_inv, _, _ = _launch_csrc(a._replace(up=None, side=None), None)
    ds, dB = segment_kernels.gradients(a.dy, a.up)
    return dy8, scale_inv, ds, dB, _bits(a)


def by_torch(a: Grad) -> Results:
    """One PyTorch kernel after the other, for any dtype, shape and stride; of blocks, one of Triton that takes dy."""
    dy, up, scaling, fp8_dtype, side, power_of_two, *_ = a
    if power_of_two is not None and dy.is_cuda:
        dy8, scale_inv = quantize_blocks.run(dy, fp8_dtype, power_of_two)
    else:
        dy8, scale_inv = quantize_by(dy, scaling, fp8_dtype, power_of_two)
    if power_of_two is None:
        scale_inv = scale_that_tells(dy, scale_inv)
    if up is None:
        return dy8, scale_inv, dy.new_empty(0), dy.new_empty(0), _bits(a)
    places = adapter_places(side)
    b = up.lora_B.to(dy.dtype)
    parts = [rows_times(dy[:, cols], b[..., cols, :], up.scaling) for _, (cols, _) in places]
    ds = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
    return dy8, scale_inv, ds, _grad_b_by_torch(dy, up, side), _bits(a)


def _grad_b_by_torch(dy: Tensor, up: Up, side: SideBySide | None) -> Tensor:
    if up.s is None:
        return dy.new_empty(0)
    if dy.dtype == torch.float16:
        dy = dy.float()
    s = up.s.to(dy.dtype)
    if side is None:
        dB = sum_over_rows(dy, s, adapters_of(up.lora_B), up.scaling)
        return dB.to(up.lora_B.dtype)
    dB = torch.zeros_like(up.lora_B)
    for _, (cols, window) in adapter_places(side):
        dB[cols] = sum_over_rows(dy[:, cols], s[:, window], alpha=up.scaling)
    return dB


def chosen(place: LayerOnGPU) -> tuple[str, str]:
    if why_not := why_not_wgmma(place.capability):
        return "torch", why_not
    if place.sizes and place.sizes[0] % MULTIPLE:
        return "torch", f"N = {place.sizes[0]} must be a multiple of {MULTIPLE}"
    needs_n = "" if place.sizes else f", N a multiple of {MULTIPLE}"
    return "csrc", f"one pass for bf16 and fp16, rank ≤ {MAX_RANK}{needs_n}; else PyTorch's"


quantize_grad = define(
    Op(
        "quantize_grad",
        Grad,
        reference,
        fake,
        check,
        (
            Implementation("csrc", by_csrc, why_not_csrc_kernel),
            Implementation("csrc, mask apart", by_csrc_mask_apart, why_not_mask_apart),
            Implementation("csrc, triton", by_segments, why_not_segments),
            Implementation("torch", by_torch),
        ),
        chosen,
    ),
    "(Tensor dy, Tensor? lora_B, Tensor? s, Tensor(a3!)? state, SymInt column, bool delayed, float scaling,"
    " ScalarType fp8_dtype, SymInt[]? rows=None, SymInt[]? ranks=None, bool? power_of_two=None, Tensor? slot=None,"
    " float p=0.0, SymInt site=0, SymInt cols=0, SymInt row0=0, SymInt col0=0, SymInt[] chunks=[])"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
