# SPDX-License-Identifier: Apache-2.0
"""dy8 = sat(dy · scale), ds = scaling · dy B, dB = scaling · dyᵀ s: a linear layer's output gradient, read once.

dy [M, N], B [N, R], s [M, R], dy8 [M, N] FP8 bytes, ds [M, R], dB [N, R]. csrc/ops/quantize_grad reads dy once and
writes dy8: 3MN bytes. It keeps the sums in registers and shared memory, and adds them up in an order that depends on
the shape alone. PyTorch's kernels read dy once for its amax, once to quantize it and once for each product.

`quantize_grad_and_mask` also draws the dropout mask of the layer's input [M, K], a bit an element. csrc's kernel draws
while it waits for memory. Then lora_grad_a and fp8_grad_input read MK / 8 bytes each instead of drawing the mask again.

Both products have dy's dtype, fp32 accumulation and one rounding. PyTorch's kernels round dB to dy's dtype first. They
sum an fp16 dB in fp32, because loss scaling may take it past 65504, where fp16 ends.

Several projections of one x have their dy side by side in dy [M, ΣN]:

    ds_i = scaling · dy_i B_i      dB_i = scaling · dy_iᵀ s_i

B and dB are [ΣN, R], one projection below the other. s and ds are [M, ΣR], side by side. Each R_i is R, or 0 without an
adapter; then B_i is not read and dB_i is 0.

B may be of J adapters in one batch, [J, N, R], but not side by side (numerics/segments.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from lorakernels.device import capability_of, extension, multiprocessors_of, why_not_csrc
from lorakernels.kernels.arguments import format_of, name, scale_of, where
from lorakernels.kernels.triton import segments as segment_kernels
from lorakernels.numerics.dropout import drawn_mask, dropped_bits, dropped_words, drops
from lorakernels.numerics.fp8 import FP8_MAX, quantize, scale_that_tells
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
    Place,
    why_not_batched,
    why_not_wgmma,
    why_not_wgmma_gemm,
)
from lorakernels.ops.lora_grad_a import MAX_RANK as MAX_GRAD_A_RANK
from lorakernels.ops.lora_grad_a import why_not_sizes as why_not_lora_grad_a
from lorakernels.ops.register import Implementation, Op, define, empty, fake_quantized
from lorakernels.values import Dropout, Scaling, SideBySide, Sizes, Up, Weight

MULTIPLE = 8  # of N, for csrc
MAX_RANK = 128  # for csrc
MAX_DRAWN_RANK = 64  # above, another kernel of csrc draws the mask
MAX_PROJECTIONS = 4  # side by side, for csrc
PROJECTION_MULTIPLE = 128  # of the columns of each projection but the last, for csrc
COLUMN_MULTIPLE = 8  # of col0, for csrc to draw the mask
Results = tuple[Tensor, Tensor, Tensor, Tensor]
ResultsAndMask = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def reference(
    dy: Tensor,
    up: Up | None,
    scaling: Scaling | None,
    fp8_dtype: torch.dtype,
    side: SideBySide | None = None,
) -> Results:
    """(dy8 [M, N], scale_inv fp32 [1], ds [M, R], dB [N, R]).

    dy8 and scale_inv are empty without a scaling, ds and dB without `up`, dB without its s. The scale_inv of an fp16 dy
    that holds inf or NaN is NaN (`scale_that_tells`).

    Raises:
        ValueError: `side` does not fit dy and `up`.
    """
    check(dy, up, scaling, fp8_dtype, side)
    dy8, scale_inv = quantize(dy, scaling, fp8_dtype)
    scale_inv = scale_that_tells(dy, scale_inv)
    if up is None:
        return dy8, scale_inv, dy.new_empty(0), dy.new_empty(0)
    places = adapter_places(side)
    b = up.lora_B.to(dy.dtype).float()
    adapters = adapters_of(b)
    ds = torch.cat([rows_times(dy[:, cols].float(), b[..., cols, :]) for _, (cols, _) in places], 1)
    ds = (up.scaling * ds).to(dy.dtype)
    if up.s is None:
        return dy8, scale_inv, ds, dy.new_empty(0)
    dB = torch.zeros_like(up.lora_B)
    for _, (cols, window) in places:
        dB_i = sum_over_rows(dy[:, cols].float(), up.s[:, window].float(), adapters)
        dB[..., cols, :] = (up.scaling * dB_i).to(dB.dtype)
    return dy8, scale_inv, ds, dB


def reference_and_mask(
    dy: Tensor,
    up: Up,
    scaling: Scaling | None,
    fp8_dtype: torch.dtype,
    dropout: Dropout,
    cols: int,
    side: SideBySide | None = None,
) -> ResultsAndMask:
    """`reference`, and the mask's `dropped_bits`: int32 [M, dropped_words(cols)].

    Raises:
        ValueError: `side` does not fit dy and `up`, or the slot does not.
    """
    check_and_mask(dy, up, scaling, fp8_dtype, dropout, cols, side)
    found = reference(dy, up, scaling, fp8_dtype, side)
    return *found, dropped_bits(drawn_mask(dropout, len(dy), cols))


def fake(
    dy: Tensor,
    up: Up | None,
    scaling: Scaling | None,
    fp8_dtype: torch.dtype,
    side: SideBySide | None = None,
) -> Results:
    dy8, scale_inv = fake_quantized(dy, scaling)
    if up is None:
        return dy8, scale_inv, empty(dy, 0), empty(dy, 0)
    dB = empty(dy, 0) if up.s is None else torch.empty_like(up.lora_B)
    return dy8, scale_inv, empty(dy, dy.shape[0], _columns(up, side)), dB


def fake_and_mask(
    dy: Tensor,
    up: Up,
    scaling: Scaling | None,
    fp8_dtype: torch.dtype,
    dropout: Dropout,
    cols: int,
    side: SideBySide | None = None,
) -> ResultsAndMask:
    dropped = empty(dy, dy.shape[0], dropped_words(cols), dtype=torch.int32)
    return *fake(dy, up, scaling, fp8_dtype, side), dropped


def _columns(up: Up, side: SideBySide | None) -> int:
    """How many columns s and ds have."""
    return up.lora_B.shape[-1] if side is None else sum(side.ranks)


def check(
    dy: Tensor,
    up: Up | None,
    scaling: Scaling | None,
    fp8_dtype: torch.dtype,
    side: SideBySide | None = None,
) -> None:
    """ValueError if projections side by side, or the adapters of a batch, do not fit dy and `up`."""
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


def check_and_mask(
    dy: Tensor,
    up: Up,
    scaling: Scaling | None,
    fp8_dtype: torch.dtype,
    dropout: Dropout,
    cols: int,
    side: SideBySide | None = None,
) -> None:
    """ValueError if projections side by side or the slot do not fit."""
    check(dy, up, scaling, fp8_dtype, side)
    checks.mask(dropout, dy.shape[0], dy.device)


def why_not_csrc_kernel(dy: Tensor, up: Up | None, side: SideBySide | None = None) -> str | None:
    """None if csrc's kernel takes these tensors; otherwise the reason why not."""
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


