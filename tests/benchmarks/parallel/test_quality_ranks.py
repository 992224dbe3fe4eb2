# SPDX-License-Identifier: Apache-2.0
"""quality_ranks: every layout trains as one process; curves are written as they come; one that is far off is WRONG."""

from __future__ import annotations

import csv
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lorakernels.graphs import GraphOptions
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.report.plots import draw_all
from lorakernels.parallel import comm
from tests.benchmarks.aliases import Load, RowsOf, Run
from tests.distributed.test_split_graphs import own_rows_of_the_sum
from tests.graphs.fake import FakeBackend
from tests.processes import on_ranks

STEPS = 12


def test_one_process_has_its_curve(load: Load, run: Run, rows_of: RowsOf, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert run(load("parallel.quality_ranks"), "--steps", STEPS) == 0
    (row,) = rows_of("quality_ranks")
    assert row["way"] == "one GPU" and row["check"] == "ok" and row["steps"] == str(STEPS)
    assert float(row["held-out loss"]) < float(row["loss before"])
    curve = rows_of("quality_ranks_curves")
    assert [point["step"] for point in curve] == [str(step) for step in range(STEPS)]
    (picture,) = draw_all(tmp_path, {"quality_ranks_curves": curve}, ("quality_ranks",))
    assert picture.read_bytes().startswith(b"\x89PNG")


def every_way(rank: int, device: torch.device, folder: str, imitated: bool) -> list[Any]:
    from benchmarks.lib.texts import demo_texts
    from benchmarks.parallel import quality_ranks

    plan = replace(quality_ranks.PLANS["tiny"], steps=STEPS)
    ranks = dist.get_world_size()
    alone = [dist.new_group([r]) for r in range(ranks)][rank]
    sources, topics = demo_texts(plan.length)
    base = quality_ranks.make_base(plan, sources, device)
    curves = quality_ranks.Curves(None if rank else Path(folder))
    rows = []
    with ExitStack() as stack:
        graphs = None
        # gloo's scatter, and attention of torch for CPUs, end in ops that the imitated capture would record
        if imitated:
            graphs = GraphOptions(backend=FakeBackend)
            stack.enter_context(mock.patch.object(comm, "sum_rows", own_rows_of_the_sum))
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        for way in quality_ranks.ways_of(ranks):
            if ranks == 4 and way[0] in ("tp 2", "cp 2"):
                continue  # two ranks have run them
            rows.append(quality_ranks.run(way, base, topics, plan, curves, alone, graphs))
    return quality_ranks.compared(rows, curves.losses)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "imitated"), [(2, True), (4, False)], ids=["2", "4"])
def test_every_layout_trains_as_one_process(ranks: int, imitated: bool, tmp_path: Path) -> None:
    """The masks of tp are those of one process; other masks show in the curve."""
    found = on_ranks(every_way, ranks, "gloo", str(tmp_path), imitated)
    rows = {row["way"]: row for row in found[0]}
    layouts = ["tp 2", "cp 2"] if ranks == 2 else ["tp 2 x cp 2"]
    assert [*rows] == ["one GPU", "one GPU, other masks", *layouts]
    assert [row["check"] for row in rows.values()] == ["ok"] * len(rows)
    assert all(row["replayed"] == (STEPS - 3 if imitated else 0) for row in rows.values())
    off = {way: float(row["largest difference"].removesuffix("%")) for way, row in rows.items()}
    assert off["one GPU"] == 0 < off["one GPU, other masks"] < 0.3
    assert ranks == 4 or off["tp 2"] < off["one GPU, other masks"]
    assert all(row["held-out loss"] < row["loss before"] for row in rows.values())
    with (tmp_path / "quality_ranks_curves.csv").open(newline="") as file:
        assert len([*csv.DictReader(file)]) == STEPS * len(rows)


def test_a_curve_that_is_far_off_is_wrong(load: Load) -> None:
    """At any step: a hump of 20 steps in the middle shows."""
    bench = load("parallel.quality_ranks")
    ways = ("one GPU", "one GPU, other masks", "tp 2", "cp 2", "lost")
    curves = {way: [2.0] * 60 for way in ways}
    curves["one GPU, other masks"] = [2.1] * 60  # is told, and no layout
    curves["tp 2"][30:50] = [2.004] * 20
    curves["cp 2"][30:50] = [2.008] * 20
    curves["lost"][7] = float("nan")
    rows = bench.compared([{"way": way, "ranks": 1, "held-out loss": 2.0} for way in ways], curves)
    assert [row["check"][:5] for row in rows] == ["ok", "ok", "ok", "WRONG", "WRONG"]
    assert rows[3]["largest difference"] == "0.400%" and rows[3]["from step"] == 30
    assert "not finite" in rows[4]["check"]
