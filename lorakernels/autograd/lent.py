# SPDX-License-Identifier: Apache-2.0
"""Weights that are lent: where they lie in parts on several ranks, they are whole only while somebody uses them.

The parameter has the weight's shape and dtype, and NaN in the place of values. Its lender makes the whole weight. That
memory is freed as soon as nobody refers to it. So who reads a weight by itself, beside its module, asks for `whole`.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

_LENDER = "lorakernels_lender"  # plain attribute of the parameter


def lend(weight: Tensor, lender: Callable[[], Tensor] | None) -> None:
    """Say that `lender` makes the whole `weight`, or, with None, that it has its own values again."""
    if lender is not None:
        setattr(weight, _LENDER, lender)
    elif hasattr(weight, _LENDER):
        delattr(weight, _LENDER)


def whole(weight: Tensor) -> Tensor:
    """`weight`, or what its lender makes of it. The lender may be a collective."""
    lender: Callable[[], Tensor] | None = getattr(weight, _LENDER, None)
    return weight if lender is None else lender()