def _drawn_by_csrc(dropout: Dropout) -> bool:
    """Whether csrc's kernels draw this mask as bits."""
    return drops(dropout) and dropout.col0 % COLUMN_MULTIPLE == 0


def why_not_drawn_beside(
    dy: Tensor, up: Up, dropout: Dropout, side: SideBySide | None = None
) -> str | None:
    """None if csrc's kernel takes these tensors and draws the mask, too; otherwise the reason why not."""
    if why_not := why_not_csrc_kernel(dy, up, side):
        return why_not
    if up.lora_B.shape[1] > MAX_DRAWN_RANK:
        return f"rank {up.lora_B.shape[1]} is above {MAX_DRAWN_RANK}"
    if not _drawn_by_csrc(dropout):
        return f"csrc draws no mask of p = {dropout.p} at col0 = {dropout.col0}"
    return None


def side_by_side(side: SideBySide) -> bool:
    """Whether csrc's kernel takes such projections side by side; otherwise their B is stacked diagonally."""
    few = len(side.rows) <= MAX_PROJECTIONS
    return few and _aligned(side) and len({*side.ranks} - {0}) == 1


def hands_mask_over(
    dy: Tensor, up: Up, dropout: Dropout | None, weight: Weight, side: SideBySide | None = None
) -> bool:
    """Whether `quantize_grad_and_mask` draws the mask that `lora_grad_a` and `fp8_grad_input` then read.

    It does over an FP8 base where all three are kernels of csrc that can. The bits live as long as one backward. In a
    trace, where tensors have no addresses, dtypes and ranks decide. On a GPU without these kernels, such a trace draws
    the mask once more, and dA and dx are the same.
    """
    if weight.scale_inv is None or dropout is None or not dy.is_cuda or dy.dtype == torch.float32:
        return False
    if adapters_of(up.lora_B):
        return False
    if not _drawn_by_csrc(dropout) or _columns(up, side) > MAX_GRAD_A_RANK:
        return False
    if torch.compiler.is_compiling():
        return True
    capability, (n, k) = capability_of(dy.device), weight.data.shape
    readers = why_not_lora_grad_a(capability, k, True) or why_not_wgmma_gemm(capability, n, k)
    return not (readers or why_not_csrc_kernel(dy, up, side))


