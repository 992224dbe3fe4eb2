# SPDX-License-Identifier: Apache-2.0
"""Slots of torch's generator of a GPU, computed many at a time on the host.

`torch.randint` draws a slot by a kernel: 16 µs of the host's time at each call of a layer, on an H200's host. What it
draws is a function of the generator's seed and offset. A table of slots therefore holds the numbers that the next calls
would draw. Taking a slot from it moves the offset as randint's kernel would. Setting the generator back, as a
recomputation does, repeats its slots, and other draws in between change nothing.
"""

from __future__ import annotations

from threading import Lock
from typing import NamedTuple

import torch
from torch import Tensor

from lorakernels.device import extension

AHEAD = 256  # slots of a table
STEP = 4  # by which a draw of two numbers moves the offset
MOST_TABLES = 16


class Table(NamedTuple):
    """Slots for the offsets first, first + STEP, … of a generator with this seed."""

    seed: int
    first: int
    slots: tuple[Tensor, ...]


# By GPU and stream: another stream could read a table before it is copied.
_tables: dict[tuple[int, int], Table] = {}
_lock = Lock()


def slot_ahead(index: int) -> Tensor:
    """int64 [2] on GPU `index`: what `torch.randint(-(2**63 - 1), 2**63 - 1, (2,))` draws there, and its effect.

    It must not be called under stream capture, which would freeze the slot in the graph.
    """
    generator = torch.cuda.default_generators[index]
    key = (index, torch._C._cuda_getCurrentRawStream(index))
    with _lock:
        seed, offset = generator.initial_seed(), generator.get_offset()
        table = _tables.get(key)
        place = -1 if table is None else (offset - table.first) // STEP
        if table is None or table.seed != seed or not 0 <= place < AHEAD:
            if len(_tables) >= MOST_TABLES:
                _tables.clear()
            table, place = _table(index, seed, offset), 0
            _tables[key] = table
        generator.set_offset(offset + STEP)
    return table.slots[place]


def _table(index: int, seed: int, offset: int) -> Table:
    with torch.inference_mode(False):  # autograd cannot save inference tensors
        numbers = torch.empty((AHEAD, 2), dtype=torch.int64, device="cpu")
        extension().torch_slots_host(numbers.data_ptr(), AHEAD, seed, offset)
        # torch waits for the copy unless it is told not to; CUDA has read so few bytes when it returns
        slots = numbers.to(torch.device("cuda", index), non_blocking=True)
        return Table(seed, offset, slots.unbind(0))
