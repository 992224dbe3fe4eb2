# SPDX-License-Identifier: Apache-2.0
"""What a GPU's compute capability and a layer's sizes allow: the reasons that several ops share.

A reason is a sentence for `lorakernels doctor` and `apply_lora`'s report; None means no objection.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lorakernels.device import capability_of, extension, why_not_csrc
from lorakernels.kernels.triton import segments
from lorakernels.numerics.dropout import drops
from lorakernels.numerics.groups import GROUP_ROWS
from lorakernels.numerics.segments import adapters_of
from lorakernels.values import Dropout

FP8_GEMM_CAPABILITY = (8, 9)
FP8_GEMM_MULTIPLE = 16
TMA_CAPABILITY = (9, 0)
DEQUANTIZED_CAPABILITY = {torch.float16: (7, 0), torch.bfloat16: (8, 0)}  # their tensor cores
LAYER_CAPABILITY = (8, 0)  # of Triton's kernels between a decoder layer's GEMMs
PLAIN = "the base is not FP8"
SEVERAL = "the adapters are several in one batch"
BLOCKS = "the scales are of blocks"
NO_BLOCKS = "the scales are not of blocks"
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class LayerOnGPU(NamedTuple):
    """A layer, and the GPU that its ops are to run on.

    Attributes:
        capability: the GPU's compute capability, e.g. (9, 0).
        sizes: (N, K) of the layer; None stands for sizes that every implementation takes.
        fp8: whether the base weight is FP8.
        split: whether the recipe has the forward GEMM add partial sums in fp32.
        blocks: whether the recipe has a scale for each block.
    """

    capability: tuple[int, int]
    sizes: tuple[int, int] | None = None
    fp8: bool = True
    split: bool = False
    blocks: bool = False


def why_not_wgmma(capability: tuple[int, int]) -> str | None:
    """None if csrc's kernels with Hopper's own instructions were built and run here; otherwise the reason why not."""
    if why_not := why_not_csrc(capability):
        return why_not
    if capability != (9, 0):
        return f"wgmma is Hopper's (9, 0), found {capability}"
    built = extension().build_info()["cuda_archs"]
    return (
        None if "90a" in built.split(";") else f"lorakernels._C was built for sm_{built}, not 90a"
    )


def why_not_wgmma_gemm(capability: tuple[int, int], n: int, k: int) -> str | None:
    """None if csrc's FP8 GEMMs take a weight [n, k]; otherwise the reason why not."""
    if why_not := why_not_wgmma(capability):
        return why_not
    if n % FP8_GEMM_MULTIPLE or k % FP8_GEMM_MULTIPLE:
        return f"N = {n} and K = {k} must be multiples of {FP8_GEMM_MULTIPLE}"
    return "N = 0" if n == 0 else None


def why_not_cublaslt(capability: tuple[int, int], rows: int, n: int, k: int) -> str | None:
    """None if `torch._scaled_mm` takes an FP8 [rows, k] × [k, n] product; otherwise the reason why not."""
    if capability < FP8_GEMM_CAPABILITY:
        return f"compute capability {capability} has no FP8 tensor cores"
    if n % FP8_GEMM_MULTIPLE or k % FP8_GEMM_MULTIPLE:
        return f"N = {n} and K = {k} must be multiples of {FP8_GEMM_MULTIPLE}"
    return "no rows" if rows == 0 else None


def why_not_cublaslt_blocks(
    capability: tuple[int, int], sizes: tuple[int, int, int], out_dtype: torch.dtype
) -> str | None:
    """None if `torch._scaled_mm` multiplies [M, K] × [K, N] with scales of 1 × 128 and 128 × 128; else the reason."""
    rows, n, k = sizes
    cuda = tuple(map(int, (torch.version.cuda or "12.9").split(".")[:2]))  # None: there is no GPU
    fits = rows and not rows % 4 and not n % FP8_GEMM_MULTIPLE and not k % 512
    if fits and capability == (9, 0) and cuda >= (12, 9) and out_dtype == torch.bfloat16:
        return None
    return (
        "cuBLASLt multiplies blocks on Hopper, from CUDA 12.9 on, into bfloat16, with M in multiples of 4, N of 16 and "
        f"K of 512; found compute capability {capability}, CUDA {torch.version.cuda}, {out_dtype}, {rows} × {n} × {k}"
    )


def why_not_gaps(**scales: Tensor | None) -> str | None:
    """None if the scales, by their operand's name, have no gaps, as csrc reads them; otherwise the reason why not."""
    for operand, scale_inv in scales.items():
        if scale_inv is not None and not scale_inv.is_contiguous():
            strides = scale_inv.stride()
            return f"{operand}_scale_inv must be contiguous, found strides {strides}"
    return None


def why_not_dequantized(capability: tuple[int, int], dtype: torch.dtype) -> str | None:
    """None if FP8 operands are multiplied in `dtype`, dequantized: there are tensor cores for it and none for FP8."""
    if capability >= FP8_GEMM_CAPABILITY:
        return f"compute capability {capability} has FP8 tensor cores"
    if dtype not in DEQUANTIZED_CAPABILITY or capability < DEQUANTIZED_CAPABILITY[dtype]:
        return f"compute capability {capability} has no tensor cores for {dtype}"
    return None


