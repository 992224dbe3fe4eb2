# SPDX-License-Identifier: Apache-2.0
"""What config.json shows is said before a weight is read, and no model is loaded twice."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lorakernels import LoRAConfig
from lorakernels.train import adapted, job
from lorakernels.train.errors import ModelError, OptionError
from lorakernels.train.model.preflight import check_before_loading
from lorakernels.train.options.options import FinetuneOptions
from lorakernels.train.run.reporter import Reporter

Cli = Callable[..., int]
ALL = LoRAConfig(r=2, target_modules="all-linear")


def config_only(tmp_path: Path, kind: str, **fields: Any) -> Path:
    from transformers import AutoConfig

    AutoConfig.for_model(kind, num_hidden_layers=2, **fields).save_pretrained(tmp_path)
    return tmp_path


def before_loading(directory: Path, seq_len: int = 32) -> list[str]:
    said: list[str] = []
    check_before_loading(directory, FinetuneOptions(seq_len=seq_len), ALL, said.append)
    return said


def test_files_in_the_place_of_a_merged_model_are_refused_before_training(
    model_dir: Path, tmp_path: Path
) -> None:
    """They are not a model that may be replaced, which the end of the run would find."""
    (tmp_path / "merged").mkdir()
    (tmp_path / "merged" / "notes.txt").write_text("mine")
    options = FinetuneOptions(seq_len=32, output=str(tmp_path), merge="bf16")
    with pytest.raises(
        OptionError, match=r"merge: output .*merged holds files but no config\.json"
    ):
        check_before_loading(model_dir, options, ALL, print)
    (tmp_path / "merged" / "notes.txt").unlink()
    check_before_loading(model_dir, options, ALL, print)


def test_excluded_names_that_no_module_has_are_said(model_dir: Path) -> None:
    said: list[str] = []
    options = FinetuneOptions(seq_len=32, exclude_modules=["q_prj", "v_proj"])
    given = replace(ALL, exclude_modules=options.exclude_modules)
    check_before_loading(model_dir, options, given, said.append)
    assert said == ["LoRAConfig.exclude_modules: 'q_prj' matches no module and has no effect"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--seq-len", 200], "seq_len must be at most 128, the model's max_position_embeddings"),
        (["--target-modules", "q_prj"], "matches no module; near: q_proj"),
        (["--exclude-modules", "q_proj", "--target-modules", "q_proj"], "all excluded by"),
        (
            ["--target-modules", "embed_tokens"],
            "'model.embed_tokens' is a Embedding, expected an nn",
        ),
        (
            ["--fp8-head", "--target-modules", "lm_head"],
            "fp8_head multiplies by a plain frozen head",
        ),
        (["--merge", "fp8"], 'merge: format "fp8": no linear layer of this model is made of whole'),
    ],
    ids=["positions", "no such target", "all excluded", "embedding", "head", "merge"],
)
@pytest.mark.parametrize("fp8", ["--fp8", "--no-fp8"])
def test_an_option_that_does_not_fit_the_model_is_refused_before_anything_is_loaded(
    cli: Cli, base_args: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch, more: list[Any], message: str, fp8: str,
) -> None:  # fmt: skip
    for place, loader in ((adapted, "load_quantized"), (adapted, "load_model"), (job, "load_data")):
        monkeypatch.setattr(place, loader, lambda *_, **__: pytest.fail("too late"))
    assert cli(*base_args, "--output", tmp_path / "out", "--steps", 1, fp8, *more) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1


def test_graphs_of_a_step_are_refused_for_several_ranks_before_anything_is_loaded(
    model_dir: Path, data_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lorakernels.train.ranks.ranks import RunRanks

    monkeypatch.setattr(job, "check_directory", lambda _: pytest.fail("too late"))
    options = FinetuneOptions(
        model=str(model_dir), data=[str(data_file)], output=str(tmp_path), graphs="step"
    )
    with pytest.raises(OptionError, match="graphs=step is for one process, found 2 ranks"):
        job.adapt(options, Reporter("test", 1), RunRanks(0, 2))


def test_a_token_outside_of_the_vocabulary_is_refused_before_anything_is_loaded(
    cli: Cli, base_args: list[str], data_file: Path, model_dir: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    from transformers import LlamaConfig

    model = Path(shutil.copytree(model_dir, tmp_path / "copy"))
    config = LlamaConfig.from_pretrained(model)
    config.vocab_size = 258
    config.save_pretrained(model)
    for loader in ("load_quantized", "load_model"):
        monkeypatch.setattr(adapted, loader, lambda *_, **__: pytest.fail("too late"))
    assert cli(*base_args, "--output", tmp_path / "out", "--model", model) == 1
    said = f"{data_file}, document 1: the tokenizer makes token 258, the model knows 258"
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        ("gpt_oss", {}, "gpt_oss models cannot be trained here"),
        ("mamba", {}, "mamba"),
        ("bloom", {}, "bloom models cannot be trained here"),
        ("qwen3_next", {}, "qwen3_next has recurrent layers (linear_attention)"),
        (
            "gpt2",
            {},
            "GPT2LMHeadModel cannot be adapted: target 'transformer.h.0.attn.c_attn' is a",
        ),
        ("t5", {}, "t5 models cannot be trained here"),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else "",
)
def test_a_model_that_cannot_be_trained_is_refused_by_its_config(
    tmp_path: Path, kind: str, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError) as caught:
        before_loading(config_only(tmp_path, kind, **fields))
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_recurrent_layers_are_refused_where_documents_are_apart_alone(tmp_path: Path) -> None:
    directory = config_only(tmp_path, "lfm2", layer_types=["conv"] * 2)
    with pytest.raises(ModelError, match=r"--no-isolate-documents takes a row as one sequence$"):
        before_loading(directory)
    options = FinetuneOptions(seq_len=32, isolate_documents=False)
    check_before_loading(directory, options, ALL, pytest.fail)


def test_a_config_that_needs_code_of_its_own_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "nobody_knows_it"}')
    with pytest.raises(ModelError, match=r"is not one that transformers .* reads, and no code"):
        before_loading(tmp_path)


def test_models_that_can_be_trained_pass_without_a_word(tmp_path: Path) -> None:
    """Logits with a factor, with a cap, and a checkpoint in block FP8."""
    quantized = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    assert before_loading(config_only(tmp_path, "granite", logits_scaling=8.0)) == []
    assert before_loading(config_only(tmp_path, "gemma2")) == []
    assert before_loading(config_only(tmp_path, "llama", quantization_config=quantized)) == []


@pytest.mark.parametrize(("kind", "name"), [("qwen3_moe", "Qwen3Moe"), ("qwen2_moe", "Qwen2Moe")])
def test_experts_without_adapters_are_said(tmp_path: Path, kind: str, name: str) -> None:
    """Those that are one parameter for all; qwen2_moe's shared expert is of linear layers, which are adapted."""
    sizes = {"hidden_size": 16, "moe_intermediate_size": 8, "num_experts": 4, "head_dim": 8}
    directory = config_only(tmp_path, kind, **sizes)
    (said,) = before_loading(directory)
    held = 2 * 4 * 3 * 16 * 8
    assert said.startswith(f"{name}ForCausalLM is a mixture of experts: {held:,} of its ")
    assert "get no adapter and are not held in FP8" in said


