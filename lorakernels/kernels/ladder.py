# SPDX-License-Identifier: Apache-2.0
"""Which implementation each op takes on a device, and why: one visible ladder, printed by `lorakernels doctor`."""

from __future__ import annotations

from lorakernels.device import why_not_csrc

OPS = (
    "quantize_lora_down",
    "fp8_linear_lora",
    "quantize_grad",
    "fp8_grad_input",
    "lora_grad_a",
    "transpose_fp8",
    "bias_dropout_add",
    "amax_and_scale_update",
)
_GEMMS = ("fp8_linear_lora", "fp8_grad_input")
FP8_GEMM_CAPABILITY = (8, 9)
FP8_GEMM_MULTIPLE = 16


def implementations(
    device_type: str,
    capability: tuple[int, int] | None = None,
    *,
    fp8: bool = True,
    sizes: tuple[int, int] | None = None,
) -> dict[str, tuple[str, str]]:
    """{op: (implementation, reason)}.

    Args:
        device_type: "cpu" or "cuda".
        capability: the GPU's compute capability, e.g. (9, 0); needed for "cuda".
        fp8: whether the base weight is FP8.
        sizes: (N, K) of the layer; None asks for sizes that every implementation takes.

    Raises:
        ValueError: another device type.
    """
    if device_type == "cpu":
        return dict.fromkeys(OPS, ("reference", "PyTorch on the CPU; masks drawn by csrc"))
    if device_type != "cuda":
        raise ValueError(f'device_type must be "cpu" or "cuda", found {device_type!r}')
    csrc_why_not = why_not_csrc(capability or (0, 0))
    masks = f"masks drawn in PyTorch: {csrc_why_not}" if csrc_why_not else "masks drawn by csrc"
    table = dict.fromkeys(OPS, ("torch", f"no fused kernel yet: PyTorch's; {masks}"))
    gemm_why_not = (
        takes_cublaslt(capability or (0, 0), 1, *(sizes or (FP8_GEMM_MULTIPLE,) * 2))
        if fp8
        else "the base is not FP8"
    )
    gemm_note = (
        "torch._scaled_mm"
        if sizes
        else f"torch._scaled_mm; N, K in multiples of {FP8_GEMM_MULTIPLE}"
    )
    gemm = ("torch", gemm_why_not) if gemm_why_not else ("cublaslt", gemm_note)
    csrc = {
        "bias_dropout_add": "one pass, forward and backward",
        "amax_and_scale_update": "one launch for all tensors",
    }
    own = {
        op: ("torch", csrc_why_not) if csrc_why_not else ("csrc", note) for op, note in csrc.items()
    }
    return {**table, **dict.fromkeys(_GEMMS, gemm), **own}


def takes_cublaslt(capability: tuple[int, int], rows: int, n: int, k: int) -> str | None:
    """None if `torch._scaled_mm` takes an FP8 [rows, k] × [k, n] product; otherwise the reason why not."""
    if capability < FP8_GEMM_CAPABILITY:
        return f"compute capability {capability} has no FP8 tensor cores"
    if n % FP8_GEMM_MULTIPLE or k % FP8_GEMM_MULTIPLE:
        return f"N = {n} and K = {k} must be multiples of {FP8_GEMM_MULTIPLE}"
    return "no rows" if rows == 0 else None
