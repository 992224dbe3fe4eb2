# SPDX-License-Identifier: Apache-2.0
"""bench_scaling: every way trains on what one GPU alone trains on, and a loss that is far off is WRONG."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.benchmarks.aliases import Load, RowsOf, Run
from tests.processes import on_ranks


def test_every_way_has_its_row_on_one_rank(load: Load, run: Run, rows_of: RowsOf) -> None:
    bench = load("parallel.bench_scaling")
    assert run(bench) == 0
    rows = rows_of("scaling")
    assert [row["way"] for row in rows] == [*bench.WAYS]
    (te,) = [row for row in rows if row["way"] == bench.TE]
    assert te["check"].startswith("not run: Unavailable: ")  # it is not installed, or finds no GPU
    rows.remove(te)
    assert [row["check"] for row in rows] == ["ok"] * len(rows)
    assert all(float(row["tokens/s"]) > 0 for row in rows)


def test_a_loss_that_is_far_off_is_wrong(load: Load) -> None:
    bench = load("parallel.bench_scaling")
    alone = {"way": "alone, eager", "first loss": 10.0, "tokens/s": 100.0}
    rows = bench.compared([alone, {"way": "tp", "first loss": 10.3, "tokens/s": 150.0}])
    assert [str(row["check"])[:5] for row in rows] == ["ok", "WRONG"]
    assert rows[1]["÷ eager"] == 1.5 and rows[1]["÷ alone"] == ""


def test_without_one_gpu_a_loss_is_compared_with_that_of_dp(load: Load) -> None:
    bench = load("parallel.bench_scaling")
    rows = [{"way": way, "first loss": loss} for way, loss in (("dp", 10.0), ("cp 2", 11.0))]
    assert [row["check"] for row in bench.compared(rows)] == [
        "ok",
        "WRONG: loss 11.0, expected 10.0",
    ]
    (row,) = bench.compared([{"way": "tp 2", "first loss": float("nan")}])
    assert row["check"] == "WRONG: loss nan"
    drifted = {"way": "dp", "first loss": 10.0, "check": "WRONG: replicas have other adapters"}
    assert bench.compared([drifted])[0]["check"] == drifted["check"]


def test_replays_are_compared_with_eager_steps_of_their_own_model(load: Load) -> None:
    bench = load("parallel.bench_scaling")
    rows = [
        {"model": model, "way": way, "graphs": graphs, "tokens/s": speed}
        for model, way, graphs, speed in (
            ("1B", "tp", "layer", 300.0),
            ("1B", "tp, eager", "none", 100.0),
            ("70B", "tp", "layer", 30.0),
            ("70B", "tp, eager", "none", 20.0),
            ("tiny", "tp", "none", 3.0),
            ("tiny", "tp, eager", "none", 2.0),
        )
    ]
    found = [row["graphs on ÷ off"] for row in bench.compared(rows)]
    assert found == [3.0, "", 1.5, "", "", ""]


def test_the_percentile_is_one_of_the_samples(load: Load) -> None:
    bench = load("parallel.bench_scaling")
    hundred = [float(i) for i in range(100, 0, -1)]
    assert bench.percentile(hundred, 0.99) == 99.0 and bench.percentile(hundred, 1.0) == 100.0
    assert bench.percentile([3.0, 1.0], 0.99) == 3.0 and bench.percentile([5.0], 0.5) == 5.0


def test_rows_of_a_step_follow_each_other(load: Load, run: Run, rows_of: RowsOf) -> None:
    assert run(load("parallel.bench_scaling"), "--ways", "alone", "tp", "--rows", 3) == 0
    rows = rows_of("scaling")
    assert [row["rows"] for row in rows] == ["3", "3"]
    assert {row["÷ best"] for row in rows} > {"1.0"} and rows[0]["÷ alone"] == "1.0"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--ways", "tp 2"), "needs a multiple of 2 ranks, found 1"),
        (("--ways", "pp"), "a way joins"),
        (("--warm-up", "0"), "must be at least 1"),
        (("--model", "tiny", "tiny-8", "1b", "--layers", "1", "2"), "one for each of ['tiny'"),
    ],
)
def test_what_is_asked_wrongly_ends_before_anything(
    options: tuple[str, ...], said: str, load: Load, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run(load("parallel.bench_scaling"), *options)
    assert said in capsys.readouterr().err and not dist.is_initialized()


def test_each_model_has_its_number_of_layers(load: Load, run: Run, rows_of: RowsOf) -> None:
    options = ("--model", "tiny", "tiny-8", "--layers", 1, 0, "--ways", "alone")
    assert run(load("parallel.bench_scaling"), *options) == 0
    names = [row["model"] for row in rows_of("scaling")]
    assert names == [
        "1 layers of a Llama of two layers",
        "a Llama of two layers and eight key heads",
    ]


def test_rows_must_divide_over_replicas(load: Load) -> None:
    bench = load("parallel.bench_scaling")
    args = mock.Mock(ways=["cp 2", "dp"], rows=6)
    with pytest.raises(ValueError, match="multiple of the 4 replicas of 'dp', found 6"):
        bench.check_ways(args, 4)
    bench.check_ways(mock.Mock(ways=["cp 2", *bench.PEERS], rows=6), 4)


def test_a_way_without_time_is_named(load: Load, run: Run, rows_of: RowsOf) -> None:
    """The first way of a model begins, with a single step; what would not be ready in time does not."""
    bench = load("parallel.bench_scaling")
    assert run(bench, "--ways", "alone", "dp", "--budget-s", "0.5", "--repetitions", 50) == 0
    first, second = rows_of("scaling")
    assert float(first["tokens/s"]) > 0 and second["tokens/s"] == ""
    assert second["check"] == "not run: 0 s of the budget are left"


def with_failures(rank: int, device: torch.device, folder: str) -> int:
    """Rank 1 has no memory to load the first way, and no rank has any to train the second one."""
    from benchmarks.lib.layouts import Layout
    from benchmarks.parallel import bench_scaling as bench

    load, step = bench.Bench._load, Layout.step

    def loaded(self: Any, name: str, spec: Any) -> Any:
        found = load(self, name, spec)
        if name == "dp" and rank == 1:
            raise torch.OutOfMemoryError("2 GiB are missing. Tried everything")
        return found

    def stepped(self: Any, ids: torch.Tensor) -> torch.Tensor:
        if self.way.name == "tp":
            raise torch.OutOfMemoryError("1 GiB is missing")
        return step(self, ids)

    options = ["--device", "cpu", "--repetitions", "2", "--output", folder]
    options += ["--ways", "dp", "tp", "cp", "sharded x cp 2", "--rows", "4"]
    patches = (
        mock.patch.object(bench.Bench, "_load", loaded),
        mock.patch.object(Layout, "step", stepped),
        mock.patch.object(bench, "start_ranks", lambda device: device),
        mock.patch.object(dist, "destroy_process_group"),
        mock.patch.object(sys, "argv", ["bench", *options]),
        mock.patch.dict("os.environ", {"WORLD_SIZE": "2"}),
    )
    for patch in patches:
        patch.start()
    code: int = bench.main()
    mock.patch.stopall()
    return code


@pytest.mark.slow
def test_a_way_without_memory_says_so_and_the_next_one_runs(tmp_path: Path) -> None:
    assert on_ranks(with_failures, 2, "gloo", str(tmp_path)) == [0, 0]
    with (tmp_path / "scaling.csv").open(newline="") as file:
        rows = {row["way"]: row for row in csv.DictReader(file)}
    assert rows["dp"]["check"] == "not run: rank 1: OutOfMemoryError: 2 GiB are missing"
    assert rows["tp"]["check"] == "not run: OutOfMemoryError: 1 GiB is missing"
    assert [rows[way]["rows"] for way in ("cp", "sharded x cp 2")] == ["4", "4"]
    assert all(float(rows[way]["tokens/s"]) > 0 for way in ("cp", "sharded x cp 2"))
    losses = [float(rows[way]["first loss"]) for way in ("cp", "sharded x cp 2")]
    assert losses[0] == pytest.approx(losses[1], abs=1e-3)
