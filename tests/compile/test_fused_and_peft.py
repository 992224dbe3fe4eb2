# SPDX-License-Identifier: Apache-2.0
"""Fused layers and PEFT's layers under torch.compile."""

from __future__ import annotations

import copy

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.testing import assert_close
from transformers import LlamaForCausalLM

from lorakernels import fuse
from tests.compile.models import FP8_ROUNDING, HISTORY, ROUNDING, llama, train
from tests.compile.test_layers import compile_layers

pytestmark = pytest.mark.slow

NAMES = ("q_proj", "k_proj", "v_proj")


def fused(layers=2):
    model, _ = llama(layers)
    fuse(model)
    return model


def test_a_fused_layer_refuses_compile_by_its_name():
    model = fused()
    with pytest.raises(RuntimeError, match=r"model\.layers\.1 is fused and cannot be compiled"):
        model.model.layers[1].compile()
    assert model.model.layers[1]._compiled_call_impl is None


@pytest.mark.slow
def test_a_model_with_fused_layers_compiles_around_them():
    model = fused()
    twin = copy.deepcopy(model)
    torch._dynamo.reset()
    ids = torch.randint(0, 64, (2, 12))
    losses = [
        m(input_ids=ids, labels=ids).loss for m in (model, torch.compile(twin, backend="aot_eager"))
    ]
    for loss in losses:
        loss.backward()
    assert_close(*losses, rtol=0, atol=ROUNDING)
    for (name, own), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        if own.grad is not None:
            assert torch.equal(own.grad, other.grad), name
    torch._dynamo.reset()
    with pytest.raises(Exception, match="FusedLlamaDecoderLayer is fused already"):
        torch.compile(twin, backend="aot_eager", fullgraph=True)(input_ids=ids)


@pytest.mark.slow
def test_peft_s_layers_compile_as_ours():
    """One compilation for any number of layers, also with an FP8State for each, as `register` gives them."""
    peft = pytest.importorskip("peft")
    from lorakernels.integrations.peft import register

    counts = {}
    for layers in (2, 4):
        models = []
        for _ in range(2):
            plain = LlamaForCausalLM(llama(layers)[0].config)
            config = peft.LoraConfig(r=4, target_modules=[*NAMES], init_lora_weights=False)
            models.append(peft.get_peft_model(plain, register(config, fp8=HISTORY)).train())
        counter = CompileCounterWithBackend("aot_eager")
        compile_layers(models[1].base_model.model, counter)
        expected, found = (train(model, None, steps=4) for model in models)
        assert_close(found, expected, rtol=0, atol=FP8_ROUNDING)
        counts[layers] = counter.frame_count
    assert counts == {2: 2, 4: 2}
