# SPDX-License-Identifier: Apache-2.0
"""from_pretrained(quantization_config=LoRAKernelsConfig()): load_quantized's bytes, through transformers' loader."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lorakernels import (
    BlockScaling,
    DelayedScaling,
    FrozenFP8Linear,
    LoRAConfig,
    LoRALinear,
    apply_lora,
    load_quantized,
)
from lorakernels.modules.linear import frozen

transformers = pytest.importorskip("transformers", minversion="5.0")
from lorakernels.integrations.quantizer import LoRAKernelsConfig  # noqa: E402

AUTO = transformers.AutoModelForCausalLM


@pytest.fixture(params=["llama", "tied, biases"])
def folder(request: Any, tmp_path: Path) -> Path:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 80}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    if request.param == "llama":
        config = transformers.LlamaConfig(**sizes, **heads)
    else:
        config = transformers.Qwen2Config(**sizes, **heads, tie_word_embeddings=True)
    model = AUTO.from_config(config)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    model.to(torch.bfloat16).save_pretrained(tmp_path, max_shard_size="60KB")
    return tmp_path


def loaded(folder: Path, dtype: Any = torch.bfloat16, **options: Any) -> Any:
    return AUTO.from_pretrained(
        folder, dtype=dtype, quantization_config=LoRAKernelsConfig(**options)
    )


def same(one: nn.Module, other: nn.Module) -> None:
    first, second = one.state_dict(), other.state_dict()
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert value.dtype == second[name].dtype, name
        assert torch.equal(value.view(torch.uint8), second[name].view(torch.uint8)), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_bytes_are_those_of_load_quantized(folder: Path, dtype: torch.dtype) -> None:
    model = loaded(folder, dtype)
    expected = load_quantized(folder, device="cpu", dtype=dtype, progress=False)
    same(expected.model, model)
    layers = [m for m in model.modules() if isinstance(m, FrozenFP8Linear)]
    assert len(layers) == 14 and type(model.lm_head) is nn.Linear
    assert len({id(m.fp8_state) for m in layers}) == 1
    assert layers[0].fp8_state.names == expected.fp8_state.names
    ids = torch.arange(24).view(2, 12)
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, expected.model(input_ids=ids).logits)
    assert not model.training and not any(p.is_meta for p in model.parameters())


def test_in_blocks_there_is_no_state(folder: Path) -> None:
    model = loaded(folder, fp8=BlockScaling())
    expected = load_quantized(folder, device="cpu", fp8=BlockScaling(), progress=False)
    same(expected.model, model)
    layers = [m for m in model.modules() if isinstance(m, FrozenFP8Linear)]
    assert len(layers) == 14 and all(m.recipe == BlockScaling() for m in layers)
    assert all(m.fp8_state is None for m in layers)


def test_one_weight_at_a_time_is_in_full_precision(folder: Path, monkeypatch: Any) -> None:
    """When a weight is quantized, no other target has memory of its own in the checkpoint's dtype."""
    seen: list[int] = []
    real = frozen.quantize_weight

    def watched(weight: Any, *blocks: Any) -> Any:
        seen.append(id(weight))
        plain = [m for m in models[-1].modules() if type(m) is nn.Linear] if models else []
        held = [m for m in plain if not m.weight.is_meta and m is not models[-1].lm_head]
        assert held == []
        return real(weight, *blocks)

    models: list[Any] = []
    from lorakernels.integrations import quantizer

    put = quantizer.LoRAKernelsQuantizer.put
    monkeypatch.setattr(
        quantizer.LoRAKernelsQuantizer,
        "put",
        lambda self, model, *rest: (models.append(model), put(self, model, *rest)),
    )
    monkeypatch.setattr(frozen, "quantize_weight", watched)
    loaded(folder)
    assert len(seen) == 14


def test_adapters_train_on_top(folder: Path, tmp_path: Path) -> None:
    model = loaded(folder, torch.float32)
    report = apply_lora(model, LoRAConfig(r=4, target_modules=["q_proj", "down_proj"]))
    expected = load_quantized(folder, device="cpu", dtype=torch.float32, progress=False).model
    same(expected.model.layers[1].mlp.up_proj, model.model.layers[1].mlp.up_proj)
    states = {id(m.fp8_state) for m in model.modules() if isinstance(m, FrozenFP8Linear)}
    assert len(report.adapted()) == 4 and states == {id(report.fp8_state)}
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(80, (8, 12))]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / "run"),
        max_steps=4,
        learning_rate=1e-2,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
    )
    trainer = transformers.Trainer(model.train(), arguments, train_dataset=rows)
    trainer.train()
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    assert len(trained) == 8
    assert all(m.lora_B.any() for m in model.modules() if isinstance(m, LoRALinear))


