# SPDX-License-Identifier: Apache-2.0
"""Marks on parameters: of lent weights, and of layers that ranks hold in parts.

Of a lent weight each rank holds a part, and the whole weight exists only while it is in use. The parameter has the
weight's shape and dtype, and NaN in the place of values. Its lender makes the whole weight. That memory is freed with
the last reference to it. So code that reads a weight outside of its module calls `whole`.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

_LENDER = "lorakernels_lender"
_OF_PART = "of_a_part"  # a plain bool, which `torch.load` takes with weights_only


def lend(weight: Tensor, lender: Callable[[], Tensor] | None) -> None:
    """Say that `lender` makes the whole `weight`, or, with None, that it has its own values again."""
    if lender is not None:
        setattr(weight, _LENDER, lender)
    elif hasattr(weight, _LENDER):
        delattr(weight, _LENDER)


def whole(weight: Tensor) -> Tensor:
    """`weight` itself, or the whole weight from its lender, which may be a collective."""
    lender: Callable[[], Tensor] | None = getattr(weight, _LENDER, None)
    return weight if lender is None else lender()


def mark_part(parameter: Tensor) -> None:
    """Say that `parameter` is of a split layer, also if all ranks hold it whole."""
    setattr(parameter, _OF_PART, True)


def is_of_part(parameter: Tensor) -> bool:
    return _OF_PART in vars(parameter)
