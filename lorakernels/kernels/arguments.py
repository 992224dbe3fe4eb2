# SPDX-License-Identifier: Apache-2.0
"""What csrc takes besides tensors and the values of values.py: sizes, dtype names, a stream, parts of an FP8 state.

csrc/bindings/values.h has a struct for each. A tuple's entries are taken by position, and of a tensor its address.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lorakernels.values import Scaling

Address = Tensor | int | None  # 0 and None stand for a tensor that is not there


class Where(NamedTuple):
    """A stream (`torch.cuda.Stream.cuda_stream`) and the index of its GPU; -1 is the current one."""

    stream: int
    device: int


class Sizes(NamedTuple):
    """Elements of a matrix."""

    rows: int
    cols: int


class RankSizes(NamedTuple):
    """Elements of a matrix, and an adapter's rank; 0 without one."""

    rows: int
    cols: int
    rank: int


class ProductSizes(NamedTuple):
    """[rows, depth] times [depth, cols], with an adapter of this rank; 0 without one.

    With `segment_rows`, as many rows after each other have an adapter of their own. `blocks`, if there are any: columns
    and ranks of those that stand on B's diagonal, beside which B is zero.
    """

    rows: int
    cols: int
    depth: int
    rank: int
    segment_rows: int = 0
    blocks: Sequence[tuple[int, int]] = ()


class GroupedWeight(NamedTuple):
    """Frozen matrices of groups of rows, one after the other.

    Attributes:
        data: uint8 [G, N, K], bytes of e4m3.
        scale_inv: fp32 [G].
        group_of: int32 [M / 128], whose 128 rows are; negative: not computed.
        groups: G.
    """

    data: Tensor
    scale_inv: Tensor
    group_of: Tensor
    groups: int


class Tiles(NamedTuple):
    """How a product is cut: whether sums along depth are split, a tile's sides, and the GPU's multiprocessors."""

    splits: bool
    tile_rows: int
    tile_cols: int
    multiprocessors: int


class Scale(NamedTuple):
    """Addresses in an FP8 state, 0 for what is not used, and scratch memory.

    Attributes:
        amax: where a tensor's amax goes.
        kept: its scale, taken if it is above 0.
        partials: 4-byte words, as many as csrc's AMAX_PARTIALS, where the op needs them.
    """

    amax: int
    kept: int
    partials: Tensor | None = None


def scale_of(scaling: Scaling | None, partials: Tensor | None = None) -> Scale:
    """A tensor's own elements of its FP8 state; none where the state is neither read nor written."""
    if scaling is None or not scaling.delayed:
        return Scale(0, 0, partials)
    state, column, _ = scaling
    first = state.data_ptr() + 4 * column
    return Scale(first, first + 4 * (state.shape[0] - 1) * state.stride(0), partials)


def name(dtype: torch.dtype) -> str:
    """torch's, without "torch."."""
    return str(dtype).removeprefix("torch.")


def format_of(fp8_dtype: torch.dtype) -> str:
    """ "e4m3fn" or "e5m2"."""
    return name(fp8_dtype).removeprefix("float8_")


def where(tensor: Tensor) -> Where:
    """The current stream of its GPU; as Triton asks for it, without a torch.cuda.Stream."""
    index = tensor.get_device()
    return Where(torch._C._cuda_getCurrentRawStream(index), index)