def test_peft_on_top(folder: Path) -> None:
    peft = pytest.importorskip("peft")
    from lorakernels.integrations.peft import register, report

    model = loaded(folder, torch.float32)
    before = model.model.layers[0].self_attn.q_proj.weight.view(torch.uint8).clone()
    lora = register(peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    wrapped = peft.get_peft_model(model, lora)
    assert len(report(wrapped).fused) == 4
    layer = wrapped.base_model.model.model.layers[0].self_attn.q_proj
    assert torch.equal(layer.base_layer.weight.view(torch.uint8), before)
    ids = torch.arange(24).view(2, 12)
    wrapped.train()(input_ids=ids, labels=ids).loss.backward()
    assert all(p.grad is not None for p in wrapped.parameters() if p.requires_grad)


def test_all_linear_of_peft_on_top(folder: Path) -> None:
    """The layers that PEFT takes of the plain model."""
    peft = pytest.importorskip("peft")
    from lorakernels.integrations.peft import register, report

    def config() -> Any:
        return peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")

    expected = report(peft.get_peft_model(AUTO.from_pretrained(folder), config())).rows
    model = loaded(folder)
    found = report(peft.get_peft_model(model, register(config(), model=model)))
    assert found.fused == [row.name for row in expected] and len(expected) == 14
    with pytest.raises(ValueError, match="all-linear"):
        register(config(), model=nn.Sequential())


def test_what_it_saves_is_a_plain_model(folder: Path, tmp_path: Path) -> None:
    model = loaded(folder)
    assert not getattr(model, "is_quantized", False) and not hasattr(model, "hf_quantizer")
    model.save_pretrained(tmp_path / "saved")
    again = AUTO.from_pretrained(tmp_path / "saved", dtype=torch.bfloat16)
    assert "quantization_config" not in (tmp_path / "saved" / "config.json").read_text()
    for path, layer in model.named_modules():
        if isinstance(layer, FrozenFP8Linear):
            assert torch.equal(
                again.get_submodule(path).weight, layer.dequantized_weight(torch.bfloat16)
            ), path


def test_layers_that_stay_plain(folder: Path) -> None:
    model = loaded(folder, modules_to_not_convert=["down_proj", "0.mlp.up_proj"])
    plain = [n for n, m in model.named_modules() if type(m) is nn.Linear]
    assert plain == [
        "model.layers.0.mlp.up_proj",
        "model.layers.0.mlp.down_proj",
        "model.layers.1.mlp.down_proj",
        "lm_head",
    ]


def test_other_recipes_reach_the_layers(folder: Path) -> None:
    recipe = DelayedScaling(amax_history_len=3)
    state = loaded(folder, fp8=recipe).model.layers[0].self_attn.q_proj.fp8_state
    assert state.recipe == recipe and copy.deepcopy(LoRAKernelsConfig(recipe)).fp8 == recipe


def test_refused(folder: Path) -> None:
    for options, error, message in (
        ({"fp8": None}, TypeError, "fp8 must be a DelayedScaling"),
        ({"modules_to_not_convert": "lm_head"}, TypeError, "must be a list of names"),
    ):
        with pytest.raises(error, match=message):
            LoRAKernelsConfig(**options)
    with pytest.raises(ValueError, match="device_map must not offload"):
        AUTO.from_pretrained(
            folder,
            quantization_config=LoRAKernelsConfig(),
            device_map={"model": "cpu", "lm_head": "disk"},
        )


def test_a_weight_that_is_not_finite_is_refused(folder: Path, tmp_path: Path) -> None:
    model = AUTO.from_pretrained(folder)
    model.model.layers[1].mlp.up_proj.weight.data[3, 5] = float("nan")
    model.save_pretrained(tmp_path / "saved")
    with pytest.raises(RuntimeError, match="conversion of the weights"):  # its report names it
        loaded(tmp_path / "saved")


@pytest.mark.gpu
def test_on_a_gpu_the_device_never_holds_the_model_in_bf16(tmp_path: Path) -> None:
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8}
    config = transformers.LlamaConfig(vocab_size=256, num_attention_heads=8, **sizes)
    AUTO.from_config(config).to(torch.bfloat16).save_pretrained(tmp_path)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model = AUTO.from_pretrained(
        tmp_path, dtype="bfloat16", device_map="cuda", quantization_config=LoRAKernelsConfig()
    )
    weights = sum(m.weight.numel() for m in model.modules() if isinstance(m, FrozenFP8Linear))
    peak = torch.cuda.max_memory_allocated() - before
    assert peak < 1.5 * weights  # bf16 would be 2 × weights; the matrix at hand is in fp32 twice
    expected = load_quantized(tmp_path, device="cuda", progress=False).model
    same(expected, model)
