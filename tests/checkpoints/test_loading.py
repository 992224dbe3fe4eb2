# SPDX-License-Identifier: Apache-2.0
"""load_quantized: equal to from_pretrained and apply_lora to the bit; block-FP8, old and synthetic checkpoints."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from lorakernels import FrozenFP8Linear, LoRAConfig, LoRALinear
from lorakernels.checkpoints.base.shards import Directory
from lorakernels.modules.model.convert import per_tensor_weight
from tests.small_checkpoints import (
    LORA,
    assert_equal,
    block_fp8,
    config,
    ours,
    theirs,
    transformers,
    write_checkpoint,
)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("Llama", {}),
        ("Llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
        ("Mistral", {}),
        ("Qwen2", {}),
        ("Qwen3", {"head_dim": 32}),
        ("Gemma2", {"head_dim": 32}),
    ],
    ids=["llama", "llama tied, biases", "mistral", "qwen2", "qwen3", "gemma2"],
)
@pytest.mark.parametrize("targets", [LORA.target_modules, "all-linear"], ids=["some", "all"])
def test_equal_to_from_pretrained_and_apply_lora(kind, changes, targets, tmp_path):
    """fp32 on the disk, so that the rounding to bf16 is part of it; several shards."""
    torch.manual_seed(1)
    made = transformers.AutoModelForCausalLM.from_config(config(kind, **changes))
    made.save_pretrained(tmp_path, max_shard_size="300KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    lora = LoRAConfig(r=4, target_modules=targets)
    loaded = ours(tmp_path, lora=lora, frozen="plain")
    peer = theirs(tmp_path, lora)
    assert_equal(loaded.model, peer)
    assert loaded.model.config._attn_implementation == peer.config._attn_implementation
    assert loaded.report is not None and loaded.fp8_state is loaded.report.fp8_state


@pytest.mark.parametrize("asked", ["argument", "config"])
def test_attention_is_the_one_that_was_asked_for(asked, tmp_path):
    transformers.LlamaForCausalLM(config()).save_pretrained(tmp_path)
    given = {"attn_implementation": "eager"}
    if asked == "config":
        given = {"config": transformers.AutoConfig.from_pretrained(tmp_path, **given)}
    assert ours(tmp_path, **given).model.config._attn_implementation == "eager"


def test_single_file_and_no_adapters(tmp_path):
    transformers.LlamaForCausalLM(config()).save_pretrained(tmp_path)
    loaded = ours(tmp_path, dtype=torch.float32)
    whole = theirs(tmp_path, None, torch.float32)
    layers = {n: m for n, m in loaded.model.named_modules() if isinstance(m, FrozenFP8Linear)}
    assert len(layers) == 14 and type(loaded.model.lm_head) is nn.Linear
    for name, layer in layers.items():
        expected = FrozenFP8Linear.from_linear(whole.get_submodule(name))
        assert torch.equal(layer.stored, expected.stored)
        assert torch.equal(layer.weight_scale_inv, expected.weight_scale_inv)
        assert layer.fp8_state is loaded.fp8_state and not layer.weight.requires_grad


def test_layers_without_adapters_are_fp8_too_and_share_the_state(tmp_path):
    write_checkpoint(tmp_path, config())
    loaded = ours(tmp_path, lora=LORA)
    fp8 = [m for m in loaded.model.modules() if isinstance(m, FrozenFP8Linear)]
    assert len(fp8) == 14 and sum(isinstance(m, LoRALinear) for m in fp8) == 6
    assert all(m.fp8_state is loaded.fp8_state for m in fp8)
    assert sorted(m.column for m in fp8) == list(range(14))
    loaded.model.train()
    loaded.model(input_ids=torch.arange(8)[None]).logits.float().square().mean().backward()
    loaded.fp8_state.reduce_and_update()
    assert (loaded.fp8_state.forward[-1] > 0).all()
    state = loaded.fp8_state
    unused = [n for n, s in zip(state.names, state.backward[-1], strict=True) if not s]
    assert unused == ["model.layers.0.self_attn.k_proj"], "its input needs no gradient"


@pytest.mark.parametrize("same", [True, False], ids=["one scale", "a scale a block"])
def test_block_fp8_checkpoint(same, tmp_path):
    """Against transformers' own FP8Linear, read by apply_lora's code."""
    finegrained = pytest.importorskip("transformers.integrations.finegrained_fp8")
    tensors = block_fp8(tmp_path, same)
    loaded = ours(tmp_path, lora=LORA)
    for path, layer in loaded.model.named_modules():
        if not isinstance(layer, FrozenFP8Linear):
            continue
        weight, scales = tensors[f"{path}.weight"], tensors[f"{path}.weight_scale_inv"]
        made = finegrained.FP8Linear(weight.shape[1], weight.shape[0], block_size=(128, 128))
        made.weight = nn.Parameter(weight, requires_grad=False)
        made.weight_scale_inv = nn.Parameter(scales, requires_grad=False)
        raw, scale_inv = per_tensor_weight(made)
        assert torch.equal(layer.stored.view(torch.uint8), raw), path
        assert torch.equal(layer.weight_scale_inv, scale_inv)
        assert torch.equal(raw, weight.view(torch.uint8)) == same
    assert not hasattr(loaded.model.config, "quantization_config")


def test_the_scale_may_be_in_another_shard(tmp_path):
    block_fp8(tmp_path, True)
    source = Directory(tmp_path)
    apart = [
        n for n, i in source.tensors.items()
        if i.dtype == "F8_E4M3" and source.tensors[f"{n}_scale_inv"].shard != i.shard
    ]  # fmt: skip
    assert apart, "the test needs one"
    ours(tmp_path)


def test_inverse_frequencies_of_old_checkpoints_are_passed_over(tmp_path):
    write_checkpoint(tmp_path, config())
    (path,) = tmp_path.glob("*.safetensors")
    tensors = load_file(path)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(18)
    save_file(tensors, path, {"format": "pt"})
    (tmp_path / "model.safetensors.index.json").unlink(missing_ok=True)
    path.rename(tmp_path / "model.safetensors")
    assert_equal(ours(tmp_path, frozen="plain").model, theirs(tmp_path, None))


def test_generation_config_is_the_directory_s(tmp_path):
    write_checkpoint(tmp_path, config())
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps({"eos_token_id": [5, 6], "do_sample": True, "temperature": 0.6}))
    found = ours(tmp_path).model.generation_config
    assert found.to_dict() == theirs(tmp_path, None).generation_config.to_dict()
    assert found.eos_token_id == [5, 6] and found.temperature == 0.6
    path.write_text("{")
    with pytest.raises(ValueError, match=r"generation_config\.json cannot be read"):
        ours(tmp_path)


def test_synthetic_weights_look_like_an_initialised_model_s(tmp_path):
    """std 0.02 within 5 sigma of its estimate; norms 1; tensors differ from each other and by seed."""
    for seed in (0, 1):
        write_checkpoint(tmp_path / str(seed), config(), seed=seed)
    one, other = (
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / str(seed), dtype=torch.float32)
        for seed in (0, 1)
    )
    q, k = (getattr(one.model.layers[0].self_attn, f"{n}_proj").weight for n in "qo")
    assert abs(q.std().item() / 0.02 - 1) < 5 / (2 * q.numel()) ** 0.5 + 2**-8
    assert (one.model.norm.weight == 1).all() and not torch.equal(q, k)
    assert not torch.equal(q, other.model.layers[0].self_attn.q_proj.weight)
