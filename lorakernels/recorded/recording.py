# SPDX-License-Identifier: Apache-2.0
"""A recording: what a function of ops launches for operands of given shapes, to be launched again by one call of csrc.

The function has run once with stand-ins. Each result becomes a tensor of its own. All that it saved for backward lies
in one block. The rest is scratch and lies in another block, where tensors that are not needed at one time share
memory. If a result is large enough and is written after the last use of scratch, its memory is that block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import starmap
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lorakernels.recorded.stand_in import Memory, NotRecorded, Recorder, StandIn

MOST_BASES = 64  # of csrc's LaunchList
_NEVER = 1 << 62
ALIGNMENT = 256  # bytes, of everything in a block; torch's own allocations have 512


def pick(indices: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """A function of a sequence: its elements at `indices`."""
    if len(indices) > 1:
        return itemgetter(*indices)
    return lambda elements: tuple([elements[i] for i in indices])


class BlockTensor(NamedTuple):
    """A contiguous tensor in a block of bytes. `offset` is in bytes."""

    offset: int
    shape: torch.Size
    dtype: torch.dtype

    def of(self, block: Tensor) -> Tensor:
        size = self.shape.numel() * self.dtype.itemsize
        return block[self.offset : self.offset + size].view(self.dtype).view(self.shape)


class Allocation(NamedTuple):
    """A tensor without gaps that a run allocates: the arguments of `_empty_strided_cuda`."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, shape: torch.Size, dtype: torch.dtype) -> Allocation:
        return cls((*shape,), torch.empty(shape, device="meta").stride(), dtype)


class View(NamedTuple):
    """A tensor in a result's memory; `part` is its shape, strides and offset, None if it is the whole result."""

    result: int
    part: tuple[torch.Size, tuple[int, ...], int] | None


@dataclass(frozen=True)
class Recording:
    """What a run launches and makes.

    Attributes:
        launches: csrc's list. Its bases are the caller's tensors and then a run's allocations.
        allocations: the results, then the block that backward needs, then one that is free again after the run. A
            block of no bytes is left out.
        outputs: the function's results: the index of a caller's tensor, a view of a result, or None.
        kept: the index among `allocations` of the block that backward needs, or -1.
        device: index of the GPU.
        whole: gives the outputs, from (*results, None), if each is a whole result or None; else None.
    """

    launches: Any
    allocations: tuple[Allocation, ...]
    outputs: tuple[int | View | None, ...]
    kept: int
    device: int
    whole: Callable[[Sequence[Any]], tuple[Any, ...]] | None

    def run(self, addresses: Iterable[Tensor | int], sites: tuple[int, ...]) -> list[Tensor] | None:
        """The allocations, or None where an address is not aligned as the kernels need it.

        Args:
            addresses: the caller's tensors, or their addresses; 0 for one that is not read.
            sites: dropout sites, in the order of the recording.
        """
        device = self.device
        if torch._C._cuda_getDevice() == device:
            # Inductor's function, which takes half of `empty`'s time. It knows the current GPU only.
            empty = torch._C._dynamo.guards._empty_strided_cuda  # type: ignore[attr-defined]
            made = [*starmap(empty, self.allocations)]
        else:
            gpu = torch.device("cuda", device)
            made = [
                torch.empty(shape, dtype=dtype, device=gpu) for shape, _, dtype in self.allocations
            ]
        stream = torch._C._cuda_getCurrentRawStream(device)
        return made if self.launches.run((*addresses, *made), sites, stream, device) else None

    def returned(
        self, results: list[Tensor], tensors: Sequence[Tensor], first: int = 0
    ) -> Sequence[Tensor | None]:
        """What the function would have returned. `tensors` are the caller's, from index `first` on."""
        if self.whole is not None:
            return self.whole((*results, None))
        returned: list[Tensor | None] = []
        for output in self.outputs:
            if isinstance(output, View):
                result, part = results[output.result], output.part
                returned.append(result if part is None else result.as_strided(*part))
            else:
                returned.append(None if output is None else tensors[output - first])
        return returned


class KeptBlock(NamedTuple):
    """The block of the memories that backward reads: their offsets, by index, and its size, in bytes."""

    offsets: dict[int, int]
    size: int

    @classmethod
    def of(cls, tensors: Sequence[StandIn]) -> KeptBlock:
        offsets, end = {}, 0
        for memory in {t.memory.index: t.memory for t in tensors}.values():
            offsets[memory.index] = end
            end += _rounded(memory.nbytes)
        return cls(offsets, end)

    def place(self, tensor: StandIn) -> BlockTensor:
        """Raises NotRecorded: the tensor has gaps."""
        if not tensor.is_contiguous():
            raise NotRecorded("a tensor with gaps that is kept for backward")
        offset = self.offsets[tensor.memory.index] + tensor.offset
        return BlockTensor(offset, tensor.shape, tensor.dtype)


