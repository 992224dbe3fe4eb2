# SPDX-License-Identifier: Apache-2.0
"""Which implementation each op takes on a device, and why: one visible ladder, printed by `lorakernels doctor`."""

from __future__ import annotations

import torch
from torch import Tensor

from lorakernels.device import capability_of, extension, why_not_csrc
from lorakernels.kernels.tuning import MAX_RANK
from lorakernels.kernels.tuning_layer import MAX_NORM_COLUMNS

OPS = (
    "quantize_lora_down",
    "fp8_linear_lora",
    "fp8_grad_input",
    "transpose_fp8",
    "bias_dropout_add",
    "amax_and_scale_update",
    "rms_norm_quantize",
    "rms_norm_backward",
    "rope_qkv",
    "swiglu_quantize",
    "swiglu_quantize_grad",
    "block_diagonal",
    "cross_entropy",
)
AROUND_LINEAR = ("bias_dropout_add", *OPS[6:])  # what a linear layer itself does not run
FP8_GEMM_CAPABILITY = (8, 9)
FP8_GEMM_MULTIPLE = 16
TMA_CAPABILITY = (9, 0)
DEQUANTIZED_CAPABILITY = {torch.float16: (7, 0), torch.bfloat16: (8, 0)}  # their tensor cores
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
DOWN_MULTIPLE = 8  # of K, for quantize_lora_down in one read
DOWN_RANK = 128
LAYER_CAPABILITY = (8, 0)  # of Triton's kernels between a decoder layer's GEMMs
TRITON_SPLIT = "Triton's split accumulation takes 1.5 times as long"


def implementations(
    device_type: str,
    capability: tuple[int, int] | None = None,
    *,
    fp8: bool = True,
    sizes: tuple[int, int] | None = None,
    split: bool = False,
) -> dict[str, tuple[str, str]]:
    """{op: (implementation, reason)}.

    Args:
        device_type: "cpu" or "cuda".
        capability: the GPU's compute capability, e.g. (9, 0); needed for "cuda".
        fp8: whether the base weight is FP8.
        sizes: (N, K) of the layer; None asks for sizes that every implementation takes.
        split: whether the recipe has the forward GEMM add partial sums in fp32.

    Raises:
        ValueError: another device type.
    """
    if device_type == "cpu":
        return dict.fromkeys(OPS, ("reference", "PyTorch on the CPU; masks drawn by csrc"))
    if device_type != "cuda":
        raise ValueError(f'device_type must be "cpu" or "cuda", found {device_type!r}')
    capability = capability or (0, 0)
    csrc_why_not = why_not_csrc(capability)
    csrc = {
        "bias_dropout_add": "one pass, forward and backward",
        "amax_and_scale_update": "one launch for all tensors",
        "transpose_fp8": "one pass",
    }
    table = {
        **_gemms(capability, sizes, fp8, split),
        "quantize_lora_down": _quantize_lora_down(capability, sizes),
    }
    for op, note in csrc.items():
        table[op] = ("torch", csrc_why_not) if csrc_why_not else ("csrc", note)
    table |= _layer(capability)
    table["cross_entropy"] = (
        "triton",
        "two reads of a chunk's logits, gradient in their place; float64: PyTorch's",
    )
    return {op: table[op] for op in OPS}


def _layer(capability: tuple[int, int]) -> dict[str, tuple[str, str]]:
    notes = {
        "rms_norm_quantize": f"one read, K ≤ {MAX_NORM_COLUMNS}; else PyTorch's",
        "rms_norm_backward": f"one read, K ≤ {MAX_NORM_COLUMNS}; else PyTorch's",
        "rope_qkv": "one pass, forward and backward",
        "swiglu_quantize": "one read",
        "swiglu_quantize_grad": "one read",
        "block_diagonal": "one launch for q, k, v or gate, up, forward and backward",
    }
    if why_not := _why_not_layer_kernel(capability):
        return dict.fromkeys(notes, ("torch", why_not))
    return {op: ("triton", note) for op, note in notes.items()}


