# SPDX-License-Identifier: Apache-2.0
"""bench_pipeline: every schedule's row on one rank and on two; the bubble's columns; a wrong loss says so."""

from __future__ import annotations

import argparse
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lorakernels.graphs import GraphOptions
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.lib.rows import Row
from tests.benchmarks.aliases import Load, RowsOf, Run
from tests.graphs.fake import FakeBackend
from tests.processes import on_ranks


def test_every_schedule_has_its_row(load: Load, run: Run, rows_of: RowsOf) -> None:
    bench = load("parallel.bench_pipeline")
    assert run(bench, "--layers", "2", "--microbatches", "1", "2", "--chunks", "1") == 0
    rows = rows_of("pipeline")
    assert [row["microbatches"] for row in rows] == ["1", "2"]
    for row in rows:
        assert row["check"] == "ok" and row["commit"] and row["device"].startswith("cpu")
        assert (
            float(row["predicted"]) == float(row["these stages"]) == 0.0
        )  # one rank waits for nobody
        assert float(row["pass ms"]) > 0 and float(row["ideal ms"]) > 0


def test_what_begins_after_the_budget_is_not_run(load: Load, run: Run, rows_of: RowsOf) -> None:
    options = ("--layers", "2", "--microbatches", "1", "2", "--chunks", "1", "--budget-s", "0.0")
    assert run(load("parallel.bench_pipeline"), *options) == 0
    assert [row["microbatches"] for row in rows_of("pipeline")] == ["1"]


def on_two(rank: int, device: torch.device, ways: list[tuple[int, int, str]]) -> list[list[Row]]:
    from benchmarks.parallel import bench_pipeline
    from benchmarks.peers.models import SPECS

    mesh: Any = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("pp",))
    found = []
    for graphs in (None, GraphOptions(backend=FakeBackend)):
        args = argparse.Namespace(on=device, repetitions=1, graphs=graphs, trace=None)
        spec = SPECS["tiny"].cut(4)
        found.append([bench_pipeline.measure(mesh, spec, args, way) for way in ways])
    return found


@pytest.mark.slow
def test_two_ranks_have_stages_and_wait_for_each_other() -> None:
    """All ranks find the same numbers; what is refused is a row, and what comes after it runs."""
    found = on_ranks(on_two, 2, "gloo", [(1, 1, "auto"), (2, 1, "auto"), (2, 2, "gloo")])
    assert found[0] == found[1]
    for layers, rows in zip(("eager", "replayed"), found[0], strict=True):
        assert [row["layers"] for row in rows] == [layers] * 3
        assert "at least the 2 ranks" in str(rows[0]["check"])
        assert [row["check"] for row in rows[1:]] == ["ok", "ok"]
        assert [row["predicted"] for row in rows[1:]] == [0.3333, 0.2]
        assert [row["sends"] for row in rows[1:]] == ["gloo", "gloo"]
        for row in rows[1:]:
            own = [float(part) for part in str(row["alone ms"]).split(" / ")]
            assert len(own) == 2 and min(own) > 0
            assert float(str(row["ideal ms"])) == pytest.approx(2 * max(own), abs=0.02)


def test_the_bubble_of_equal_stages_is_the_schedules(load: Load) -> None:
    """By hand: 3 ranks, 6 microbatches of 2 s. 2 others fill and drain, 4 s, or 2 s with two chunks."""
    bubbles = load("parallel.bench_pipeline").bubbles
    for chunks, waits in ((1, 4.0), (2, 2.0)):
        alone = dict.fromkeys(range(3 * chunks), (0.75 / chunks, 1.25 / chunks))
        row = bubbles(alone, 12.0 + waits, 6, 3)
        expected = waits / (12.0 + waits)
        found = [row[name] for name in ("bubble", "predicted", "these stages")]
        assert found == pytest.approx([expected] * 3, abs=1e-4)
        assert row["ideal ms"] == 12000.0
    # the faster rank's stage fills and drains: 1 s
    uneven = bubbles({0: (0.5, 0.5), 1: (1.0, 1.0)}, 13.0, 6, 2)
    assert uneven["these stages"] == uneven["bubble"] == pytest.approx(1 / 13, abs=1e-4)
    assert uneven["predicted"] == pytest.approx(1 / 7, abs=1e-4)


def test_a_late_stage_that_takes_longer_is_waited_for(load: Load) -> None:
    """By hand: two ranks, two chunks, two microbatches; forwards of 1 s, of the last stage 2 s, backwards of 1 s.

    Rank 1 waits 1 s and then runs for 10 s without a gap. Its last backward is read by rank 0's, which ends at 12 s.
    """
    row = load("parallel.bench_pipeline").bubbles(
        {0: (1.0, 1.0), 1: (1.0, 1.0), 2: (1.0, 1.0), 3: (2.0, 1.0)}, 12.0, 2, 2
    )
    assert row["ideal ms"] == 10000.0 and row["alone ms"] == "4000.00 / 5000.00"
    assert row["these stages"] == pytest.approx(1 - 10 / 12, abs=1e-4)


def torchs(rank: int, device: torch.device, ways: list[tuple[int, int]]) -> list[list[str]]:
    """What torch's interleaved schedules run on this rank."""
    from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B

    found = []
    for chunks, microbatches in ways:
        x = torch.empty(1, device="meta")
        of = [
            PipelineStage(torch.nn.Identity(), i, 2 * chunks, device, input_args=x, output_args=x)
            for i in range(rank, 2 * chunks, 2)
        ]
        order = ScheduleInterleaved1F1B(of, microbatches).pipeline_order[rank]
        found.append([str(action) for action in order if action is not None])
    return found


@pytest.mark.slow
def test_orders_are_those_of_torch(load: Load) -> None:
    ways = [(2, 2), (2, 4), (3, 4), (2, 3), (2, 8)]
    orders = load("parallel.bench_pipeline").orders
    for rank, of_torch in enumerate(on_ranks(torchs, 2, "gloo", ways)):
        for (chunks, microbatches), theirs in zip(ways, of_torch, strict=True):
            ours = orders(2, chunks, microbatches)[rank]
            assert [f"{r.stage}{'FB'[not r.forward]}{r.microbatch}" for r in ours] == theirs
