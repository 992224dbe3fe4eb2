# SPDX-License-Identifier: Apache-2.0
"""report/quality_ranks.py: runs become one table, where what differs by chance in one run is a mean's smaller part."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import pytest

from tests.benchmarks.aliases import Load

STEPS = 40


def run(folder: Path, curves: dict[str, list[float]], held: dict[str, str]) -> str:
    folder.mkdir()
    with (folder / "quality_ranks_curves.csv").open("w", newline="") as file:
        points = csv.writer(file)
        points.writerow(("way", "step", "loss"))
        for way, losses in curves.items():
            points.writerows((way, step, loss) for step, loss in enumerate(losses))
    with (folder / "quality_ranks.csv").open("w", newline="") as file:
        facts = dict.fromkeys(
            ("device", "torch", "cuda", "python", "triton", "driver", "commit"), "x"
        )
        facts["date"] = folder.name
        rows = csv.DictWriter(file, ["way", "ranks", "held-out loss", *facts])
        rows.writeheader()
        rows.writerows(
            {"way": way, "ranks": "2", "held-out loss": loss, **facts} for way, loss in held.items()
        )
    return str(folder)


def test_runs_are_compared_by_their_means(load: Load, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report = load("report.quality_ranks")
    flat = [2.0] * STEPS
    ways = ("one GPU", "tp 2", "cp 2")
    first = {"one GPU": flat, "tp 2": [2.01] * STEPS, "cp 2": flat[:5]}  # cp was ended
    second = {"one GPU": flat, "tp 2": [1.994] * STEPS, "cp 2": [2.004] * STEPS}
    folders = [
        run(tmp_path / "1", first, dict(zip(ways, ("4", "2", "8"), strict=True))),
        run(tmp_path / "2", second, dict(zip(ways, ("4", "3", "5"), strict=True))),
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["report", "--output", str(tmp_path / "all"), *folders])
        assert report.main() == 0
    with (tmp_path / "all" / "quality_ranks.csv").open(newline="") as file:
        one, tp, cp = csv.DictReader(file)
    assert (one["largest difference"], one["runs"]) == ("0.000%", "2")
    assert (tp["largest difference"], tp["of one run"]) == ("0.100%", "0.500%, 0.300%")
    assert (tp["held-out ÷ one GPU"], tp["runs"]) == ("0.625", "2")
    assert (cp["largest difference"], cp["runs"], cp["held-out ÷ one GPU"]) == (
        "0.200%",
        "1",
        "1.25",
    )
    assert one["commit"] == "x" and "date" not in one, "what runs do not share is left out"
    with (tmp_path / "all" / "quality_ranks_curves.csv").open(newline="") as file:
        drawn = [*csv.DictReader(file)]
    assert [*dict.fromkeys(point["way"] for point in drawn)] == ["one GPU", "tp 2"]
    assert drawn[-1] == {"way": "tp 2", "step": str(STEPS - 1), "loss": "2.002"}
    assert (tmp_path / "all" / "quality_ranks.png").read_bytes().startswith(b"\x89PNG")
