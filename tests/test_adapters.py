# SPDX-License-Identifier: Apache-2.0
"""Adapter files: PEFT reads ours, we read PEFT's, nothing is half read, half written or run."""

from __future__ import annotations

import copy
import json
import resource
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lorakernels import DelayedScaling, LoRAConfig, LoRALinear, apply_lora, disable_lora, merge_lora
from lorakernels.adapters import load_adapter, save_adapter

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"

CASES = {
    "plain": {"target_modules": ["q", "v"], "r": 3, "lora_alpha": 7},
    "rank and alpha patterns": {
        "target_modules": ["q", "v"],
        "rank_pattern": {"layers.0.q": 5, "^layers.1.v": 1},
        "alpha_pattern": {"v": 11},
    },
    "rslora": {"target_modules": ["q"], "use_rslora": True, "r": 5, "rank_pattern": {"1.q": 2}},
    "scaled": {"target_modules": ["v"], "modules_to_save": ["head", "norm"], "lora_alpha": 16},
    "saved modules": {"target_modules": ["v"], "modules_to_save": ["head", "norm"]},
    "every bias": {"target_modules": ["q", "v"], "bias": "all"},
    "every bias and a saved module": {
        "target_modules": ["q"],
        "bias": "all",
        "modules_to_save": ["head"],
    },
    "adapted biases": {"target_modules": ["q", "v"], "bias": "lora_only"},
    "regex": {"target_modules": r"layers\.\d\.[qv]", "exclude_modules": r".*\.0\.v"},
    "layers": {"target_modules": ["q"], "layers_to_transform": [1], "layers_pattern": "layers"},
    "all-linear": {"target_modules": "all-linear"},
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.v = nn.Linear(12, 20), nn.Linear(20, 12, bias=False)
        self.norm = nn.LayerNorm(12)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.v(torch.tanh(self.q(x))))


class Model(nn.Module):
    def __init__(self, width: int = 7) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(12, width)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def randomize(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.5)


def adapted(base: nn.Module, case: str = "plain", fp8: DelayedScaling | None = None) -> nn.Module:
    model = copy.deepcopy(base)
    apply_lora(model, LoRAConfig(**CASES[case], fp8=fp8))
    randomize(model)
    return model.eval()


def peft_adapted(base: nn.Module, **kwargs) -> nn.Module:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(copy.deepcopy(base), peft.LoraConfig(**kwargs))
    randomize(model)
    return model.eval()


def peft_load(base: nn.Module, folder: Path) -> nn.Module:
    peft = pytest.importorskip("peft")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a missing key is only a warning there
        return peft.PeftModel.from_pretrained(copy.deepcopy(base), folder)


def tensor_bytes(folder: Path) -> dict[str, tuple]:
    tensors = load_file(folder / WEIGHTS)
    return {
        key: (value.dtype, tuple(value.shape), value.view(torch.uint8).numpy().tobytes())
        for key, value in tensors.items()
        if "original_module" not in key and "modules_to_save" not in key
    }


def assert_same_outputs(first: nn.Module, second: nn.Module, fp8: bool = False) -> None:
    x = torch.randn(2, 5, 12)
    # fp32: another order of the same sums; with FP8 both run the same code on the same bytes
    tolerance = {"rtol": 0, "atol": 0} if fp8 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(first(x), second(x), **tolerance)


@pytest.mark.parametrize("case", CASES)
def test_peft_reads_what_we_save(case, tmp_path):
    base = Model()
    ours = adapted(base, case)
    save_adapter(ours, tmp_path / "ours")
    theirs = peft_load(base, tmp_path / "ours")
    assert_same_outputs(ours, theirs)
    theirs.save_pretrained(tmp_path / "theirs")
    assert tensor_bytes(tmp_path / "theirs") == tensor_bytes(tmp_path / "ours")


@pytest.mark.parametrize("case", CASES)
def test_we_read_what_peft_saves(case, tmp_path):
    base = Model()
    theirs = peft_adapted(base, **CASES[case])
    theirs.save_pretrained(tmp_path / "theirs")
    ours = copy.deepcopy(base)
    load_adapter(ours, tmp_path / "theirs", fp8=None, is_trainable=False)
    assert not ours.training and not any(p.requires_grad for p in ours.parameters())
    assert_same_outputs(ours, theirs)
    save_adapter(ours, tmp_path / "ours")
    assert tensor_bytes(tmp_path / "ours") == tensor_bytes(tmp_path / "theirs")