def by_csrc(
    dy: Tensor,
    up: Up | None,
    scaling: Scaling | None,
    fp8_dtype: torch.dtype,
    side: SideBySide | None = None,
    mask: Dropout | None = None,
    cols: int = 0,
) -> Results:
    """One read of dy, by csrc's kernel. It draws a `mask` of `cols` columns into `mask.dropped`."""
    rows, n = dy.shape
    ext, quantizes = extension(), scaling is not None
    lora_B, s, _ = (None, None, 1.0) if up is None else up
    rank = 0 if lora_B is None else lora_B.shape[1]
    projections = [] if up is None or side is None else [*zip(*side, strict=True)]
    dy8 = dy.new_empty((rows, n) if quantizes else 0, dtype=torch.uint8)
    scale_inv = dy.new_empty(1 if quantizes else 0, dtype=torch.float32)
    ds_shape = 0 if up is None else (rows, _columns(up, side))
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
        ),
        None if mask is None else (mask, cols),
        where(dy),
    )
    return dy8, scale_that_tells(dy, scale_inv), ds, dB


def drawn_beside_by_csrc(
    dy: Tensor,
    up: Up,
    scaling: Scaling | None,
    fp8_dtype: torch.dtype,
    dropout: Dropout,
    cols: int,
    side: SideBySide | None = None,
) -> ResultsAndMask:
    """One kernel of csrc, which draws the mask, too."""
    dropped = dy.new_empty((len(dy), dropped_words(cols)), dtype=torch.int32)
    mask = dropout._replace(dropped=dropped)
    return *by_csrc(dy, up, scaling, fp8_dtype, side, mask, cols), dropped


def drawn_apart_by_csrc(
    dy: Tensor,
    up: Up,
    scaling: Scaling | None,
    fp8_dtype: torch.dtype,
    dropout: Dropout,
    cols: int,
    side: SideBySide | None = None,
) -> ResultsAndMask:
    """csrc's kernel, and another one for the mask."""
    return *by_csrc(dy, up, scaling, fp8_dtype, side), drawn_bits(dropout, len(dy), cols)


def drawn_bits(dropout: Dropout, rows: int, cols: int) -> Tensor:
    """int32 [rows, dropped_words(cols)]: the mask's bits, drawn by a kernel that does nothing else."""
    slot = dropout.slot
    by_csrc = slot.is_cuda and _drawn_by_csrc(dropout)
    if not by_csrc or why_not_csrc(capability_of(slot.device)):
        return dropped_bits(drawn_mask(dropout, rows, cols))
    dropped = slot.new_empty((rows, dropped_words(cols)), dtype=torch.int32)
    extension().dropped_bits(dropped, Sizes(rows, cols), dropout, where(slot))
    return dropped


def why_not_segments(dy: Tensor, up: Up | None, side: SideBySide | None = None) -> str | None:
    """None if Triton's kernels take the adapters of a batch; otherwise the reason why not."""
    if up is None or not adapters_of(up.lora_B):
        return "lora_B is of one adapter"
    if side is not None:
        return "adapters in one batch are not taken side by side"
    if why_not := why_not_csrc_kernel(dy, None):
        return why_not
    if up.s is not None and (up.s.dtype != dy.dtype or not up.s.is_contiguous()):
        return f"s must be contiguous in {dy.dtype}, found {up.s.dtype}"
    return why_not_batched(dy, up.lora_B, up.lora_B.shape[2])


