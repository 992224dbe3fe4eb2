# SPDX-License-Identifier: Apache-2.0
"""What several ops ask before anything is changed: TypeError or ValueError naming argument, found and expected."""

from __future__ import annotations

import torch
from torch import Tensor

from lorakernels.numerics.blocks import blocks_of
from lorakernels.numerics.dropout import dropped_words
from lorakernels.numerics.groups import GROUP_ROWS
from lorakernels.numerics.segments import adapters_of, check_segments
from lorakernels.ops.hardware import FLOATS
from lorakernels.values import Dropout, Groups, Scaled, Scaling, SideBySide, Up, Weight


def mask(dropout: Dropout | None, rows: int, device: torch.device) -> None:
    """A slot is int64 [2] on the tensors' device. Chunks are a `RowChunks`, and the rank has below 2³¹ rows."""
    if dropout is None:
        return
    slot = dropout.slot
    if slot.shape != (2,) or slot.dtype != torch.int64 or slot.device != device:
        raise ValueError(
            f"slot must be int64 [2] on {device}, found {slot.dtype} {list(slot.shape)} on {slot.device}"
        )
    chunks, end = dropout.chunks, dropout.row0 + rows
    if not chunks:
        return
    three = len(chunks) == 3
    if not three or not 0 <= chunks[0] < chunks[1] or not 0 < chunks[2] < 2**31 or end > 2**31:
        raise ValueError(
            "chunks must be () or (rank, ranks, size) with rank below ranks, of rows that end below 2**31, found "
            f"{tuple(chunks)} and rows {dropout.row0} to {end}"
        )


def dropped(dropout: Dropout | None, rows: int, cols: int, device: torch.device) -> None:
    """A mask of [rows, cols] that is handed over is int32 [rows, dropped_words(cols)] without gaps on that device."""
    if dropout is None or dropout.dropped is None:
        return
    mask, shape = dropout.dropped, (rows, dropped_words(cols))
    fits = mask.shape == shape and mask.dtype == torch.int32 and mask.is_contiguous()
    if not fits or mask.device != device:
        raise ValueError(
            f"dropped must be contiguous int32 {list(shape)} on {device}, found {mask.dtype} "
            f"{list(mask.shape)} with strides {mask.stride()} on {mask.device}"
        )


def matrix(name: str, tensor: Tensor) -> None:
    """It has two dimensions."""
    if tensor.dim() != 2:
        raise ValueError(f"{name} must be a matrix, found {tuple(tensor.shape)}")


def floats(name: str, tensor: Tensor) -> None:
    """It is of a dtype that is computed in."""
    if tensor.dtype not in FLOATS:
        raise TypeError(f"{name} must be float32, bfloat16 or float16, found {tensor.dtype}")


def vector(
    name: str,
    tensor: Tensor,
    length: int,
    device: torch.device,
    dtype: torch.dtype | None = None,
) -> None:
    """It is [length] of `dtype`, or of any that is computed in, on that device."""
    if tensor.shape != (length,) or tensor.device != device:
        raise ValueError(
            f"{name} must be [{length}] on {device}, found {list(tensor.shape)} on {tensor.device}"
        )
    if dtype is None:
        floats(name, tensor)
    elif tensor.dtype != dtype:
        raise TypeError(f"{name} must be {dtype}, found {tensor.dtype}")


def one_recipe(scaling: Scaling | None, power_of_two: bool | None) -> None:
    """A tensor has one scale, by `scaling`, or one for each block, by `power_of_two`."""
    if scaling is not None and power_of_two is not None:
        raise ValueError(
            f"scaling must be None with power_of_two = {power_of_two}, where each 1 × 128 has a scale, "
            f"found column {scaling.column} of a state"
        )


def scales_of_blocks(name: str, operand: Scaled, weight: Weight) -> None:
    """The operand [M, K] has a scale for each 1 × 128, and the weight one for each 128 × 128."""
    (rows, depth), (n, k) = operand.data.shape, weight.data.shape
    _scales(f"{name}_scale_inv", operand.scale_inv, [blocks_of(depth), rows])
    _scales("weight_scale_inv", weight.scale_inv, [blocks_of(n), blocks_of(k)])


def _scales(name: str, scales: Tensor | None, expected: list[int]) -> None:
    if scales is None or list(scales.shape) != expected or scales.dtype != torch.float32:
        what = None if scales is None else f"{scales.dtype} {list(scales.shape)}"
        raise ValueError(f"{name} must be float32 {expected}, found {what}")