def _why_not_layer_kernel(capability: tuple[int, int]) -> str | None:
    if capability < LAYER_CAPABILITY:
        return f"compute capability {capability} has no bf16"
    return None


def why_not_layer_kernel(**tensors: Tensor | None) -> str | None:
    """None if Triton's kernels between a decoder layer's GEMMs take these tensors; otherwise the reason why not."""
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if why_not := _why_not_layer_kernel(capability_of(tensor.device)):
            return why_not
        if tensor.numel() == 0:
            return f"{name} has no elements"
        if not tensor.is_contiguous():
            return f"{name} must be contiguous, found strides {tensor.stride()}"
    return None


def why_not_norm_kernel(x: Tensor, **others: Tensor | None) -> str | None:
    """None if Triton's RMSNorm kernels take these tensors; otherwise the reason why not."""
    if x.shape[1] > MAX_NORM_COLUMNS:
        return f"K = {x.shape[1]} is above {MAX_NORM_COLUMNS}"
    return why_not_layer_kernel(x=x, **others)


def _gemms(
    capability: tuple[int, int], sizes: tuple[int, int] | None, fp8: bool, split: bool
) -> dict[str, tuple[str, str]]:
    ops = ("fp8_linear_lora", "fp8_grad_input")
    if not fp8:
        return dict.fromkeys(ops, ("torch", "the base is not FP8"))
    n, k = sizes or (FP8_GEMM_MULTIPLE,) * 2
    dtypes = [t for t in (torch.bfloat16, torch.float16) if takes_dequantized(capability, t)]
    if dtypes:
        names = " or ".join(str(t).removeprefix("torch.") for t in dtypes)
        note = f"dequantized {names} matmul, 2 bytes a weight of scratch: no FP8 tensor cores"
        return dict.fromkeys(ops, ("dequantized", f"{note}; else fp32"))
    if why_not := takes_cublaslt(capability, 1, n, k):
        return dict.fromkeys(ops, ("torch", why_not))
    needs = "" if sizes else f", N, K in multiples of {FP8_GEMM_MULTIPLE}"
    not_csrc = _why_not_wgmma_gemm(capability, n, k)
    not_triton = _why_not_triton_gemm(capability, 1, n, k) or (TRITON_SPLIT if split else None)
    forward = ("triton", f"rank ≤ {MAX_RANK}", not_triton)
    table = {}
    for op, implementation, ranks, why_not in (
        ("fp8_linear_lora", *(forward if not_csrc else ("csrc", "any rank", None))),
        ("fp8_grad_input", "csrc", "any rank", not_csrc),
    ):
        note = f"one kernel for bf16 and fp16, {ranks}{needs}; else torch._scaled_mm"
        by_cublaslt = ("cublaslt", f"torch._scaled_mm{needs}: {why_not}")
        table[op] = by_cublaslt if why_not else (implementation, note)
    return table


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


def why_not_one_read(x: Tensor, lora_A: Tensor | None, col0: int) -> str | None:
    """None if csrc's `quantize_lora_down` takes these tensors; otherwise the reason why not."""
    if why_not := _why_not_one_read(capability_of(x.device), x.shape[1]):
        return why_not
    if x.dtype not in (torch.bfloat16, torch.float16):
        return f"x is {x.dtype}, not bfloat16 or float16"
    if col0 % DOWN_MULTIPLE:
        return f"col0 = {col0} must be a multiple of {DOWN_MULTIPLE}"
    if lora_A is not None and not 0 < lora_A.shape[0] <= DOWN_RANK:
        return f"rank {lora_A.shape[0]} is not in 1 to {DOWN_RANK}"
    for name, tensor in (("x", x), ("lora_A", lora_A)):
        if tensor is not None and (tensor.data_ptr() % 16 or not tensor.is_contiguous()):
            return f"{name} must be contiguous and 16-byte aligned, found strides {tensor.stride()}"
    return None


