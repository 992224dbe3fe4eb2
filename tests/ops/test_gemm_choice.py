# SPDX-License-Identifier: Apache-2.0
"""Which implementation multiplies by a base, as the report and `lorakernels doctor` say it, and why."""

from __future__ import annotations

import pytest
import torch

from lorakernels.ops import hardware
from lorakernels.ops.choice import implementations
from lorakernels.ops.fp8_linear_lora import TRITON_SPLIT
from lorakernels.ops.hardware import LayerOnGPU, why_not_cublaslt, why_not_dequantized

GEMMS = ("fp8_linear_lora", "fp8_grad_input")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("capability", [(0, 0), (8, 0), (8, 9), (9, 0), (12, 0)], ids=str)
def test_fp8_tensor_cores_are_used_where_there_are_some(device, capability):
    table = implementations(device, LayerOnGPU(capability))
    fp8_cores = device == "cuda" and capability >= (8, 9)
    for op in GEMMS:
        assert (table[op][0] in ("cublaslt", "csrc", "triton")) == fp8_cores
    assert table["transpose_fp8"][0] and table["transpose_fp8"][1]


def test_where_csrc_s_kernels_run_both_are_its(monkeypatch):
    monkeypatch.setattr(hardware, "why_not_wgmma", lambda _: None)
    table = implementations("cuda", LayerOnGPU((9, 0), split=True))
    note = "one kernel for bf16 and fp16, any rank, N, K in multiples of 16; else torch._scaled_mm"
    assert all(table[op] == ("csrc", note) for op in GEMMS)
    in_blocks = implementations("cuda", LayerOnGPU((9, 0), blocks=True))
    assert in_blocks["fp8_linear_lora"] == ("csrc", note.partition(";")[0])
    assert in_blocks["fp8_grad_input"][1].startswith("a kernel behind Wᵀ's copy for bf16 and")
    odd = implementations("cuda", LayerOnGPU((9, 0), (30, 64)))
    assert all(odd[op] == ("torch", "N = 30 and K = 64 must be multiples of 16") for op in GEMMS)


def test_a_split_forward_gemm_is_not_triton_s(monkeypatch):
    """Asked for by the recipe's fp8_gemm_fprop; the kernel's `why_not` refuses it too."""
    monkeypatch.setattr(hardware, "why_not_csrc", lambda _: "built without nvcc")
    place = LayerOnGPU((9, 0), (32, 64))
    assert implementations("cuda", place)["fp8_linear_lora"][0] == "triton"
    table = implementations("cuda", place._replace(split=True))
    assert table["fp8_linear_lora"] == ("cublaslt", f"torch._scaled_mm: {TRITON_SPLIT}")


def test_cublaslt_s_reason_says_why_no_kernel_of_ours(monkeypatch):
    monkeypatch.setattr(hardware, "why_not_csrc", lambda _: "built without nvcc")
    table = implementations("cuda", LayerOnGPU((8, 9)))
    assert table["fp8_linear_lora"][0] == table["fp8_grad_input"][0] == "cublaslt"
    assert table["fp8_linear_lora"][1].endswith("compute capability (8, 9) has no TMA")
    assert table["fp8_grad_input"][1].endswith("built without nvcc")


@pytest.mark.parametrize(
    ("capability", "implementation", "dtypes"),
    [
        ((7, 0), "dequantized", [torch.float16]),
        ((8, 0), "dequantized", [torch.bfloat16, torch.float16]),
        ((8, 6), "dequantized", [torch.bfloat16, torch.float16]),
        ((8, 9), "cublaslt", []),
        ((6, 1), "torch", []),
    ],
    ids=str,
)
def test_without_fp8_tensor_cores_it_says_what_is_multiplied(capability, implementation, dtypes):
    table = implementations("cuda", LayerOnGPU(capability))
    for op in GEMMS:
        assert table[op][0] == implementation
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            name = str(dtype).removeprefix("torch.")
            said = f"{name} matmul" in table[op][1] or f"{name} or" in table[op][1]
            assert said == (not why_not_dequantized(capability, dtype)) == (dtype in dtypes)
    plain = implementations("cuda", LayerOnGPU(capability, fp8=False))
    assert plain["fp8_linear_lora"] == ("torch", "the base is not FP8")


@pytest.mark.parametrize(
    ("capability", "sizes", "reason"),
    [
        ((9, 0), (8, 32, 64), None),
        ((8, 0), (8, 32, 64), "no FP8"),
        ((9, 0), (8, 30, 64), "N = 30"),
        ((9, 0), (0, 32, 64), "no rows"),
    ],
)
def test_what_cublaslt_takes(capability, sizes, reason):
    found = why_not_cublaslt(capability, *sizes)
    assert found is None if reason is None else reason in found
