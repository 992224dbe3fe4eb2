# SPDX-License-Identifier: Apache-2.0
"""load_quantized: equal to from_pretrained + apply_lora to the bit; what it holds meanwhile; what it refuses."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lorakernels import FrozenFP8Linear, LoRAConfig, LoRALinear, apply_lora, load_quantized
from lorakernels.modules.convert import per_tensor_weight
from lorakernels.shards import Directory

transformers = pytest.importorskip("transformers")
pytest.importorskip("numpy", reason="the generator of checkpoints is finetune's")
pytest.importorskip("rich", reason="the generator of checkpoints is finetune's")
from lorakernels.train.synthetic import Synthetic, write_checkpoint  # noqa: E402

LORA = LoRAConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj", "down_proj"])


def config(kind: str = "Llama", **changes: Any) -> Any:
    """Sizes with partial 128 × 128 blocks, biases where the architecture has them."""
    sizes = {
        "vocab_size": 96,
        "hidden_size": 144,
        "intermediate_size": 272,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
        "use_cache": False,
    }
    return getattr(transformers, f"{kind}Config")(**(sizes | changes))


@pytest.fixture(autouse=True)
def quiet():
    transformers.utils.logging.disable_progress_bar()


def theirs(folder: Path, lora: LoRAConfig | None, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    torch.manual_seed(5)
    if lora is not None:
        apply_lora(model, lora)
    return model


def ours(folder: Path, **options: Any) -> Any:
    torch.manual_seed(5)
    return load_quantized(folder, device="cpu", progress=False, **options)


def assert_equal(one: nn.Module, other: nn.Module) -> None:
    """Names, order, dtypes and bits of everything, buffers included; mode, and what trains."""
    for what in ("named_parameters", "named_buffers"):
        found, expected = ({n: t for n, t in getattr(m, what)()} for m in (one, other))
        assert list(found) == list(expected)
        for name, tensor in expected.items():
            assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape, name
            assert found[name].requires_grad == tensor.requires_grad, name
            assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name
    modes = [{n: (type(m), m.training) for n, m in model.named_modules()} for model in (one, other)]
    assert modes[0] == modes[1]
    ids = torch.arange(24).view(2, 12)
    for model in (one, other):
        model.eval()
    with torch.no_grad():
        assert torch.equal(one(input_ids=ids).logits, other(input_ids=ids).logits)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("Llama", {}),
        ("Llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
        ("Mistral", {}),
        ("Qwen2", {}),
        ("Qwen3", {"head_dim": 32}),
    ],
    ids=["llama", "llama tied, biases", "mistral", "qwen2", "qwen3"],
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
    assert_equal(loaded.model, theirs(tmp_path, lora))
    assert loaded.report is not None and loaded.fp8_state is loaded.report.fp8_state


def test_single_file_and_no_adapters(tmp_path):
    transformers.LlamaForCausalLM(config()).save_pretrained(tmp_path)
    loaded = ours(tmp_path, dtype=torch.float32)
    whole = theirs(tmp_path, None, torch.float32)
    layers = {n: m for n, m in loaded.model.named_modules() if isinstance(m, FrozenFP8Linear)}
    assert len(layers) == 14 and type(loaded.model.lm_head) is nn.Linear
    for name, layer in layers.items():
        expected = FrozenFP8Linear.from_linear(whole.get_submodule(name))
        assert torch.equal(layer._stored, expected._stored)
        assert torch.equal(layer.weight_scale_inv, expected.weight_scale_inv)
        assert layer.fp8_state is loaded.fp8_state and not layer.weight.requires_grad


def test_layers_without_adapters_are_fp8_too_and_share_the_state(tmp_path):
    write_checkpoint(tmp_path, config())
    loaded = ours(tmp_path, lora=LORA)
    fp8 = [m for m in loaded.model.modules() if isinstance(m, FrozenFP8Linear)]
    assert len(fp8) == 14 and sum(isinstance(m, LoRALinear) for m in fp8) == 6
    assert all(m.fp8_state is loaded.fp8_state for m in fp8)
    assert sorted(m._column for m in fp8) == list(range(14))
    loaded.model.train()
    loaded.model(input_ids=torch.arange(8)[None]).logits.float().square().mean().backward()
    loaded.fp8_state.reduce_and_update()
    assert (loaded.fp8_state.forward[-1] > 0).all()
    state = loaded.fp8_state
    unused = [n for n, s in zip(state.names, state.backward[-1], strict=True) if not s]
    assert unused == ["model.layers.0.self_attn.k_proj"], "its input needs no gradient"


def block_fp8(folder: Path, same: bool) -> dict[str, Tensor]:
    """A synthetic block-FP8 checkpoint, its scales made unequal unless `same`; its tensors."""
    write_checkpoint(folder, config(), block_fp8=True, shard_bytes=144 * 272)
    tensors: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        part = load_file(path)
        if not same:
            for name in part:
                if name.endswith("_scale_inv"):
                    part[name] = part[name] * torch.rand_like(part[name])
            save_file(part, path, {"format": "pt"})
        tensors |= part
    return tensors


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
        assert torch.equal(layer._stored.view(torch.uint8), raw), path
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


class Live(TorchDispatchMode):
    """Bytes of the storages that ops made and that live, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: set[int] = set()

    def count(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        key = storage.data_ptr()
        if tensor.device.type == "cpu" and key and key not in self._seen:
            self._seen.add(key)
            size = storage.nbytes()
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._forget, key, size)
        return tensor

    def _forget(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, Tensor):
                self.count(tensor)
        return out


