# SPDX-License-Identifier: Apache-2.0
"""Tensors that have no memory yet, to record launches with, and the run of what was recorded."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lorakernels import _C


@contextmanager
def recording() -> Iterator[_C.LaunchList]:
    launches = _C.LaunchList()
    launches.begin()
    try:
        yield launches
    finally:
        launches.end()


def symbolic(index: int, offset: int = 0) -> int:
    """The address of a recorded index (csrc/host/launch_list.h)."""
    return (index + 1) << 48 | offset


class StandIn:
    """As much of a contiguous Tensor as the launchers of Triton's kernels ask for."""

    def __init__(self, memory: Memory, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.memory, self.shape, self.dtype = memory, torch.Size(shape), dtype
        self.index = len(memory.stand_ins)
        self.tensor: Tensor | None = None  # what it stands for; None: to be allocated
        self.then: Callable[[Tensor], Tensor] = lambda tensor: tensor  # of what was launched
        memory.stand_ins.append(self)

    @property
    def device(self) -> torch.device:
        return self.memory.device

    def data_ptr(self) -> int:
        return symbolic(self.index) if self.numel() else 0

    def numel(self) -> int:
        return math.prod(self.shape)

    def stride(self, dim: int | None = None) -> Any:
        strides = tuple(math.prod(self.shape[i + 1 :]) for i in range(len(self.shape)))
        return strides if dim is None else strides[dim]

    def contiguous(self) -> StandIn:
        return self

    def new_empty(self, *shape: Any, dtype: torch.dtype | None = None) -> StandIn:
        sizes = tuple(shape[0]) if isinstance(shape[0], tuple) else shape
        return StandIn(self.memory, sizes, dtype or self.dtype)

    def sum(self, dim: int) -> StandIn:
        self.then = lambda tensor: tensor.sum(dim)
        return self


@dataclass
class Memory:
    """All stand-ins by their indices."""

    device: torch.device
    stand_ins: list[StandIn] = field(default_factory=list)

    def of(self, value: Any) -> Any:
        """`value`, which may be of lists and tuples, with a stand-in for each contiguous tensor."""
        if not isinstance(value, Tensor):
            return _mapped(self.of, value)
        assert value.is_contiguous()
        found = StandIn(self, value.shape, value.dtype)
        found.tensor = value
        return found

    def allocate(self) -> list[int]:
        """Each stand-in's address, which is not 0."""
        for each in self.stand_ins:
            if each.tensor is None:
                size = max(1, each.numel())
                whole = torch.empty(size, dtype=each.dtype, device=self.device)
                each.tensor = whole[: each.numel()].view(each.shape)
        return [each.tensor.data_ptr() for each in self.stand_ins]


def results(value: Any) -> Any:
    """`value` with what its stand-ins stand for."""
    return value.then(value.tensor) if isinstance(value, StandIn) else _mapped(results, value)


def run_recorded(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """What `function` returns, launched by csrc; `arguments` are of the current GPU, whose current stream runs it."""
    memory = Memory(next(tensors_of(arguments)).device)
    with recording() as launches:
        result = function(*memory.of(arguments))
    addresses = tuple(memory.allocate())
    launches.place([(i, 0) for i in range(len(addresses))], [False] * len(addresses))
    assert launches.run(addresses, (), torch.cuda.current_stream().cuda_stream, -1)
    return results(result)


def tensors_of(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from tensors_of(each)


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(function, value))
    if isinstance(value, tuple | list):
        return type(value)(map(function, value))
    return value