def by_segments(
    dy: Tensor,
    up: Up | None,
    scaling: Scaling | None,
    fp8_dtype: torch.dtype,
    side: SideBySide | None = None,
) -> Results:
    """csrc's kernel for dy8, and Triton's of ds and of dB for all adapters."""
    assert up is not None
    return *by_csrc(dy, None, scaling, fp8_dtype)[:2], *segment_kernels.gradients(dy, up)


def by_torch(
    dy: Tensor,
    up: Up | None,
    scaling: Scaling | None,
    fp8_dtype: torch.dtype,
    side: SideBySide | None = None,
) -> Results:
    """One PyTorch kernel after the other, for any dtype, shape and stride."""
    dy8, scale_inv = quantize(dy, scaling, fp8_dtype)
    scale_inv = scale_that_tells(dy, scale_inv)
    if up is None:
        return dy8, scale_inv, dy.new_empty(0), dy.new_empty(0)
    places = adapter_places(side)
    b = up.lora_B.to(dy.dtype)
    parts = [rows_times(dy[:, cols], b[..., cols, :], up.scaling) for _, (cols, _) in places]
    ds = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
    return dy8, scale_inv, ds, _grad_b_by_torch(dy, up, side)


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


def drawn_apart_by_torch(
    dy: Tensor,
    up: Up,
    scaling: Scaling | None,
    fp8_dtype: torch.dtype,
    dropout: Dropout,
    cols: int,
    side: SideBySide | None = None,
) -> ResultsAndMask:
    """PyTorch's kernels, and a kernel of csrc or PyTorch's for the mask."""
    return *by_torch(dy, up, scaling, fp8_dtype, side), drawn_bits(dropout, len(dy), cols)


def chosen(place: Place) -> tuple[str, str]:
    if why_not := why_not_wgmma(place.capability):
        return "torch", why_not
    if place.sizes and place.sizes[0] % MULTIPLE:
        return "torch", f"N = {place.sizes[0]} must be a multiple of {MULTIPLE}"
    needs_n = "" if place.sizes else f", N a multiple of {MULTIPLE}"
    return "csrc", f"one pass for bf16 and fp16, rank ≤ {MAX_RANK}{needs_n}; else PyTorch's"


quantize_grad = define(
    Op(
        "quantize_grad",
        reference,
        fake,
        check,
        (
            Implementation(
                "csrc",
                by_csrc,
                lambda dy, up, scaling, fp8_dtype, side=None: why_not_csrc_kernel(dy, up, side),
            ),
            Implementation(
                "csrc, triton",
                by_segments,
                lambda dy, up, scaling, fp8_dtype, side=None: why_not_segments(dy, up, side),
            ),
            Implementation("torch", by_torch),
        ),
        chosen,
    ),
    "(Tensor dy, Tensor? lora_B, Tensor? s, Tensor(a3!)? state, SymInt column, bool delayed, float scaling,"
    " ScalarType fp8_dtype, SymInt[]? rows=None, SymInt[]? ranks=None) -> (Tensor, Tensor, Tensor, Tensor)",
)
quantize_grad_and_mask = define(
    Op(
        "quantize_grad_and_mask",
        reference_and_mask,
        fake_and_mask,
        check_and_mask,
        (
            Implementation(
                "csrc",
                drawn_beside_by_csrc,
                lambda dy, up, scaling, fp8_dtype, dropout, cols, side=None: why_not_drawn_beside(
                    dy, up, dropout, side
                ),
            ),
            Implementation(
                "csrc, mask apart",
                drawn_apart_by_csrc,
                lambda dy, up, scaling, fp8_dtype, dropout, cols, side=None: why_not_csrc_kernel(
                    dy, up, side
                ),
            ),
            Implementation("torch", drawn_apart_by_torch),
        ),
    ),
    "(Tensor dy, Tensor lora_B, Tensor? s, Tensor(a3!)? state, SymInt column, bool delayed, float scaling,"
    " ScalarType fp8_dtype, Tensor slot, float p, SymInt site, SymInt cols, SymInt row0=0, SymInt col0=0,"
    " SymInt[]? rows=None, SymInt[]? ranks=None, SymInt[] chunks=[]) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
