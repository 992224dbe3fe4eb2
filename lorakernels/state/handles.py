# SPDX-License-Identifier: Apache-2.0
"""Handles by which a compiled layer's ops find the layer's numbers.

A trace holds Python numbers as constants, so layers that differ in a number could not share it. A layer's FP8 state
cannot be an argument either, because a tensor that ops write may not be saved for backward. A compiled layer therefore
passes a handle, a tensor that is never written. When the ops run, they look up its numbers by its address.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import Tensor

from lorakernels.config import BlockScaling
from lorakernels.state.fp8 import FP8State


@dataclass(frozen=True, eq=False)
class Numbers:
    """The numbers of one layer.

    Attributes:
        name: the layer's name.
        state: its FP8 state.
        column_x, column_dy: the columns of x and dy in that state.
        site: the dropout site.
        row0, chunks: where x's rows lie in the tensor that the mask is drawn for (`values.Dropout`).
        scaling, p: the adapter's scaling and dropout probability.
        blocks: the recipe of a base with a scale for each block; None over any other.
        made: a cache of values that ops derive from the numbers.
    """

    name: str
    state: FP8State | None
    column_x: int
    column_dy: int
    site: int = 0
    row0: int = 0
    chunks: tuple[int, ...] = ()
    scaling: float = 1.0
    p: float = 0.0
    blocks: BlockScaling | None = None
    made: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)


_by_address: dict[int, Numbers] = {}
_by_serial: dict[int, Numbers] = {}
_serials = count(1)


class Handle:
    """A tensor that stands for `numbers` as long as it lives. New numbers need a new handle.

    Attributes:
        tensor: int64 [1], a serial number.
        drops: whether the layer has dropout, the only number that a trace may read.
    """

    def __init__(self, numbers: Numbers, device: torch.device) -> None:
        serial = next(_serials)
        with torch.inference_mode(False):  # autograd cannot save inference tensors
            self.tensor = torch.full((1,), serial, dtype=torch.int64, device=device)
        self.drops = numbers.p > 0
        if type(self.tensor) is Tensor and not self.tensor.is_meta:
            address = self.tensor.data_ptr()
            _by_address[address] = _by_serial[serial] = numbers
            weakref.finalize(self.tensor, _forget, address, serial).atexit = False


def _forget(address: int, serial: int) -> None:
    del _by_address[address], _by_serial[serial]


def known_numbers(handle: object) -> Numbers | None:
    """The numbers of a handle that is no copy; None of anything else."""
    return _by_address.get(handle.data_ptr()) if type(handle) is Tensor else None


def numbers_of(handle: Tensor) -> Numbers:
    """The numbers that belong to `handle`, which may be a copy, as saved-tensor hooks make.

    Raises:
        RuntimeError: no living layer has this handle, or it is a copy and cannot be read under stream capture.
    """
    numbers = _by_address.get(handle.data_ptr())
    if numbers is None:
        if handle.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "a compiled layer's handle is a copy, which cannot be read under stream capture: compile the layer "
                "as an nn.Module, whose tensors keep their addresses"
            )
        numbers = _by_serial.get(int(handle))
    if numbers is None:
        raise RuntimeError(
            f"a compiled layer's handle holds {int(handle)}, which no living layer has: its layer was changed or "
            "deleted between this call's forward and backward, or the handle was written to"
        )
    return numbers
