# SPDX-License-Identifier: Apache-2.0
"""load_quantized of Mixtral's and Qwen3-MoE's checkpoints, which have each expert's matrices one by one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

transformers = pytest.importorskip("transformers")

from lorakernels import (  # noqa: E402
    BlockScaling,
    LoRAConfig,
    LoRALinear,
    apply_lora,
    load_adapter,
    load_quantized,
    save_adapter,
)
from lorakernels.modules.linear.frozen import FrozenFP8Linear  # noqa: E402
from tests.modules.test_experts import BOTH, FAMILIES, IDS  # noqa: E402
from tests.small_checkpoints import assert_equal  # noqa: E402

NAMED = {"r": 4, "target_modules": ["q_proj"], "target_parameters": BOTH}


def saved(family: str, folder: Path, **options: Any) -> nn.Module:
    model = FAMILIES[family]()
    model.save_pretrained(folder, **options)
    return model


def load(folder: Path, **options: Any) -> Any:
    torch.manual_seed(5)
    given = {"device": "cpu", "dtype": torch.float32, "progress": False, **options}
    return load_quantized(folder, **given)


def adapters(model: nn.Module) -> dict[str, LoRALinear]:
    return {path: m for path, m in model.named_modules() if isinstance(m, LoRALinear)}


@pytest.mark.parametrize("shards", ["one file", "many files"])
@pytest.mark.parametrize("family", FAMILIES)
def test_it_is_from_pretrained_and_apply_lora_to_the_bit(
    family: str, shards: str, tmp_path: Path
) -> None:
    """In many files, the parts of a layer lie apart."""
    expected = saved(family, tmp_path, max_shard_size="50GB" if shards == "one file" else "9KB")
    loaded = load(tmp_path, lora=LoRAConfig(**NAMED), frozen="plain")
    torch.manual_seed(5)
    apply_lora(expected, LoRAConfig(**NAMED))
    theirs, ours = adapters(expected), adapters(loaded.model)
    assert list(ours) == list(theirs) and len(ours) > 16
    for path, layer in theirs.items():
        assert torch.equal(ours[path].stored, layer.stored), path
        assert torch.equal(ours[path].lora_A, layer.lora_A), path
    assert torch.equal(loaded.model(IDS).logits, expected(IDS).logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_without_an_adapter_are_held_in_fp8(family: str, tmp_path: Path) -> None:
    """e4m3 has three bits behind the leading one: half a step is 2⁻⁴ of the value, or 2⁻¹⁰ where 448 is the amax."""
    expected = saved(family, tmp_path).model.layers[0].mlp.experts
    experts = load(tmp_path).model.model.layers[0].mlp.experts
    for name in ("gate_up_proj", "down_proj"):
        stacked = getattr(expected, name)
        for layer, weight in zip(getattr(experts, name), stacked, strict=True):
            assert isinstance(layer, FrozenFP8Linear)
            error = (layer.dequantized_weight(torch.float32) - weight).abs()
            assert (error <= weight.abs() * 2**-4 + weight.abs().max() / 448 * 2**-10).all()


@pytest.mark.parametrize("frozen", ["fp8", "plain"])
@pytest.mark.parametrize("family", FAMILIES)
def test_without_target_parameters_experts_are_plain_stacks(
    family: str, frozen: str, tmp_path: Path
) -> None:
    """As from_pretrained and apply_lora have them, to the bit."""
    saved(family, tmp_path, max_shard_size="9KB")
    lora = LoRAConfig(r=4, target_modules=["q_proj"])
    ours = load(tmp_path, lora=lora, frozen=frozen, dtype=torch.bfloat16).model
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    torch.manual_seed(5)
    apply_lora(theirs, lora, frozen=frozen)
    assert_equal(ours, theirs)


def test_deepseek_s_correction_bias_stays_in_fp32(tmp_path: Path) -> None:
    config = transformers.DeepseekV3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        n_routed_experts=4,
        n_group=2,
        topk_group=1,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
    )
    made = transformers.DeepseekV3ForCausalLM(config)
    bias = made.model.layers[1].mlp.gate.e_score_correction_bias
    nn.init.normal_(bias)
    made.save_pretrained(tmp_path)
    lora = LoRAConfig(r=4, target_modules=["o_proj"])
    ours = load(tmp_path, lora=lora, frozen="plain", dtype=torch.bfloat16).model
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    torch.manual_seed(5)
    apply_lora(theirs, lora)
    assert_equal(ours, theirs)
    assert torch.equal(ours.model.layers[1].mlp.gate.e_score_correction_bias, bias)


def test_one_stack_alone_is_adapted_and_the_other_one_held(tmp_path: Path) -> None:
    """Plain where nothing else is held in FP8, and then not stacked again: one half has adapters."""
    saved("Mixtral", tmp_path)
    lora = LoRAConfig(r=4, target_parameters=BOTH[1:])
    for frozen, kind in (("fp8", FrozenFP8Linear), ("plain", nn.Linear)):
        experts = load(tmp_path, lora=lora, frozen=frozen).model.model.layers[0].mlp.experts
        assert all(type(m) is kind for m in experts.gate_up_proj)
        assert all(isinstance(m, LoRALinear) for m in experts.down_proj)


def test_an_adapter_loads_over_experts_that_are_held_already(tmp_path: Path) -> None:
    saved("Mixtral", tmp_path / "base")
    first = load(tmp_path / "base", lora=LoRAConfig(**NAMED)).model
    for layer in adapters(first).values():
        nn.init.normal_(layer.lora_B, std=0.1)
    save_adapter(first, tmp_path / "adapter")
    again = load(tmp_path / "base").model
    load_adapter(again, tmp_path / "adapter")
    assert torch.equal(again(IDS).logits, first(IDS).logits)


def in_blocks(folder: Path) -> dict[str, torch.Tensor]:
    """Make the checkpoint's experts block-FP8, with scales that are powers of two; returns its tensors."""
    tensors = load_file(folder / "model.safetensors")
    for name in [n for n in tensors if ".experts." in n]:
        n, k = tensors[name].shape
        tensors[name] = (tensors[name] * 16).to(torch.float8_e4m3fn)
        scales = torch.full((-(-n // 128), -(-k // 128)), 1 / 16)
        tensors[f"{name}_scale_inv"] = scales
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    quantized = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantized}))
    return tensors


