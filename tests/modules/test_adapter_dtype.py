# SPDX-License-Identifier: Apache-2.0
"""adapter_dtype=None: lora_A and lora_B have the dtype of their layer."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lorakernels import DelayedScaling, FrozenFP8Linear, LoRAConfig, LoRALinear, apply_lora


def model(dtype: torch.dtype) -> nn.Sequential:
    return nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.Linear(16, 16, bias=False)).to(
        dtype
    )


@pytest.mark.parametrize("fp8", [None, DelayedScaling()], ids=["plain", "FP8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_none_takes_the_weight_s_dtype(dtype, fp8):
    m = model(dtype)
    apply_lora(m, LoRAConfig(target_modules=["1", "2"], fp8=fp8), adapter_dtype=None)
    assert {p.dtype for layer in (m[1], m[2]) for p in (layer.lora_A, layer.lora_B)} == {dtype}
    one = LoRALinear.from_linear(nn.Linear(4, 4).to(dtype), LoRAConfig(fp8=fp8), adapter_dtype=None)
    assert one.lora_A.dtype == dtype


def test_an_fp8_weight_leaves_it_to_the_bias_then_to_the_model():
    m = model(torch.bfloat16)
    m[1], m[2] = FrozenFP8Linear.from_linear(m[1]), FrozenFP8Linear.from_linear(m[2])
    m[1].bias.data = m[1].bias.data.half()
    m.register_parameter(
        "weight_scale", nn.Parameter(torch.ones(1))
    )  # a scale is fp32 in any model
    apply_lora(m, LoRAConfig(target_modules=["1", "2"]), adapter_dtype=None)
    assert (m[1].lora_A.dtype, m[2].lora_A.dtype) == (torch.float16, torch.bfloat16)


def test_a_module_may_be_called_as_scales_are():
    m = model(torch.bfloat16)
    m[2] = FrozenFP8Linear.from_linear(m[2])
    m = nn.ModuleDict({"rescale": m})
    apply_lora(m, LoRAConfig(target_modules=["2"]), adapter_dtype=None)
    assert m["rescale"][2].lora_A.dtype == torch.bfloat16


def test_a_dtype_that_adapters_have_not_is_refused_before_anything_is_changed():
    m = model(torch.float64)
    with pytest.raises(TypeError, match=r"adapter_dtype=None: 1 is torch\.float64, expected"):
        apply_lora(m, LoRAConfig(target_modules=["1", "2"], fp8=None), adapter_dtype=None)
    assert type(m[1]) is nn.Linear and m[1].weight.requires_grad
