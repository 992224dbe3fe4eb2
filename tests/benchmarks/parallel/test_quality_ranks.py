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

from benchmarks.report.plots import draw_all, quality_ranks
from lorakernels.parallel.ranks import comm
from tests.benchmarks.aliases import Load, RowsOf, Run
from tests.distributed.test_split_graphs import own_rows_of_the_sum
from tests.graphs.fake import FakeBackend
from tests.processes import on_ranks

STEPS = 12
LAYOUTS = {
    2: ["tp 2", "cp 2", "dp 2, one base"],
    4: ["tp 4", "tp 2 x cp 2", "cp 4", "tp 2 x dp 2", "cp 2 x dp 2, one base"],
    8: ["tp 8", "cp 8", "tp 2 x cp 2 x dp 2", "cp 4 x dp 2, one base"],
}
BY_FOUR = ["tp 4 x cp 2", "tp 2 x cp 4", "tp 4 x dp 2"]  # not run here


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


def test_a_rank_that_raises_waits_for_no_other(
    load: Load, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = load("parallel.quality_ranks")
    monkeypatch.setattr(bench, "_main", mock.Mock(side_effect=RuntimeError("out of memory")))
    monkeypatch.setattr(bench.dist, "barrier", lambda: pytest.fail("waits"))
    with pytest.raises(RuntimeError, match="out of memory"):
        run(bench, "--steps", 1)


def every_way(rank: int, device: torch.device, folder: str, masks: bool) -> list[Any]:
    from benchmarks.parallel import quality_ranks as bench
    from benchmarks.peers.texts import demo_texts

    plan = replace(bench.PLANS["tiny"], steps=STEPS)
    ranks = dist.get_world_size()
    alone = [dist.new_group([r]) for r in range(ranks)][rank]
    sources, topics = demo_texts(plan.length)
    base = bench.make_base(plan, sources, device)
    curves = bench.Curves(None if rank else Path(folder))
    rows = []
    with ExitStack() as stack:
        graphs = None
        if not masks:
            stack.enter_context(mock.patch.object(bench, "P", 0.0))
        # gloo's scatter, and attention of torch for CPUs, end in ops that the imitated capture would record
        if ranks == 2:
            graphs = GraphOptions(backend=FakeBackend)
            stack.enter_context(mock.patch.object(comm, "sum_rows", own_rows_of_the_sum))
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        for way in bench.ways_of(ranks, plan.rows):
            if way.name in BY_FOUR:
                continue
            rows += bench.run(way, base, topics, plan, curves, alone, graphs)
    return bench.compared(rows, curves.losses)


def test_a_picture_has_a_curve_of_each_way() -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    ways = ["one GPU", "one GPU, other masks", *LAYOUTS[8], *BY_FOUR]
    points = [{"way": way, "step": "0", "loss": "2.0"} for way in ways]
    figure, panels = pyplot.subplots(2)
    quality_ranks(panels, {"quality_ranks_curves": points})
    lines = [panel.get_lines() for panel in panels]
    pyplot.close(figure)
    assert [line.get_label() for line in lines[0]] == ways and len(lines[1]) == len(ways)
    assert len({(line.get_color(), line.get_linestyle()) for line in lines[0]}) == len(ways)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", LAYOUTS)
def test_every_layout_trains_as_one_process(ranks: int, tmp_path: Path) -> None:
    """Two ranks have dropout, and imitate replays. tp and cp have the masks of one process; others show in the curve.

    Without dropout single roundings of FP8 turn, which makes 0.005 %. Gradients that are not summed over the ranks of a
    row make 0.028 %, and those that are not averaged over replicas 0.4 %.
    """
    masks = ranks == 2
    found = on_ranks(every_way, ranks, "gloo", str(tmp_path), masks)
    rows = {row["way"]: row for row in found[0]}
    assert [*rows] == ["one GPU", "one GPU, other masks", *LAYOUTS[ranks]]
    assert [row["check"] for row in rows.values()] == ["ok"] * len(rows)
    assert [rows[way]["ranks"] for way in LAYOUTS[ranks]] == [ranks] * len(LAYOUTS[ranks])
    assert all(row["replayed"] == (STEPS - 3 if ranks == 2 else 0) for row in rows.values())
    off = {way: float(row["largest difference"].removesuffix("%")) for way, row in rows.items()}
    assert off["one GPU"] == 0
    assert (off["one GPU, other masks"] > 0) == masks
    assert max(off.values()) < (0.3 if masks else 0.015)
    assert not masks or max(off["tp 2"], off["cp 2"]) < off["one GPU, other masks"]
    assert all(row["held-out loss"] < row["loss before"] for row in rows.values())
    with (tmp_path / "quality_ranks_curves.csv").open(newline="") as file:
        assert len([*csv.DictReader(file)]) == STEPS * len(rows)


def test_every_layout_uses_all_ranks(load: Load) -> None:
    bench = load("parallel.quality_ranks")
    for ranks, layouts in LAYOUTS.items():
        one, *found = bench.ways_of(ranks, 2)
        assert one.ranks == 1 and one.told(ranks) == {bench.ONE: 0, bench.OTHER: 1}
        assert all(way.told(ranks) == {way.name: 0} for way in found)
        assert {way.ranks for way in found} == {ranks}
        assert {way.name for way in found} - {*layouts} == ({*BY_FOUR} if ranks == 8 else set())
    assert [way.name for way in bench.ways_of(1, 2)] == ["one GPU"]
    assert all(way.dp == 1 for way in bench.ways_of(8, 1)), "one row has no replicas"


def test_a_way_that_these_ranks_have_not_is_refused(
    load: Load, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run(load("parallel.quality_ranks"), "--ways", "tp 2")
    assert "--ways: must be of ['one GPU'] on 1 ranks, found ['tp 2']" in capsys.readouterr().err


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
