# SPDX-License-Identifier: Apache-2.0
"""finetune --layout auto: the options that a plan chooses, and what it does not go with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lorakernels import BlockScaling, LoRAConfig, ShardPlan
from lorakernels.parallel.base.offload import divide
from lorakernels.train.errors import OptionError
from lorakernels.train.layouts.auto import Gpus, planned
from lorakernels.train.model.model import ALLOCATOR
from lorakernels.train.options.options import FinetuneOptions
from lorakernels.train.options.sources import resolve

LORA = LoRAConfig(target_modules="all-linear")
WIDTHS = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 20}
HEADS = {"num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 32000}


@pytest.fixture(autouse=True)
def a_host_that_offers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is planned would depend on where the tests run."""
    monkeypatch.setattr("lorakernels.planner.plan.host_memory_limit", lambda: None)


@pytest.fixture
def options(tmp_path: Path) -> FinetuneOptions:
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **WIDTHS, **HEADS}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return FinetuneOptions(model=str(tmp_path), layout="auto", seq_len=2048, batch_size=4)


def test_the_plan_s_choice_becomes_the_options(options: FinetuneOptions) -> None:
    said: list[str] = []
    gpus = Gpus("H200", 30_000_000_000, 2)
    found = planned(options, LORA, gpus, said.append)
    from lorakernels.train.model.preflight import read_config

    config = read_config(Path(str(options.model)))
    plan = ShardPlan.of(config, gpus.memory, (4, 2048), 2, lora=LORA)
    assert found.shard_base and plan.placement.ranks == 2
    assert found.memory_budget is not None
    assert int(found.memory_budget * 2**30) == plan.bytes.kept
    assert replace(found, memory_budget=None, shard_base=False) == options
    assert "sharded over 2 GPUs" in said[1] and "tokens/s predicted" in said[3]
    alone = planned(options, LORA, Gpus("H200", 80_000_000_000, 1), said.append)
    assert not alone.shard_base


def test_a_base_in_blocks_is_planned(options: FinetuneOptions) -> None:
    lora = replace(LORA, fp8=BlockScaling())
    said: list[str] = []
    found = planned(
        replace(options, fp8_recipe="block"), lora, Gpus("H200", 30 * 10**9, 2), said.append
    )
    assert found.shard_base and found.fp8_recipe == "block" and found.memory_budget
    resolve(
        {"model": "m", "data": ["d"], "output": "o", "layout": "auto", "fp8_recipe": "block"}, {}
    )


def test_the_host_takes_what_the_gpu_has_no_room_for(options, monkeypatch) -> None:
    monkeypatch.setattr("lorakernels.planner.plan.host_memory_limit", lambda: 60_000_000_000)
    said: list[str] = []
    found = planned(options, LORA, Gpus("H200", 16_000_000_000, 1), said.append)
    assert 0 < found.offload < 1 and not found.shard_base
    assert found.offload_activations and "checkpoint-offload" in said[2]
    shape = [
        ("q", (10240, 8192)),
        ("o", (8192, 8192)),
        ("up", (57344, 8192)),
        ("down", (8192, 28672)),
    ]
    stay, there = divide([[part] for part in shape], found.offload)
    there_bytes = sum(n * k for group in there for _, (n, k) in group)
    share = there_bytes / sum(n * k for _, (n, k) in shape)
    assert stay and share == pytest.approx(found.offload, abs=1e-5), "no more goes than was planned"


def test_what_fits_nowhere_is_an_option_s_error(options: FinetuneOptions) -> None:
    with pytest.raises(OptionError, match=r"layout auto: memory: nothing fits 9\.0 GB"):
        planned(options, LORA, Gpus("H200", 9_000_000_000, 2), print)


