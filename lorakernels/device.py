# SPDX-License-Identifier: Apache-2.0
"""Facts about this machine, asked at first use and never at import: GPUs, and the C++/CUDA extension."""

from __future__ import annotations

from functools import cache
from types import ModuleType

import torch


@cache
def capability(index: int) -> tuple[int, int]:
    """Compute capability of GPU `index`, e.g. (9, 0)."""
    return torch.cuda.get_device_capability(index)


def capability_of(device: torch.device) -> tuple[int, int]:
    """Compute capability of a "cuda" device; without an index, of the current one."""
    return capability(torch.cuda.current_device() if device.index is None else device.index)


@cache
def extension() -> ModuleType:
    """`lorakernels._C`.

    Raises:
        ImportError: it was not built, or was built for another Python.
    """
    try:
        from lorakernels import _C
    except ImportError as error:
        raise ImportError(
            f"lorakernels._C cannot be imported ({error}); build it with `pip install .` or `pip install -e .`"
        ) from error
    return _C


def extension_error() -> str | None:
    """Why `extension()` raises, or None if it does not."""
    try:
        extension()
    except ImportError as error:
        return str(error)
    return None
