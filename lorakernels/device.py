# SPDX-License-Identifier: Apache-2.0
"""This machine and process: GPUs, the C++/CUDA extension, a backward that runs, pinned pages of the host.

Nothing is asked at import.
"""

from __future__ import annotations

import os
import re
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

AS_ON = "LORAKERNELS_CAPABILITY"
NEEDED = (9, 0)  # no implementation needs more; those of Hopper, by wgmma, run on it alone
PORTABLE = 1  # cudaHostRegisterPortable: pinned for all GPUs


@cache
def capability(index: int) -> tuple[int, int]:
    """Compute capability that ops choose by for GPU `index`, e.g. (9, 0).

    `LORAKERNELS_CAPABILITY=8.9` hides implementations that need more: a newer GPU then runs as an older one.
    No implementation needs more than Hopper has. So a Hopper GPU may also get 10.0 or 12.0, which hides implementations
    for Hopper alone. Newer GPUs refuse 9.0: they have no wgmma.

    Raises:
        ValueError: the variable is not a number like 8.9, or names what this GPU cannot run.
    """
    actual, text = torch.cuda.get_device_capability(index), os.environ.get(AS_ON)
    if not text:
        return actual
    match = re.fullmatch(r"(\d+)\.(\d)", text)
    wanted = (int(match[1]), int(match[2])) if match else None
    if wanted is None or not _can_run(actual, wanted):
        has = f"{actual[0]}.{actual[1]}"
        expected = "like 8.0 or 12.0" if actual >= NEEDED else f"up to this GPU's {has}, like 8.0"
        if actual[0] > NEEDED[0]:
            expected += f", but not Hopper's own 9.0, which {has} cannot run"
        raise ValueError(f"{AS_ON} must be a compute capability {expected}, found {text!r}")
    return wanted


def _can_run(actual: tuple[int, int], wanted: tuple[int, int]) -> bool:
    """Whether a GPU of capability `actual` can run implementations for `wanted`."""
    if wanted[0] == NEEDED[0]:
        return actual[0] == wanted[0] and wanted <= actual
    return wanted <= actual or actual >= NEEDED


def capability_of(device: torch.device) -> tuple[int, int]:
    """`capability` of a "cuda" device. A device without an index is the current one."""
    return capability(torch.cuda.current_device() if device.index is None else device.index)


@cache
def multiprocessors_of(index: int) -> int:
    """The number of multiprocessors of GPU `index`."""
    return torch.cuda.get_device_properties(index).multi_processor_count


@cache
def extension() -> ModuleType:
    """The compiled module `lorakernels._C`.

    Raises:
        ImportError: it was not built, or was built for another Python.
    """
    try:
        import lorakernels._C as compiled
    except ImportError as error:
        raise ImportError(
            f"lorakernels._C cannot be imported ({error}); build it with `pip install .` or `pip install -e .`"
        ) from error
    return compiled


def extension_error() -> str | None:
    """Why `extension()` raises, or None if it does not."""
    try:
        extension()
    except ImportError as error:
        return str(error)
    return None


@cache
def why_not_csrc(capability: tuple[int, int]) -> str | None:
    """None if csrc's CUDA kernels were built and run on this compute capability; otherwise the reason why not.

    Machine code for sm_XY runs on X.Y and on later minors of X. Code for sm_XYa runs on X.Y alone (CUDA C++
    programming guide, "binary compatibility").
    """
    if (error := extension_error()) is not None:
        return error
    build = extension().build_info()
    if not build["cuda"]:
        return "lorakernels._C was built without nvcc: host part only"
    for arch in build["cuda_archs"].split(";"):
        digits = arch.rstrip("af")
        major, minor = int(digits[:-1]), int(digits[-1])
        exact = digits != arch
        if major == capability[0] and (
            minor == capability[1] or (not exact and minor < capability[1])
        ):
            return None
    return f"lorakernels._C was built for sm_{build['cuda_archs']}, not for {capability}"


def in_backward() -> bool:
    """Whether this thread runs a backward. A forward inside of one is a recomputation (torch.utils.checkpoint)."""
    return torch._C._current_graph_task_id() != -1


def cudnn_folders(maps: Path = Path("/proc/self/maps")) -> list[str]:
    """Folders of the cuDNN libraries that this process has loaded, as `maps` lists them; [] without /proc.

    Parts of different cuDNNs do not fit together. torch loads libcudnn.so.9 with itself, and each part when it needs
    it. A part that is loaded already is used for every later request of its name. Transformer Engine 2.12 loads all
    parts, and the system's loader finds the missing ones elsewhere. torch's attention then ran with those and computed
    NaN.
    """
    try:
        lines = maps.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return sorted(
        {m[1] for m in re.finditer(r"(/\S*)/libcudnn\w*\.so[.\d]*$", lines, re.MULTILINE)}
    )


def pin(address: int, size: int, device: torch.device, runtime: Any = None) -> int:
    """0, or CUDA's error code if the system did not pin `size` bytes at `address`.

    GPUs copy from and to pinned pages while they compute. torch's own pinned memory is not used where much is needed or
    graphs are captured: its allocator rounds to a power of two and gives nothing back, and its record of uses does not
    work inside a captured graph.

    Args:
        address, size: of memory that outlives its pinning.
        device: the GPU whose context is used, so that no other GPU gets one.
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
