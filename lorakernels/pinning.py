# SPDX-License-Identifier: Apache-2.0
"""Pin pages of the host, so that GPUs copy from and to them while they compute.

torch's own pinned memory is not used where much is needed or graphs are captured. Its allocator rounds to a power of
two and gives nothing back, and its record of uses does not work inside a captured graph.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch

PORTABLE = 1  # cudaHostRegisterPortable: pinned for all GPUs


def pin(address: int, size: int, device: torch.device, runtime: Any = None) -> int:
    """0, or CUDA's error code if the system did not pin `size` bytes at `address`.

    Args:
        address, size: of memory that outlives its pinning.
        device: the GPU whose context is used; another one's would be made.
        runtime: has `cudaHostRegister`; None is torch's.
    """
    runtime = runtime or torch.cuda.cudart()
    with _on(device):
        code = int(runtime.cudaHostRegister(address, size, PORTABLE))
        if code and torch.cuda.is_initialized():
            # CUDA keeps the error for the next launch that asks, which would raise in place of this call
            with suppress(RuntimeError):
                torch.zeros(1, device=device)
    return code


def unpin(addresses: list[int], device: torch.device, runtime: Any = None) -> None:
    """Unpin what `pin` pinned, after the copies that `device` was given. `addresses` is empty then."""
    if not addresses:
        return
    with suppress(RuntimeError):  # at the end of a process that failed
        if torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize(device)
    while addresses:
        (runtime or torch.cuda.cudart()).cudaHostUnregister(addresses.pop())


def _on(device: torch.device) -> AbstractContextManager[Any]:
    return torch.cuda.device(device) if torch.cuda.is_initialized() else nullcontext()
