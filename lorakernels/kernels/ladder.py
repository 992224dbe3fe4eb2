# SPDX-License-Identifier: Apache-2.0
"""Which implementation each op takes on a device, and why: one visible ladder, printed by `lorakernels doctor`."""

from __future__ import annotations

from functools import cache

from lorakernels.device import extension, extension_error

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
    table = dict.fromkeys(OPS, ("reference", "no fused kernel yet: PyTorch on the GPU"))
    gemm_why_not = (
        takes_cublaslt(capability or (0, 0), 1, *(sizes or (FP8_GEMM_MULTIPLE,) * 2))
        if fp8
        else "the base is not FP8"
    )
    note = (
        "torch._scaled_mm"
        if sizes
        else f"torch._scaled_mm; N, K in multiples of {FP8_GEMM_MULTIPLE}"
    )
    gemm = ("reference", gemm_why_not) if gemm_why_not else ("cublaslt", note)
    update_why_not = why_not_csrc(capability or (0, 0))
    update = (
        ("reference", update_why_not) if update_why_not else ("csrc", "one launch for all tensors")
    )
    return {**table, **dict.fromkeys(_GEMMS, gemm), "amax_and_scale_update": update}


@cache
def why_not_csrc(capability: tuple[int, int]) -> str | None:
    """None if csrc's CUDA kernels were built and run on this compute capability; otherwise the reason why not.

    Machine code for sm_XY runs on X.Y and later minors of X, for sm_XYa on X.Y alone (CUDA C++ programming guide,
    "binary compatibility").
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


def takes_cublaslt(capability: tuple[int, int], rows: int, n: int, k: int) -> str | None:
    """None if `torch._scaled_mm` takes an FP8 [rows, k] × [k, n] product; otherwise the reason why not."""
    if capability < FP8_GEMM_CAPABILITY:
        return f"compute capability {capability} has no FP8 tensor cores"
    if n % FP8_GEMM_MULTIPLE or k % FP8_GEMM_MULTIPLE:
        return f"N = {n} and K = {k} must be multiples of {FP8_GEMM_MULTIPLE}"
    return "no rows" if rows == 0 else None
