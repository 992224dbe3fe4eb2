# SPDX-License-Identifier: Apache-2.0
"""Predictions of a plan beside recorded steps and peaks. docs/plan.md has the same numbers as a table.

Its constants were made from decoder_layer_kernels.csv, one row of end_to_end.csv (FITTED), and the gathers' time, all
of an H200. Those of an H100 are these and its bandwidth, by data sheets.
"""

from __future__ import annotations

import csv
import math
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import pytest

from benchmarks.parallel import bench_plan
from benchmarks.peers.models import RANK, SPECS
from lorakernels import BlockScaling
from lorakernels.planner.machine import MACHINES
from lorakernels.planner.memory import Placement
from lorakernels.planner.plan import predict
from lorakernels.planner.size import ModelSize
from lorakernels.planner.time import BLOCK_FORWARD, REPLAY, BatchSize

RECORDED = Path(__file__).parents[2] / "benchmarks" / "results"
RESULTS = RECORDED / "h200"
FOLDERS = {"H200": "h200", "H100-80GB": "h100"}
COLUMN = {"sharded_base": "base", "scaling": "way"}  # that has the row's name
WITHIN = 0.05


class Case(NamedTuple):
    """A recorded row, and the form it ran in."""

    file: str
    model: str  # of SPECS
    adapted: str
    row: str  # provider, or base
    saves: tuple[tuple[str, int], ...]
    ranks: int = 1
    sharded: bool = False
    offload: float = 0.0  # of the base
    cut: tuple[int, int] | None = None  # layers and sequences, where they are not those of SPECS
    machine: str = "H200"
    cp: int = 1  # ranks that share a row
    # sequences and their length, where they are not those of SPECS
    tokens: tuple[int, int] | None = None
    rank: int = RANK
    optimizer: bool = False  # AdamW's state is split over the ranks
    folder: str = ""  # of results, if it is not the machine's own

    def __str__(self) -> str:
        where = "" if self.machine == "H200" else f"-{self.machine}"
        on = f"-{self.ranks}" if self.ranks > 1 else ""
        name = f"{self.file}-{self.model}-{self.adapted}-{self.row}{where}{on}"
        return name.replace(" ", "_").replace(",", "")


def end_to_end(model: str, adapted: str, provider: str, *saves: tuple[str, int]) -> Case:
    return Case("end_to_end", model, adapted, provider, saves)


FITTED = end_to_end("8b", "qkvo", "ours, one graph", ("recompute", 32))
FIT_AWAY = "ours, fit, offload, graphs by layer"
FIT = "ours, fit, graphs by layer"
CASES = (
    end_to_end("1b", "qkvo", "ours, one graph", ("recompute", 16)),
    end_to_end("1b", "qkvo", "ours, graphs by layer", ("recompute", 16)),
    end_to_end("8b", "qkvo", "ours, graphs by layer", ("recompute", 32)),
    end_to_end("8b", "qkvo", "ours, blocks, one graph", ("recompute", 32)),
    end_to_end("8b", "all", "ours, graphs by layer", ("recompute", 32)),
    end_to_end("70b", "qkvo", FIT, ("checkpoint", 19), ("fp8", 61)),
    end_to_end("70b", "qkvo", FIT_AWAY, ("fp8-offload", 41), ("fp8", 39)),
    end_to_end("70b", "qkvo", "ours, checkpoint, graphs by layer", ("checkpoint", 80)),
    end_to_end("70b", "all", FIT, ("checkpoint", 22), ("fp8", 58)),
    Case("sharded_base", "70b", "qkvo", "whole", (("checkpoint", 20), ("fp8", 60)), 2),
    Case("sharded_base", "70b", "qkvo", "sharded, peer", (("checkpoint", 20), ("fp8", 60)), 2, True),
    Case("sharded_base", "70b", "qkvo", "offloaded, 0.27", (("checkpoint", 76), ("fp8", 4)), offload=0.2745),
    Case("sharded_base", "405b", "qkvo", "offloaded, 0.547", (("full", 24),), 2, True, 0.5474, (24, 1)),
    Case("sharded_base", "70b", "qkvo", "sharded, peer", (("fp8", 49), ("recompute", 31)), 2, True),
    Case("sharded_base", "70b", "qkvo", "sharded, peer", (("fp8", 13), ("recompute", 67)), 4, True),
    Case("sharded_base", "405b", "qkvo", "sharded, peer", (("checkpoint", 123), ("fp8", 3)), 4, True),
    Case("sharded_base", "405b", "qkvo", "offloaded, 0.54", (("checkpoint", 115), ("fp8", 11)), 2, True, 0.5474),
    Case("finetune", "8b", "all", "ours, one graph", (("recompute", 8),), cut=(8, 2)),
    Case(
        "sharded_base", "70b", "qkvo", "offloaded, 0.27", (("checkpoint", 68), ("fp8", 12)), offload=0.2745,
        machine="H100-80GB",
    ),
    Case(
        "sharded_base", "70b", "qkvo", "sharded, peer", (("checkpoint", 52), ("fp8", 28)), 2, True, machine="H100-80GB",
    ),
    Case("scaling", "70b", "qkvo", "cp", (("full", 8),), 2, cut=(8, 1), machine="H100-80GB", cp=2),
    Case("scaling", "70b", "qkvo", "dp", (("checkpoint", 23), ("fp8", 57)), 8, folder="h200x8"),
    Case("scaling", "70b", "qkvo", "sharded", (("fp8", 1), ("recompute", 79)), 8, True, folder="h200x8"),
    Case(
        "sharded_base", "405b", "qkvo", "sharded, peer", (("checkpoint", 109), ("fp8", 17)), 8, True, tokens=(1, 8192),
        folder="h200x8",
    ),
)  # fmt: skip


