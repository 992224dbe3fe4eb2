# SPDX-License-Identifier: Apache-2.0
"""report/join.py: runs of parts become one record, in which a later run's rows take the place of an earlier one's."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.report import join

FACTS = {fact: "x" for fact in join.FACTS}


def put(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0]])
        writer.writeheader()
        writer.writerows(rows)


def command(*words: object) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["join", *map(str, words)])
        return join.main()


def row(size: str, provider: str, ms: str, **more: str) -> dict[str, str]:
    return {"size": size, "provider": provider, "ms": ms, **FACTS, **more}


OLD = [row("small", "a", "1"), row("small", "b", "2"), row("large", "a", "3")]
NEW = [row("small", "b", "4", J="5", commit="new"), row("medium", "a", "6", commit="new")]


@pytest.mark.parametrize(
    ("by", "expected"),
    [
        (["size"], ["small b 4", "large a 3", "medium a 6"]),
        (["size", "provider"], ["small a 1", "small b 4", "large a 3", "medium a 6"]),
    ],
    ids=["a-size-as-a-whole", "one-provider"],
)
def test_later_rows_take_the_place_of_earlier_ones(
    tmp_path: Path, by: list[str], expected: list[str]
) -> None:
    for name, rows in (("old", OLD), ("new", NEW)):
        put(tmp_path / name / "layer.csv", rows)
    runs = (tmp_path / "old", tmp_path / "new")
    assert command("layer", *runs, "--by", *by, "--output", tmp_path) == 0
    found = join.read(tmp_path / "layer.csv")
    assert [f"{r['size']} {r['provider']} {r['ms']}" for r in found] == expected
    assert [r["commit"] for r in found] == ["new" if r["ms"] in "46" else "x" for r in found]
    assert {r["J"] for r in found} == {"", "5"}, "a column that one run alone has"


def test_a_column_that_is_not_there_is_named(tmp_path: Path) -> None:
    put(tmp_path / "layer.csv", OLD)
    with pytest.raises(ValueError, match="'layers'"):
        command("layer", tmp_path, "--by", "layers", "--output", tmp_path)
    with pytest.raises(SystemExit):
        command("layer", tmp_path, "--output", tmp_path)


def test_runs_that_have_no_row_are_refused() -> None:
    with pytest.raises(ValueError, match="no run has a row"):
        join.joined([[], []], ["size"])


def test_means_of_quality_are_over_the_seeds_of_all_runs(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    same = {"model": "demo", "check": "ok", "steps": "5", "base": "ab", "loss before": "3.0"}
    for seed, losses in enumerate((("2.0", "2.1"), ("1.0", "0.8"))):
        rows = [
            {**same, "variant": variant, "seed": seed, "held-out loss": loss, "seconds": "1"}
            for variant, loss in zip(("hf + peft bf16", "ours fp8 + lora"), losses, strict=True)
        ]
        put(tmp_path / str(seed) / "quality_seeds.csv", [{**r, **FACTS} for r in rows])
        points = [{**{k: r[k] for k in join.SEED}, "step": 0, "loss": 3} for r in rows]
        put(tmp_path / str(seed) / "quality_curves.csv", points)
    assert command("quality", tmp_path / "0", tmp_path / "1", "--output", tmp_path) == 0
    seeds = [(r["variant"], r["seed"]) for r in join.read(tmp_path / "quality_seeds.csv")]
    assert seeds == [(v, s) for v in ("hf + peft bf16", "ours fp8 + lora") for s in "01"]
    peft, ours = join.read(tmp_path / "quality.csv")
    assert (peft["seeds"], peft["held-out loss"], peft["÷ bf16"]) == ("2", "1.5", "1.0")
    assert (ours["held-out loss"], ours["spread"]) == ("1.45", "1.3")
    assert ours["÷ bf16"] == str(round(1.45 / 1.5, 5)) and ours["commit"] == "x"
    assert len(join.read(tmp_path / "quality_curves.csv")) == 4
