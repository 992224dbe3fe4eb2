# SPDX-License-Identifier: Apache-2.0
"""Which implementation `lorakernels doctor` and the report name."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from unittest import mock

import pytest
import torch

from lorakernels import _C, device
from lorakernels.ops.choice import implementations
from lorakernels.ops.hardware import LayerOnGPU
from lorakernels.ops.register import OPS as REGISTERED

OPS = (
    "block_diagonal",
    "rms_norm_backward",
    "rms_norm_quantize",
    "rope_qkv",
    "swiglu_quantize",
    "swiglu_quantize_grad",
)


@pytest.mark.parametrize("op", OPS)
def test_what_the_layer_s_kernels_take(op):
    old = implementations("cuda", LayerOnGPU((7, 5)))
    new = implementations("cuda", LayerOnGPU((8, 0), fp8=False))
    assert old[op] == ("torch", "compute capability (7, 5) has no bf16")
    assert new[op][0] == "triton"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("capability", [(0, 0), (8, 0), (8, 9), (9, 0), (12, 0)], ids=str)
def test_every_op_is_named(device, capability):
    """Each op, or the one that it goes with, has an implementation and a reason."""
    table = implementations(device, LayerOnGPU(capability))
    mains = {name.rstrip("_") for name, op in REGISTERED.items() if op.chosen is not None}
    assert set(table) == mains and len(mains) == 25
    assert all(implementation and reason for implementation, reason in table.values())


# Of docs/support.md's table: y and dx over an FP8 base, by compute capability
PRODUCTS = {
    (8, 0): ("dequantized", "dequantized"),
    (8, 9): ("cublaslt", "cublaslt"),
    (9, 0): ("csrc", "csrc"),
    (10, 0): ("triton", "cublaslt"),
    (12, 0): ("triton", "cublaslt"),
}
ANYWHERE = {
    "amax_and_scale_update",
    "bias_dropout_add",
    "lora_grad_a",
    "quantize_lora_down",
    "transpose_fp8",
}
HOPPER = {"grouped_linear_lora", "grouped_grad_input", "quantize_grad"}


@pytest.fixture
def built_for_all() -> Iterator[None]:
    info = {**_C.build_info(), "cuda": True, "cuda_archs": "80;89;90a;100a;120a"}
    with mock.patch.object(_C, "build_info", lambda: info):
        device.why_not_csrc.cache_clear()
        yield
    device.why_not_csrc.cache_clear()


@pytest.mark.parametrize("capability", PRODUCTS, ids=str)
def test_what_a_gpu_runs_that_csrc_was_compiled_for(capability, built_for_all):
    """wgmma's kernels on Hopper alone; where these are PyTorch's elsewhere, csrc's other kernels still run."""
    table = {op: name for op, (name, _) in implementations("cuda", LayerOnGPU(capability)).items()}
    in_blocks = implementations("cuda", LayerOnGPU(capability, blocks=True))
    products = {in_blocks[op][0] for op in ("fp8_linear_lora", "fp8_grad_input")}
    assert products == {"csrc" if capability == (9, 0) else "dequantized"}
    assert (table["fp8_linear_lora"], table["fp8_grad_input"]) == PRODUCTS[capability]
    assert {table[op] for op in ANYWHERE} == {"csrc"}
    assert {table[op] for op in HOPPER} == {"csrc" if capability == (9, 0) else "torch"}
    rest = table.keys() - ANYWHERE - HOPPER - {"fp8_linear_lora", "fp8_grad_input"}
    assert {table[op] for op in rest} == {"triton"}


def test_unknown_device():
    with pytest.raises(ValueError, match="found 'mps'"):
        implementations("mps")


@pytest.mark.parametrize(
    ("capability", "most"), [((8, 0), 32), ((8, 9), 32), ((9, 0), 256)], ids=str
)
def test_ranks_that_ask_for_more_shared_memory_than_a_gpu_has_are_not_csrc_s(
    capability: tuple[int, int], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module("lorakernels.ops.quantize_lora_down")
    monkeypatch.setattr(module, "capability_of", lambda _: capability)
    monkeypatch.setattr(module, "why_not_csrc", lambda _: None)
    x = torch.zeros(8, 64, dtype=torch.bfloat16)
    for rank in (most, most + 1):
        lora_A = torch.zeros(rank, 64, dtype=torch.bfloat16)
        why_not = module.why_not_csrc_kernel(module.Down(x, lora_A, None, None))
        assert why_not == (None if rank == most else f"rank {rank} is not in 1 to {most}")
