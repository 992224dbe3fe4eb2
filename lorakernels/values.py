# SPDX-License-Identifier: Apache-2.0
"""Values that travel together through modules, autograd, ops and kernels, each as one argument.

An op's schema stays flat: ops/register.py takes such a value apart where torch.library begins and puts it together
again behind it. Where an argument is optional, None stands for the whole value.

csrc/bindings/values.h has a struct for each that csrc takes. A tuple's entries are taken by position, and of a tensor
its address.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

Address = Tensor | int | None  # 0 and None stand for a tensor that is not there


class RowChunks(NamedTuple):
    """Which rows of a tensor a rank has, where n ranks share rows of S = 2 n C tokens, one after the other.

    Of each S tokens rank r has chunks r and 2 n − 1 − r of C tokens, in this order.

    Attributes:
        rank, ranks, size: r, n and C.
    """

    rank: int
    ranks: int
    size: int


class Dropout(NamedTuple):
    """Which elements of an operand [M, K] are dropped: the mask that (slot, site) draws.

    Attributes:
        slot: int64 [2], Philox's key and offset (state/philox.py).
        p: probability, in [0, 1).
        site: which of the model's dropouts this is; sites of one slot draw independent masks.
        row0: row of the whole tensor at which this operand begins, where it is a shard; with `chunks`, of the rank's.
        col0: its column, likewise.
        dropped: int32 [M, 4 ⌈K / 128⌉], the same mask where it has been drawn already (numerics/dropout.py).
        chunks: the `RowChunks` of the rank that has these rows; () where they are consecutive in the tensor.
    """

    slot: Tensor
    p: float
    site: int
    row0: int = 0
    col0: int = 0
    dropped: Tensor | None = None
    chunks: Sequence[int] = ()


class Scaling(NamedTuple):
    """The source of a quantization's scale, and the destination of its amax.

    Attributes:
        state: fp32 [L + 1, n], an FP8 state of one direction: L rows of amax history, then the scales of n tensors.
        column: which of the n tensors this is.
        delayed: True in training: the state's scale is used and the amax is recorded. False in evaluation: the tensor
            is scaled by its own amax and the state is left alone.
    """

    state: Tensor
    column: int
    delayed: bool


class Scaled(NamedTuple):
    """An operand of a product.

    Attributes:
        data: its elements, or uint8 bytes of an FP8 type.
        scale_inv: fp32 [1], by which FP8 bytes are multiplied, or [⌈K/128⌉, M] for each 1 × 128 of them; None for a
            plain operand.
    """

    data: Tensor
    scale_inv: Tensor | None = None


class Weight(NamedTuple):
    """A frozen matrix.

    Attributes:
        data: [N, K], plain or uint8 bytes of e4m3.
        scale_inv: fp32 [1], [N] for a scale of each row, or [⌈N/128⌉, ⌈K/128⌉] for each 128 × 128; None for a plain
            matrix.
    """

    data: Tensor
    scale_inv: Tensor | None = None


class Groups(NamedTuple):
    """Rows [M, …] in G groups, each with matrices of its own, as the tokens of G experts (numerics/groups.py).

    A group begins at a multiple of 128 rows. Rows between its end and the next multiple belong to no group.

    Attributes:
        group_of: int32 [M / 128], the group of each 128 rows; −1 for none.
        starts: int32 [G], the first row of each group.
        ends: int32 [G], the row behind its last.
    """

    group_of: Tensor
    starts: Tensor
    ends: Tensor


class LogitChange(NamedTuple):
    """The change of a head's logits z before the loss: cap · tanh(scale · z / cap), or scale · z.

    Attributes:
        scale: a positive factor.
        cap: what the size of a logit stays below; None for no cap.
    """

    scale: float = 1.0
    cap: float | None = None


class Up(NamedTuple):
    """The second half of an adapter, which adds scaling · s Bᵀ.

    Attributes:
        lora_B: [N, R].
        s: [M, R], the first half's result D(x) Aᵀ; None where only lora_B is needed.
        scaling: alpha / R, or alpha / √R with rslora.
    """

    lora_B: Tensor
    s: Tensor | None
    scaling: float


class SideBySide(NamedTuple):
    """Several projections of one x whose matrices lie one below the other.

    Attributes:
        rows: their N_i.
        ranks: their R_i; 0 for one without an adapter.
    """

    rows: Sequence[int]
    ranks: Sequence[int]


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

    With `segment_rows`, as many rows after each other have an adapter of their own. `blocks`: columns and ranks of B's
    diagonal blocks, if it has any. Outside of them B is zero.
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
        group_of: int32 [M / 128], the group of each 128 rows. Rows with a negative one are not computed.
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
    """Addresses in an FP8 state, 0 for unused ones, and scratch memory.

    Attributes:
        amax: where a tensor's amax goes.
        kept: its scale, taken if it is above 0.
        partials: 4-byte words, as many as csrc's AMAX_PARTIALS, where the op needs them.
    """

    amax: int
    kept: int
    partials: Tensor | None = None
