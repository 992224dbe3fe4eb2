# SPDX-License-Identifier: Apache-2.0
"""A block-FP8 checkpoint under BlockScaling: its very bytes in the model, and in what is exported."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lorakernels import (
    BlockScaling,
    DelayedScaling,
    FrozenFP8Linear,
    apply_lora,
    export_model,
    merge_lora,
    save_adapter,
    unmerge_lora,
)
from lorakernels.modules.linear.weights import quantize_weight
from lorakernels.numerics.blocks import dequantize_weight_blocks
from lorakernels.values import Weight
from tests.small_checkpoints import LORA, block_fp8, ours

BLOCKS = BlockScaling()
IN_BLOCKS = replace(LORA, fp8=BLOCKS)


def scaled(tensors: dict[str, Tensor], path: str) -> tuple[Tensor, Tensor]:
    return tensors[f"{path}.weight"].view(torch.uint8), tensors[f"{path}.weight_scale_inv"]


def held(layer: FrozenFP8Linear) -> tuple[Tensor, Tensor]:
    return layer.stored.view(torch.uint8), layer.weight_scale_inv


def change(folder: Path, name: str, value: Tensor | None) -> None:
    """Another value for one tensor; None removes it."""
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        if name in tensors:
            tensors[name] = value
            save_file({k: v for k, v in tensors.items() if v is not None}, path, {"format": "pt"})
    index = folder / "model.safetensors.index.json"
    if value is None and index.is_file():
        found = json.loads(index.read_text())
        found["weight_map"].pop(name)
        index.write_text(json.dumps(found))


@pytest.mark.parametrize("same", [True, False], ids=["one scale", "a scale a block"])
def test_every_layer_has_the_file_s_bytes_and_scales(same, tmp_path):
    """Hidden 144 and intermediate 272: no layer is made of whole blocks."""
    tensors = block_fp8(tmp_path, same)
    loaded = ours(tmp_path, lora=IN_BLOCKS)
    assert loaded.fp8_state is None
    layers = {n: m for n, m in loaded.model.named_modules() if isinstance(m, FrozenFP8Linear)}
    assert len(layers) == 14
    for path, layer in layers.items():
        assert all(map(torch.equal, held(layer), scaled(tensors, path))), path
    reasons = {row.reason for row in loaded.report.adapted()}
    assert reasons == {"matches target_modules; FP8 bytes and scales kept"}
    loaded.model(input_ids=torch.arange(24).view(2, 12)).logits.sum().backward()


def test_merging_requantizes_its_blocks_and_unmerging_restores_them(tmp_path):
    tensors = block_fp8(tmp_path, False)
    model = ours(tmp_path, lora=IN_BLOCKS).model
    path = "model.layers.1.mlp.down_proj"
    layer = model.get_submodule(path)
    torch.nn.init.normal_(layer.lora_B, std=0.1)
    total = dequantize_weight_blocks(Weight(*scaled(tensors, path))) + layer.delta_weight()
    merge_lora(model)
    assert all(map(torch.equal, held(layer), quantize_weight(total, BLOCKS)))
    unmerge_lora(model)
    assert all(map(torch.equal, held(layer), scaled(tensors, path)))


def test_exported_in_fp8_an_untouched_layer_has_the_same_bytes(tmp_path):
    """Also where N or K is no multiple of 128: what the base holds in FP8 stays FP8."""
    base, adapter, merged = (tmp_path / name for name in ("base", "adapter", "merged"))
    tensors = block_fp8(base, False)
    model = ours(base, lora=replace(IN_BLOCKS, target_modules=["v_proj"])).model
    for row in (m for n, m in model.named_modules() if n.endswith("v_proj")):
        torch.nn.init.normal_(row.lora_B, std=0.1)
    save_adapter(model, adapter)
    done = export_model(base, adapter, merged, format="fp8")
    assert done.plain == ("lm_head",)
    found: dict[str, Tensor] = {}
    for path in merged.glob("*.safetensors"):
        found |= load_file(path)
    assert found.keys() == tensors.keys()
    for name, value in tensors.items():
        assert found[name].dtype == value.dtype
        is_same = torch.equal(found[name].view(torch.uint8), value.view(torch.uint8))
        assert is_same == (".v_proj." not in name), name
    again = ours(merged, fp8=BLOCKS).model
    merge_lora(model)
    for path in ("model.layers.0.self_attn.v_proj", "model.layers.1.mlp.up_proj"):
        assert all(map(torch.equal, held(again.get_submodule(path)), scaled(found, path)))
        assert all(
            map(torch.equal, held(again.get_submodule(path)), held(model.get_submodule(path)))
        )


def test_a_plain_checkpoint_is_quantized_in_blocks_as_apply_lora_does(tmp_path):
    from tests.small_checkpoints import config, theirs, write_checkpoint

    write_checkpoint(tmp_path, config())
    loaded = ours(tmp_path, lora=IN_BLOCKS)
    torch.manual_seed(5)
    model = theirs(tmp_path, None)
    apply_lora(model, IN_BLOCKS, frozen="fp8")
    for path, layer in model.named_modules():
        if isinstance(layer, FrozenFP8Linear):
            assert all(map(torch.equal, held(layer), held(loaded.model.get_submodule(path)))), path


SCALES = "model.layers.0.mlp.up_proj.weight_scale_inv"  # [3, 2]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.ones(5, 3), r"must be \(3, 2\) for \(272, 144\) in blocks of \(128, 128\), found \(5, 3\)"),
        (-torch.ones(3, 2), "weight_scale_inv must not be negative, found -1.0"),
        (torch.full((3, 2), torch.inf), "must be finite to be held in FP8"),
        (None, "without model.layers.0.mlp.up_proj.weight_scale_inv"),
    ],
    ids=["another block size", "negative", "not finite", "missing"],
)  # fmt: skip
@pytest.mark.parametrize("recipe", [BLOCKS, DelayedScaling()], ids=["blocks", "delayed"])
def test_scales_that_do_not_fit_are_refused(recipe, value, message, tmp_path):
    block_fp8(tmp_path, False)
    change(tmp_path, SCALES, value)
    with pytest.raises(ValueError, match=message):
        ours(tmp_path, fp8=recipe)


def test_blocks_of_another_size_are_refused_by_name(tmp_path):
    block_fp8(tmp_path, True)
    found = json.loads((tmp_path / "config.json").read_text())
    found["quantization_config"]["weight_block_size"] = [64, 64]
    (tmp_path / "config.json").write_text(json.dumps(found))
    for path in tmp_path.glob("*.safetensors"):
        tensors = load_file(path)
        for name in [name for name in tensors if name.endswith("_scale_inv")]:
            tensors[name] = tensors[name].flatten()[:1].clone()
        save_file(tensors, path, {"format": "pt"})
    with pytest.raises(
        ValueError, match=r"must be \(128, 128\) under BlockScaling, found \(64, 64\)"
    ):
        ours(tmp_path, fp8=BLOCKS)


def test_an_offloaded_base_has_the_file_s_bytes_and_computes_the_same(tmp_path):
    tensors, ids = block_fp8(tmp_path, False), torch.arange(24).view(2, 12)
    away, whole = (ours(tmp_path, fp8=BLOCKS, offload=offload) for offload in (0.5, 0.0))
    for path in away.sharded.layers:
        with away.sharded.gathered(path) as weights:
            for name, weight in weights.items():
                found = (
                    weight.view(torch.uint8),
                    away.model.get_submodule(f"{path}.{name}").weight_scale_inv,
                )
                assert all(map(torch.equal, found, scaled(tensors, f"{path}.{name}"))), name
    with torch.no_grad():
        logits = [loaded.model(input_ids=ids).logits for loaded in (away, whole)]
    assert torch.equal(*logits)
