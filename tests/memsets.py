# SPDX-License-Identifier: Apache-2.0
"""cuMemset*Async on the current stream: what torch has no function for."""

from __future__ import annotations

import ctypes
from ctypes import c_size_t, c_uint, c_uint64, c_void_p
from typing import Any

import torch


def memset(address: int, size: int, value: int, count: int) -> None:
    """Write `value` to `count` elements of `size` bytes (1, 2 or 4). Host memory must be pinned."""
    _call(f"cuMemsetD{8 * size}Async", c_uint64(address), c_uint(value), c_size_t(count))


def memset_rows(address: int, pitch: int, value: int, width: int, height: int) -> None:
    """Write the byte `value` to `width` bytes of each of `height` rows that begin `pitch` bytes after each other."""
    rows = c_size_t(width), c_size_t(height)
    _call("cuMemsetD2D8Async", c_uint64(address), c_size_t(pitch), c_uint(value), *rows)


def allocate(size: int) -> int:
    """The address of `size` bytes of the driver's pool, an allocation node of a graph in a capture."""
    address = c_uint64()
    _call("cuMemAllocAsync", ctypes.byref(address), c_size_t(size))
    return address.value


def free(address: int) -> None:
    """Give back what `allocate` gave."""
    _call("cuMemFreeAsync", c_uint64(address))


def _call(name: str, *arguments: Any) -> None:
    stream = c_void_p(torch.cuda.current_stream().cuda_stream)
    error = getattr(ctypes.CDLL("libcuda.so.1"), name)(*arguments, stream)
    assert error == 0, f"{name} returned {error}"
