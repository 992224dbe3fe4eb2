# SPDX-License-Identifier: Apache-2.0
"""PEFT over linear layers that a tool has quantized: their weight means nothing without its scales."""

from __future__ import annotations

import pytest
import torch
from torch import nn

peft = pytest.importorskip("peft")
from lorakernels.integrations.peft import patch  # noqa: E402
from tests.integrations.test_peft import FP8, FP32, MLP, config, layer_of, pair  # noqa: E402


def test_a_base_that_dequantizes_in_its_own_forward_is_left_to_peft():
    """As compressed-tensors does: the weight alone means nothing."""
    _, ours = pair()
    layer = layer_of(ours).eval()
    x = torch.randn(3, 10)
    expected = layer(x)
    base = layer.base_layer
    base.weight.data /= 4
    base.register_buffer("weight_scale", torch.tensor(4.0))
    base.forward = lambda x: nn.functional.linear(x, base.weight * base.weight_scale, base.bias)
    assert layer.lorakernels_path == "peft: the base layer is a Linear with a forward of its own"
    torch.testing.assert_close(layer(x), expected, **FP32)


def test_a_quantized_base_is_not_held_in_fp8_without_its_scales():
    model = peft.get_peft_model(MLP(), config())
    base = layer_of(model).base_layer
    base.register_buffer("weight_scale", torch.tensor(4.0))
    with pytest.raises(TypeError, match="lin0: its weight is quantized, with weight_scale"):
        patch(model, fp8=FP8)
    del base.weight_scale
    base.weight = nn.Parameter(base.weight.data.to(torch.float8_e4m3fn), requires_grad=False)
    with pytest.raises(TypeError, match=r"lin0: its weight must be plain .*found torch\.float8"):
        patch(model, fp8=FP8)
    assert type(layer_of(model)) is peft.tuners.lora.Linear
