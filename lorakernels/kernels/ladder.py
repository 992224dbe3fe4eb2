# SPDX-License-Identifier: Apache-2.0
"""Which implementation each op takes on a device, and why: one visible ladder, printed by `lorakernels doctor`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lorakernels.device import capability_of, extension, why_not_csrc
from lorakernels.kernels.tuning_layer import MAX_NORM_COLUMNS

OPS = (
    "quantize_lora_down",
    "quantize_grad",
    "lora_grad_a",
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
AROUND_LINEAR = ("bias_dropout_add", *OPS[5:])  # what a linear layer itself does not run
FP8_GEMM_MULTIPLE = 16
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
DOWN_MULTIPLE = 8  # of K, for quantize_lora_down in one read
DOWN_RANK = 128
GRAD_MULTIPLE = 8  # of N, for quantize_grad in one pass
GRAD_RANK = 128
DRAWN_RANK = 64  # above, quantize_grad has the mask drawn by another kernel
GRAD_PROJECTIONS = 4  # side by side, for quantize_grad in one pass
GRAD_PROJECTION_MULTIPLE = 128  # of the columns of each but the last
GRAD_A_MULTIPLE = {True: 16, False: 8}  # of K, for lora_grad_a in one pass, by whether x is FP8
GRAD_A_RANK = 128
LAYER_CAPABILITY = (8, 0)  # of Triton's kernels between a decoder layer's GEMMs


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
    }
    table = {
        "quantize_lora_down": _quantize_lora_down(capability, sizes),
        "quantize_grad": _quantize_grad(capability, sizes),
        "lora_grad_a": _lora_grad_a(capability, sizes, fp8),
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


def _quantize_grad(capability: tuple[int, int], sizes: tuple[int, int] | None) -> tuple[str, str]:
    if why_not := why_not_wgmma(capability):
        return "torch", why_not
    if sizes and sizes[0] % GRAD_MULTIPLE:
        return "torch", f"N = {sizes[0]} must be a multiple of {GRAD_MULTIPLE}"
    needs_n = "" if sizes else f", N a multiple of {GRAD_MULTIPLE}"
    return "csrc", f"one pass for bf16 and fp16, rank ≤ {GRAD_RANK}{needs_n}; else PyTorch's"


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


def why_not_one_pass(
    dy: Tensor, lora_B: Tensor | None, s: Tensor | None, rows: Sequence[int] | None = None
) -> str | None:
    """None if csrc's `quantize_grad` takes these tensors; otherwise the reason why not."""
    if why_not := why_not_wgmma(capability_of(dy.device)):
        return why_not
    if dy.dtype not in (torch.bfloat16, torch.float16):
        return f"dy is {dy.dtype}, not bfloat16 or float16"
    if dy.shape[1] % GRAD_MULTIPLE or dy.shape[1] == 0:
        return f"N = {dy.shape[1]} must be a positive multiple of {GRAD_MULTIPLE}"
    if dy.data_ptr() % 16 or not dy.is_contiguous():
        return f"dy must be contiguous and 16-byte aligned, found strides {dy.stride()}"
    if lora_B is None:
        return None
    if rows and len(rows) > GRAD_PROJECTIONS:
        return f"{len(rows)} projections are more than {GRAD_PROJECTIONS}"
    if rows and any(n % GRAD_PROJECTION_MULTIPLE for n in rows[:-1]):
        return f"rows {list(rows)} before the last must be multiples of {GRAD_PROJECTION_MULTIPLE}"
    if not 0 < lora_B.shape[1] <= GRAD_RANK:
        return f"rank {lora_B.shape[1]} is not in 1 to {GRAD_RANK}"
    if lora_B.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"lora_B is {lora_B.dtype}"
    if s is not None and s.dtype != dy.dtype:
        return f"s is {s.dtype}, dy {dy.dtype}"
    if not all(t is None or t.is_contiguous() for t in (lora_B, s)):
        return "lora_B and s must be contiguous"
    return None


def why_not_lora_grad_a(
    ds: Tensor, x: Tensor, x_scale_inv: Tensor | None, out_dtype: torch.dtype, col0: int
) -> str | None:
    """None if csrc's `lora_grad_a` takes these tensors; otherwise the reason why not."""
    fp8 = x_scale_inv is not None
    if why_not := _why_not_lora_grad_a(capability_of(x.device), x.shape[1], fp8):
        return why_not
    if ds.dtype not in (torch.bfloat16, torch.float16):
        return f"ds is {ds.dtype}, not bfloat16 or float16"
    if not fp8 and x.dtype != ds.dtype:
        return f"x is {x.dtype}, ds {ds.dtype}"
    if out_dtype not in FLOATS:
        return f"out_dtype is {out_dtype}"
    if col0 % DOWN_MULTIPLE:
        return f"col0 = {col0} must be a multiple of {DOWN_MULTIPLE}"
    if not 0 < ds.shape[1] <= GRAD_A_RANK:
        return f"rank {ds.shape[1]} is not in 1 to {GRAD_A_RANK}"
    if x.data_ptr() % 16 or not x.is_contiguous():
        return f"x must be contiguous and 16-byte aligned, found strides {x.stride()}"
    return None


def _why_not_lora_grad_a(capability: tuple[int, int], k: int, fp8: bool) -> str | None:
    if why_not := why_not_csrc(capability):
        return why_not
    if capability < (8, 0):
        return f"compute capability {capability} has no bf16 tensor cores"
    multiple = GRAD_A_MULTIPLE[fp8]
    return f"K = {k} must be a multiple of {multiple}" if k % multiple else None


def _lora_grad_a(
    capability: tuple[int, int], sizes: tuple[int, int] | None, fp8: bool
) -> tuple[str, str]:
    multiple = GRAD_A_MULTIPLE[fp8]
    if why_not := _why_not_lora_grad_a(capability, sizes[1] if sizes else multiple, fp8):
        return "torch", why_not
    needs_k = "" if sizes else f", K a multiple of {multiple}"
    return "csrc", f"one pass for bf16 and fp16, rank ≤ {GRAD_A_RANK}{needs_k}; else PyTorch's"


def _why_not_wgmma_gemm(capability: tuple[int, int], n: int, k: int) -> str | None:
    if why_not := why_not_wgmma(capability):
        return why_not
    if n % FP8_GEMM_MULTIPLE or k % FP8_GEMM_MULTIPLE:
        return f"N = {n} and K = {k} must be multiples of {FP8_GEMM_MULTIPLE}"
    return "N = 0" if n == 0 else None


def side_by_side(rows: Sequence[int], ranks: Sequence[int]) -> bool:
    """Whether csrc's `quantize_grad` takes such projections side by side; otherwise their B is stacked diagonally."""
    aligned = not any(n % GRAD_PROJECTION_MULTIPLE for n in rows[:-1])
    return aligned and len(rows) <= GRAD_PROJECTIONS and len({*ranks} - {0}) == 1


def can_hand_mask_over(capability: tuple[int, int], n: int, k: int) -> bool:
    """Whether `lora_grad_a` and `fp8_grad_input` of an FP8 base [n, k] are one kernel of csrc each, which can read a
    mask that `quantize_grad` drew."""
    return not (_why_not_lora_grad_a(capability, k, True) or _why_not_wgmma_gemm(capability, n, k))
