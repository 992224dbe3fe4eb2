# SPDX-License-Identifier: Apache-2.0
"""The launch of a Triton kernel: by Triton, or recorded for csrc to launch (`_C.LaunchList`).

What is recorded is what Triton's launcher would hand to the driver. Triton compiles a kernel for its arguments' types,
and for whether each is divisible by 16, equal to 1, or a constant. A stand-in answers these questions in a tensor's
place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from torch.nn import Parameter
from triton.tools.tensor_descriptor import TensorDescriptor

from lorakernels.device import extension

_PLAIN = frozenset({Tensor, Parameter, int, float, bool, type(None)})
_WARP = 32  # threads
TRITON_DTYPE = {
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
}


def on_device(tensor: Tensor) -> torch.cuda.device:
    """Inside, Triton launches on the GPU of `tensor`. Its interpreter has none."""
    return torch.cuda.device(tensor.device if tensor.device.type == "cuda" else -1)


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Launch `kernel` as `kernel[grid](*arguments, **options)` does, or record it if an argument is a stand-in.

    A stand-in is no Tensor, but has `data_ptr()` and a shape; its address is symbolic (`_C.LaunchList`), and a list
    records. A CUDA device is the current one, also while recording: Triton loads kernels for it.

    Raises:
        NotImplementedError: a stand-in is given to a kernel that csrc cannot launch.
    """
    if not _PLAIN.issuperset(map(type, arguments)) and any(map(_is_stand_in, arguments)):
        _record(kernel, grid, arguments, options)
    else:
        kernel[grid](*arguments, **options)


def _is_stand_in(argument: Any) -> bool:
    if isinstance(argument, TensorDescriptor):
        argument = argument.base
    return not isinstance(argument, Tensor) and hasattr(argument, "data_ptr")


def _record(
    kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], options: dict[str, Any]
) -> None:
    if any(isinstance(argument, TensorDescriptor) for argument in arguments):
        raise NotImplementedError(f"{kernel.__name__}: a tensor descriptor holds an address")
    compiled = kernel.warmup(*arguments, grid=grid, **options)
    compiled._init_handles()  # loads it, with the shared memory that it needs
    metadata, signature = compiled.metadata, compiled.src.signature
    arguments_by_name = dict(zip(signature, arguments, strict=False)) | options
    extension().record_kernel(
        function=compiled.function,
        grid=(*grid, 1, 1)[:3],
        threads=_WARP * metadata.num_warps,
        shared_bytes=metadata.shared,
        early=metadata.launch_pdl,
        parameters=[*_parameters(signature, arguments_by_name), *_scratch(kernel, metadata)],
    )


def _parameters(
    signature: Mapping[str, Any], arguments: Mapping[str, Any]
) -> Iterator[tuple[str, int | float]]:
    """The parameters that the code takes. A "constexpr" was compiled into it."""
    for name, kind in signature.items():
        if kind == "constexpr":
            continue
        if not isinstance(kind, str) or kind.startswith("tensordesc"):
            raise NotImplementedError(f"{name} must be a pointer or a number, found {kind}")
        yield ("*", arguments[name].data_ptr()) if kind.startswith("*") else (kind, arguments[name])


def _scratch(kernel: Any, metadata: Any) -> list[tuple[str, int]]:
    """Two more pointers, null without scratch memory (CudaLauncher of triton/backends/nvidia/driver.py)."""
    sizes = metadata.global_scratch_size, metadata.profile_scratch_size
    if any(sizes) or metadata.num_ctas != 1 or metadata.launch_cooperative_grid:
        raise NotImplementedError(
            f"{kernel.__name__}: must take no scratch memory and run in blocks of their own, found {metadata}"
        )
    return [("*", 0)] * len(sizes)
