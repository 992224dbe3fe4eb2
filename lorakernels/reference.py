# SPDX-License-Identifier: Apache-2.0
"""Every op in plain PyTorch: the truth for tests, the baseline for benchmarks, the CPU path.

    y  = x Wᵀ + bias + scaling · s Bᵀ        s = D(x) Aᵀ        D(x) = mask ⊙ x / (1 − p)
    ds = scaling · dy B      dB = scaling · dyᵀ s      dA = dsᵀ D(x)      dx = dy W + mask ⊙ (ds A) / (1 − p)

    x [M, K]   W [N, K]   A [R, K]   B [N, R]   s, ds [M, R]   y, dy [M, N]

Sums are taken in fp32 and rounded once, when the result is stored. The adapters are rounded to the compute dtype (that
of x or dy) before they are multiplied, as tensor cores would read them. FP8: `x8 = sat(x · scale)`,
`scale_inv = 1/scale`; saturation keeps NaN, turns ±inf into ±max. An FP8 state is one fp32 tensor [L + 1, n]
per direction: rows 0…L−1 are the amax history of n tensors, row L their scales (state/fp8.py). Scale 0 means that
no amax has been seen yet: the tensor is then scaled by its own amax.

FP8 operands cross an op's boundary as uint8 bytes, which torch's checks, gloo and autograd all understand:
x8 and W8 hold e4m3, dy8 holds the `fp8_dtype` it is passed with.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lorakernels import checks
from lorakernels.device import capability_of, extension, why_not_csrc

FP8_MAX = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
FLT_MAX = torch.finfo(torch.float32).max
E4M3 = torch.float8_e4m3fn
_MASK32 = 0xFFFFFFFF


def philox4x32_10(counter: list[Tensor], key: tuple[Tensor, Tensor]) -> list[Tensor]:
    """Philox4x32-10 on int64 tensors that hold 32-bit words (Salmon et al., SC'11, doi:10.1145/2063384.2063405)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57  # wraps mod 2⁶⁴: both halves stay exact
        c0, c1, c2, c3 = (
            ((p1 >> 32) & _MASK32) ^ c1 ^ k0,
            p1 & _MASK32,
            ((p0 >> 32) & _MASK32) ^ c3 ^ k1,
            p0 & _MASK32,
        )
        k0, k1 = (k0 + 0x9E3779B9) & _MASK32, (k1 + 0xBB67AE85) & _MASK32
    return [c0, c1, c2, c3]


def dropout_threshold(p: float) -> int:
    """Of 65536 equally likely 16-bit draws, how many drop: `round(65536·p)`, halves up, at most 65535."""
    return min(int(65536.0 * p + 0.5), 65535)


def keep_scale(p: float) -> float:
    """1 / (1 − p′) for the probability p′ that 16 bits can express, so that the mean is unbiased for every p."""
    return 65536.0 / (65536 - dropout_threshold(p))


def dropout_keep(
    slot: Tensor, p: float, site: int, rows: int, cols: int, row0: int = 0, col0: int = 0
) -> Tensor:
    """bool [rows, cols]: which elements survive, for the window at (row0, col0) of the logical tensor.

    `slot` int64 [2] = (key, offset). Element (row, col): counter = (row, col // 8, offset mod 2³², site); its 16 bits
    are half `col % 2` of word `col % 8 // 2`; dropped iff they are below `dropout_threshold(p)`.
    """
    device = slot.device
    first = col0 // 8
    blocks = (col0 + cols + 7) // 8 - first
    row = torch.arange(row0, row0 + rows, device=device).view(-1, 1) & _MASK32
    block = torch.arange(first, first + blocks, device=device).view(1, -1)
    key = (slot[0] & _MASK32, (slot[0] >> 32) & _MASK32)
    offset, stream = slot[1] & _MASK32, torch.full((), site, dtype=torch.int64, device=device)
    counter = [t.expand(rows, blocks) for t in (row, block, offset, stream)]
    words = torch.stack(philox4x32_10(counter, key), dim=-1)
    lanes = torch.stack((words & 0xFFFF, words >> 16), dim=-1).view(rows, blocks * 8)
    return lanes[:, col0 - 8 * first : col0 - 8 * first + cols] >= dropout_threshold(p)


def drawn_mask(
    slot: Tensor, p: float, site: int, rows: int, cols: int, row0: int = 0, col0: int = 0
) -> Tensor:
    """`dropout_keep`, drawn by csrc/philox.h where it can: the same bits, on one CPU core in an eighth of the time."""
    if torch.compiler.is_compiling() or (slot.is_cuda and why_not_csrc(capability_of(slot.device))):
        return dropout_keep(slot, p, site, rows, cols, row0, col0)
    keep = torch.empty(rows, cols, dtype=torch.bool, device=slot.device)
    threshold = dropout_threshold(p)
    if slot.is_cuda:
        stream = torch.cuda.current_stream(slot.device).cuda_stream
        device = slot.get_device()
        extension().dropout_mask(
            keep.data_ptr(),
            rows,
            cols,
            slot.data_ptr(),
            site,
            threshold,
            stream,
            device,
            row0,
            col0,
        )
    else:
        key, offset = (int(word) & (2**64 - 1) for word in slot.tolist())
        extension().dropout_mask_host(
            keep.data_ptr(), rows, cols, key, offset, site, threshold, row0, col0
        )
    return keep


def dropped_words(cols: int) -> int:
    """How many words of 32 bits a row of `dropped_bits` has."""
    return -(-cols // 128) * 4


def dropped_bits(keep: Tensor) -> Tensor:
    """csrc/dropout.h's form of a mask: int32 [M, dropped_words(K)] of bool [M, K], a bit set where it is False.

    Column 8 d + 2 w + h of a word's 32 has bit 16 h + 8 (d % 2) + 2 w + d // 2.
    """
    rows, words = keep.shape[0], dropped_words(keep.shape[1])
    drop = torch.nn.functional.pad(~keep, (0, 32 * words - keep.shape[1]))
    d, w, h = torch.meshgrid(
        *(torch.arange(n, device=keep.device) for n in (4, 4, 2)), indexing="ij"
    )
    weight = 1 << (16 * h + 8 * (d % 2) + 2 * w + d // 2).flatten()
    total = (drop.view(rows, words, 32) * weight).sum(-1)
    return (total - ((total >> 31) << 32)).to(torch.int32)


def masked(
    x: Tensor, slot: Tensor | None, p: float, site: int, row0: int = 0, col0: int = 0
) -> tuple[Tensor, float]:
    """(mask ⊙ x in x's dtype, factor still to multiply): the factor is applied to the rank-sized or final sum."""
    if slot is None or dropout_threshold(p) == 0:
        return x, 1.0
    keep = drawn_mask(slot, p, site, x.shape[0], x.shape[1], row0, col0)
    return torch.where(keep, x, 0.0), keep_scale(p)


def amax_of(x: Tensor) -> Tensor:
    """fp32 [1]: largest magnitude; NaN if there is one, else inf if there is one; 0 for an empty tensor."""
    if x.numel() == 0:
        return torch.zeros(1, device=x.device)
    return x.abs().amax().float().view(1)


def scale_of(amax: Tensor, fp8_max: float) -> Tensor:
    """fp8_max / amax; 1 where amax is 0, inf or NaN (TE's `compute_scale_from_amax`); FLT_MAX where it overflows."""
    usable = amax.isfinite() & (amax > 0)
    return torch.where(usable, _divide(fp8_max, amax).clamp(max=FLT_MAX), 1.0)


def _divide(value: float, by: Tensor) -> Tensor:
    """value / by, rounded once: torch's scalar / tensor multiplies by a rounded reciprocal."""
    return torch.full_like(by, value) / by


def quantize_fp8(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """sat(x · scale): round to nearest even, ±max beyond the range, NaN stays NaN."""
    return (x.float() * scale).clamp(-FP8_MAX[dtype], FP8_MAX[dtype]).to(dtype)


def quantize(
    x: Tensor, state: Tensor | None, column: int, delayed: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """(x8, scale_inv [1]). Without a state both are empty: the operand stays as it is.

    `delayed`: scaled by the state's scale (by its own amax while that is 0), amax recorded in row 0. Otherwise, in
    eval, scaled by its own amax, and the state is left alone.
    """
    if state is None:
        return x.new_empty(0, dtype=torch.uint8), torch.empty(0, device=x.device)
    amax = amax_of(x)
    scale = scale_of(amax, FP8_MAX[dtype])
    if delayed:
        kept = state[-1, column : column + 1]
        scale = torch.where(kept > 0, kept, scale)
        row0 = state[0, column : column + 1]
        row0.copy_(torch.maximum(row0, amax))
    return quantize_fp8(x, scale, dtype).view(torch.uint8), 1.0 / scale


def scale_that_tells(dy: Tensor, scale_inv: Tensor) -> Tensor:
    """scale_inv [1] of dy8; NaN where dy is fp16 and holds inf or NaN.

    FP8 saturates: without that, an overflow of fp16 that passes a frozen layer would come out finite, and torch's
    GradScaler would not see it. bf16 and fp32 have no loss scale to look after.
    """
    if dy.dtype != torch.float16 or scale_inv.numel() == 0 or dy.numel() == 0:
        return scale_inv
    least, most = dy.aminmax()  # both NaN if there is one
    return torch.where(least.isfinite() & most.isfinite(), scale_inv, torch.nan)


def _dequantize(x: Tensor, scale_inv: Tensor | None, dtype: torch.dtype = E4M3) -> Tensor:
    return x.float() if scale_inv is None else x.view(dtype).float() * scale_inv


def quantize_lora_down(
    x: Tensor,
    lora_A: Tensor | None,
    state: Tensor | None,
    column: int,
    delayed: bool,
    slot: Tensor | None,
    p: float,
    site: int,
    row0: int = 0,
    col0: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """x8 = sat(x · scale), s = D(x) Aᵀ, one read of x. Empty x8 and scale_inv without a state, empty s without A."""
    x8, scale_inv = quantize(x, state, column, delayed, E4M3)
    if lora_A is None:
        return x8, scale_inv, x.new_empty(0)
    xd, factor = masked(x.float(), slot, p, site, row0, col0)
    s = (xd @ lora_A.to(x.dtype).float().t()) * factor
    return x8, scale_inv, s.to(x.dtype)


def quantize_grad(
    dy: Tensor,
    lora_B: Tensor | None,
    s: Tensor | None,
    state: Tensor | None,
    column: int,
    delayed: bool,
    scaling: float,
    fp8_dtype: torch.dtype,
    rows: Sequence[int] | None = None,
    ranks: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dy8 = sat(dy · scale), ds = scaling · dy B, dB = scaling · dyᵀ s. Empty dB without s, empty ds without B.

    The scale_inv of an fp16 dy that is not finite is NaN (`scale_that_tells`).

    Of n projections side by side in dy [M, ΣN], with `rows` N_i and `ranks` R_i, 0 or one R:

        ds_i = scaling · dy_i B_i      dB_i = scaling · dy_iᵀ s_i

    lora_B and dB are [ΣN, R], one projection below the other; where R_i = 0 lora_B is not read and dB is 0. s and ds
    are [M, ΣR], side by side.

    Raises:
        ValueError: they do not fit together.
    """
    checks.side_by_side(dy, lora_B, s, rows, ranks)
    dy8, scale_inv = quantize(dy, state, column, delayed, fp8_dtype)
    scale_inv = scale_that_tells(dy, scale_inv)
    if lora_B is None:
        return dy8, scale_inv, dy.new_empty(0), dy.new_empty(0)
    places = adapter_places(rows, ranks)
    b = lora_B.to(dy.dtype).float()
    ds = torch.cat([dy[:, cols].float() @ b[cols] for _, (cols, _) in places], 1)
    ds = (scaling * ds).to(dy.dtype)
    if s is None:
        return dy8, scale_inv, ds, dy.new_empty(0)
    dB = torch.zeros_like(lora_B)
    for _, (cols, window) in places:
        dB[cols] = (scaling * (dy[:, cols].float().t() @ s[:, window].float())).to(dB.dtype)
    return dy8, scale_inv, ds, dB


def quantize_grad_and_mask(
    dy: Tensor,
    lora_B: Tensor,
    s: Tensor | None,
    state: Tensor | None,
    column: int,
    delayed: bool,
    scaling: float,
    fp8_dtype: torch.dtype,
    slot: Tensor,
    p: float,
    site: int,
    cols: int,
    row0: int = 0,
    col0: int = 0,
    rows: Sequence[int] | None = None,
    ranks: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`quantize_grad`, and `dropped_bits` of the input's mask [M, cols]: int32 [M, dropped_words(cols)]."""
    found = quantize_grad(dy, lora_B, s, state, column, delayed, scaling, fp8_dtype, rows, ranks)
    return *found, dropped_bits(drawn_mask(slot, p, site, len(dy), cols, row0, col0))


def adapter_places(
    rows: Sequence[int] | None, ranks: Sequence[int] | None, compact: bool = False
) -> list[tuple[int, tuple[slice, slice]]]:
    """Of each projection with R_i > 0: i, its N_i, and its R_i of the ΣR side by side; `compact`: of one R for all.

    Without `rows` there is one projection, which has everything.
    """
    if not rows or not ranks:
        return [(0, (slice(None), slice(None)))]
    places, row, rank = [], 0, 0
    for i, (n, r) in enumerate(zip(rows, ranks, strict=True)):
        if r:
            places.append((i, (slice(row, row + n), slice(rank, rank + r))))
        row, rank = row + n, rank + (0 if compact else r)
    return places


def lora_grad_a(
    ds: Tensor,
    x: Tensor,
    x_scale_inv: Tensor | None,
    slot: Tensor | None,
    p: float,
    site: int,
    out_dtype: torch.dtype,
    row0: int = 0,
    col0: int = 0,
    dropped: Tensor | None = None,
) -> Tensor:
    """dA = dsᵀ D(x) in `out_dtype`, from the saved x8 (with its scale_inv) or x. A kernel may read
    the mask from `dropped` instead of drawing it."""
    xd, factor = masked(_dequantize(x, x_scale_inv), slot, p, site, row0, col0)
    return ((ds.float().t() @ xd) * factor).to(out_dtype)


def amax_and_scale_update(
    forward: Tensor,
    backward: Tensor,
    current: Tensor | None,
    gated: bool,
    fp8_max_forward: float,
    fp8_max_backward: float,
    margin: int,
    most_recent: bool,
) -> None:
    """Roll the amax histories and compute new scales, in place, for every column of both directions [L + 1, n].

    A column's current amax is its row 0, or its entry of `current` [2n] (forward's, then backward's). A column whose
    current amax is 0 is left as it is. Otherwise its scale becomes `fp8_max · 2^−margin / amax`, amax being the
    current one or the history's largest finite one; an inf or NaN current amax keeps the scale, an overflowing
    scale becomes FLT_MAX; then the history rolls. `gated`: nothing changes unless one of backward's current amaxes is
    > 0 or NaN. Transformer Engine's `delayed_scaling.cu`, less the freeze that one inf causes for a whole history.

    Raises:
        ValueError: shapes, dtypes, devices or strides do not fit; nothing is changed then.
    """
    checks.fp8_states(forward, backward, current)
    if current is None:
        current = torch.cat((forward[0], backward[0]))
    new_x, new_dy = current.view(2, -1)
    is_open = ~(new_dy <= 0).all() if gated else torch.ones_like(new_dy, dtype=torch.bool)
    for state, new, fp8_max in (
        (forward, new_x, fp8_max_forward),
        (backward, new_dy, fp8_max_backward),
    ):
        history, scale = state[:-1], state[-1]
        live = (new != 0) & is_open
        older = torch.where(history[1:].isfinite(), history[1:], 0.0)
        amax = new if most_recent else torch.cat((new[None], older)).amax(0)
        fresh = _divide(fp8_max * 2.0**-margin, amax).clamp(max=FLT_MAX)
        scale.copy_(torch.where(live & new.isfinite() & (amax > 0), fresh, scale))
        rolled = torch.cat((history[1:], new[None]))
        rolled[0] = 0.0
        history.copy_(torch.where(live, rolled, history))
