# SPDX-License-Identifier: Apache-2.0
"""What `lorakernels finetune` says, in one line each, to input that it cannot use and where something is missing."""

from __future__ import annotations

import errno
import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lorakernels.train.data.packing import attention_mask
from lorakernels.train.errors import ModelError
from lorakernels.train.job import locked
from lorakernels.train.model.checks import check_model
from lorakernels.train.model.model import load_model

Cli = Callable[..., int]


def copy_of(model_dir: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model_dir, tmp_path / "copy"))


def remove_tokenizer(model: Path) -> str:
    for path in model.glob("tokenizer*"):
        path.unlink()
    return "has no tokenizer"


def remove_config(model: Path) -> str:
    (model / "config.json").unlink()
    return "has no config.json"


def break_config(model: Path) -> str:
    (model / "config.json").write_text("{")
    return "config.json is not JSON"


def truncate_weights(model: Path) -> str:
    with (model / "model.safetensors").open("r+b") as file:
        file.truncate(file.seek(0, 2) - 1)
    return "model.safetensors is truncated or corrupted"


def only_a_pickle(model: Path) -> str:
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    return "pytorch_model.bin is a pickle, which could run code"


def missing_shard(model: Path) -> str:
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    return "lacks 1 of 1 files: model-00001-of-00002.safetensors"


def missing_tensor(model: Path) -> str:
    from safetensors.torch import load_file, save_file

    tensors = load_file(model / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    return "lacks tensors of its model: model.layers.1.mlp.up_proj.weight"


def small_vocabulary(model: Path) -> str:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig.from_pretrained(model)
    config.vocab_size = 200
    LlamaForCausalLM(config).save_pretrained(model)
    return "the tokenizer makes token 258, the model knows 200"


def hidden_adapter(model: Path) -> str:
    (model / "adapter_config.json").write_text("{}")
    return "holds an adapter (adapter_config.json)"


def modelopt_s_file(model: Path) -> str:
    """e4m3 weights beside scales that transformers would drop without a word."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(model / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        tensors[f"{name}_scale"] = tensors[name].abs().amax() / 448
        tensors[name] = (tensors[name] / tensors[f"{name}_scale"]).to(torch.float8_e4m3fn)
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    says = {"quantization": {"quant_algo": "FP8"}}
    (model / "hf_quant_config.json").write_text(json.dumps(says))
    return "hf_quant_config.json says that the base's weights are in ModelOpt's format"


BREAKAGES: list[Callable[[Path], str]] = [
    remove_tokenizer, remove_config, break_config, truncate_weights, only_a_pickle, missing_shard, missing_tensor,
    small_vocabulary, hidden_adapter, modelopt_s_file,
]  # fmt: skip


@pytest.mark.parametrize("breakage", BREAKAGES, ids=lambda f: f.__name__)
def test_bad_model_directory(
    cli: Cli, base_args: list[str], model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    breakage: Callable[[Path], str],
) -> None:  # fmt: skip
    model = copy_of(model_dir, tmp_path)
    message = breakage(model)
    assert cli(*base_args, "--output", tmp_path / "out", "--steps", 1, "--model", model) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "code", "message"),
    [
        (["--model", "nowhere"], 1, "model directory nowhere does not exist"),
        (["--data", "nowhere.txt"], 1, "data file nowhere.txt does not exist"),
        (
            ["--seq-len", "200"],
            2,
            "seq_len must be at most 128, the model's max_position_embeddings",
        ),
        (["--target-modules", "q_prj"], 2, "q_prj"),
        (["--device", "tpu"], 2, "device must be auto, cpu, cuda or cuda:N, got 'tpu'"),
        (["--r", "0"], 2, "r must be at least 1, got 0"),
        (["--seed", str(2**63)], 2, "seed must be at least 0 and below"),
        (["--lora-dropout", "1"], 2, "lora_dropout must be at least 0 and below 1"),
    ],
    ids=lambda value: "_".join(value) if isinstance(value, list) else "",
)
def test_bad_arguments(
    cli: Cli, base_args: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str],
    more: list[str], code: int, message: str,
) -> None:  # fmt: skip
    assert cli(*base_args, "--output", tmp_path / "out", "--steps", 1, *more) == code
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out" / "adapter").exists()


def test_model_that_changes_its_logits_is_refused(model_dir: Path) -> None:
    model: Any = load_model(model_dir, torch.float32, torch.device("cpu"))
    check_model(model)
    forward = model.forward

    def capped(**inputs: Any) -> Any:
        output = forward(**inputs)
        output.logits = 0.5 * output.logits
        return output

    model.forward = capped
    with pytest.raises(ModelError, match="changes logits after its output head"):
        check_model(model)


def test_model_that_ignores_the_mask_is_refused(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lorakernels.train.model import model as module

    model: Any = load_model(model_dir, torch.float32, torch.device("cpu"))
    monkeypatch.setattr(
        module, "attention_mask", lambda segments: attention_mask(torch.zeros_like(segments))
    )
    with pytest.raises(ModelError, match="lets packed documents see each other"):
        check_model(model)


def test_full_disk_while_writing_metrics(
    cli: Cli,
    base_args: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from lorakernels.train.run.metrics import MetricsLog

    def full(self: MetricsLog, **_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(self.path))

    monkeypatch.setattr(MetricsLog, "write", full)
    assert cli(*base_args, "--output", tmp_path, "--steps", 1) == 1
    assert re.search(r"no space left while writing .*metrics\.jsonl \(\d", capsys.readouterr().err)


def test_full_disk_while_saving_the_adapter(
    cli: Cli,
    base_args: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import lorakernels

    save = lorakernels.save_adapter

    def full(model: Any, path: Path, **keywords: Any) -> Any:
        if path.name != ".tmp-adapter":
            return save(model, path, **keywords)
        (path / "adapter_model.safetensors").write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    run = [*base_args, "--output", tmp_path, "--steps", 2]
    with monkeypatch.context() as patch:
        patch.setattr(lorakernels, "save_adapter", full)
        assert cli(*run) == 1
    assert "no space left while writing" in capsys.readouterr().err
    assert not [p for p in tmp_path.iterdir() if "adapter" in p.name]
    assert cli(*run, "--resume") == 0, (
        "the last checkpoint is there: nothing has to be trained again"
    )
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()


def test_one_run_per_directory(
    cli: Cli, base_args: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with locked(tmp_path):
        assert cli(*base_args, "--output", tmp_path, "--steps", 1) == 1
    assert f"another run is using {tmp_path}" in capsys.readouterr().err


def test_missing_dependency_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    from lorakernels.train.errors import FinetuneError, require

    monkeypatch.setitem(sys.modules, "rich", None)
    with pytest.raises(
        FinetuneError,
        match=r'pip install "lorakernels\[hf,train\]" \(rich is in the extra "train"\)',
    ):
        require("rich")


@pytest.mark.parametrize("package", ["numpy", "rich", "matplotlib", "transformers"])
def test_a_missing_package_is_one_line(
    cli: Cli, base_args: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch, package: str,
) -> None:  # fmt: skip
    monkeypatch.setitem(sys.modules, package, None)
    assert cli(*base_args, "--output", tmp_path) == 1
    said = capsys.readouterr().err
    assert f"finetune needs {package}, which cannot be imported" in said and said.count("\n") == 1