@pytest.mark.parametrize("case", ["plain", "saved modules", "adapted biases"])
def test_fp8_base_saves_and_loads(case, tmp_path):
    base = Model()
    ours = adapted(base, case, fp8=DelayedScaling())
    save_adapter(ours, tmp_path)
    again = copy.deepcopy(base).eval()
    report = load_adapter(again, tmp_path)
    assert report.fp8_state is not None and report.trainable_parameters > 0
    assert_same_outputs(ours, again, fp8=True)


def test_files_are_pefts(tmp_path):
    save_adapter(
        adapted(Model()), tmp_path, base_model_name_or_path="org/base", task_type="CAUSAL_LM"
    )
    text = (tmp_path / CONFIG).read_text()
    config = json.loads(text)
    assert text == json.dumps(config, indent=2, sort_keys=True)
    assert config["base_model_name_or_path"] == "org/base" and config["task_type"] == "CAUSAL_LM"
    assert config["peft_type"] == "LORA" and config["inference_mode"] is True
    header = (tmp_path / WEIGHTS).read_bytes()
    assert b'"__metadata__":{"format":"pt"}' in header
    assert sorted(path.name for path in tmp_path.iterdir()) == [CONFIG, WEIGHTS]
    assert "base_model.model.layers.0.q.lora_A.weight" in load_file(tmp_path / WEIGHTS)


def test_bf16_file_stays_bf16_when_asked(tmp_path):
    base = Model()
    theirs = peft_adapted(base, **CASES["plain"]).to(torch.bfloat16)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = copy.deepcopy(base)
    load_adapter(ours, tmp_path / "theirs", fp8=None, adapter_dtype=None)
    assert ours.layers[0].q.lora_A.dtype == torch.bfloat16
    save_adapter(ours, tmp_path / "ours")
    assert tensor_bytes(tmp_path / "ours") == tensor_bytes(tmp_path / "theirs")


def test_layers_made_by_hand_describe_themselves(tmp_path):
    base = Model()
    base.q = nn.Linear(12, 12)  # a name that is the tail of others
    ours = copy.deepcopy(base)
    ours.q = LoRALinear.from_linear(ours.q, LoRAConfig(r=2, lora_alpha=6, fp8=None))
    ours.layers[1].v = LoRALinear.from_linear(ours.layers[1].v, LoRAConfig(r=5, fp8=None))
    for parameter in (ours.q.lora_B, ours.layers[1].v.lora_B):
        nn.init.normal_(parameter)
    save_adapter(torch.compile(ours), tmp_path)
    theirs = peft_load(base, tmp_path)
    assert_same_outputs(ours, theirs)
    x = torch.randn(3, 12)
    torch.testing.assert_close(ours.q(x), theirs.base_model.model.q(x), rtol=1e-5, atol=1e-5)


def test_loading_over_an_adapter_copies_in_place(tmp_path):
    base = Model()
    saved = adapted(base, "saved modules")
    save_adapter(saved, tmp_path)
    model = adapted(base, "saved modules")
    before = {name: p.data_ptr() for name, p in model.named_parameters()}
    load_adapter(model, tmp_path)
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == before
    assert_same_outputs(model, saved, fp8=True)
    with disable_lora(model):
        assert_same_outputs(model, base)


@pytest.mark.parametrize("bias", ["none", "all", "lora_only"])
def test_the_same_parameters_are_trained_as_in_peft(bias):
    base = Model()
    base.position_bias = nn.Embedding(3, 4)  # "bias" in its path is not a bias
    fields = {"target_modules": ["q"], "bias": bias, "modules_to_save": ["head"]}
    theirs, ours = peft_adapted(base, **fields), copy.deepcopy(base)
    apply_lora(ours, LoRAConfig(**fields, fp8=None))
    trained = {
        name.removeprefix("base_model.model.")
        .replace(".default", "")
        .replace(".base_layer", "")
        .replace(".modules_to_save", "")
        .removesuffix(".weight")
        for name, p in theirs.named_parameters()
        if p.requires_grad and "original_module" not in name
    }
    found = {name.removesuffix(".weight") for name, p in ours.named_parameters() if p.requires_grad}
    assert found == trained