class Counting(Directory):
    """Counts open shards and the tensors that were read from them."""

    def __init__(self, path: Path, live: Live) -> None:
        super().__init__(path)
        self.live, self.open_now, self.most_open = live, 0, 0
        self.read: list[weakref.ref[Tensor]] = []
        self.most_read = 0

    def open(self, shard: str) -> Any:
        from contextlib import contextmanager

        outer = super().open

        @contextmanager
        def counted():  # type: ignore[no-untyped-def]
            self.open_now += 1
            self.most_open = max(self.most_open, self.open_now)
            with outer(shard) as get:

                def read(name: str) -> Tensor:
                    tensor = get(name)
                    self.read.append(weakref.ref(tensor))
                    self.most_read = max(self.most_read, sum(r() is not None for r in self.read))
                    return tensor

                yield read
            self.open_now -= 1

        return counted()


def test_one_shard_is_open_one_tensor_is_read_and_one_matrix_is_being_quantized(tmp_path):
    """Everything that ops allocate on the CPU, which is host and device here: the model, its largest matrix in bf16 on
    its way, and 12 bytes an element of it for its quantization (|W|, W · scale, its clamped copy in fp32, FP8)."""
    layers = 12
    write_checkpoint(tmp_path, config(num_hidden_layers=layers), shard_bytes=300_000)
    live = Live()
    source = Counting(tmp_path, live)
    with live:
        loaded = load_quantized(
            source, config=config(num_hidden_layers=layers), device="cpu", progress=False
        )
    assert source.most_open == 1 and source.most_read == 1
    assert source.open_now == 0 and not any(r() is not None for r in source.read)
    held = sum(t.untyped_storage().nbytes() for t in loaded.model.state_dict().values())
    largest = 144 * 272
    assert live.peak <= held + (2 + 12) * largest + 100_000  # the FP8 state, norms, rotary tables
    assert live.peak < held + 2 * sum(i.bytes for i in source.tensors.values()) / layers
    shard = max(map(source.mapped_bytes, source.shards))
    assert shard < loaded.peak_host_bytes <= shard + 2 * largest


def test_loaded_values_do_not_live_in_the_mapped_files(tmp_path):
    write_checkpoint(tmp_path, config())
    loaded = ours(tmp_path)
    before = loaded.model.model.embed_tokens.weight.clone()
    for path in tmp_path.glob("*.safetensors"):
        with path.open("r+b") as file:
            file.seek(2000)
            file.write(b"\xff" * 4000)
    assert torch.equal(loaded.model.model.embed_tokens.weight, before)


