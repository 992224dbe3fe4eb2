# SPDX-License-Identifier: Apache-2.0
"""What layers ask of ranks that have rows of their own: to gather rows and to sum them, apart or beside a product."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Branch(NamedTuple):
    """What is added to this rank's own rows of a sum, by the rank that has them.

    Attributes:
        factor: [ranks · M, R]. The product of the own rows is given its sum over the ranks.
        partials: from this rank's rows of that sum, what is then summed over all rows, too.
        form: shape and dtype of all `partials` in one tensor; None if there are none.
    """

    factor: Tensor
    partials: Callable[[Tensor], list[Tensor]]
    form: tuple[torch.Size, torch.dtype] | None


class Beside(Protocol):
    """Exchanges rows while a product of them is computed, in pieces of M rows. All of it is collective."""

    def gather(
        self,
        product: Callable[[slice, list[Tensor]], None],
        parts: Sequence[Tensor],
        totals: Sequence[Tensor] = (),
    ) -> list[Tensor]:
        """As `RowExchange.gather` without its first result, which is there for `product` alone.

        `product(rows, pieces)` is called for pieces of all rows, of which `pieces` has those of each of `parts`.
        """

    def sum(
        self,
        product: Callable[[slice], Tensor],
        rows: int,
        factor: Tensor | None = None,
        added: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """As `RowExchange.sum` of the `rows` that `product(rows of a rank)` returns."""

    def sum_with(
        self, product: Callable[[slice, Tensor | None], Tensor], rows: int, branch: Branch
    ) -> tuple[Tensor, list[Tensor]]:
        """(this rank's rows of the sum, `RowExchange.total` of the branch's partials).

        `product(rows of a rank, None)` is called for the other ranks' rows, and last `product(own rows, factor)`, with
        the own rows of the branch's factor, summed as by `RowExchange.sum`.
        """


class RowExchange(Protocol):
    """How the ranks of a group gather rows, and sum them. All of it is collective. `name` is one of TRANSPORTS."""

    name: str

    def gather(self, *parts: Tensor, totals: Sequence[Tensor] = ()) -> list[Tensor]:
        """For each of `parts` [M, …] [ranks · M, …]: every rank's below each other, by rank. Then `total(*totals)`."""

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
        """What each rank has laid down for the others to read, by rank: contiguous, of `shape` and `dtype`.

        `write` fills this rank's. What is returned has to be read before the next exchange. None, where ranks do not
        read each other's memory: nothing is written then, nor exchanged.
        """

    def beside(self, gain: float, slower: Callable[[int], float]) -> Beside | None:
        """How to exchange rows beside a product, where that gains so many seconds; None if before or after it.

        `slower`: seconds that the product takes longer in pieces, on a GPU of so many multiprocessors. All ranks give
        equal arguments, and decide alike.
        """
