# SPDX-License-Identifier: Apache-2.0
"""Dropout's masks: which elements Philox drops, drawn by PyTorch or by csrc with the same bits.

A mask depends on (key, offset, site, row, column) alone, so that kernels, tilings and shards all draw the same one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lorakernels.device import capability_of, extension, why_not_csrc
from lorakernels.values import Dropout, RowChunks

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
    """How many of 65536 equally likely 16-bit draws drop: `round(65536·p)`, halves up, at most 65535."""
    return min(int(65536.0 * p + 0.5), 65535)


def keep_scale(p: float) -> float:
    """1 / (1 − p′) for the probability p′ that 16 bits can express, so that the mean is unbiased for every p."""
    return 65536.0 / (65536 - dropout_threshold(p))


def drops(dropout: Dropout | None) -> bool:
    """Whether any element can be dropped."""
    return dropout is not None and dropout_threshold(dropout.p) > 0


def rows_of_tensor(row0: int, rows: int, chunks: Sequence[int], device: torch.device) -> Tensor:
    """int64 [rows]: which rows of the whole tensor an operand's are (`values.Dropout`)."""
    row = torch.arange(row0, row0 + rows, device=device)
    if not chunks:
        return row
    rank, ranks, size = RowChunks(*chunks)
    chunk = row // size  # of the rank's, two of each row of tokens
    begin = torch.where(chunk % 2 == 0, rank, 2 * ranks - 1 - rank) + chunk // 2 * (2 * ranks)
    return begin * size + row % size


def dropout_keep(dropout: Dropout, rows: int, cols: int) -> Tensor:
    """bool [rows, cols]: which elements survive, for the window at (row0, col0) of the logical tensor.

    With `slot` = (key, offset), element (row, col) has counter (row, col // 8, offset mod 2³², site). Its 16 bits are
    half `col % 2` of word `col % 8 // 2`. It is dropped if they are below `dropout_threshold(p)`.
    """
    slot, p, site, row0, col0, _, chunks = dropout
    device = slot.device
    first = col0 // 8
    blocks = (col0 + cols + 7) // 8 - first
    row = rows_of_tensor(row0, rows, chunks, device).view(-1, 1) & _MASK32
    block = torch.arange(first, first + blocks, device=device).view(1, -1)
    key = (slot[0] & _MASK32, (slot[0] >> 32) & _MASK32)
    offset, stream = slot[1] & _MASK32, torch.full((), site, dtype=torch.int64, device=device)
    counter = [t.expand(rows, blocks) for t in (row, block, offset, stream)]
    words = torch.stack(philox4x32_10(counter, key), dim=-1)
    lanes = torch.stack((words & 0xFFFF, words >> 16), dim=-1).view(rows, blocks * 8)
    return lanes[:, col0 - 8 * first : col0 - 8 * first + cols] >= dropout_threshold(p)


def drawn_mask(dropout: Dropout, rows: int, cols: int) -> Tensor:
    """`dropout_keep`, drawn by csrc where it can: the same bits, on one CPU core in an eighth of the time."""
    slot = dropout.slot
    if torch.compiler.is_compiling() or (slot.is_cuda and why_not_csrc(capability_of(slot.device))):
        return dropout_keep(dropout, rows, cols)
    # while a call is recorded, `slot` is a stand-in, and so is this
    keep = slot.new_empty(rows, cols, dtype=torch.bool)
    if slot.is_cuda:
        stream = torch.cuda.current_stream(slot.device).cuda_stream
        where = (stream, slot.get_device())
        extension().dropout_mask(keep, (rows, cols), dropout, where)
    else:
        extension().dropout_mask_host(keep, (rows, cols), dropout)
    return keep


def dropped_words(cols: int) -> int:
    """How many words of 32 bits a row of `dropped_bits` has."""
    return -(-cols // 128) * 4


def dropped_bits(keep: Tensor) -> Tensor:
    """csrc/device/dropout.h's form of a mask: int32 [M, dropped_words(K)] of bool [M, K], a bit set where it is False.

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


def masked(x: Tensor, dropout: Dropout | None) -> tuple[Tensor, float]:
    """(mask ⊙ x in x's dtype, the factor still to multiply), so that the factor meets the rank-sized or final sum."""
    if dropout is None or not drops(dropout):
        return x, 1.0
    return torch.where(drawn_mask(dropout, *x.shape), x, 0.0), keep_scale(dropout.p)
