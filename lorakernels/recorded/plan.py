# SPDX-License-Identifier: Apache-2.0
"""A plan: what a function of ops launches for operands of given shapes, to be launched again by one call of csrc.

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

from lorakernels.recorded.stand_in import Memory, NotPlanned, Recording, StandIn

MOST_BASES = 64  # of csrc's LaunchList
_NEVER = 1 << 62
ALIGNMENT = 256  # bytes, of everything in a block; torch's own allocations have 512


def pick(places: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """A function of a sequence: its elements at `places`."""
    if len(places) > 1:
        return itemgetter(*places)
    return lambda elements: tuple([elements[place] for place in places])


class Place(NamedTuple):
    """A tensor in a block of bytes: where it begins, and what it is."""

    offset: int
    shape: torch.Size
    dtype: torch.dtype

    def of(self, block: Tensor) -> Tensor:
        size = self.shape.numel() * self.dtype.itemsize
        return block[self.offset : self.offset + size].view(self.dtype).view(self.shape)


class Form(NamedTuple):
    """A tensor without gaps that a run allocates: the arguments of `_empty_strided_cuda`."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, shape: torch.Size, dtype: torch.dtype) -> Form:
        return cls((*shape,), torch.empty(shape, device="meta").stride(), dtype)


class View(NamedTuple):
    """A tensor in memory that a run allocates: which, and if it is not simply all of that, its part."""

    result: int
    part: tuple[torch.Size, tuple[int, ...], int] | None


@dataclass(frozen=True)
class Plan:
    """What a run launches and makes.

    Attributes:
        launches: csrc's list. Its bases are the given tensors and those that a run allocates.
        forms: of the latter: the results, then the block that backward needs, then one that is free again after the
            run. Blocks of no bytes are not there.
        outputs: what the function returned: a given tensor by its place, a view of a result, or None.
        kept: the place among `forms` of the block that backward needs, or -1.
        device: index of the GPU.
        whole: gives `outputs` of (*results, None), if none of them is given or a part; else None.
    """

    launches: Any
    forms: tuple[Form, ...]
    outputs: tuple[int | View | None, ...]
    kept: int
    device: int
    whole: Callable[[Sequence[Any]], tuple[Any, ...]] | None

    def run(self, given: Iterable[Tensor | int], sites: tuple[int, ...]) -> list[Tensor] | None:
        """What was allocated, or None where an address is not aligned as the kernels need it.

        Args:
            given: the caller's tensors, or their addresses; 0 for those that are not needed.
            sites: dropout sites, in the order of the recording.
        """
        device = self.device
        if torch._C._cuda_getDevice() == device:
            # Inductor's function, which takes half of `empty`'s time. It knows the current GPU only.
            empty = torch._C._dynamo.guards._empty_strided_cuda  # type: ignore[attr-defined]
            made = [*starmap(empty, self.forms)]
        else:
            gpu = torch.device("cuda", device)
            made = [torch.empty(shape, dtype=dtype, device=gpu) for shape, _, dtype in self.forms]
        stream = torch._C._cuda_getCurrentRawStream(device)
        return made if self.launches.run((*given, *made), sites, stream, device) else None

    def returned(
        self, results: list[Tensor], given: Sequence[Tensor], first: int = 0
    ) -> Sequence[Tensor | None]:
        """What the function would have returned; `given` are the caller's tensors from the `first` on."""
        if self.whole is not None:
            return self.whole((*results, None))
        found: list[Tensor | None] = []
        for output in self.outputs:
            if isinstance(output, View):
                result, part = results[output.result], output.part
                found.append(result if part is None else result.as_strided(*part))
            else:
                found.append(None if output is None else given[output - first])
        return found


class Kept(NamedTuple):
    """Where each of the memories that backward reads lies in the kept block, in bytes; and that block's size."""

    offsets: dict[int, int]
    size: int

    @classmethod
    def of(cls, tensors: Sequence[StandIn]) -> Kept:
        offsets, end = {}, 0
        for memory in {t.memory.index: t.memory for t in tensors}.values():
            offsets[memory.index] = end
            end += _rounded(memory.nbytes)
        return cls(offsets, end)

    def place(self, tensor: StandIn) -> Place:
        """Raises NotPlanned: the tensor has gaps."""
        if not tensor.is_contiguous():
            raise NotPlanned("a tensor with gaps that is kept for backward")
        at = self.offsets[tensor.memory.index] + tensor.offset
        return Place(at, tensor.shape, tensor.dtype)