def recorded(case: Case) -> tuple[float, float]:
    """(ms of a step, GiB at most)."""
    folder = RECORDED / (case.folder or FOLDERS[case.machine])
    with (folder / f"{case.file}.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    name, column = SPECS[case.model].name, COLUMN.get(case.file, "provider")
    wanted = {"model": f"{case.cut[0]} layers of {name}" if case.cut else name}
    wanted[column] = case.row
    if case.file == "end_to_end":
        wanted["LoRA on"] = case.adapted
    if case.tokens:
        wanted["tokens"] = " x ".join(map(str, case.tokens))
    if column != "provider":
        wanted["ranks"] = str(case.ranks)
    found = [r for r in rows if wanted.items() <= r.items()]
    if len(found) > 1:  # one base in two forms
        form = ", ".join(f"{count} × {save}" for save, count in case.saves)
        found = [r for r in found if r["note"].startswith(form)]
    (row,) = found
    return float(row["ms/step" if column == "provider" else "p50 ms"]), float(row["peak GiB"])


@lru_cache
def size_of(model: str, adapted: str, rank: int, blocks: bool = False) -> ModelSize:
    spec = replace(SPECS[model], rank=rank)
    lora = spec.lora(adapted)
    return ModelSize.of(spec.config(), replace(lora, fp8=BlockScaling()) if blocks else lora)


def predicted(case: Case) -> tuple[float, float]:
    """(ms of a step, GiB at most)."""
    size = size_of(case.model, case.adapted, case.rank, "blocks" in case.row)
    spec = SPECS[case.model]
    sequences, length = case.tokens or (spec.batch, spec.length)
    if case.cut:
        count, sequences = case.cut
        trained = size.trained * count // len(size.layers)
        size = replace(size, layers=size.layers[:count], trained=trained)
    saves = [save for save, count in case.saves for _ in range(count)]
    batch = BatchSize(sequences, length, case.cp)
    over = case.ranks if case.sharded else 1
    placement = Placement(over, case.offload, optimizer=case.ranks if case.optimizer else 1)
    plan = predict(size, batch, MACHINES[case.machine], case.ranks, placement, saves)
    by_layer = (
        case.ranks == 1 and "layer" in case.row
    )  # with offload and on several GPUs a plan has layers' graphs
    replays = 2 * len(saves) * REPLAY if by_layer else 0.0
    return (plan.step + replays) * 1e3, plan.bytes.peak / 2**30


@pytest.mark.slow
@pytest.mark.parametrize("case", [FITTED, *CASES], ids=str)
def test_a_prediction_is_within_five_percent(case: Case) -> None:
    for what, found, measured in zip(("ms", "GiB"), predicted(case), recorded(case), strict=True):
        assert abs(found / measured - 1) < WITHIN, (what, found, measured)


@pytest.mark.parametrize("name", ["8b-6144", "13b-4096", "3b-2048"])
def test_unseen_shapes_were_predicted_within_five_percent(name: str) -> None:
    """plan.csv: the predictions were made before the runs, and are still made now."""
    case = bench_plan.CASES[name]
    with (RESULTS / "plan.csv").open(encoding="utf-8") as file:
        (row,) = (r for r in csv.DictReader(file) if r["model"] == case.spec.name)
    seconds, held = bench_plan.predicted(case)
    found = (round(seconds * 1e3, 2), round(held / 2**30, 2))
    assert found == (float(row["predicted ms"]), float(row["predicted GiB"]))
    assert abs(found[0] / float(row["measured ms"]) - 1) < WITHIN
    assert abs(found[1] / float(row["measured GiB"]) - 1) < WITHIN


def times(file: str, **columns: str) -> dict[str, float]:
    """Milliseconds of ours by shape, rank 16, of the rows with these columns."""
    with (RESULTS / f"{file}.csv").open(encoding="utf-8") as text:
        rows = [r for r in csv.DictReader(text) if columns.items() <= r.items()]
    return {row["M x N x K"]: float(row["ms"]) for row in rows if row["rank"] == "16"}


def test_a_product_in_blocks_is_as_much_slower_as_was_recorded() -> None:
    """The forward's, by the geometric mean over the shapes that both files have. The backward's is by a step's row."""
    slow, fast = (times(f"fp8_{op}", provider="ours") for op in ("block_linear", "linear_lora"))
    ratios = [slow[shape] / fast[shape] for shape in slow.keys() & fast.keys()]
    assert len(ratios) >= 3
    mean = math.exp(math.fsum(map(math.log, ratios)) / len(ratios))
    assert pytest.approx(mean, rel=0.01) == BLOCK_FORWARD


def test_the_table_of_errors_is_that_of_the_recorded_rows() -> None:
    """docs/plan.md, line by line."""
    text = (RESULTS.parents[2] / "docs" / "plan.md").read_text(encoding="utf-8")
    for case in (FITTED, *CASES):
        (ms, gib), (took, held) = predicted(case), recorded(case)
        line = f"| {ms:,.1f} | {took:,.1f} | {ms / took - 1:+.1%} | {gib:.1f} | {held:.1f} | {gib / held - 1:+.1%} |"
        assert line in text, (str(case), line)