def why_not_aligned(**tensors: Tensor | None) -> str | None:
    """None if these tensors have no gaps and begin at 16 bytes, as TMA reads them; otherwise the reason why not."""
    for name, tensor in tensors.items():
        if tensor is not None and (tensor.data_ptr() % 16 or not tensor.is_contiguous()):
            return f"{name} must be contiguous and 16-byte aligned, found strides {tensor.stride()}"
    return None


def gemm_without_ours(place: LayerOnGPU) -> tuple[str, str] | None:
    """The implementation that multiplies such a base where no kernel of ours can, and why; None where one may."""
    if not place.fp8:
        return "torch", PLAIN
    halves = (torch.bfloat16, torch.float16)
    if dtypes := [t for t in halves if not why_not_dequantized(place.capability, t)]:
        names = " or ".join(str(t).removeprefix("torch.") for t in dtypes)
        note = f"dequantized {names} matmul, 2 bytes a weight of scratch: no FP8 tensor cores"
        return "dequantized", f"{note}; else fp32"
    sizes = place.sizes or (FP8_GEMM_MULTIPLE,) * 2
    if why_not := why_not_cublaslt(place.capability, 1, *sizes):
        return "torch", why_not
    return None


def gemm_in_blocks(place: LayerOnGPU, kernel: str) -> tuple[str, str]:
    """The implementation of a product in blocks, and a note for doctor. `kernel` names csrc's."""
    n, k = place.sizes or (FP8_GEMM_MULTIPLE,) * 2
    if not why_not_wgmma_gemm(place.capability, n, k):
        return "csrc", f"{kernel} for bf16 and fp16, any rank{_needed(place)}"
    if why_not_cublaslt_blocks(place.capability, (4, 16, 512), torch.bfloat16):
        return "dequantized", "dequantized matmul, 2 bytes a weight of scratch"
    return "cublaslt", "torch._scaled_mm, M, N, K in multiples of 4, 16, 512"


def gemm_by_kernel(place: LayerOnGPU, name: str, ranks: str) -> tuple[str, str]:
    """A GEMM kernel with the LoRA term, and a note for doctor. It takes `ranks`."""
    return name, f"one kernel for bf16 and fp16, {ranks}{_needed(place)}; else torch._scaled_mm"


def gemm_by_cublaslt(place: LayerOnGPU, why_not: str) -> tuple[str, str]:
    """cuBLASLt, and a note for doctor why."""
    return "cublaslt", f"torch._scaled_mm{_needed(place)}: {why_not}"


def _needed(place: LayerOnGPU) -> str:
    return "" if place.sizes else f", N, K in multiples of {FP8_GEMM_MULTIPLE}"


def why_not_layer_capability(capability: tuple[int, int]) -> str | None:
    """None if Triton's kernels between a decoder layer's GEMMs run here; otherwise the reason why not."""
    if capability < LAYER_CAPABILITY:
        return f"compute capability {capability} has no bf16"
    return None


def why_not_layer_kernel(**tensors: Tensor | None) -> str | None:
    """None if Triton's kernels between a decoder layer's GEMMs take these tensors; otherwise the reason why not."""
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if why_not := why_not_layer_capability(capability_of(tensor.device)):
            return why_not
        if tensor.numel() == 0:
            return f"{name} has no elements"
        if not tensor.is_contiguous():
            return f"{name} must be contiguous, found strides {tensor.stride()}"
    return None


def chosen_layer_kernel(note: str, place: LayerOnGPU) -> tuple[str, str]:
    """Triton's kernel with this `note`, or PyTorch with the reason why not."""
    why_not = why_not_layer_capability(place.capability)
    return ("torch", why_not) if why_not else ("triton", note)


def chosen_csrc(note: str, place: LayerOnGPU) -> tuple[str, str]:
    """csrc's kernel with this `note`, or PyTorch with the reason why not."""
    why_not = why_not_csrc(place.capability)
    return ("torch", why_not) if why_not else ("csrc", note)


def why_not_batched(
    x: Tensor, factor: Tensor, rank: int, dropout: Dropout | None = None
) -> str | None:
    """None if Triton's kernels of adapters in one batch take x [M, …] and J adapters' A or B; otherwise the reason."""
    if why_not := why_not_layer_capability(capability_of(x.device)):
        return why_not
    if drops(dropout):
        return "dropout of adapters in one batch is computed by PyTorch"
    if not 0 < rank <= segments.MOST_RANK:
        return f"rank {rank} is not in 1 to {segments.MOST_RANK}"
    rows = x.shape[0] // adapters_of(factor)
    if rows == 0 or rows % segments.ROWS_MULTIPLE:
        return f"an adapter's {rows} rows must be a multiple of {segments.ROWS_MULTIPLE}"
    if not x.is_contiguous() or not factor.is_contiguous():
        return "the adapters and their operands must be contiguous"
    return None


def why_not_batched_gemm(rows: int, adapters: int, out_dtype: torch.dtype) -> str | None:
    """None if csrc's FP8 GEMMs take as many rows and adapters in one batch; otherwise the reason why not."""
    if rows % adapters or rows // adapters % GROUP_ROWS:
        return f"{rows} rows of {adapters} adapters must be a multiple of {GROUP_ROWS} for each"
    if out_dtype != torch.bfloat16:
        return f"several adapters in one batch are computed in bfloat16, found {out_dtype}"
    return None
