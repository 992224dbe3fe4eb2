# SPDX-License-Identifier: Apache-2.0
"""Tensors without memory, with which ops are run once to record what they launch.

A `StandIn` has a tensor's shape, strides, dtype and device. Its address stands for a place: csrc's LaunchList writes
launches down with such addresses and replaces them at each run. The functions that launch an op's
kernels need nothing else of a tensor. Our ops run their CUDA implementation; everything else of torch that would
compute raises `NotRecorded`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lorakernels.device import extension
from lorakernels.ops.register import OPS

_EMPTY_LIKE = torch.empty_like
_FOREVER = 1 << 62
_INDEX_BITS = 48  # of an address; the lower bits are an offset in bytes
# Methods of a tensor whose result is a view of it, or the tensor itself.
_VIEWS = frozenset(
    (
        "view",
        "view_as",
        "reshape",
        "split",
        "transpose",
        "t",
        "narrow",
        "select",
        "detach",
        "contiguous",
    )
)
_FACTS = frozenset(
    ("dim", "numel", "stride", "is_contiguous", "element_size", "is_floating_point", "size")
)


def column_offset(column: int) -> int:
    """The byte offset of `column` in an FP8 state, minus the 4 that its stand-in begins at.

    Kernels are compiled for addresses that are multiples of 16 if a stand-in's address is one. A column's is not.
    """
    return 4 * column - 4


class NotRecorded(Exception):
    """These operands need something that cannot be recorded; the message names it."""


class Site(int):
    """Stands for the number of a dropout site: its index among the sites of a run."""


class Memory:
    """One allocation, or one tensor of the caller's.

    Attributes:
        index: its number in the recorder.
        nbytes: its size.
        born, died: how many launches had been recorded when it was allocated, and when nothing referred to it any more.
        is_aligned: whether its address has to be a multiple of 16 bytes.
    """

    def __init__(self, index: int, nbytes: int, born: int) -> None:
        self.index, self.nbytes, self.born = index, nbytes, born
        self.died: int | None = None
        self.is_aligned = nbytes > 16

    def meets(self, other: Memory) -> bool:
        """Whether both are needed at one time."""
        ends = [_FOREVER if m.died is None else m.died for m in (self, other)]
        return self.born < ends[1] and other.born < ends[0]


def _refuse(name: str) -> Callable[..., Any]:
    def operator(*operands: object) -> Any:
        raise NotRecorded(f"Tensor.{name}")

    return operator


class _Held:
    """The memory that stand-ins share. It dies with the last of them, and so does the memory."""

    def __init__(self, memory: Memory, recorder: Recorder) -> None:
        self.memory, self.recorder = memory, recorder

    def __del__(self) -> None:
        self.memory.died = len(self.recorder.launches)


class StandIn:
    """`meta` is a tensor on "meta" with the shape, strides and offset that the tensor would have."""

    requires_grad = False
    is_cuda = True

    def __init__(self, held: _Held, meta: Tensor) -> None:
        self.held, self.meta = held, meta

    @property
    def memory(self) -> Memory:
        return self.held.memory

    @property
    def shape(self) -> torch.Size:
        return self.meta.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.meta.dtype

    @property
    def device(self) -> torch.device:
        return self.held.recorder.device

    def get_device(self) -> int:
        return self.device.index

    def __len__(self) -> int:
        return len(self.meta)

    def data_ptr(self) -> int:
        if self.meta.numel() == 0:
            return 0
        return (self.memory.index + 1) << _INDEX_BITS | self.offset

    @property
    def offset(self) -> int:
        """Where it begins in its memory, in bytes."""
        return int(self.meta.storage_offset()) * self.meta.element_size()

    def is_all_of(self, other: StandIn) -> bool:
        """Whether both stand for the same elements of one memory."""
        mine, theirs = ((t.memory.index, t.offset, t.shape, t.stride()) for t in (self, other))
        return mine == theirs

    def new_empty(self, *shape: Any, dtype: torch.dtype | None = None) -> StandIn:
        return self.held.recorder.allocate(
            torch.empty(*shape, dtype=dtype or self.dtype, device="meta")
        )

    def __getitem__(self, place: Any) -> StandIn:
        return self._viewed(self.meta[place])

    def __getattr__(self, name: str) -> Any:
        if name in _FACTS:
            return getattr(self.meta, name)
        if name not in _VIEWS:
            raise NotRecorded(f"Tensor.{name}")

        def view(*args: Any, **kwargs: Any) -> Any:
            plain = [a.meta if isinstance(a, StandIn) else a for a in args]
            views = getattr(self.meta, name)(*plain, **kwargs)
            several = isinstance(views, tuple | list)
            return tuple(map(self._viewed, views)) if several else self._viewed(views)

        return view

    def _viewed(self, meta: Tensor) -> StandIn:
        if meta.untyped_storage()._cdata != self.meta.untyped_storage()._cdata:
            raise NotRecorded("a copy of a tensor")
        return StandIn(self.held, meta)

    @classmethod
    def __torch_function__(
        cls,
        function: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        run = _BY_OVERLOAD.get(function) or _overloads().get(function)
        if run is not None:
            return run(*args, **kwargs or {})
        if function is _EMPTY_LIKE:
            like: StandIn = args[0]
            return like.held.recorder.allocate(torch.empty_like(like.meta, **kwargs or {}))
        raise NotRecorded(f"torch.{getattr(function, '__name__', function)}")


for _name in (
    "add",
    "sub",
    "mul",
    "truediv",
    "matmul",
    "neg",
    "lt",
    "le",
    "gt",
    "ge",
    "invert",
    "and",
    "or",
    "bool",
):
    setattr(StandIn, f"__{_name}__", _refuse(f"__{_name}__"))
    setattr(StandIn, f"__r{_name}__", _refuse(f"__r{_name}__"))

_BY_OVERLOAD: dict[Any, Callable[..., Any]] = {}


def _overloads() -> dict[Any, Callable[..., Any]]:
    """{torch's overload of an op: its implementation on CUDA, which takes the overload's arguments}."""
    for op in OPS.values():
        _BY_OVERLOAD[getattr(torch.ops.lorakernels, op.name).default] = op.run_flat
    return _BY_OVERLOAD


class Recorder:
    """Launches of ops that are called with its stand-ins, while it is entered.

    Attributes:
        launches: csrc's list of them.
        memories: of the stand-ins, by index.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.launches = extension().LaunchList()
        self.memories: list[Memory] = []
        self._first = 0

    def __enter__(self) -> Recorder:
        self.launches.begin()
        return self

    def __exit__(self, *error: object) -> None:
        self.launches.end()

    def again(self) -> Recorder:
        """This recorder with a new list. Its stand-ins stay valid."""
        self.launches = extension().LaunchList()
        self._first = len(self.memories)
        return self

    def allocated(self) -> list[Memory]:
        """The memories since the list was new."""
        return self.memories[self._first :]

    def tensor(self, shape: Any, dtype: torch.dtype, stride: tuple[int, ...] | None = None) -> Any:
        """A StandIn for a tensor of the caller's, which has no gaps if no `stride` is given."""
        meta = torch.empty(shape, dtype=dtype, device="meta")
        return self.allocate(meta if stride is None else meta.as_strided(shape, stride))

    def column(self, state: torch.Size) -> Any:
        """A StandIn for an FP8 state of this shape, from one of its columns on: an address by `column_offset`."""
        memory = torch.empty(state.numel() + 1, dtype=torch.float32, device="meta")
        held = self.allocate(memory)
        held.memory.is_aligned = False
        return held[1:].view(state)

    def allocate(self, meta: Tensor) -> StandIn:
        size = sum((n - 1) * step for n, step in zip(meta.shape, meta.stride(), strict=True)) + 1
        nbytes = size * meta.element_size() if meta.numel() else 0
        memory = Memory(len(self.memories), nbytes, len(self.launches))
        self.memories.append(memory)
        return StandIn(_Held(memory, self), meta)
