# SPDX-License-Identifier: Apache-2.0
"""The ladder names an implementation and a reason for every op on every device."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from lorakernels import device as device_facts
from lorakernels.kernels import ladder


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("capability", [None, (8, 0), (8, 9), (9, 0), (12, 0)], ids=str)
def test_every_op_is_named(device, capability):
    table = ladder.implementations(device, capability)
    assert set(table) == set(ladder.OPS)
    assert all(impl and reason for impl, reason in table.values())
    fp8_cores = device == "cuda" and capability is not None and capability >= (8, 9)
    assert (table["fp8_linear_lora"][0] in ("cublaslt", "csrc", "triton")) == fp8_cores


def test_a_split_forward_gemm_is_not_triton_s(monkeypatch):
    """Asked for by the recipe's fp8_gemm_fprop; `why_not_triton_gemm` refuses it too."""
    monkeypatch.setattr(ladder, "why_not_csrc", lambda _: "built without nvcc")
    sizes = {"sizes": (32, 64)}
    assert ladder.implementations("cuda", (9, 0), **sizes)["fp8_linear_lora"][0] == "triton"
    table = ladder.implementations("cuda", (9, 0), **sizes, split=True)
    assert table["fp8_linear_lora"] == ("cublaslt", f"torch._scaled_mm: {ladder.TRITON_SPLIT}")


def test_cublaslt_s_reason_says_why_no_kernel_of_ours(monkeypatch):
    monkeypatch.setattr(ladder, "why_not_csrc", lambda _: "built without nvcc")
    table = ladder.implementations("cuda", (8, 9))
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
def test_without_fp8_tensor_cores_the_ladder_says_what_is_multiplied(
    capability, implementation, dtypes
):
    table = ladder.implementations("cuda", capability)
    for op in ("fp8_linear_lora", "fp8_grad_input"):
        assert table[op][0] == implementation
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            name = str(dtype).removeprefix("torch.")
            said = f"{name} matmul" in table[op][1] or f"{name} or" in table[op][1]
            assert said == ladder.takes_dequantized(capability, dtype) == (dtype in dtypes)
    plain = ladder.implementations("cuda", capability, fp8=False)
    assert plain["fp8_linear_lora"] == ("torch", "the base is not FP8")


def test_unknown_device():
    with pytest.raises(ValueError, match="found 'mps'"):
        ladder.implementations("mps")


@pytest.mark.parametrize(
    ("archs", "capability", "runs"),
    [
        ("90a", (9, 0), True),
        ("90a", (10, 0), False),
        ("80", (8, 9), True),
        ("86;90a", (8, 0), False),
        ("80;90a", (9, 0), True),
        ("100f", (10, 0), True),
        ("120", (12, 1), True),
    ],
)
def test_binary_compatibility(archs, capability, runs):
    built = mock.Mock(build_info=lambda: {"cuda": True, "cuda_archs": archs})
    device_facts.why_not_csrc.cache_clear()
    with mock.patch.object(device_facts, "extension", lambda: built):
        assert (device_facts.why_not_csrc(capability) is None) == runs
    device_facts.why_not_csrc.cache_clear()


def test_without_nvcc_the_reason_says_so():
    built = mock.Mock(build_info=lambda: {"cuda": False, "cuda_archs": ""})
    device_facts.why_not_csrc.cache_clear()
    with mock.patch.object(device_facts, "extension", lambda: built):
        assert "without nvcc" in device_facts.why_not_csrc((9, 0))
    device_facts.why_not_csrc.cache_clear()


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
    found = ladder.takes_cublaslt(capability, *sizes)
    assert found is None if reason is None else reason in found
