# SPDX-License-Identifier: Apache-2.0
"""bench_sharded_base: the sharded base computes the whole one's loss, and every row has its numbers."""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.lib.predictions import machine_of, placement_of, prediction
from benchmarks.lib.rows import Row
from benchmarks.peers.models import SPECS
from lorakernels.planner.machine import MACHINES
from lorakernels.planner.memory import Placement
from lorakernels.planner.size import ModelSize
from tests.benchmarks.aliases import Load, RowsOf, Run
from tests.processes import on_ranks


def test_the_whole_and_the_sharded_base(load: Load, run: Run, rows_of: RowsOf) -> None:
    assert run(load("parallel.bench_sharded_base")) == 0
    rows = rows_of("sharded_base")
    assert [row["base"] for row in rows] == ["whole", "sharded, gloo"]
    assert [row["check"] for row in rows] == ["ok", "ok"]
    assert all(float(row["tokens/s a GPU"]) > 0 for row in rows)
    assert float(rows[1]["gather ms"]) > 0 and rows[0]["gather ms"] == ""


def test_embedding_and_head_too(load: Load, run: Run, rows_of: RowsOf) -> None:
    assert run(load("parallel.bench_sharded_base"), "--embeddings", "--layers", "1") == 0
    _, row = rows_of("sharded_base")
    assert (row["base"], row["check"]) == ("sharded, gloo, embedding and head too", "ok")


def test_an_offloaded_base(load: Load, run: Run, rows_of: RowsOf) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "no control group limits")
        assert run(load("parallel.bench_sharded_base"), "--offload", "0.3", "--layers", "1") == 0
    (row,) = rows_of("sharded_base")
    assert (row["base"], row["check"]) == ("offloaded, 0.3", "finite")
    assert row["model"] == "1 layers of a Llama of two layers"
    assert float(row["tokens/s a GPU"]) > 0 and float(row["no copies ms"]) > 0


def test_other_tokens_and_adapters_and_what_was_predicted(
    load: Load, run: Run, rows_of: RowsOf
) -> None:
    options = (
        "--rank",
        "8",
        "--lora",
        "all",
        "--batch",
        "2",
        "--length",
        "16",
        "--machine",
        "H200",
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "no control group limits")
        assert run(load("parallel.bench_sharded_base"), "--offload", "0.3", *options) == 0
    (row,) = rows_of("sharded_base")
    assert (row["LoRA"], row["tokens"], row["optimizer"]) == ("8, all", "2 x 16", "whole")
    rate, predicted = float(row["tokens/s a GPU"]), float(row["predicted tokens/s a GPU"])
    assert float(row["÷ measured"]) == pytest.approx(predicted / rate, rel=1e-3)
    assert row["load s"] and row["warm-up s"]


def asked(load: Load, monkeypatch: pytest.MonkeyPatch, *options: str) -> argparse.Namespace:
    monkeypatch.setattr(sys, "argv", ["bench", "--device=cpu", *options])
    args: argparse.Namespace = load("parallel.bench_sharded_base").asked()[0]
    return args


def test_what_is_given_beside_a_preset_counts(
    load: Load, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    args = asked(load, monkeypatch, "--preset=s003", "--length=32", "--models", "tiny")
    assert (args.batch, args.length, args.rank, args.lora) == (4, 32, 64, "all")
    assert (args.models, args.repetitions, args.shard_optimizer) == (["tiny"], 2, True)
    with pytest.raises(SystemExit):
        asked(load, monkeypatch, "--shard-optimizer")
    assert "--shard-optimizer needs --offload" in capsys.readouterr().err


def on_two(rank: int, device: torch.device, args: argparse.Namespace) -> tuple[Any, ...]:
    """(row, losses and adapters after three more steps, placement) with AdamW's state whole, then split."""
    from benchmarks.parallel import bench_sharded_base as bench

    found: list[Any] = []
    for args.shard_optimizer in (False, True):
        (row,), one = bench.bench_offload("tiny", device, args)
        losses = [float(one.step(number)) for number in range(3)]
        trained = [p.detach().clone() for p in one.training.trained]
        ranks = 2 if args.shard_optimizer else 1
        found.append((row, losses, trained, placement_of(one.training.sharded, ranks)))
    assert bench.run_models(args, device, time.perf_counter() + 600) == 0
    return tuple(found)


def test_s003_trains_as_with_a_whole_optimizer(
    load: Load, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rows_of: RowsOf
) -> None:
    """On two ranks both sum the same two gradients, so that all bits agree."""
    options = ("--preset=s003", "--length=16", "--models", "tiny", f"--output={tmp_path}")
    args = asked(load, monkeypatch, *options, "--machine=H200")
    for whole, split in on_ranks(on_two, 2, "gloo", args):
        rows: list[Row] = [whole[0], split[0]]
        assert [row["optimizer"] for row in rows] == ["whole", "sharded"]
        assert all(row["check"] == "finite" and row["LoRA"] == "64, all" for row in rows)
        assert whole[1] == split[1]
        pairs: Any = zip(whole[2], split[2], strict=True)
        assert all(torch.equal(a, b) for a, b in pairs) and len(whole[2]) == 2 * 2 * 7
        assert split[3] == Placement(2, 0.0, False, 2) and whole[3] == Placement(2)
    (row,) = rows_of("sharded_base")
    assert (row["tokens"], row["optimizer"], row["ranks"]) == ("4 x 16", "sharded", "2")


def test_a_prediction_is_that_of_lorakernels_plan(load: Load) -> None:
    from lorakernels import ShardPlan

    training = load("peers.training").Ours(SPECS["tiny"], "qkvo", torch.device("cpu"))
    found = prediction(training, 1, Placement(), MACHINES["H200"])
    config, lora = SPECS["tiny"].config(), SPECS["tiny"].lora("qkvo")
    plan = ShardPlan.of(config, None, 32, lora=lora, host_memory=0)
    assert ModelSize.of(training.model, None) == plan.model  # fused and in FP8, and as a config
    assert set(plan.saves) == {"full"} and set(training.saves) == {"recompute"}
    assert 0.5 < found.rate / plan.rate < 1 and found.gib < plan.bytes.peak / 2**30
    assert machine_of("H100-80GB", torch.device("cpu")) is MACHINES["H100-80GB"]
    assert machine_of(None, torch.device("cpu")) is None
