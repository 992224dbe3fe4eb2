# SPDX-License-Identifier: Apache-2.0
"""A small Llama, built from a config: Trainer, gradient checkpointing, block-FP8 checkpoints."""

from __future__ import annotations

import copy
import json
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lorakernels import (
    BlockScaling,
    DelayedScaling,
    FrozenFP8Linear,
    LoRAConfig,
    LoRALinear,
    apply_lora,
)
from lorakernels.checkpoints.adapters.files import load_adapter, save_adapter

transformers = pytest.importorskip("transformers")
finegrained = pytest.importorskip("transformers.integrations.finegrained_fp8")
from lorakernels.integrations.transformers import (  # noqa: E402
    AdapterCallback,
    convert_fp8_model,
    frozen_from_fp8_linear,
)
from lorakernels.modules.model.convert import dequantize  # noqa: E402
from tests.interrupt import Interrupt  # noqa: E402

TARGETS = ["q_proj", "v_proj", "down_proj"]
BLOCK = (128, 128)


def llama(**changes) -> nn.Module:
    """Sizes that leave partial 128×128 blocks."""
    sizes = {
        "hidden_size": 144,
        "intermediate_size": 272,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 64,
        "max_position_embeddings": 64,
        "use_cache": False,
    }
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**(sizes | changes)))


def with_lora(model: nn.Module, fp8: DelayedScaling | None = DelayedScaling()) -> nn.Module:  # noqa: B008
    apply_lora(model, LoRAConfig(r=4, lora_dropout=0.1, target_modules=TARGETS, fp8=fp8))
    for module in model.modules():
        if isinstance(module, LoRALinear):
            nn.init.normal_(module.lora_B, std=0.02)
    return model.train()


def tokens(rows: int = 4, length: int = 12) -> Tensor:
    return torch.randint(0, 64, (rows, length))


def gradients(model: nn.Module, ids: Tensor) -> dict[str, Tensor]:
    """Of two microbatches that are in flight at once."""
    torch.manual_seed(3)
    losses = [model(input_ids=part, labels=part).loss for part in ids.chunk(2)]
    sum(losses).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "non-reentrant"])
@pytest.mark.parametrize("fp8", [None, DelayedScaling()], ids=["plain base", "FP8 base"])
def test_gradient_checkpointing_is_bit_equal(use_reentrant, fp8):
    model, ids = with_lora(llama(), fp8), tokens()
    again = copy.deepcopy(model)
    expected = gradients(model, ids)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # transformers 5.23 renames the method
        again.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    again.enable_input_require_grads()
    found = gradients(again, ids)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert gradient.abs().max() > 0 and torch.equal(found[name], gradient), name


def trainer(model: nn.Module, folder: Path, **options) -> transformers.Trainer:
    generator = torch.Generator().manual_seed(0)
    rows = [
        {"input_ids": row, "labels": row}
        for row in torch.randint(0, 8, (24, 12), generator=generator)
    ]
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=6,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        seed=1,
        **options,
    )
    return transformers.Trainer(model, arguments, train_dataset=rows, callbacks=[AdapterCallback()])


def adapter_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def losses_of(run: transformers.Trainer) -> list[float]:
    return [entry["loss"] for entry in run.state.log_history if "loss" in entry]


@pytest.mark.parametrize("sharded", [False, True])
def test_every_rank_saves_a_sharded_adapter(sharded, tmp_path, monkeypatch):
    """Gathering is a collective: rank 0 alone would wait for the others for ever."""
    called = []
    monkeypatch.setattr(
        "lorakernels.integrations.transformers.save_adapter", lambda *args: called.append(args)
    )
    monkeypatch.setattr("lorakernels.integrations.transformers.is_sharded", lambda p: sharded)
    state = transformers.TrainerState(global_step=3, is_world_process_zero=False)
    arguments = transformers.TrainingArguments(str(tmp_path), use_cpu=True)
    AdapterCallback().on_save(arguments, state, None, model=nn.Linear(2, 2))
    assert bool(called) == sharded


