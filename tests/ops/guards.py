# SPDX-License-Identifier: Apache-2.0
"""GPU memory between bytes that nobody may touch, so that a kernel which writes beside its results shows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

GUARD = 512  # bytes


@contextmanager
def between_guards(rooms: list[tuple[Tensor, int]]) -> Iterator[None]:
    """What is allocated on the GPU lies between bytes that nobody may touch."""
    real = torch.empty, torch.empty_like, Tensor.new_empty

    def room(shape: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
        count = math.prod(shape) * dtype.itemsize
        whole = real[0](count + 2 * GUARD, dtype=torch.uint8, device=device).fill_(0xA5)
        inner = whole[GUARD : GUARD + count].fill_(0xFF)
        rooms.append((whole, count))
        return inner.view(dtype).view(shape)

    def empty(*shape: Any, dtype: Any = None, device: Any = None, **options: Any) -> Tensor:
        if torch.device(device or "cpu").type != "cuda":
            return real[0](*shape, dtype=dtype, device=device, **options)
        sizes = shape[0] if isinstance(shape[0], tuple | list | torch.Size) else shape
        return room(sizes, dtype or torch.get_default_dtype(), device)

    def like(t: Tensor, dtype: Any = None, device: Any = None, **_: Any) -> Tensor:
        return room(t.shape, dtype or t.dtype, device or t.device)

    def new(t: Tensor, *shape: Any, dtype: Any = None, device: Any = None, **_: Any) -> Tensor:
        sizes = shape[0] if isinstance(shape[0], tuple | list | torch.Size) else shape
        return room(sizes, dtype or t.dtype, device or t.device)

    with (
        mock.patch.object(torch, "empty", empty),
        mock.patch.object(torch, "empty_like", like),
        mock.patch.object(Tensor, "new_empty", new),
    ):
        yield


def assert_untouched(rooms: list[tuple[Tensor, int]]) -> None:
    """Nothing was written around what was allocated."""
    for whole, count in rooms:
        assert bool((torch.cat((whole[:GUARD], whole[GUARD + count :])) == 0xA5).all())
