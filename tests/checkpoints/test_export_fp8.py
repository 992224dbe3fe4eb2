# SPDX-License-Identifier: Apache-2.0
"""export_model(format="fp8"): e4m3 with a scale per block, as transformers and our own loader read it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lorakernels import BlockScaling, DelayedScaling, LoRAConfig, export_model, load_quantized
from lorakernels.numerics.blocks import quantize_weight_blocks
from tests.checkpoints.exported import (
    load_base,
    logits,
    merged_tensors,
    reload,
    tensors_of,
    write_adapter,
    write_base,
)

finegrained = pytest.importorskip("transformers.integrations.finegrained_fp8")

E4M3 = torch.float8_e4m3fn
# Round to nearest of 3 bits of mantissa: 2⁻⁴ of the value, or half a subnormal, 2⁻¹⁰ of the scale_inv
RELATIVE, ABSOLUTE = 2.0**-4, 2.0**-10
BF16 = 2.0**-8


def expand(scales: Tensor, shape: torch.Size) -> Tensor:
    n, k = shape
    return scales.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]


def assert_within_e4m3(raw: Tensor, scales: Tensor, exact: Tensor, also: float = 0.0) -> None:
    """`also`: how far from the fp32 sum `exact` may be, relatively."""
    wide = expand(scales, raw.shape).double()
    error = (raw.double() * wide - exact.double()).abs()
    # 2⁻²³: the quotient by the scale is rounded to fp32 before it is rounded to e4m3
    bound = (1 + also) * (1 + RELATIVE + 2**-23) - 1
    assert bool((error <= exact.double().abs() * bound + ABSOLUTE * wide).all())


@pytest.mark.parametrize("shape", [(128, 128), (256, 384), (200, 144), (1, 129)])
def test_blocks_have_scales_of_their_own(shape):
    weight = torch.randn(shape) * torch.logspace(-3, 3, shape[1])
    weight[:, : min(64, shape[1])] = 0
    weight[0, 0] = 0
    raw, scales = quantize_weight_blocks(weight, (128, 128))
    assert raw.shape == shape and raw.is_contiguous() and raw.dtype == E4M3
    assert scales.shape == (-(-shape[0] // 128), -(-shape[1] // 128)) and bool((scales > 0).all())
    assert_within_e4m3(raw, scales, weight)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            tile = weight[i * 128 : (i + 1) * 128, j * 128 : (j + 1) * 128]
            assert scales[i, j] == tile.abs().max() / 448 or tile.abs().max() == 0


def test_a_block_of_zeros_has_a_scale_of_one():
    raw, scales = quantize_weight_blocks(torch.zeros(130, 128), (128, 128))
    assert torch.equal(scales, torch.ones(2, 1)) and not raw.float().any()


@pytest.fixture
def exported(tmp_path) -> tuple[Path, dict[str, Tensor]]:
    base = write_base(tmp_path / "base")
    model = write_adapter(base, tmp_path / "adapter", target_modules=["q_proj", "down_proj"])
    export_model(base, tmp_path / "adapter", tmp_path / "merged", format="fp8")
    return tmp_path / "merged", merged_tensors(model)


def test_the_files_are_transformers_own_form(exported):
    folder, merged = exported
    found = tensors_of(folder)
    config = json.loads((folder / "config.json").read_text())
    assert config["quantization_config"] == {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head"],
    }
    quantized = {name for name in merged if name.endswith("_proj.weight")}
    assert set(found) == set(merged) | {f"{name}_scale_inv" for name in quantized}
    for name, value in merged.items():
        if name not in quantized:
            assert torch.equal(found[name], value), name
            continue
        assert found[name].dtype == E4M3 and found[f"{name}_scale_inv"].dtype == torch.float32
        assert_within_e4m3(found[name], found[f"{name}_scale_inv"], value, also=BF16)


def test_transformers_modules_take_names_dtypes_and_shapes(exported):
    """The model as transformers builds it for this config on a GPU, without running it."""
    transformers = pytest.importorskip("transformers")
    folder, _ = exported
    config = transformers.AutoConfig.from_pretrained(folder)
    quantization = transformers.FineGrainedFP8Config.from_dict(config.quantization_config)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        finegrained.replace_with_fp8_linear(
            model, quantization.modules_to_not_convert, quantization, pre_quantized=True
        )
    expected = {name: (p.shape, p.dtype) for name, p in model.named_parameters()}
    found = {name: (t.shape, t.dtype) for name, t in tensors_of(folder).items()}
    assert found == expected
    assert sum(isinstance(m, finegrained.FP8Linear) for m in model.modules()) == 14


def test_transformers_reads_it_back(exported):
    """On a CPU transformers dequantizes as it loads."""
    folder, merged = exported
    tensors, again = tensors_of(folder), reload(folder)
    for name, value in again.state_dict().items():
        exact = tensors[name].float()
        if (scales := tensors.get(f"{name}_scale_inv")) is not None:
            exact = exact * expand(scales, exact.shape)
        assert torch.equal(value, exact.bfloat16()), name
    plain = load_base(folder.parent / "base")
    plain.load_state_dict(merged)
    # 2⁻⁴/√3 in norm for each of 14 products, most of which add up like random numbers
    difference = (logits(again) - logits(plain)).norm()
    assert 0 < difference < 2**-4 / 3**0.5 * 14**0.5 * logits(plain).norm()


def test_our_loader_reads_it_back(exported):
    folder, merged = exported
    loaded = load_quantized(folder, device="cpu", progress=False)
    tensors = tensors_of(folder)
    for name, value in merged.items():
        own = loaded.model.get_submodule(name.rpartition(".")[0])
        if f"{name}_scale_inv" not in tensors:
            assert torch.equal(own.weight, value), name
            continue
        exact = tensors[name].float() * expand(tensors[f"{name}_scale_inv"], value.shape)
        # one scale for the whole matrix: rounded to e4m3 once more
        bound = exact.abs() * RELATIVE * (1 + 2**-10) + ABSOLUTE * own.weight_scale_inv
        assert bool(((own.dequantized_weight() - exact).abs() <= bound).all()), name


def test_an_fp8_base_keeps_the_bytes_of_what_is_not_merged(exported, tmp_path):
    folder, _ = exported
    write_adapter(tmp_path / "base", tmp_path / "second", target_modules=["v_proj"])
    export_model(folder, tmp_path / "second", tmp_path / "again", format="fp8")
    before, after = tensors_of(folder), tensors_of(tmp_path / "again")
    assert set(before) == set(after)
    changed = {n for n, v in before.items() if not torch.equal(v.float(), after[n].float())}
    merged = [f"model.layers.{i}.self_attn.v_proj.weight" for i in (0, 1)]
    assert changed == {*merged, *(f"{name}_scale_inv" for name in merged)}
    export_model(folder, tmp_path / "second", tmp_path / "plain")
    for name in merged:
        rounded = tensors_of(tmp_path / "plain")[name]
        assert_within_e4m3(after[name], after[f"{name}_scale_inv"], rounded, also=BF16)


@pytest.fixture
def powers_of_two(exported, tmp_path) -> dict[torch.dtype, Path]:
    """One FP8 base whose scales are powers of two, in each dtype that files store them in. uint8 is e8m0's bytes."""
    folder, _ = exported
    found = {}
    for dtype in (torch.float32, torch.bfloat16, torch.uint8):
        target = found[dtype] = Path(shutil.copytree(folder, tmp_path / str(dtype)))
        for path in target.glob("*.safetensors"):
            tensors = load_file(path)
            for name, scales in tensors.items():
                if name.endswith("_scale_inv"):
                    powers = torch.arange(scales.numel()).view_as(scales) % 5 - 9
                    as_bytes = (powers + 127).to(torch.uint8)
                    is_bytes = dtype == torch.uint8
                    tensors[name] = as_bytes if is_bytes else torch.exp2(powers.float()).to(dtype)
            save_file(tensors, path, {"format": "pt"})
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8], ids=str)
def test_scales_in_fewer_bytes_are_the_same_scales(powers_of_two, dtype, tmp_path):
    """Kept, dequantized to be merged, dequantized to bf16, and loaded with one scale or as they are."""
    one, other = powers_of_two[torch.float32], powers_of_two[dtype]
    write_adapter(tmp_path / "base", tmp_path / "second", target_modules=["v_proj"])
    for format in ("fp8", "bf16"):
        targets = [tmp_path / f"{format} of {folder.name}" for folder in (one, other)]
        for folder, target in zip((one, other), targets, strict=True):
            export_model(folder, tmp_path / "second", target, format=format)
        expected, found = map(tensors_of, targets)
        assert expected.keys() == found.keys()
        for name, value in expected.items():
            assert found[name].dtype == value.dtype and torch.equal(found[name], value), name
    for fp8 in (DelayedScaling(), BlockScaling()):
        lora = LoRAConfig(r=2, target_modules=["q_proj"], fp8=fp8)
        pair = [
            load_quantized(f, lora=lora, device="cpu", progress=False).model for f in (one, other)
        ]
        expected, found = (
            dict(model.named_buffers()) | dict(model.named_parameters()) for model in pair
        )
        for name, value in expected.items():
            if "lora_" not in name:  # A is random
                assert torch.equal(found[name].float(), value.float()), name


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=str)
def test_a_base_with_one_scale_for_a_weight_gets_one_for_each_block(exported, tmp_path, shape):
    folder, _ = exported
    path = tmp_path / "one scale"
    shutil.copytree(folder, path)
    for file in path.glob("*.safetensors"):
        tensors = load_file(file)
        ones = {n: torch.full(shape, 2.0**-9) for n in tensors if n.endswith("_scale_inv")}
        save_file(tensors | ones, file, {"format": "pt"})
    write_adapter(tmp_path / "base", tmp_path / "second", target_modules=["v_proj"])
    export_model(path, tmp_path / "second", tmp_path / "again", format="fp8")
    before, after = tensors_of(path), tensors_of(tmp_path / "again")
    for name, raw in before.items():
        if raw.dtype != E4M3 or "v_proj" in name:
            continue
        assert after[f"{name}_scale_inv"].shape == tuple(-(-size // 128) for size in raw.shape)
        exact = raw.float() * 2.0**-9
        assert_within_e4m3(after[name], after[f"{name}_scale_inv"], exact)


@pytest.mark.parametrize(
    ("sizes", "plain"),
    [
        ({"intermediate_size": 272}, ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]),
        # k and v are 64 wide, and q is packed with them
        ({"num_key_value_heads": 1}, ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]),
    ],
    ids=["partial blocks", "packed with a partial block"],
)
def test_layers_without_whole_blocks_stay_bf16_and_are_named(sizes, plain, tmp_path):
    base = write_base(tmp_path / "base", **sizes)
    model = write_adapter(base, tmp_path / "adapter")
    done = export_model(base, tmp_path / "adapter", tmp_path / "merged", format="fp8")
    expected = [f"model.layers.{i}.{name}" for i in (0, 1) for name in plain] + ["lm_head"]
    assert list(done.plain) == expected
    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert config["quantization_config"]["modules_to_not_convert"] == expected
    found, merged = tensors_of(tmp_path / "merged"), merged_tensors(model)
    for path in expected:
        assert torch.equal(found[f"{path}.weight"], merged[f"{path}.weight"])
    again = reload(tmp_path / "merged")
    assert isinstance(again.model.layers[0].mlp.up_proj, nn.Linear)
    assert bool(logits(again).isfinite().all())


def test_a_model_without_whole_blocks_is_refused(tmp_path):
    base = write_base(tmp_path / "base", hidden_size=96, intermediate_size=272)
    write_adapter(base, tmp_path / "adapter")
    with pytest.raises(ValueError, match=r'no linear layer .* whole 128×128 blocks; take "bf16"'):
        export_model(base, tmp_path / "adapter", tmp_path / "merged", format="fp8")
    assert not (tmp_path / "merged").exists()


@pytest.mark.gpu
def test_transformers_runs_it_on_the_gpu(tmp_path):
    """By its own FP8 kernels; they come from the hub, so that offline only the loading is compared."""
    base = write_base(tmp_path / "base")
    model = write_adapter(base, tmp_path / "adapter")
    export_model(base, tmp_path / "adapter", tmp_path / "merged", format="fp8")
    again = reload(tmp_path / "merged", device_map="cuda")
    found, tensors = again.state_dict(), tensors_of(tmp_path / "merged")
    for name, value in tensors.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name].cpu().view(torch.uint8), value.view(torch.uint8)), name
    assert merged_tensors(model).keys() <= tensors.keys()