def wide(folder: Path, ffn: int) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = transformers.MixtralConfig(
        vocab_size=64, intermediate_size=ffn, num_key_value_heads=2, num_local_experts=2, **sizes
    )
    transformers.MixtralForCausalLM(config).save_pretrained(folder)


def test_block_fp8_experts_keep_their_bytes(tmp_path: Path) -> None:
    wide(tmp_path, 256)
    tensors = in_blocks(tmp_path)
    model = load(tmp_path, fp8=BlockScaling()).model
    layer = model.model.layers[0].mlp.experts.gate_up_proj[1]
    parts = [
        tensors[f"model.layers.0.block_sparse_moe.experts.1.{part}.weight"] for part in ("w1", "w3")
    ]
    assert torch.equal(layer.stored.view(torch.uint8), torch.cat(parts).view(torch.uint8))
    assert layer.weight_scale_inv.shape == (4, 1)


def test_a_border_inside_a_block_is_refused(tmp_path: Path) -> None:
    wide(tmp_path, 192)
    in_blocks(tmp_path)
    with pytest.raises(ValueError, match="192 rows, expected a multiple of the block's 128"):
        load(tmp_path)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=str)
def test_one_scale_for_each_matrix_becomes_one_for_each_block(
    shape: tuple[int, ...], tmp_path: Path
) -> None:
    """w1 and w3 lie in one layer and have scales of their own. The scale of an input is left out."""
    wide(tmp_path, 256)
    tensors, expected = in_blocks(tmp_path), []
    for part, scale in {"w1": 1 / 16, "w2": 1 / 8, "w3": 1 / 4}.items():
        for name in [n for n in tensors if n.endswith(f".{part}.weight")]:
            tensors[f"{name}_scale_inv"] = torch.full(shape, scale)
            tensors[name.replace("weight", "activation_scale")] = torch.tensor(0.5)
        if part != "w2":
            weight = tensors[f"model.layers.0.block_sparse_moe.experts.1.{part}.weight"]
            expected.append(weight.float() * scale)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded = load(tmp_path, frozen="plain")
    experts = loaded.model.model.layers[0].mlp.experts
    assert torch.equal(experts.gate_up_proj[1], torch.cat(expected))
    assert len(loaded.left_out) == 4
    assert all(name.endswith("activation_scale") for name in loaded.left_out)


def without(folder: Path, part: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors = {name: value for name, value in tensors.items() if part not in name}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    saved("Mixtral", tmp_path)
    without(tmp_path, "layers.1.block_sparse_moe.experts.2.w3")
    with pytest.raises(
        ValueError, match=r"gate_up_proj\.2\.weight must be of 2 tensors.*experts\.2\.w1"
    ):
        load(tmp_path)
    saved("Mixtral", tmp_path)
    without(tmp_path, "layers.1.block_sparse_moe.experts.2.w2")
    with pytest.raises(
        ValueError, match=r"1 missing \(model.layers.1.mlp.experts.down_proj.2.weight"
    ):
        load(tmp_path)


def test_offload_is_refused(tmp_path: Path) -> None:
    saved("Mixtral", tmp_path)
    with pytest.raises(ValueError, match="takes no mixture of experts: leave out mesh, offload"):
        load(tmp_path, offload=0.5)