def _why_not_one_read(capability: tuple[int, int], k: int) -> str | None:
    if why_not := why_not_csrc(capability):
        return why_not
    if capability < (8, 0):
        return f"compute capability {capability} has no bf16 tensor cores"
    return f"K = {k} must be a multiple of {DOWN_MULTIPLE}" if k % DOWN_MULTIPLE else None


def _quantize_lora_down(
    capability: tuple[int, int], sizes: tuple[int, int] | None
) -> tuple[str, str]:
    if why_not := _why_not_one_read(capability, sizes[1] if sizes else DOWN_MULTIPLE):
        return "torch", why_not
    needs_k = "" if sizes else f", K a multiple of {DOWN_MULTIPLE}"
    return "csrc", f"one read for bf16 and fp16, rank ≤ {DOWN_RANK}{needs_k}; else PyTorch's"


def why_not_wgmma_gemm(
    dy: Tensor,
    weight: Tensor,
    weight_t: Tensor | None,
    ds: Tensor | None,
    lora_A: Tensor | None,
    out_dtype: torch.dtype,
    col0: int,
) -> str | None:
    """None if csrc's `fp8_grad_input` takes these FP8 operands; otherwise the reason why not."""
    if why_not := _why_not_wgmma_gemm(capability_of(dy.device), *weight.shape):
        return why_not
    if out_dtype not in (torch.bfloat16, torch.float16):
        return f"out_dtype is {out_dtype}, not bfloat16 or float16"
    if dy.shape[0] == 0:
        return "no rows"
    if col0 % DOWN_MULTIPLE:
        return f"col0 = {col0} must be a multiple of {DOWN_MULTIPLE}"
    for name, tensor in (("dy", dy), ("weight", weight), ("weight_t", weight_t)):
        if tensor is not None and (tensor.data_ptr() % 16 or not tensor.is_contiguous()):
            return f"{name} must be contiguous and 16-byte aligned, found strides {tensor.stride()}"
    if ds is None or lora_A is None:
        return None
    if ds.dtype != out_dtype:
        return f"ds is {ds.dtype}, out_dtype {out_dtype}"
    if lora_A.dtype not in FLOATS:
        return f"lora_A is {lora_A.dtype}"
    for name, tensor in (("ds", ds), ("lora_A", lora_A)):
        if not tensor.is_contiguous():
            return f"{name} must be contiguous, found strides {tensor.stride()}"
    return None


def why_not_wgmma_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    s: Tensor | None,
    lora_B: Tensor | None,
    out_dtype: torch.dtype,
    residual: Tensor | None,
) -> str | None:
    """None if csrc's `fp8_linear_lora` takes these FP8 operands; otherwise the reason why not."""
    if why_not := _why_not_wgmma_gemm(capability_of(x.device), *weight.shape):
        return why_not
    if out_dtype not in (torch.bfloat16, torch.float16):
        return f"out_dtype is {out_dtype}, not bfloat16 or float16"
    if x.shape[0] == 0 or x.shape[1] == 0:
        return f"x is empty, {tuple(x.shape)}"
    for name, tensor in (("x", x), ("weight", weight), ("residual", residual)):
        if tensor is not None and (tensor.data_ptr() % 16 or not tensor.is_contiguous()):
            return f"{name} must be contiguous and 16-byte aligned, found strides {tensor.stride()}"
    if residual is not None and residual.dtype != out_dtype:
        return f"residual is {residual.dtype}, out_dtype {out_dtype}"
    if s is not None and lora_B is not None and s.dtype != out_dtype:
        return f"s is {s.dtype}, out_dtype {out_dtype}"
    for name, optional in (("bias", bias), ("s", s), ("lora_B", lora_B)):
        if optional is not None and not optional.is_contiguous():
            return f"{name} must be contiguous, found strides {optional.stride()}"
        if optional is not None and optional.dtype not in FLOATS:
            return f"{name} is {optional.dtype}"
    return None


