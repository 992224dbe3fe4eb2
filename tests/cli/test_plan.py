# SPDX-License-Identifier: Apache-2.0
"""`lorakernels plan`: a config.json is all it needs; what it cannot do is one line and an exit code."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from lorakernels.cli import plan as command
from lorakernels.cli.__main__ import main
from lorakernels.cli.plan import SEQ_LEN
from lorakernels.planner.machine import MACHINES
from lorakernels.train.options.options import FinetuneOptions

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 8192,
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return tmp_path


def plan(model: Path, *options: str) -> int:
    return main(["plan", f"--model={model}", *options])


def test_a_config_alone_is_planned(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    offered = ("--seq-len=8192", "--memory=80GB", "--machine=H100-80GB", "--host-memory=200GiB")
    assert plan(model, *offered) == 0
    shown = capsys.readouterr().out
    assert "1 x H100-80GB, 80.0 GB each, 1 x 8192 tokens a GPU" in shown
    for part in ("of it in host memory", "optimizer", "host copy, each way", "tokens a second"):
        assert part in shown


@pytest.mark.slow
def test_a_base_in_blocks_takes_longer(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rates = []
    for recipe in ("delayed", "block"):
        assert plan(model, "--seq-len=8192", f"--fp8-recipe={recipe}") == 0
        found = re.search(r"tokens a second\s+([0-9,]+)", capsys.readouterr().out)
        assert found
        rates.append(float(found[1].replace(",", "")))
    assert 0.7 < rates[1] / rates[0] < 0.95


def test_blocks_that_fuse_refuses_are_no_plan(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = LLAMA | {"num_key_value_heads": 1, "head_dim": 64}
    (model / "config.json").write_text(json.dumps(odd))
    assert plan(model, "--seq-len=8192", "--fp8-recipe=block") == 1
    assert "k_proj has 64 rows, which must be a multiple of 128" in capsys.readouterr().err


@pytest.mark.slow
def test_ranks_that_share_rows_and_stages_are_planned(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(model, "--seq-len=8192", "--gpus=4", "--cp=4") == 0
    assert "1 x 8192 tokens over 4 GPUs" in capsys.readouterr().out
    assert plan(model, "--seq-len=8192", "--gpus=4", "--pp=2", "--microbatches=6") == 0
    shown = capsys.readouterr().out
    assert "6 microbatches of 1 x 8192 tokens" in shown and "of it a rank waits" in shown
    assert plan(model, "--seq-len=8192", "--gpus=4", "--cp=2", "--pp=2", "--microbatches=6") == 0
    assert "6 microbatches of 1 x 8192 tokens over 2 GPUs a stage" in capsys.readouterr().out


@pytest.mark.slow
def test_layers_that_gpus_hold_together_are_planned(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(model, "--seq-len=8192", "--gpus=8", "--tp=4") == 0
    shown = capsys.readouterr().out
    assert "1 x 8192 tokens over 4 GPUs (tp 4)" in shown and "waits for rows, both" in shown
    assert plan(model, "--seq-len=8192", "--gpus=8", "--tp=4", "--cp=2") == 0
    assert "1 x 8192 tokens over 8 GPUs (tp 4, cp 2)" in capsys.readouterr().out
    assert plan(model, "--seq-len=8192", "--gpus=8", "--tp=4", "--memory=30GB") == 0
    assert "in 4 parts, each sharded over 2 GPUs" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--seq-len=8192", "--memory=80GB"], "nothing fits 80.0 GB"),
        (["--seq-len=64", "--gpus=4", "--cp=3"], "cp must divide the 4 gpus, found 3"),
        (["--seq-len=64", "--gpus=2", "--pp=2", "--host-memory=1GB"], "host_memory does not go with pp 2"),
        (["--seq-len=64", "--gpus=4", "--tp=2", "--pp=2"], "tp does not go with pp"),
        (["--seq-len=64", "--gpus=16", "--tp=16"], "num_key_value_heads must be a multiple of the 16 ranks"),
        (
            ["--seq-len=64", "--memory=40GB", "--host-memory=100GB"],
            "ms of .* a step are not hidden. Take more tokens, or allow_exposed",
        ),
        (["--seq-len=64", "--probe"], "a probe needs a GPU with FP8 tensor cores, found cpu"),
        (["--seq-len=64", "--target-modules=nothing"], "nothing"),
    ],
    ids=["memory", "cp", "pp", "tp", "heads", "exposed", "probe", "targets"],
)  # fmt: skip
def test_what_cannot_be_planned(
    model: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert plan(model, *options) == 1
    shown = capsys.readouterr().err
    assert shown.startswith("lorakernels plan: error: ") and shown.count("\n") == 1
    assert re.search(message, shown)


def test_what_is_not_hidden_can_be_asked_for(model: Path, capsys) -> None:
    options = ["--seq-len=64", "--memory=40GB", "--host-memory=100GB", "--allow-exposed"]
    assert plan(model, *options) == 0
    line = next(t for t in capsys.readouterr().out.splitlines() if "of it not hidden" in t)
    assert float(line.split()[-2]) > 100


def test_there_must_be_a_config_of_a_known_family(model: Path, capsys) -> None:
    assert plan(model / "other", "--seq-len=64") == 1
    assert f"model directory {model / 'other'} does not exist" in capsys.readouterr().err
    (model / "config.json").write_text('{"model_type": "gpt2", "n_positions": 1024}')
    assert plan(model, "--seq-len=64") == 1
    assert "LlamaDecoderLayer" in capsys.readouterr().err
    (model / "config.json").write_text('{"model_type": "bird"}')
    assert plan(model, "--seq-len=64") == 1
    assert "config.json is not one that transformers" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--seq-len=0"], "argument --seq-len: expected a positive whole number, found '0'"),
        (["--seq-len=64", "--gpus=-1"], "argument --gpus: expected a positive whole number, found '-1'"),
        (["--seq-len=64", "--memory=80XB"], "argument --memory: expected a size such as 80GB"),
        (["--seq-len=64", "--memory=1.2.3GB"], "argument --memory: expected a size such as 80GB"),
        (["--seq-len=64", "--memory=1e999"], "argument --memory: expected a size such as 80GB"),
        (["--machine=B200"], "argument --machine: expected H200 or H100-80GB, found 'B200'; --probe"),
        (["--seq=64"], "unknown option --seq; did you mean --seq-len?"),
    ],
    ids=["seq", "gpus", "unit", "number", "infinite", "machine", "old name"],
)  # fmt: skip
def test_options_are_checked_first(model: Path, options, message, capsys) -> None:
    with pytest.raises(SystemExit) as stop:
        plan(model, *options)
    assert stop.value.code == 2 and message in capsys.readouterr().err


def test_a_sequence_is_no_longer_than_the_model_s(model: Path, capsys) -> None:
    assert plan(model, "--seq-len=8193") == 2
    assert "seq_len must be at most 8192" in capsys.readouterr().err


def test_a_sharded_optimizer_is_planned_for_several_gpus_alone(model: Path, capsys) -> None:
    assert plan(model, "--seq-len=4096", "--gpus=2", "--sharded-optimizer") == 0
    assert "optimizer sharded over 2 GPUs" in capsys.readouterr().out
    assert plan(model, "--seq-len=4096", "--sharded-optimizer") == 1
    assert "sharded_optimizer needs several GPUs" in capsys.readouterr().err


def test_the_default_sequence_is_finetune_s(model: Path, capsys) -> None:
    assert FinetuneOptions().seq_len == SEQ_LEN
    assert plan(model, f"--seq-len={SEQ_LEN}") == 0
    told = capsys.readouterr().out
    assert plan(model) == 0
    assert capsys.readouterr().out == told


def test_the_command_names_the_machines_that_a_plan_knows() -> None:
    assert list(MACHINES) == list(command.MACHINES)
