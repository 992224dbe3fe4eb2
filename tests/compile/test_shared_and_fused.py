# SPDX-License-Identifier: Apache-2.0
"""Groups, fused layers and PEFT's layers under torch.compile."""

from __future__ import annotations

import copy
from unittest import mock

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.testing import assert_close
from transformers import LlamaForCausalLM

from lorakernels import BlockScaling, LoRAConfig, apply_lora, fuse, group_projections
from tests.compile.models import FP8_ROUNDING, HISTORY, ROUNDING, llama, train
from tests.compile.test_layers import compile_layers

pytestmark = pytest.mark.slow

NAMES = ("q_proj", "k_proj", "v_proj")


class Attention(nn.Module):
    """q, k and v of one x, called as a group."""

    def __init__(self):
        super().__init__()
        for name in NAMES:
            setattr(self, name, nn.Linear(32, 32, bias=False))

    def forward(self, x):
        q, k, v = self.q_proj.group(x)
        return torch.tanh(q + 2 * k) * v


def stack(shared_dropout, p, fp8=HISTORY):
    torch.manual_seed(1)
    model = nn.Sequential(*(Attention() for _ in range(3)))
    report = apply_lora(model, LoRAConfig(r=4, lora_dropout=p, target_modules=list(NAMES), fp8=fp8))
    for module in model.modules():
        if hasattr(module, "lora_B"):
            nn.init.normal_(module.lora_B, std=0.2)
    group_projections(model, [NAMES], shared_dropout=shared_dropout)
    return model, report.fp8_state


@pytest.mark.parametrize("shared_dropout", [False, True], ids=["masks apart", "one mask"])
@pytest.mark.parametrize("fp8", [HISTORY, BlockScaling("HYBRID")], ids=["delayed", "blocks"])
def test_groups_share_x_and_one_compilation(fp8, shared_dropout):
    """Eager stacks the adapters where one mask serves all; here each has its own product: fp32 sums in other orders."""
    slot = torch.tensor([11, 12])
    (model, state), (twin, other) = (stack(shared_dropout, 0.3, fp8) for _ in range(2))
    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    for block in twin:
        block.compile(backend=counter, fullgraph=True, dynamic=False)
    with (
        mock.patch("lorakernels.modules.linear.lora.draw_slot", lambda *_: slot.clone()),
        mock.patch("lorakernels.modules.group.layer.traced_slot", lambda *_: slot.clone()),
    ):
        for _ in range(2):
            x = torch.randn(6, 32, requires_grad=True)
            z = x.detach().clone().requires_grad_()
            y, w = model(x), twin(z)
            y.sum().backward()
            w.sum().backward()
            assert_close(w, y, rtol=0, atol=1e-4)
            assert_close(
                z.grad, x.grad, rtol=0, atol=1e-2
            )  # dy turns a rounding of e5m2: 1/8 of it
    if state is not None:
        # all layers' columns of x of the second and third members stay empty, as eagerly
        assert torch.equal(other.forward == 0, state.forward == 0)
        assert other._leader == state._leader == 0
    assert counter.frame_count == 1


@pytest.mark.slow
def test_grouped_layers_train_as_eager_when_compiled_one_by_one():
    (model, state), (twin, other) = llama(p=0.1), llama(p=0.1)
    group_projections(twin, [NAMES])
    compile_layers(twin)
    expected, found = train(model, state, True), train(twin, other, True)
    # k and v quantize x with q's scale, which is of the same x: the same numbers as apart
    assert_close(found[:2], expected[:2], rtol=0, atol=ROUNDING)
    assert_close(found, expected, rtol=0, atol=FP8_ROUNDING)


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
