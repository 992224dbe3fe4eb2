# SPDX-License-Identifier: Apache-2.0
"""Launches recorded by hand, or with stand-ins for the tensors of a call, and the run of what was recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lorakernels import _C
from lorakernels.recorded.stand_in import Recorder, StandIn


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


def stand_ins(recorder: Recorder, value: Any) -> Any:
    """`value`, which may be of lists and tuples, with a stand-in for each contiguous tensor."""
    if not isinstance(value, Tensor):
        return _mapped(partial(stand_ins, recorder), value)
    assert value.is_contiguous()
    return recorder.tensor(value.shape, value.dtype)


def recorded_call(
    function: Callable[..., Any], arguments: tuple[Any, ...]
) -> tuple[Any, _C.LaunchList, list[Tensor]]:
    """What `function` returns of stand-ins, its launches, ready to run, and the memory of each of their bases."""
    given = list(tensors_of(arguments))
    recorder = Recorder(given[0].device)
    placed = stand_ins(recorder, arguments)
    with recorder:
        result = function(*placed)
    own = recorder.memories[len(given) :]
    bytes_ = [torch.empty(max(1, m.nbytes), dtype=torch.uint8, device=given[0].device) for m in own]
    count = len(recorder.memories)
    recorder.launches.place([(i, 0) for i in range(count)], [False] * count)
    return result, recorder.launches, given + bytes_


def results(value: Any, memory: list[Tensor]) -> Any:
    """`value` with what its stand-ins stand for."""
    if not isinstance(value, StandIn):
        return _mapped(partial(results, memory=memory), value)
    bytes_ = memory[value.memory.index].flatten().view(torch.uint8)
    size = value.numel() * value.dtype.itemsize
    return bytes_[value.offset : value.offset + size].view(value.dtype).view(value.shape)


def run_recorded(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """What `function` returns, launched by csrc; `arguments` are of the current GPU, whose current stream runs it."""
    result, launches, memory = recorded_call(function, arguments)
    addresses = tuple(tensor.data_ptr() for tensor in memory)
    assert launches.run(addresses, (), torch.cuda.current_stream().cuda_stream, -1)
    return results(result, memory)


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
