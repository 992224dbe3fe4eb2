# SPDX-License-Identifier: Apache-2.0
"""The records of a run: metrics.jsonl, with one JSON object per line, and loss.png."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any, TextIO

from lorakernels.train.errors import require
from lorakernels.train.files.files import replace_file


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Every whole line. A crash may have cut the last line, which is then left out."""
    if not path.exists():
        return []
    records = []
    for line in path.read_bytes().split(b"\n"):
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and "step" in record:
            records.append(record)
    return records


class MetricsLog:
    """Appends to metrics.jsonl, after `begin`.

    Without a path nothing is written: of several ranks, only the first has a path.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._file: TextIO | None = None

    def begin(self, step: int, resumed: bool) -> None:
        """Open the file. A run that is not resumed drops all lines, and a resumed one those after `step`."""
        self.go_back(step if resumed else -1)

    def go_back(self, step: int) -> None:
        """Drop the lines after `step`."""
        self.close()
        if (path := self.path) is None:
            return
        kept = [record for record in read_metrics(path) if record["step"] <= step]
        replace_file(path, "".join(json.dumps(record) + "\n" for record in kept).encode())
        self._file = path.open("a", encoding="utf-8")

    def write(self, **values: Any) -> None:
        """Append one line. Numbers that are not finite become null, because JSON cannot express them."""
        if self._file is None:
            return
        clean = {
            k: None if isinstance(v, float) and not math.isfinite(v) else v
            for k, v in values.items()
        }
        self._file.write(json.dumps(clean) + "\n")
        self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def plot_losses(metrics: Path, target: Path, title: str) -> None:
    """Plot training and validation loss over steps as a PNG."""
    matplotlib = require("matplotlib")
    matplotlib.use("Agg")
    figures = require("matplotlib.figure")
    records = read_metrics(metrics)
    train = [(r["step"], r["loss"]) for r in records if r.get("loss") is not None]
    held = [(r["step"], r["eval_loss"]) for r in records if r.get("eval_loss") is not None]
    figure = figures.Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    if train:
        axes.plot(*zip(*train, strict=True), linewidth=0.8, label="training")
    if held:
        axes.plot(*zip(*held, strict=True), marker="o", label="validation")
    axes.set(xlabel="step", ylabel="loss (nats per token)", title=title)
    axes.grid(alpha=0.3)
    if train or held:
        axes.legend()
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=120)
    replace_file(target, picture.getvalue())