def finish(
    recorder: Recorder,
    stand_ins: Sequence[StandIn],
    returned: Sequence[Any],
    kept: KeptBlock,
    is_new: bool,
) -> Recording:
    """The recording of `recorder`.

    Args:
        stand_ins: of the caller's tensors, in the order of a run's addresses.
        returned: by the function: stand-ins and None.
        kept: the block that backward reads.
        is_new: whether this run makes that block. Otherwise it is the last of `stand_ins`.

    Raises:
        NotRecorded: a result is also kept, or is a part of a caller's tensor, or there are too many tensors.
    """
    callers = {t.memory.index: i for i, t in enumerate(stand_ins)}
    outputs, results = _outputs(callers, stand_ins, returned)
    if {*results} & {*kept.offsets}:
        raise NotRecorded("a result that backward reads, too")
    bases = [*callers, *results]
    places = {index: (base, 0) for base, index in enumerate(bases)}
    rest = [
        m for m in recorder.allocated() if m.index not in places and m.index not in kept.offsets
    ]
    scratch, size = by_lifetime(rest)
    later = _born_later(rest, size, [recorder.memories[index] for index in results])
    blocks = [n for n in (kept.size if is_new else 0, size if later is None else 0) if n]
    block = len(bases) if is_new else len(stand_ins) - 1
    places |= {index: (block, offset) for index, offset in kept.offsets.items()}
    last = len(bases) + len(blocks) - 1 if later is None else bases.index(later)
    places |= {index: (last, offset) for index, offset in scratch.items()}
    if len(bases) + len(blocks) > MOST_BASES:
        raise NotRecorded(f"more than {MOST_BASES} tensors")
    aligned = [t.memory.is_aligned for t in stand_ins] + [True] * (len(results) + len(blocks))
    of_memories = [places.get(i, (0, 0)) for i in range(len(recorder.memories))]
    recorder.launches.place(of_memories, aligned)
    kinds = [*results.values(), *((torch.Size((n,)), torch.uint8) for n in blocks)]
    allocations = tuple(Allocation.of(shape, dtype) for shape, dtype in kinds)
    index, device = len(results) if is_new and kept.size else -1, recorder.device.index
    return Recording(recorder.launches, allocations, outputs, index, device, _whole(outputs))


def _whole(
    outputs: Sequence[int | View | None],
) -> Callable[[Sequence[Any]], tuple[Any, ...]] | None:
    """`Recording.whole`."""
    indices: list[int] = []
    for output in outputs:
        if isinstance(output, int) or (output is not None and output.part is not None):
            return None
        indices.append(-1 if output is None else output.result)
    return pick(indices)


def _outputs(
    callers: dict[int, int], stand_ins: Sequence[StandIn], returned: Sequence[Any]
) -> tuple[tuple[int | View | None, ...], dict[int, tuple[torch.Size, torch.dtype]]]:
    """(`Recording.outputs`, {memory's index: shape and dtype of its result}).

    `callers`: {memory's index: the index of its address} of the caller's tensors.
    """
    outputs: list[int | View | None] = []
    results: dict[int, tuple[torch.Size, torch.dtype]] = {}
    for tensor in returned:
        if tensor is None:
            outputs.append(None)
        elif tensor.memory.index in callers:
            index = callers[tensor.memory.index]
            if not stand_ins[index].is_all_of(tensor):
                raise NotRecorded("a part of an operand as a result")
            outputs.append(index)
        else:
            outputs.append(_result(tensor, results))
    return tuple(outputs), results


def _result(tensor: StandIn, results: dict[int, tuple[torch.Size, torch.dtype]]) -> View:
    memory, size = tensor.memory, tensor.element_size()
    is_all = tensor.is_contiguous() and tensor.numel() * size == memory.nbytes
    if memory.index not in results:
        shape = tensor.shape if is_all else torch.Size((memory.nbytes // size,))
        results[memory.index] = (shape, tensor.dtype)
    number = [*results].index(memory.index)
    if is_all and results[memory.index][0] == tensor.shape:
        return View(number, None)
    return View(number, (tensor.shape, tensor.stride(), tensor.offset // size))


def _born_later(rest: Sequence[Memory], size: int, results: Sequence[Memory]) -> int | None:
    """The index of a result that has room for all of `rest`, and is first written after their last use."""
    ends = [_NEVER if memory.died is None else memory.died for memory in rest]
    end = max(ends, default=_NEVER)
    fitting = (r.index for r in results if r.nbytes >= size and r.born >= end)
    return next(fitting, None)


def _rounded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def by_lifetime(memories: Sequence[Memory]) -> tuple[dict[int, int], int]:
    """({index: offset}, size) such that memories which are needed at one time do not overlap.

    The largest are placed first, each at the lowest place that is free.
    """
    offsets: dict[int, int] = {}
    placed: list[tuple[int, int, Memory]] = []
    for memory in sorted(memories, key=lambda m: (-m.nbytes, m.index)):
        offset, size = 0, _rounded(memory.nbytes)
        for begin, end, other in sorted(placed, key=lambda p: p[:2]):
            if memory.meets(other) and offset + size > begin:
                offset = max(offset, end)
        offsets[memory.index] = offset
        placed.append((offset, offset + size, memory))
    return offsets, max((end for _, end, _ in placed), default=0)