def test_a_cpu_has_no_plan() -> None:
    with pytest.raises(OptionError, match="layout auto plans for GPUs, found device cpu"):
        Gpus.of(torch.device("cpu"), 1)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"shard_base": True}, "layout auto plans with shard_base False or chooses it, got True"),
        ({"memory_budget": 3.0}, "memory_budget None or chooses it, got 3.0: drop one of them"),
        ({"save": "full"}, "save recompute or chooses it, got full"),
        ({"fp8": False}, "fp8 True or chooses it, got False"),
        ({"fuse": False}, "plans fused layers in bfloat16: drop it or --no-fuse"),
        ({"dtype": "float32"}, "plans fused layers in bfloat16: drop it or dtype float32"),
        ({"demo": True, "model": None, "data": []}, "layout auto is for --model"),
        ({"layout": "best"}, "layout must be one of given, auto, got 'best'"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_it_does_not_go_with(given: dict[str, object], message: str) -> None:
    base = {"model": "m", "data": ["d"], "output": "o", "layout": "auto"}
    with pytest.raises(OptionError) as error:
        resolve(base | given, {})
    assert message in str(error.value)


def run_planned(cli, base_args, output: Path) -> dict[str, object]:
    """A run that stops after two steps and goes on; its options."""
    run = [*base_args, "--layout", "auto", "--output", output, "--save-every", 2]
    assert cli(*run, "--steps", 2) == 0
    assert cli(*run, "--steps", 3, "--resume") == 0
    found: dict[str, object] = json.loads((output / "options.json").read_text())
    return found


@pytest.mark.slow
def test_a_planned_run_goes_on(cli, base_args, tmp_path, monkeypatch, capsys) -> None:
    gpus = classmethod(lambda *_: Gpus("H200", 150_000_000_000, 1))
    monkeypatch.setattr(Gpus, "of", gpus)
    found = run_planned(cli, [*base_args, "--fuse"], tmp_path)
    assert found["layout"] == "auto" and found["memory_budget"] and not found["shard_base"]
    assert "layout: save      2 x full" in capsys.readouterr().out
    given = [*base_args, "--fuse", "--memory-budget", found["memory_budget"]]
    again = [*given, "--output", tmp_path, "--steps", 4, "--resume"]
    assert cli(*again) == 0, "the plan's own budget, given by hand, is the same run"


@pytest.mark.gpu
def test_a_planned_run_on_this_gpu(cli, base_args, gpu_model, tmp_path, capsys) -> None:
    run = [*base_args, "--device", "cuda", "--model", gpu_model]
    found = run_planned(cli, run, tmp_path / "out")
    assert found["layout"] == "auto" and found["memory_budget"]
    assert "save full" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("asked", "before", "then"),
    [
        ({"layout": "auto"}, None, "max_split_size_mb:64"),
        ({"memory_budget": 60.0}, None, "max_split_size_mb:64"),
        ({"memory_budget": 60.0}, "expandable_segments:True", "expandable_segments:True"),
        ({}, None, None),
    ],
    ids=["layout auto", "a budget", "the user's own", "neither"],
)
def test_layers_that_fill_a_gpu_find_large_blocks_whole(
    asked: dict[str, object],
    before: str | None,
    then: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from lorakernels.train import job

    for name in ALLOCATOR:
        monkeypatch.delenv(name, raising=False)
    if before is not None:
        monkeypatch.setenv(ALLOCATOR[0], before)
    found = []

    class Ended(Exception):
        pass

    def adapt(*_: object) -> None:
        found.append(os.environ.get(ALLOCATOR[0]))
        raise Ended

    monkeypatch.setattr(job, "adapt", adapt)
    # what is set is undone after the test, also where nothing was set before
    monkeypatch.setattr(os, "environ", os.environ.copy())
    with pytest.raises(Ended):
        job.finetune(FinetuneOptions(output=str(tmp_path), device="cpu", **asked))  # type: ignore[arg-type]
    assert found == [then]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_torch_reads_the_allocator_s_variable_after_it_is_imported(device: str) -> None:
    """In a process of its own, since a process reads it once."""
    if not hasattr(torch._C, "_accelerator_getAllocatorSettings") and device == "cpu":
        pytest.skip("this torch tells its allocator's settings on a GPU alone")
    lines = (
        "import torch",
        "from lorakernels.train.model.model import keep_large_blocks_whole",
        "keep_large_blocks_whole()",
        "torch.cuda.is_available() and torch.cuda.device_count()",
        "print(torch._C._accelerator_getAllocatorSettings())"
        if device == "cpu"
        else "torch.ones(1, device='cuda'); "
        "found = torch.cuda.memory._snapshot()['allocator_settings']; "
        "print('max_split_size_mb:%d' % (found['max_split_size'] >> 20))",
    )
    environment = {name: value for name, value in os.environ.items() if name not in ALLOCATOR}
    found = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, env=environment
    )
    assert found.stdout.strip() == "max_split_size_mb:64", found.stderr