def _why_not_wgmma_gemm(capability: tuple[int, int], n: int, k: int) -> str | None:
    if why_not := why_not_wgmma(capability):
        return why_not
    if n % FP8_GEMM_MULTIPLE or k % FP8_GEMM_MULTIPLE:
        return f"N = {n} and K = {k} must be multiples of {FP8_GEMM_MULTIPLE}"
    return "N = 0" if n == 0 else None


def why_not_transpose_fp8(weight: Tensor) -> str | None:
    """None if csrc's `transpose_fp8` takes this matrix; otherwise the reason why not."""
    if why_not := why_not_csrc(capability_of(weight.device)):
        return why_not
    if weight.element_size() != 1:
        return f"weight is {weight.dtype}, not a byte an element"
    if not weight.is_contiguous():
        return f"weight must be contiguous, found strides {weight.stride()}"
    return None


def takes_cublaslt(capability: tuple[int, int], rows: int, n: int, k: int) -> str | None:
    """None if `torch._scaled_mm` takes an FP8 [rows, k] × [k, n] product; otherwise the reason why not."""
    if capability < FP8_GEMM_CAPABILITY:
        return f"compute capability {capability} has no FP8 tensor cores"
    if n % FP8_GEMM_MULTIPLE or k % FP8_GEMM_MULTIPLE:
        return f"N = {n} and K = {k} must be multiples of {FP8_GEMM_MULTIPLE}"
    return "no rows" if rows == 0 else None


def takes_dequantized(capability: tuple[int, int], dtype: torch.dtype) -> bool:
    """Whether FP8 operands are multiplied in `dtype`, dequantized: there are tensor cores for it and none for FP8."""
    least = DEQUANTIZED_CAPABILITY.get(dtype)
    return least is not None and least <= capability < FP8_GEMM_CAPABILITY


def why_not_triton_gemm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    s: Tensor | None,
    lora_B: Tensor | None,
    scaling: float,
    out_dtype: torch.dtype,
    split: bool = False,
    residual: Tensor | None = None,
) -> str | None:
    """None if the Triton kernel of `fp8_linear_lora` takes these FP8 operands; otherwise the reason why not."""
    if why_not := _why_not_triton_gemm(capability_of(x.device), x.shape[0], *weight.shape):
        return why_not
    for name, tensor in (("x", x), ("weight", weight)):
        if tensor.data_ptr() % 16 or not tensor.is_contiguous():
            return f"{name} must be contiguous and 16-byte aligned, found strides {tensor.stride()}"
    if split:
        return TRITON_SPLIT
    if out_dtype not in (torch.bfloat16, torch.float16):
        return f"out_dtype is {out_dtype}, not bfloat16 or float16"
    if s is not None and lora_B is not None:
        if s.dtype not in (torch.bfloat16, torch.float16):
            return f"s is {s.dtype}, not bfloat16 or float16"
        if s.shape[1] > MAX_RANK:
            return f"rank {s.shape[1]} is above {MAX_RANK}"
        if scaling and not 2.0**-64 <= abs(scaling) <= 2.0**64:
            return f"scaling = {scaling}: the accumulator divided by it may leave fp32's range"
    if residual is not None and (residual.dtype != out_dtype or residual.data_ptr() % 16):
        return f"residual must be {out_dtype} and 16-byte aligned, found {residual.dtype}"
    for name, optional in (("bias", bias), ("s", s), ("lora_B", lora_B), ("residual", residual)):
        if optional is not None and not optional.is_contiguous():
            return f"{name} must be contiguous, found strides {optional.stride()}"
        if optional is not None and optional.dtype not in FLOATS:
            return f"{name} is {optional.dtype}"
    return None


def _why_not_triton_gemm(capability: tuple[int, int], rows: int, n: int, k: int) -> str | None:
    if capability < TMA_CAPABILITY:
        return f"compute capability {capability} has no TMA"
    return takes_cublaslt(capability, rows, n, k) or ("K = 0" if k == 0 else None)
