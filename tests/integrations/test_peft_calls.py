# SPDX-License-Identifier: Apache-2.0
"""Calls of a PeftModel with `adapter_names` that are refused leave no hook, and a callback tells PEFT's own layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lorakernels import fuse, unfuse

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
from lorakernels.integrations.peft import patch, register  # noqa: E402
from lorakernels.integrations.transformers import LoRAKernelsCallback  # noqa: E402

IDS = torch.randint(64, (2, 6), generator=torch.Generator().manual_seed(5))
NAMES = ["default", "__base__"]


@pytest.fixture
def model() -> Any:
    """Its embedding is PEFT's own layer, and comes before the fused ones."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    base = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**sizes, num_attention_heads=4, use_cache=False)
    )
    config = peft.LoraConfig(target_modules=["embed_tokens", "q_proj"], init_lora_weights=False)
    return peft.get_peft_model(base, register(config, fp8=None)).eval()


def hooks(model: Any) -> list[str]:
    return [name for name, module in model.named_modules() if module._forward_pre_hooks]


@torch.no_grad()
def test_a_fused_model_refuses_before_it_is_hooked(model: Any) -> None:
    mixed = model(IDS, adapter_names=NAMES).logits
    fuse(model)
    before = model(IDS).logits
    for _ in range(2):
        with pytest.raises(ValueError, match=r"q_proj is in a fused layer.*unfuse\(model\) first"):
            model(IDS, adapter_names=NAMES)
        assert hooks(model) == []
    assert torch.equal(model(IDS).logits, before)
    unfuse(model)
    assert torch.equal(model(IDS, adapter_names=NAMES).logits, mixed)


@torch.no_grad()
@pytest.mark.parametrize("call", ["forward", "generate"])
def test_a_call_that_raises_leaves_no_hook(model: Any, call: str) -> None:
    before = model(IDS).logits
    with pytest.raises(ValueError, match="Length of `adapter_names` should be the same"):
        getattr(model, call)(input_ids=IDS, adapter_names=NAMES[:1])
    assert hooks(model) == []
    assert torch.equal(model(IDS).logits, before)


def test_a_call_leaves_the_hooks_that_a_user_has_set(model: Any) -> None:
    layer = model.get_base_model().model.layers[1].self_attn.q_proj
    calls: list[str] = []

    def hook(*_: Any) -> None:
        calls.append("called")
        raise RuntimeError("mine")

    layer.register_forward_pre_hook(hook)
    with pytest.raises(RuntimeError, match="mine"):
        model(IDS, adapter_names=NAMES)
    assert list(layer._forward_pre_hooks.values()) == [hook]
    assert len(hooks(model)) == 1


def test_a_callback_over_peft_s_own_layers_says_what_to_do() -> None:
    peft = pytest.importorskip("peft")
    model = nn.Sequential(nn.Linear(8, 8))
    callback = LoRAKernelsCallback(model)  # adapters may come until training begins
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="call apply_lora first, or, with PEFT, register before"):
        callback.on_train_begin(None, None, None, optimizer=optimizer)
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["0"]))
    for each in (model, wrapped):
        with pytest.raises(
            ValueError, match=r"0 is PEFT's own layer.*register.*before get_peft_model"
        ):
            LoRAKernelsCallback(each)
    patch(wrapped)
    assert LoRAKernelsCallback(wrapped).attached is None