REFUSED = [
    ({"use_dora": True}, "use_dora=True is not supported.*DoRA"),
    ({"alora_invocation_tokens": [5]}, r"alora_invocation_tokens=\[5\]"),
    ({"layer_replication": [[0, 1]]}, "layer_replication"),
    ({"lora_bias": True}, "lora_bias"),
    ({"target_parameters": ["w"]}, "target_parameters"),
    ({"trainable_token_indices": [1]}, "trainable_token_indices"),
    ({"use_qalora": True}, "use_qalora"),
    ({"use_bdlora": {"x": 1}}, "use_bdlora"),
    ({"kasa_config": {"x": 1}}, "kasa_config"),
    ({"init_lora_weights": "pissa_niter_4"}, "'pissa_niter_4'.*changed the base weights"),
    ({"init_lora_weights": "corda"}, "'corda'.*changed the base weights"),
    ({"init_lora_weights": "olora"}, "'olora'.*changed the base weights"),
    ({"init_lora_weights": "loftq"}, "'loftq'.*changed the base weights"),
    ({"peft_type": "IA3"}, "peft_type must be 'LORA', got 'IA3'"),
    ({"peft_type": None}, "peft_type must be 'LORA', got None"),
    ({"r": None}, "r must be set, got null"),
    ({"r": "8"}, "LoRAConfig.r must be an int, got '8'"),
    ({"r": 0}, "LoRAConfig.r must be at least 1"),
    ({"target_modules": ["nothing"]}, "does not fit this model.*matches no module"),
    ({"lora_alpha": 8, "modules_to_save": ["nope"]}, "no module ends with 'nope'"),
]
ACCEPTED = [{"init_lora_weights": "eva"}, {"init_lora_weights": "orthogonal"}, {"later_field": {}}]


def edit_config(folder: Path, change: dict) -> None:
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config | change))


def state_of(model: nn.Module) -> dict:
    return {
        name: (type(module), module.training, sorted(module.__dict__))
        for name, module in model.named_modules()
    } | {name: (p.data_ptr(), p.clone(), p.requires_grad) for name, p in model.named_parameters()}


def assert_refused(model: nn.Module, folder: Path, message: str, error=ValueError) -> None:
    before = state_of(model)
    with pytest.raises(error, match=rf"(?s){message}") as raised:
        load_adapter(model, folder)
    assert str(folder) in str(raised.value)
    after = state_of(model)
    assert before.keys() == after.keys()
    for name, (first, *rest) in before.items():
        assert after[name][0] == first and str(after[name][1:]) == str(tuple(rest)), name


@pytest.mark.parametrize("change, message", REFUSED, ids=lambda value: str(value)[:40])
def test_other_maths_is_refused_by_name(change, message, tmp_path):
    base = Model()
    save_adapter(adapted(base), tmp_path)
    edit_config(tmp_path, change)
    assert_refused(base, tmp_path, message)


@pytest.mark.parametrize("change", ACCEPTED, ids=str)
def test_what_does_not_matter_is_read(change, tmp_path):
    base = Model()
    save_adapter(adapted(base), tmp_path)
    edit_config(tmp_path, change)
    load_adapter(base, tmp_path)


def damage(folder: Path, what: str) -> None:
    weights, config = folder / WEIGHTS, folder / CONFIG
    data, tensors = weights.read_bytes(), load_file(weights)
    first = next(iter(tensors))
    writes = {
        "truncated": lambda: weights.write_bytes(data[: len(data) - 9]),
        "cut in the header": lambda: weights.write_bytes(data[:40]),
        "empty": lambda: weights.write_bytes(b""),
        "header length": lambda: weights.write_bytes(b"\xff" * 8 + data[8:]),
        "header text": lambda: weights.write_bytes(data[:8] + b"\x00" * 50 + data[58:]),
        "a pickle": lambda: weights.write_bytes(b"\x80\x04."),
        "no weights": weights.unlink,
        "only a .bin": lambda: weights.rename(folder / "adapter_model.bin"),
        "no config": config.unlink,
        "config cut": lambda: config.write_text(config.read_text()[:-20]),
        "config no object": lambda: config.write_text("[1]"),
        "config no text": lambda: config.write_bytes(b"\xff\xfe\x00"),
        "a key less": lambda: save_file({k: v for k, v in tensors.items() if k != first}, weights),
        "a key more": lambda: save_file(tensors | {"base_model.model.z": torch.ones(1)}, weights),
        "a shape": lambda: save_file(tensors | {first: torch.ones(3, 13)}, weights),
        "a dtype": lambda: save_file(
            tensors | {first: tensors[first].to(torch.float8_e4m3fn)}, weights
        ),
    }
    writes[what]()


DAMAGED = {
    "truncated": "not a whole safetensors file",
    "cut in the header": "not a whole safetensors file",
    "empty": "not a whole safetensors file",
    "header length": "not a whole safetensors file",
    "header text": "not a whole safetensors file",
    "a pickle": "not a whole safetensors file",
    "no weights": "has no adapter_model.safetensors",
    "only a .bin": "adapter_model.bin is a pickle, which is not read",
    "no config": "has no adapter_config.json",
    "config cut": "adapter_config.json",
    "config no object": "expected a JSON object, found list",
    "config no text": "adapter_config.json",
    "a key less": "does not fit this model:.*1 missing:.*lora_A.weight",
    "a key more": "1 unexpected:.*base_model.model.z",
    "a shape": r"1 of another shape:.*: \(3, 13\), expected \(3, 12\)",
    "a dtype": "1 not float32, bfloat16 or float16:.*float8_e4m3fn",
}


