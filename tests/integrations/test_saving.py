# SPDX-License-Identifier: Apache-2.0
"""transformers' save_pretrained of models with our layers: what comes back from the directory."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import warnings
import weakref

import pytest
import torch
from torch import Tensor, nn

from lorakernels import (
    DelayedScaling,
    LoRAConfig,
    apply_lora,
    fuse,
    load_quantized,
    merge_and_unload,
    merge_lora,
    unload,
    unmerge_lora,
)
from tests.fusion.fused_models import adapted, tokens

transformers = pytest.importorskip("transformers")
transformers.utils.logging.disable_progress_bar()

FP8 = DelayedScaling()
BASES = pytest.mark.parametrize("fp8", [None, FP8], ids=["plain base", "FP8 base"])


def llama(fp8: DelayedScaling | None, **options) -> nn.Module:
    model = adapted("Llama", fp8=fp8, dtype=torch.bfloat16, **options)
    rotary = model.model.rotary_emb  # its frequencies are fp32 in a model that was loaded
    model.model.rotary_emb = type(rotary)(model.config)
    return model.eval()


def logits(model: nn.Module, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(input_ids=ids).logits


def reload(folder) -> nn.Module:
    """As transformers reads it; what it would only warn of is an error."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype="auto", output_loading_info=True
    )
    assert not any(info.values()), info
    return model


@BASES
@pytest.mark.parametrize("fused", [False, True], ids=["not fused", "fused"])
@pytest.mark.parametrize("how", ["merge_lora", "merge_and_unload"])
def test_what_is_saved_merged_is_the_merged_model(how, fused, fp8, tmp_path):
    model, ids = llama(fp8), tokens()
    if fused:
        fuse(model, keep_linears=how == "merge_and_unload")
    exact = merge_and_unload(copy.deepcopy(model))
    before = logits(model, ids)
    {"merge_lora": merge_lora, "merge_and_unload": merge_and_unload}[how](model)
    merged = logits(model, ids)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.save_pretrained(tmp_path)
    found = logits(reload(tmp_path), ids)
    assert torch.equal(found, logits(exact, ids)), "with FP8, what merge_and_unload gives"
    if fp8 is None and not fused:
        assert torch.equal(found, merged)
    # bf16 rounds each product by 2⁻⁸; e4m3 rounds x and W by 2⁻⁴ each, through fourteen products in two layers
    assert (found - before).norm() < (2**-3 if fp8 else 2**-6) * before.norm()
    assert torch.equal(logits(model, ids), merged), "saving changes nothing"
    assert ("save_pretrained" in vars(model)) == (how == "merge_lora"), "a plain model has its own"


def test_frozen_fp8_layers_without_an_adapter_are_saved_plain(tmp_path):
    base = llama(None)
    unload(base).save_pretrained(tmp_path / "base")
    model = load_quantized(tmp_path / "base", device="cpu", progress=False).model
    model.save_pretrained(tmp_path / "saved")
    expected = unload(copy.deepcopy(model))
    ids = tokens()
    assert torch.equal(logits(reload(tmp_path / "saved"), ids), logits(expected, ids))


@BASES
def test_what_is_not_merged_is_called_a_checkpoint(fp8, tmp_path):
    model = llama(fp8)
    with pytest.warns(UserWarning, match=r"base and adapter apart.*merge_and_unload"):
        model.save_pretrained(tmp_path)
    merge_lora(model)
    unmerge_lora(model)
    with pytest.warns(UserWarning, match="base and adapter apart"):
        model.save_pretrained(tmp_path)


def test_fp8_values_given_as_a_state_dict_are_refused(tmp_path):
    model = llama(FP8)
    merge_lora(model)
    with pytest.raises(ValueError, match=r"found FP8 in 8 \(the first is .*q_proj.weight"):
        model.save_pretrained(tmp_path / "a", state_dict=model.state_dict())
    assert not (tmp_path / "a").exists()


def through_pickle(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


def through_torch(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


@pytest.mark.parametrize("how", [copy.deepcopy, through_pickle, through_torch])
def test_a_copy_saves_itself_and_not_the_one_it_was_made_of(how, tmp_path):
    model, ids = llama(None), tokens()
    twin = how(model)
    with torch.no_grad():
        twin.model.layers[0].self_attn.q_proj.lora_B.add_(1)
    merge_lora(twin)
    twin.save_pretrained(tmp_path)
    assert torch.equal(logits(reload(tmp_path), ids), logits(twin, ids))
    there = weakref.ref(model)
    gc.collect()
    gc.disable()
    try:
        del model
        assert there() is None, "no cycle keeps a model and its memory"
    finally:
        gc.enable()


@pytest.mark.parametrize("what", ["an adapted head", "a trained head", "a trained embedding"])
def test_tied_embeddings_that_came_apart_are_saved_apart(what, tmp_path):
    model, ids = transformers.LlamaForCausalLM(small(tie_word_embeddings=True)).eval(), tokens()
    options = {
        "an adapted head": {"target_modules": ["q_proj", "lm_head"]},
        "a trained head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
        "a trained embedding": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    }[what]
    apply_lora(model, LoRAConfig(r=4, fp8=None, **options))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    for merge in (merge_lora, merge_and_unload):
        merge(model)
        before = model.config.tie_word_embeddings
        assert before == (merge is merge_lora)
        model.save_pretrained(tmp_path)
        assert model.config.tie_word_embeddings == before, "saving changes nothing"
        again = reload(tmp_path)
        assert not again.config.tie_word_embeddings
        assert torch.equal(logits(again, ids), logits(model, ids))


def small(**options):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    return transformers.LlamaConfig(vocab_size=64, num_attention_heads=4, **sizes, **options)


def test_tied_embeddings_that_stay_tied_are_saved_once(tmp_path):
    model = transformers.LlamaForCausalLM(small(tie_word_embeddings=True)).eval()
    apply_lora(model, LoRAConfig(r=4, target_modules=["q_proj"]))
    merge_lora(model)
    model.save_pretrained(tmp_path)
    again = reload(tmp_path)
    assert again.config.tie_word_embeddings and model.config.tie_word_embeddings
    assert again.lm_head.weight is again.model.embed_tokens.weight


def test_a_save_pretrained_set_on_the_instance_stays(tmp_path):
    model, calls = transformers.LlamaForCausalLM(small()), []
    model.save_pretrained = own = lambda path: calls.append(path)
    apply_lora(model, LoRAConfig(r=2, target_modules=["q_proj"]))
    model.save_pretrained(tmp_path)
    merge_and_unload(model)
    assert calls == [tmp_path] and model.save_pretrained is own