def damage(folder: Path, how: str) -> str:
    """Break the checkpoint; what the error must say."""
    shards = sorted(folder.glob("*.safetensors"))
    index = folder / "model.safetensors.index.json"
    if how == "missing shard":
        shards[1].unlink()
        return f"lacks 1 of {len(shards)} files: {shards[1].name}"
    if how == "truncated shard":
        with shards[1].open("r+b") as file:
            file.truncate(shards[1].stat().st_size - 1)
        return f"{shards[1]} is truncated or corrupted"
    if how == "no safetensors":
        for path in [*shards, index]:
            path.unlink()
        return "lacks 1 of 1 files: model.safetensors"
    if how == "index lies":
        table = json.loads(index.read_text())
        table["weight_map"]["model.norm.weight"] = shards[0].name
        index.write_text(json.dumps(table))
        return "lacks 1 tensors of model.safetensors.index.json: model.norm.weight"
    tensors = load_file(shards[-1])
    if how == "missing and unexpected":
        tensors["model.other.weight"] = tensors.pop("model.norm.weight")
        expected = "1 missing (model.norm.weight) and 1 unexpected (model.other.weight)"
    elif how == "wrong shape":
        tensors["model.norm.weight"] = torch.ones(143, dtype=torch.bfloat16)
        expected = "model.norm.weight is [143] in the checkpoint, [144] in the model"
    elif how == "scale without e4m3":
        tensors["lm_head.weight_scale_inv"] = torch.ones(1)
        expected = "lm_head.weight is BF16 with lm_head.weight_scale_inv"
    else:
        name = next(n for n in tensors if n.endswith("mlp.down_proj.weight"))
        tensors[name][3, 5] = float("nan")
        expected = f"{name}: weight must be finite to be held in FP8"
    index.unlink()
    everything: dict[str, Tensor] = {}
    for path in shards[:-1]:
        everything |= load_file(path)
        path.unlink()
    shards[-1].unlink()
    save_file(everything | tensors, folder / "model.safetensors", {"format": "pt"})
    return expected


@pytest.mark.parametrize(
    "how",
    [
        "missing shard",
        "truncated shard",
        "no safetensors",
        "index lies",
        "missing and unexpected",
        "wrong shape",
        "scale without e4m3",
        "not finite",
    ],
)
def test_a_damaged_checkpoint_is_refused(how, tmp_path, monkeypatch):
    """And, but for a value, before any value is read."""
    write_checkpoint(tmp_path, config(), shard_bytes=400_000)
    expected = damage(tmp_path, how)
    read: list[str] = []
    real = Directory.open
    monkeypatch.setattr(Directory, "open", lambda self, s: (read.append(s), real(self, s))[1])
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        ours(tmp_path)
    assert expected in str(caught.value)
    assert bool(read) == (how == "not finite")


def test_inverse_frequencies_of_old_checkpoints_are_passed_over(tmp_path):
    write_checkpoint(tmp_path, config())
    (path,) = tmp_path.glob("*.safetensors")
    tensors = load_file(path)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(18)
    save_file(tensors, path, {"format": "pt"})
    (tmp_path / "model.safetensors.index.json").unlink(missing_ok=True)
    path.rename(tmp_path / "model.safetensors")
    assert_equal(ours(tmp_path, frozen="plain").model, theirs(tmp_path, None))


def test_a_tensor_in_two_shards_is_read_where_the_index_says(tmp_path):
    """Else refused: nothing says which one is meant."""
    write_checkpoint(tmp_path, config(), shard_bytes=400_000)
    index = tmp_path / "model.safetensors.index.json"
    table = json.loads(index.read_text())
    name = "model.layers.0.input_layernorm.weight"
    right = table["weight_map"][name]
    others = sorted(set(table["weight_map"].values()) - {right})
    for shard in others:
        save_file(load_file(tmp_path / shard) | {name: torch.full((144,), 7.0)}, tmp_path / shard)
    assert max(others) > right, "a later file would win"
    assert (ours(tmp_path).model.get_parameter(name) == 1).all()
    del table["weight_map"][name]
    index.write_text(json.dumps(table))
    with pytest.raises(ValueError, match=rf"{name} is in \S+ and in \S+, but not in model"):
        Directory(tmp_path)


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