def state(scaling: Scaling | None, device: torch.device, name: str = "state") -> None:
    """An FP8 state is a float32 matrix on the tensors' device."""
    if scaling is None:
        return
    state = scaling.state
    if state.dim() != 2 or state.dtype != torch.float32 or state.device != device:
        raise ValueError(
            f"{name} must be float32 [history length + 1, tensors] on {device}, "
            f"found {state.dtype} {tuple(state.shape)} on {state.device}"
        )


def groups(groups: Groups, rows: int, device: torch.device) -> None:
    """`rows` is a multiple of 128, and Groups are int32 on the tensors' device, with one entry for each 128 rows."""
    if rows % GROUP_ROWS:
        raise ValueError(f"rows in groups must be a multiple of {GROUP_ROWS}, found {rows}")
    vector("group_of", groups.group_of, rows // GROUP_ROWS, device, torch.int32)
    vector("starts", groups.starts, groups.ends.shape[0], device, torch.int32)
    vector("ends", groups.ends, groups.ends.shape[0], device, torch.int32)


def of_groups(
    name: str,
    tensor: Tensor,
    groups: Groups,
    sizes: tuple[int | None, int | None],
    dtype: torch.dtype | None = None,
) -> None:
    """It is [G, *sizes] of `dtype`, or of any floating dtype of ops. None stands for any size."""
    expected = (groups.ends.shape[0], *sizes)
    fits = tensor.dim() == 3 and all(
        size in (None, n) for size, n in zip(expected, tensor.shape, strict=True)
    )
    if not fits or tensor.device != groups.ends.device:
        sizes_text = ", ".join("…" if size is None else str(size) for size in expected)
        raise ValueError(
            f"{name} must be [{sizes_text}] on {groups.ends.device}, found {list(tensor.shape)} on {tensor.device}"
        )
    if dtype is None:
        floats(name, tensor)
    elif tensor.dtype != dtype:
        raise TypeError(f"{name} must be {dtype}, found {tensor.dtype}")


def scales_of_groups(name: str, scales: Tensor | None, groups: Groups) -> None:
    """There is a float32 for each group."""
    if scales is None:
        raise ValueError(f"{name} must be float32 [{groups.ends.shape[0]}], found None")
    vector(name, scales, groups.ends.shape[0], groups.ends.device, torch.float32)


def places(place: Tensor, device: torch.device) -> None:
    """They are int32 [T, J] on the tensors' device."""
    matrix("place", place)
    if place.dtype != torch.int32 or place.device != device:
        raise TypeError(f"place must be int32 on {device}, found {place.dtype} on {place.device}")


def terms(
    shape: tuple[int, int],
    bias: Tensor | None,
    up: Up | None,
    residual: Tensor | None,
    side: SideBySide | None,
) -> None:
    """The terms besides x Wᵀ fit y [M, N]. `shape` is (M, N)."""
    rows, cols = shape
    if residual is not None and residual.shape != (rows, cols):
        raise ValueError(f"residual must be {[rows, cols]}, found {list(residual.shape)}")
    if bias is not None and bias.shape != (cols,):
        raise ValueError(f"bias must be [{cols}], found {list(bias.shape)}")
    _up(up, rows, cols)
    _side(up, side, cols)


def _side(up: Up | None, side: SideBySide | None, cols: int) -> None:
    """ValueError unless `side`, if given, has N and R of the one adapter's lora_B together."""
    if side is None:
        return
    rows, ranks = list(side.rows or ()), list(side.ranks or ())
    if up is None or up.s is None or adapters_of(up.lora_B):
        raise ValueError("rows and ranks are of one adapter's lora_B, which is not given")
    expected = [cols, up.s.shape[1]]
    if len(rows) != len(ranks) or min(*rows, *ranks, 0) < 0 or [sum(rows), sum(ranks)] != expected:
        raise ValueError(
            f"rows and ranks must be as many, none negative, and sum to lora_B's {expected}, found {rows} and {ranks}"
        )


def _up(up: Up | None, rows: int, cols: int) -> None:
    """ValueError unless lora_B is [N, R], or [J, N, R] of J adapters that divide the rows, for an s [M, R]."""
    if up is not None and up.s is not None:
        if up.lora_B.shape[-2:] != (cols, up.s.shape[1]) or up.lora_B.dim() > 3:
            raise ValueError(
                f"lora_B must be {[cols, up.s.shape[1]]}, found {list(up.lora_B.shape)}"
            )
        check_segments("lora_B", up.lora_B, rows)
