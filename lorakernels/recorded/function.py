# SPDX-License-Identifier: Apache-2.0
"""A function of ops by a plan, outside of autograd."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from lorakernels.recorded.node import Operands
from lorakernels.recorded.plan import Kept, finish
from lorakernels.recorded.stand_in import NotPlanned, Recording


class FunctionPlan:
    """The plan of `function` for operands of certain shapes; which returns a tuple of new tensors."""

    def __init__(
        self,
        function: Callable[..., tuple[Any, ...]],
        device: torch.device,
        operands: Callable[[Recording], Operands],
    ) -> None:
        """Raises NotPlanned: the function does something that cannot be recorded."""
        with torch.cuda.device(device), Recording(device) as recording, torch.no_grad():
            given, arguments, *_ = operands(recording)
            returned = function(*arguments)
        self._plan = finish(recording, given, returned, Kept({}, 0), is_new=True)
        if any([isinstance(output, int) for output in self._plan.outputs]):
            raise NotPlanned("a given tensor that is returned")

    def run(
        self, given: Iterable[Tensor | int], sites: tuple[int, ...]
    ) -> tuple[Tensor | None, ...] | None:
        """What the function returns, or None where an address is not aligned as the kernels need it.

        Args:
            given, sites: as of `Plan.run`.
        """
        results = self._plan.run(given, sites)
        return None if results is None else tuple(self._plan.returned(results, ()))