@pytest.mark.parametrize("what", DAMAGED)
@pytest.mark.parametrize("fresh", [True, False], ids=["plain model", "adapted model"])
def test_damaged_files_change_nothing(what, fresh, tmp_path):
    base = Model()
    save_adapter(adapted(base), tmp_path)
    damage(tmp_path, what)
    error = (
        FileNotFoundError if "has no" in DAMAGED[what] or "pickle," in DAMAGED[what] else ValueError
    )
    assert_refused(base if fresh else adapted(base), tmp_path, DAMAGED[what], error)


@pytest.mark.parametrize(
    "model, message",
    [
        (lambda: nn.Sequential(nn.Linear(3, 3)), "does not fit this model.*matches no module"),
        (lambda: Model(width=9), "does not fit this model.*head.weight: .7, 12., expected .9, 12."),
        (lambda: nn.Sequential(Model()), "10 missing.*10 unexpected"),
        (lambda: Model().to("meta"), "layers.0.q.weight is on the meta device"),
        (lambda: adapted(Model(), "scaled"), "layers.0.v has scaling 2, the file's is 1"),
        (lambda: adapted(Model(), "plain"), "4 missing:.*6 unexpected:.*4 of another shape"),
    ],
    ids=["other names", "other width", "one level down", "meta", "other scaling", "other targets"],
)
def test_adapter_for_another_model(model, message, tmp_path):
    save_adapter(adapted(Model(), "saved modules"), tmp_path)
    assert_refused(model(), tmp_path, message)


def test_merged_and_disabled_models_say_so(tmp_path):
    model = adapted(Model())
    save_adapter(model, tmp_path)
    merge_lora(model)
    assert_refused(model, tmp_path, "layers.0.q is merged: call unmerge_lora first")
    before = tensor_bytes(tmp_path)
    save_adapter(model, tmp_path)  # a merged model still has its adapter
    assert tensor_bytes(tmp_path) == before
    with disable_lora(model), pytest.raises(ValueError, match="leave disable_lora first"):
        save_adapter(model, tmp_path)
    with pytest.raises(ValueError, match="Model has no LoRALinear"):
        save_adapter(Model(), tmp_path)


@pytest.mark.parametrize("exists", [True, False], ids=["over an adapter", "new"])
def test_full_disk_leaves_the_old_adapter(exists, tmp_path):
    folder = tmp_path / "adapter"
    first, second = adapted(Model()), adapted(Model())
    if exists:
        save_adapter(first, folder)
    before = {p.name: p.read_bytes() for p in folder.iterdir()} if exists else None
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))  # the kernel refuses the rest
        with pytest.raises(OSError, match="adapter not saved") as raised:
            save_adapter(second, folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert raised.value.filename == str(folder)
    assert ({p.name: p.read_bytes() for p in folder.iterdir()} if exists else None) == before
    assert [p.name for p in tmp_path.iterdir()] == (["adapter"] if exists else [])


def test_a_file_is_not_a_directory(tmp_path):
    (tmp_path / "adapter").write_text("")
    with pytest.raises(OSError, match="is a file, expected a directory"):
        save_adapter(adapted(Model()), tmp_path / "adapter")


def sharded_rank(rank: int, folder: str) -> None:
    """Save from FSDP2 shards, load into other shards; rank 0 also loads into a plain model."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2
    )
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    base = Model(width=8)
    first = adapted(base, "saved modules")
    x = torch.randn(3, 12)
    y = first(x)
    fully_shard(first, mesh=mesh)
    save_adapter(first, f"{folder}/adapter")
    torch.distributed.barrier()
    again = adapted(base, "saved modules")
    fully_shard(again, mesh=mesh)
    load_adapter(again, f"{folder}/adapter")
    plain = copy.deepcopy(base)
    load_adapter(plain, f"{folder}/adapter", fp8=None)
    for model in (again, plain):
        torch.testing.assert_close(model(x), y, rtol=1e-5, atol=1e-5)
    torch.distributed.destroy_process_group()


def test_sharded_parameters_are_saved_whole(tmp_path):
    torch.multiprocessing.spawn(sharded_rank, (str(tmp_path),), nprocs=2)
    assert sorted(p.name for p in (tmp_path / "adapter").iterdir()) == [CONFIG, WEIGHTS]