def finish(
    recording: Recording,
    given: Sequence[StandIn],
    returned: Sequence[Any],
    kept: Kept,
    is_new: bool,
) -> Plan:
    """The plan of what was recorded.

    Args:
        given: stand-ins of the caller's tensors, in the order of a run's addresses.
        returned: by the function: stand-ins and None.
        kept: what backward reads.
        is_new: whether this run makes the kept block. Otherwise it is the last of `given`.

    Raises:
        NotPlanned: what is returned is also kept, or is a part of a given tensor, or there are too many tensors.
    """
    own = {t.memory.index: i for i, t in enumerate(given)}
    outputs, results = _outputs(own, given, returned)
    if {*results} & {*kept.offsets}:
        raise NotPlanned("a result that backward reads, too")
    bases = [*own, *results]
    places = {index: (base, 0) for base, index in enumerate(bases)}
    rest = [
        m for m in recording.allocated() if m.index not in places and m.index not in kept.offsets
    ]
    scratch, size = by_lifetime(rest)
    later = _born_later(rest, size, [recording.memories[index] for index in results])
    blocks = [n for n in (kept.size if is_new else 0, size if later is None else 0) if n]
    block = len(bases) if is_new else len(given) - 1
    places |= {index: (block, offset) for index, offset in kept.offsets.items()}
    last = len(bases) + len(blocks) - 1 if later is None else bases.index(later)
    places |= {index: (last, offset) for index, offset in scratch.items()}
    if len(bases) + len(blocks) > MOST_BASES:
        raise NotPlanned(f"more than {MOST_BASES} tensors")
    aligned = [t.memory.is_aligned for t in given] + [True] * (len(results) + len(blocks))
    at = [places.get(i, (0, 0)) for i in range(len(recording.memories))]
    recording.launches.place(at, aligned)
    kinds = [*results.values(), *((torch.Size((n,)), torch.uint8) for n in blocks)]
    forms = tuple(Form.of(shape, dtype) for shape, dtype in kinds)
    place = len(results) if is_new and kept.size else -1
    return Plan(recording.launches, forms, outputs, place, recording.device.index, _whole(outputs))


def _whole(
    outputs: Sequence[int | View | None],
) -> Callable[[Sequence[Any]], tuple[Any, ...]] | None:
    """`Plan.whole`."""
    found: list[int] = []
    for output in outputs:
        if isinstance(output, int) or (output is not None and output.part is not None):
            return None
        found.append(-1 if output is None else output.result)
    return pick(found)


def _outputs(
    own: dict[int, int], given: Sequence[StandIn], returned: Sequence[Any]
) -> tuple[tuple[int | View | None, ...], dict[int, tuple[torch.Size, torch.dtype]]]:
    """(`Plan.outputs`, {memory's index: shape and dtype of its result})."""
    found: list[int | View | None] = []
    results: dict[int, tuple[torch.Size, torch.dtype]] = {}
    for tensor in returned:
        if tensor is None:
            found.append(None)
        elif tensor.memory.index in own:
            place = own[tensor.memory.index]
            if not given[place].is_all_of(tensor):
                raise NotPlanned("a part of a given tensor that is returned")
            found.append(place)
        else:
            found.append(_result(tensor, results))
    return tuple(found), results


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
    found = (r.index for r in results if r.nbytes >= size and r.born >= end)
    return next(found, None)


def _rounded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def by_lifetime(memories: Sequence[Memory]) -> tuple[dict[int, int], int]:
    """({index: offset}, size) such that memories which are needed at one time do not overlap.

    The largest are placed first, each at the lowest place that is free.
    """
    offsets: dict[int, int] = {}
    placed: list[tuple[int, int, Memory]] = []
    for memory in sorted(memories, key=lambda m: (-m.nbytes, m.index)):
        at, size = 0, _rounded(memory.nbytes)
        for begin, end, other in sorted(placed, key=lambda p: p[:2]):
            if memory.meets(other) and at + size > begin:
                at = max(at, end)
        offsets[memory.index] = at
        placed.append((at, at + size, memory))
    return offsets, max((end for _, end, _ in placed), default=0)
