# SPDX-License-Identifier: Apache-2.0
"""Protocols of row exchanges: ranks gather and sum rows, before or after a GEMM, or overlapped with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Branch(NamedTuple):
    """The LoRA branch of a summed product. Each rank adds it to its own rows of the sum.

    Attributes:
        factor: [ranks · M, R]. It is summed over the ranks, and the product of this rank's rows takes that sum.
        partials: computes tensors from this rank's rows of the summed factor. They are summed over the ranks, too.
        form: shape and dtype of all `partials` in one tensor; None if there are none.
    """

    factor: Tensor
    partials: Callable[[Tensor], list[Tensor]]
    form: tuple[torch.Size, torch.dtype] | None


class Beside(Protocol):
    """Exchanges rows while a GEMM over them runs in pieces of M rows. All methods are collective."""

    def gather(
        self,
        product: Callable[[slice, list[Tensor]], None],
        parts: Sequence[Tensor],
        totals: Sequence[Tensor] = (),
    ) -> list[Tensor]:
        """As `RowExchange.gather`, but the first of `parts` is not returned: only `product` sees it gathered.

        `product(rows, pieces)` is called for one slice of all rows after the other. `pieces` holds these rows of each
        of `parts`.
        """

    def sum(
        self,
        product: Callable[[slice], Tensor],
        rows: int,
        factor: Tensor | None = None,
        added: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """As `RowExchange.sum` of [rows, N], of which `product(slice of one rank's rows)` computes a part."""

    def sum_with(
        self, product: Callable[[slice, Tensor | None], Tensor], rows: int, branch: Branch
    ) -> tuple[Tensor, list[Tensor]]:
        """(this rank's rows of the sum, `RowExchange.total` of the branch's partials).

        `product(rows, None)` is called for the rows of every other rank. The last call is `product(rows, factor)` for
        this rank's rows, with their branch factor summed as by `RowExchange.sum`.
        """


class RowExchange(Protocol):
    """How ranks gather and sum rows. All methods but `beside` are collective. `name` is one of TRANSPORTS."""

    name: str

    def gather(self, *parts: Tensor, totals: Sequence[Tensor] = ()) -> list[Tensor]:
        """Each of `parts` [M, …] of all ranks as one tensor [ranks · M, …], in rank order. Then `total(*totals)`."""

    def sum(
        self, whole: Tensor, factor: Tensor | None = None, added: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """This rank's rows of `whole` [ranks · M, N] and of `factor` [ranks · M, R], summed over the ranks.

        `added` [M, N] is added to the first. `factor` is summed in fp32 and rounded once to its dtype.
        """

    def total(self, *parts: Tensor) -> list[Tensor]:
        """Each of `parts`, of any shape, summed over the ranks in fp32 and rounded once to its dtype.

        All ranks get the same bits.
        """

    def lay_down(
        self, shape: torch.Size, dtype: torch.dtype, write: Callable[[Tensor], None]
    ) -> list[Tensor] | None:
        """One buffer per rank, in rank order, which all ranks can read: contiguous, of `shape` and `dtype`.

        `write` fills this rank's buffer. Read the buffers before the next exchange. Returns None where ranks do not
        read each other's memory. Nothing is written or exchanged then.
        """

    def beside(self, gain: float, slower: Callable[[int], float]) -> Beside | None:
        """How to overlap an exchange with a GEMM, if that is faster; None to exchange before or after the GEMM.

        `gain`: seconds that the overlap saves. `slower(multiprocessors)`: seconds that the GEMM loses by running in
        pieces on such a GPU. All ranks pass equal arguments, and so decide alike.
        """
