# SPDX-License-Identifier: Apache-2.0
"""Whether what an op computed is what its equation says in float64, for the benchmarks of single ops.

The bounds are the tests': tests/ops/cases has them, each with its derivation. A result that misses one is a wrong
kernel's, and is not timed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from tests.ops import contract
from tests.ops.cases import CONTRACTS


def beyond(found: Tensor, exact: Tensor, bound: Tensor) -> bool:
    """Whether an element of `found` is off by more than its `bound`; nan is."""
    return not bool(((found.double() - exact).abs() <= bound).all())


def fault(
    name: str, arguments: tuple[Any, ...], results: Tensor | tuple[Tensor, ...], roundings: int = 2
) -> str:
    """What is wrong with a call of the op `name`, "" if nothing.

    `arguments` are those of an op that writes to none of them but an FP8 state, in which the call's amax is again what
    it was. Peers may round results up to so many times.
    """
    found = results if isinstance(results, tuple) else (results,)
    call = contract.Call(arguments, arguments, found, roundings)
    return contract.fault(CONTRACTS[name].bound, call)


def exact_result(name: str, arguments: tuple[Any, ...]) -> Tensor:
    """The one result of the op `name`, in float64."""
    unknown = torch.empty(0)
    return next(CONTRACTS[name].bound(contract.Call(arguments, arguments, (unknown,)))).exact


def head(values: Any, rows: int) -> Any:
    """The first rows of every matrix: float64 of all would take longer than the timings."""
    return tree_map_only(Tensor, lambda t: t[:rows] if t.dim() == 2 else t, values)


def relative_error(found: Tensor, exact: Tensor) -> float:
    """In the Frobenius norm, of the rows that `exact` has."""
    return float((found[: exact.shape[0]].double() - exact).norm() / exact.norm())