def test_a_tied_head_that_differs_is_refused(tmp_path):
    made = transformers.LlamaForCausalLM(config(tie_word_embeddings=False))
    made.save_pretrained(tmp_path)
    tied = config(tie_word_embeddings=True)
    with pytest.raises(ValueError, match=r"lm_head.weight differs from model.embed_tokens.weight"):
        ours(tmp_path, config=tied)
    made.lm_head.weight = made.model.embed_tokens.weight
    save_file({n: t.clone() for n, t in made.state_dict().items()}, tmp_path / "model.safetensors")
    model = ours(tmp_path, config=tied).model
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"frozen": "bf16"}, 'must be "fp8" or "plain"'),
        ({"lora": LoRAConfig(target_modules=["q_proj"], fp8=None)}, "lora.fp8 must be"),
        ({"lora": LoRAConfig(target_modules=["x_proj"])}, "matches no module"),
    ],
    ids=["frozen", "no recipe", "no target"],
)
def test_wrong_options_are_refused(options, message, tmp_path):
    write_checkpoint(tmp_path, config())
    with pytest.raises(ValueError, match=message):
        ours(tmp_path, **options)


def test_another_quantization_is_refused(tmp_path):
    made = config()
    made.quantization_config = {"quant_method": "gptq", "bits": 4}
    write_checkpoint(tmp_path, made)
    with pytest.raises(ValueError, match="must be 'fp8', found 'gptq'"):
        ours(tmp_path)


def test_progress_counts_every_byte(tmp_path):
    write_checkpoint(tmp_path, config(), shard_bytes=400_000)
    seen: list[tuple[int, int]] = []
    loaded = load_quantized(tmp_path, device="cpu", progress=lambda *done: seen.append(done))
    total = sum(i.bytes for i in Directory(tmp_path).tensors.values())
    assert seen[-1] == (total, total) and seen == sorted(seen) and loaded.bytes == total
    assert len(seen) == loaded.tensors


# Synthetic checkpoints


def test_shards_that_exist_only_while_they_are_read(tmp_path):
    """The same bits as the written checkpoint, and never two files."""
    write_checkpoint(tmp_path / "whole", config(), shard_bytes=200_000, seed=3)
    source = Synthetic(config(), tmp_path / "passing", shard_bytes=200_000, seed=3)
    most = 0

    def look(done: int, total: int) -> None:
        nonlocal most
        most = max(most, len(list((tmp_path / "passing").iterdir())))

    passing = load_quantized(source, config=config(), device="cpu", progress=look)
    assert_equal(passing.model, ours(tmp_path / "whole").model)
    assert most == 1 and not list((tmp_path / "passing").iterdir()) and len(source.shards) > 2


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


@pytest.mark.gpu
def test_peak_device_memory_is_the_model_and_one_matrix(tmp_path):
    """The largest matrix while it is quantized: bf16, |W| in bf16, then fp32 twice and FP8; 512-byte blocks round
    up."""
    big = config(
        hidden_size=1024, intermediate_size=4096, num_hidden_layers=8, num_attention_heads=8
    )
    source = Synthetic(big, tmp_path, shard_bytes=64 << 20)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loaded = load_quantized(source, config=big, device="cuda", progress=False)
    peak = torch.cuda.max_memory_allocated() - before
    held = torch.cuda.memory_allocated() - before
    weights = sum(t.untyped_storage().nbytes() for t in loaded.model.state_dict().values())
    assert held < weights * 1.01 + (1 << 20)
    assert peak < held + 13 * 1024 * 4096 + (4 << 20)