def test_a_weight_that_cannot_be_quantized_ends_the_run_without_a_second_load(
    cli: Cli, base_args: list[str], model_dir: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    from safetensors.torch import load_file, save_file

    model = Path(shutil.copytree(model_dir, tmp_path / "copy"))
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = torch.nan
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    monkeypatch.setattr(adapted, "load_model", lambda *_: pytest.fail("loaded again"))
    assert cli(*base_args, "--output", tmp_path / "out", "--model", model) == 1
    said = capsys.readouterr()
    assert f"the model in {model} cannot be loaded: " in said.err and "finite" in said.err
    assert "loaded by transformers instead" not in said.out


def test_a_tensor_that_the_model_has_no_place_for_is_refused(
    cli: Cli, base_args: list[str], model_dir: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """load_quantized refuses it, and transformers would pass over it."""
    from safetensors.torch import load_file, save_file

    model = Path(shutil.copytree(model_dir, tmp_path / "copy"))
    tensors = {**load_file(model / "model.safetensors"), "model.extra": torch.ones(2)}
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    assert cli(*base_args, "--output", tmp_path / "out", "--model", model, "--steps", 1) == 1
    said = capsys.readouterr()
    assert "loaded by transformers instead of into FP8 tensor by tensor: " in said.out
    assert "1 unexpected (model.extra)" in said.out
    assert "no place, and which would be lost: model.extra" in said.err


def test_the_name_of_a_model_on_a_hub_is_answered_with_how_to_fetch_it(
    cli: Cli, base_args: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli(*base_args, "--output", tmp_path / "out", "--model", "some-org/some-model") == 1
    assert "hf download some-org/some-model --local-dir DIR" in capsys.readouterr().err