def test_trainer_trains_saves_and_resumes(tmp_path):
    base = llama()
    base.save_pretrained(tmp_path / "base")  # a directory, no hub
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", use_cache=False)
    start = with_lora(copy.deepcopy(base))
    model = copy.deepcopy(start)
    frozen = {n: p.clone() for n, p in model.named_parameters() if not p.requires_grad}
    whole = trainer(model, tmp_path / "a", save_steps=3)
    whole.train()
    losses = losses_of(whole)
    assert len(losses) == 6 and losses[-1] < losses[0]
    assert all(torch.equal(dict(model.named_parameters())[n], p) for n, p in frozen.items())

    again = copy.deepcopy(start)
    resumed = trainer(again, tmp_path / "a", save_steps=100)
    resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-3"))
    assert losses_of(resumed)[-3:] == losses[-3:]
    for name, value in adapter_of(model).items():
        assert torch.equal(adapter_of(again)[name], value), name

    loaded = copy.deepcopy(base)
    load_adapter(loaded, tmp_path / "a" / "checkpoint-6" / "adapter")
    for name, value in adapter_of(model).items():
        assert torch.equal(adapter_of(loaded)[name], value), name


def quantize_blocks(weight: Tensor, equal: bool = False) -> tuple[Tensor, Tensor]:
    """e4m3 [N, K] and scale_inv [⌈N/128⌉, ⌈K/128⌉], as block-FP8 checkpoints hold them."""
    blocks = [-(-size // step) for size, step in zip(weight.shape, BLOCK, strict=True)]
    scales = torch.empty(blocks)
    raw = torch.empty_like(weight, dtype=torch.float8_e4m3fn)
    for i in range(blocks[0]):
        for j in range(blocks[1]):
            place = (slice(i * 128, (i + 1) * 128), slice(j * 128, (j + 1) * 128))
            scales[i, j] = (weight if equal else weight[place]).abs().max() / 448
            raw[place] = (weight[place] / scales[i, j]).to(torch.float8_e4m3fn)
    return raw, scales


def fp8_linear(linear: nn.Linear, equal: bool = False) -> nn.Module:
    has_bias = linear.bias is not None
    new = finegrained.FP8Linear(linear.in_features, linear.out_features, block_size=BLOCK)
    raw, scales = quantize_blocks(linear.weight.detach(), equal)
    new.weight = nn.Parameter(raw, requires_grad=False)
    new.weight_scale_inv = nn.Parameter(scales, requires_grad=False)
    new.bias = nn.Parameter(linear.bias.detach().clone()) if has_bias else None
    return new


def block_fp8(model: nn.Module) -> nn.Module:
    """`model` as its block-FP8 checkpoint would be loaded on a GPU, marks included."""
    model = copy.deepcopy(model)
    for path, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and path != "lm_head":
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, fp8_linear(module))
    config = transformers.FineGrainedFP8Config(weight_block_size=BLOCK)
    quantizer = transformers.quantizers.auto.AutoHfQuantizer.from_config(config, pre_quantized=True)
    model.is_quantized, model.quantization_method = True, config.quant_method
    model.hf_quantizer, model.config.quantization_config = quantizer, config
    return model


@pytest.mark.parametrize("bias", [False, True])
def test_one_layer_keeps_its_values(bias):
    linear = nn.Linear(200, 144, bias=bias)
    linear.weight.data[:128, :128] *= 100  # blocks far apart
    old = fp8_linear(linear)
    exact = dequantize(old)
    given = linear.weight.detach()
    rounding = given.abs() * 2.0**-4 + 2.0**-10 * old.weight_scale_inv.max()
    assert bool(((exact - given).abs() <= rounding).all())
    new = frozen_from_fp8_linear(old, DelayedScaling())
    found = new.dequantized_weight()
    # e4m3 rounds to 2**-4 of the value, or to half of its smallest step (2**-10) times the scale
    step = 2.0**-10 * new.weight_scale_inv
    assert bool(((found - exact).abs() <= exact.abs() * 2.0**-4 + step).all())
    assert (new.bias is None) == (not bias) and new.weight.element_size() == 1
    if bias:
        assert torch.equal(new.bias, linear.bias) and not new.bias.requires_grad


def test_equal_blocks_keep_their_bytes():
    old = fp8_linear(nn.Linear(200, 144), equal=True)
    new = frozen_from_fp8_linear(old, DelayedScaling())
    assert torch.equal(new.weight.view(torch.uint8), old.weight.view(torch.uint8))
    assert torch.equal(new.dequantized_weight(), dequantize(old))


def test_blocks_keep_their_bytes_under_block_scaling():
    model = block_fp8(llama())
    old = {
        path: (m.weight.detach().clone(), m.weight_scale_inv.detach().clone())
        for path, m in model.named_modules()
        if isinstance(m, finegrained.FP8Linear)
    }
    paths = convert_fp8_model(model, fp8=BlockScaling())
    report = apply_lora(
        model, LoRAConfig(r=4, target_modules=["q_proj", "down_proj"], fp8=BlockScaling())
    )
    assert len(paths) == len(old) == 14 and report.fp8_state is None
    for path, (weight, scales) in old.items():
        new = model.get_submodule(path)
        assert torch.equal(new.stored, weight.view(torch.uint8))
        assert torch.equal(new.weight_scale_inv, scales)
    model(input_ids=tokens()).logits.sum().backward()


def test_blocks_of_another_size_are_refused_before_a_change():
    old = fp8_linear(nn.Linear(200, 144))
    old.block_size = (200, 128)
    old.weight_scale_inv = nn.Parameter(torch.ones(1, 2), requires_grad=False)
    with pytest.raises(ValueError, match=r"blocks of \(128, 128\) under BlockScaling"):
        frozen_from_fp8_linear(old, BlockScaling())


def test_scales_may_be_powers_of_two_as_bytes():
    old = fp8_linear(nn.Linear(200, 144))
    exponents = torch.randint(-3, 3, old.weight_scale_inv.shape)
    old.weight_scale_inv = nn.Parameter(torch.exp2(exponents), requires_grad=False)
    expected = frozen_from_fp8_linear(old, DelayedScaling())
    stored = (exponents + 127).to(torch.uint8)  # e8m0
    old.weight_scale_inv = nn.Parameter(stored, requires_grad=False)
    found = frozen_from_fp8_linear(old, DelayedScaling())
    assert torch.equal(found.dequantized_weight(), expected.dequantized_weight())
    assert not torch.equal(found.dequantized_weight(), torch.zeros(144, 200))


def test_block_fp8_checkpoint_trains(tmp_path):
    base = llama()
    model = block_fp8(base)
    with pytest.raises(ValueError, match="cannot perform fine-tuning on purely quantized models"):
        trainer(model, tmp_path)
    dense = copy.deepcopy(base)
    for path, module in model.named_modules():
        if isinstance(module, finegrained.FP8Linear):
            dense.get_submodule(path).weight.data = dequantize(module)
    paths = convert_fp8_model(model)
    assert len(paths) == 14
    assert all(type(model.get_submodule(path)) is FrozenFP8Linear for path in paths)
    ids = tokens()
    with torch.no_grad():
        exact, found = dense(input_ids=ids).logits, model.eval()(input_ids=ids).logits
    # two roundings of 2**-4 per product, averaged over K ≥ 144 terms and seven layers in a row
    assert (found - exact).norm() < 0.1 * exact.norm()
    report = apply_lora(model, LoRAConfig(r=4, lora_dropout=0.1, target_modules=TARGETS))
    assert len(report.adapted()) == 6
    run = trainer(model, tmp_path, save_steps=6)
    run.train()
    assert losses_of(run)[-1] < losses_of(run)[0]
    saved = load_file(tmp_path / "checkpoint-6" / "model.safetensors")
    assert saved["model.layers.0.self_attn.q_proj.weight"].dtype == torch.float8_e4m3fn
    written = json.loads((tmp_path / "checkpoint-6" / "config.json").read_text())
    assert "quantization_config" not in written


def test_apply_lora_takes_fp8_linears_itself():
    model = block_fp8(llama())
    layer = model.model.layers[0].self_attn.q_proj
    exact = dequantize(layer)
    apply_lora(model, LoRAConfig(r=4, target_modules=TARGETS))
    found = model.model.layers[0].self_attn.q_proj
    assert isinstance(found, LoRALinear)
    # one more rounding to e4m3: 2**-4 at most for each weight
    assert (found.dequantized_weight() - exact).norm() < 2.0**-4 * exact.norm()


def test_adapter_of_the_dense_model_fits_the_fp8_one(tmp_path):
    base = llama()
    save_adapter(with_lora(copy.deepcopy(base), fp8=None), tmp_path)
    model = block_fp8(base)
    convert_fp8_model(model)
    load_adapter(model, tmp_path)
    lora_b = model.model.layers[1].mlp.down_proj.lora_B
    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert torch.equal(lora_b, saved["base_model.model.model.layers.1.mlp.down_proj.lora_B.weight"])


def break_scales(model: nn.Module) -> None:
    model.model.layers[1].mlp.up_proj.weight_scale_inv = nn.Parameter(torch.ones(2, 2))


def break_dtype(model: nn.Module) -> None:
    weight = torch.zeros(272, 72, dtype=torch.int8)
    model.model.layers[1].mlp.up_proj.weight = nn.Parameter(weight, requires_grad=False)


def break_bytes(model: nn.Module, byte: int) -> None:
    model.model.layers[1].mlp.up_proj.weight.data.view(torch.uint8)[3, 5] = byte


def break_scale(model: nn.Module, value: float) -> None:
    scales = model.model.layers[1].mlp.up_proj.weight_scale_inv.data
    scales[-1, -1] = value


FINITE = r"up_proj.weight must be finite to be held in FP8, found inf or NaN"


@pytest.mark.parametrize("how", ["convert_fp8_model", "apply_lora"])
@pytest.mark.parametrize(
    "change",
    [
        partial(break_bytes, byte=0x7F),
        partial(break_bytes, byte=0xFF),
        partial(break_scale, value=float("nan")),
        partial(break_scale, value=3e38),
    ],
    ids=["NaN", "-NaN", "scale", "product"],
)
def test_block_fp8_that_is_not_finite_changes_nothing(change, how):
    model = block_fp8(llama())
    change(model)
    before = {name: type(module) for name, module in model.named_modules()}
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\." + FINITE):
        if how == "apply_lora":
            apply_lora(model, LoRAConfig(target_modules=["q_proj", "up_proj"]))
        else:
            convert_fp8_model(model)
    assert {name: type(module) for name, module in model.named_modules()} == before
    assert model.is_quantized and model.model.norm.weight.requires_grad


@pytest.mark.parametrize("at", [1, 20, 60])
def test_a_conversion_that_is_interrupted_leaves_the_model_as_it_was(at):
    model = block_fp8(llama())
    before = dict(model.named_modules())
    ids = tokens(1)
    with pytest.raises(KeyboardInterrupt), Interrupt(at):
        convert_fp8_model(model)
    assert dict(model.named_modules()) == before
    assert model.is_quantized and model.hf_quantizer is not None
    assert model.config.quantization_config is not None
    convert_fp8_model(model)
    assert model.eval()(input_ids=ids).logits.isfinite().all()


@pytest.mark.parametrize(
    "change, error, message",
    [
        (break_scales, ValueError, r"up_proj.weight_scale_inv must be \(3, 2\).*found \(2, 2\)"),
        (break_dtype, TypeError, "up_proj.weight must be float8_e4m3fn, found torch.int8"),
    ],
)
def test_bad_checkpoint_changes_nothing(change, error, message):
    model = block_fp8(llama())
    change(model)
    before = {name: type(module) for name, module in model.named_modules()}
    with pytest.raises(error, match=message):
        convert_fp8_model(model)
    assert {name: type(module) for name, module in model.named_modules()} == before
    assert model.is_quantized


def test_nothing_to_convert():
    with pytest.raises(ValueError, match="LlamaForCausalLM has no FP8Linear"):
        convert_fp8_model(llama())
    with pytest.raises(TypeError, match="fp8 must be a DelayedScaling or a BlockScaling, got None"):
        convert_fp8_model(block_fp8(llama()), fp8=None)


@pytest.mark.gpu
def test_block_fp8_directory_loads_and_trains_on_the_gpu(tmp_path):
    base = llama(hidden_size=256, intermediate_size=512).to(torch.bfloat16)
    base.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for key in [key for key in tensors if key.endswith("_proj.weight")]:
        raw, scales = quantize_blocks(tensors[key].float())
        tensors |= {key: raw, key.replace(".weight", ".weight_scale_inv"): scales}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "weight_block_size": list(BLOCK),
        "activation_scheme": "dynamic",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, device_map="cuda")
    assert len(convert_fp8_model(model)) == 14
    with_lora(model)
    ids = tokens().cuda()
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    losses = []
    for _ in range(10):
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
