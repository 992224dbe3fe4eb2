# SPDX-License-Identifier: Apache-2.0
"""A recorded function of ops, outside of autograd."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from lorakernels.recorded.node import Operands
from lorakernels.recorded.recording import KeptBlock, finish
from lorakernels.recorded.stand_in import NotRecorded, Recorder


class RecordedFunction:
    """The recording of `function`, which returns a tuple of new tensors, for operands of certain shapes."""

    def __init__(
        self,
        function: Callable[..., tuple[Any, ...]],
        device: torch.device,
        operands: Callable[[Recorder], Operands],
    ) -> None:
        """Raises NotRecorded: the function does something that cannot be recorded."""
        with torch.cuda.device(device), Recorder(device) as recorder, torch.no_grad():
            stand_ins, arguments, *_ = operands(recorder)
            returned = function(*arguments)
        self._recording = finish(recorder, stand_ins, returned, KeptBlock({}, 0), is_new=True)
        if any([isinstance(output, int) for output in self._recording.outputs]):
            raise NotRecorded("an operand as a result")

    def run(
        self, addresses: Iterable[Tensor | int], sites: tuple[int, ...]
    ) -> tuple[Tensor | None, ...] | None:
        """What the function returns, or None where an address is not aligned as the kernels need it.

        Args:
            addresses, sites: as of `Recording.run`.
        """
        results = self._recording.run(addresses, sites)
        return None if results is None else tuple(self._recording.returned(results, ()))
