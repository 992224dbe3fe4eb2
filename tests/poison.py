# SPDX-License-Identifier: Apache-2.0
"""Memory that nobody wrote is 0xFF in every byte, so that a result which lacks an element shows.

0xFF is NaN in every floating dtype used here, -1 in a signed integer, 255 in uint8, True in a bool. The kernels
that allocate for aten are replaced, not the functions of Python: `torch.empty`, `empty_like`, `new_empty` and what C++
asks for all go through them. So is the function by which Inductor's code and recorded calls allocate on a GPU. Traces,
FakeTensors, meta tensors and dispatch modes see nothing new.

What stays as it is:
- a CUDA graph's capture, in which the fill would be one more kernel of the graph,
- the buffers that Inductor's code has on the CPU, and the results of torch's own kernels, which do not ask aten for
  memory,
- other processes that a test starts, as the fixture does not run there.
"""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor
from torch._C._dynamo import guards

from tests.memsets import memset

BYTE = 0xFF
AVAILABLE = hasattr(torch.library, "get_kernel")  # torch 2.8 cannot call a kernel that it replaced
ALLOCATIONS = ("empty.memory_format", "empty_strided")


def poison(x: Tensor) -> Tensor:
    memory = x.untyped_storage()
    if x.device.type == "cpu":
        ctypes.memset(memory.data_ptr(), BYTE, memory.nbytes())
    elif memory.nbytes() and not torch.cuda.is_current_stream_capturing():
        with torch.cuda.device(x.device):
            # By the driver: a `fill_` of torch's allocates, which would poison in turn.
            memset(memory.data_ptr(), 1, BYTE, memory.nbytes())
    return x


def _poisoning(name: str, key: str) -> Callable[..., Tensor]:
    real = torch.library.get_kernel(f"aten::{name}", key)

    def allocate(keys: torch.DispatchKeySet, *args: object, **kwargs: object) -> Tensor:
        return poison(real.call_boxed(keys, *args, **kwargs))

    return allocate


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """What aten allocates on the CPU and, where there is one, on a GPU comes poisoned."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*operators may also be overridden.*")
        for key in ("CPU", "CUDA") if torch.cuda.is_available() else ("CPU",):
            for name in ALLOCATIONS:
                kernel = _poisoning(name, key)
                library.impl(name, kernel, key, with_keyset=True, allow_override=True)
    allocate = guards._empty_strided_cuda
    try:
        with mock.patch.object(guards, "_empty_strided_cuda", lambda *a: poison(allocate(*a))):
            yield
    finally:
        library._destroy()
