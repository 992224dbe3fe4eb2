# SPDX-License-Identifier: Apache-2.0
"""report/: the pages hold what the committed CSVs say, and the numbers are the ones meant."""

from __future__ import annotations

import csv
import importlib
from pathlib import Path
from typing import Any

import pytest

from benchmarks.lib import goals
from tests.benchmarks.aliases import Load


@pytest.fixture
def report(load: Load) -> Any:
    return load("report.pages")


@pytest.fixture
def ops(load: Load) -> Any:
    return load("report.ops")


@pytest.mark.parametrize(
    "page", ["README.md", "docs/performance.md", "benchmarks/recipes/README.md"]
)
def test_a_page_holds_what_the_committed_results_say(report: Any, page: str) -> None:
    text = (report.ROOT / page).read_text(encoding="utf-8")
    expected = report.PAGES[page](report.records(report.RESULTS))
    assert report.between_markers(text) == expected, "run `python benchmarks/report/pages.py`"


def test_the_headlines_are_measured_and_beside_a_peer(report: Any) -> None:
    block = report.PAGES["README.md"](report.read(report.RESULTS))
    assert "not measured" not in block and "PEFT: –" not in block


def test_adapters_are_shown_where_a_row_of_a_sharded_base_names_them(report: Any) -> None:
    results = report.read(report.RESULTS)
    new = ("LoRA", "optimizer")
    old = [{k: v for k, v in row.items() if k not in new} for row in results["sharded_base"]]
    told = {**old[0], "LoRA": "64, all", "optimizer": "sharded"}
    assert "| model | tokens | base |" in report.tables({"sharded_base": old})
    assert "| 64, all | sharded |" in report.tables({"sharded_base": [*old, told]})


def test_generate_is_a_line_for_each_provider_and_way(report: Any) -> None:
    row = {"model": "8b", "prompt": "512", "batch": "64", "provider": "ours", "forwards": "eager"}
    row |= {"ms a token": "6.5", "repeatable ms": "6.6", "tokens/s": "9846.2", "÷ peft": "0.646"}
    row |= {"check": "ok", "device": "cuda: NVIDIA H100", "torch": "2.11", "commit": "abc"}
    failed = {**row, "forwards": "one graph", "ms a token": "", "check": "WRONG: other tokens"}
    text = report.tables({"generate": [row, failed]})
    assert "| 8b, 512, 64 | ours | eager | 6.5 (6.6) | 9846.2 | 0.646 |  |" in text
    assert "|  | ours | one graph | – | 9846.2 | 0.646 | WRONG: other tokens |" in text


@pytest.mark.parametrize(
    ("at_least", "value", "verdict"),
    [(False, 1.15, ["1.15", "≤ 1.15", "met"]), (False, 1.3, ["1.30", "≤ 1.15", "missed by 13%"]),
     (False, None, ["–", "≤ 1.15", "not measured"]), (True, 1.2, ["1.20", "≥ 1.15", "met"]),
     (True, 1.0, ["1.00", "≥ 1.15", "missed by 15%"])],
    ids=["met", "missed", "not-measured", "above", "below"],
)  # fmt: skip
def test_a_target_is_met_missed_or_not_measured(
    report: Any, at_least: bool, value: float | None, verdict: list[str]
) -> None:
    """The row with the values of `where` is the target's, and no other."""
    target = goals.Target("it", "op", {"p": 0.1, "provider": "ours"}, "÷ floor", 1.15, at_least)
    row = {"p": "0.1", "provider": "ours", "÷ floor": "" if value is None else str(value)}
    others = [{**row, key: "other", "÷ floor": "9"} for key in ("p", "provider")]
    found = report.find([*others, row], target.where)
    assert target.line(report.number(found["÷ floor"])) == ["it", *verdict]


def source_of(path: Path) -> str:
    """Of a benchmark and of what benchmarks share."""
    shared = [p for p in (path.parents[1] / "lib").glob("*.py") if p.stem != "goals"]
    return "".join(p.read_text(encoding="utf-8") for p in (path, *shared))


def test_every_target_names_a_benchmark_and_the_provider_of_it(report: Any, load: Load) -> None:
    """A column or provider renamed in a benchmark must not become "not measured" here."""
    for target in report.targets():
        csv_name = target.csv.removeprefix(goals.NODE)
        name = csv_name if csv_name == "check_gpu" else f"bench_{csv_name}"
        (path,) = (report.ROOT / "benchmarks").glob(f"*/{name}.py")
        bench = load(f"{path.parent.name}.{name}")
        if name == "check_gpu":
            assert "{shape}: {part}".format(**target.where) in {p.key for p in bench.ON_GPU}
        elif name != "bench_sharded_base":  # its rows are of transports
            providers = getattr(bench, "PEERS", None) or bench.PROVIDERS
            assert target.where["provider"] in providers, target
        text = source_of(path)
        for column in (target.column, *target.where):
            assert f'"{column}"' in text, (target.csv, column)


def test_every_op_of_the_table_names_columns_of_its_benchmark(ops: Any, load: Load) -> None:
    for op in ops.OPS:
        bench = load(f"ops.bench_{op.csv}")
        text = source_of(Path(bench.__file__))
        for column in (*op.where, *op.by, op.ratio):
            assert f'"{column}"' in text, (op.csv, column)
        assert set(op.ours) <= set(getattr(bench, "PROVIDERS", op.ours)), op.csv


def test_every_picture_is_drawn_from_the_committed_results(report: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plots = importlib.import_module("benchmarks.report.plots")
    results = report.read(report.RESULTS) | report.read(report.H100)
    losses = {"one GPU": "2.0", "tp 2": "2.1"}
    rows = [{"way": way, "step": "0", "loss": loss} for way, loss in losses.items()]
    results.setdefault("quality_ranks_curves", rows)
    drawn = plots.draw_all(tmp_path, results)
    assert [path.stem for path in drawn] == list(plots.PLOTS)
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)


def test_it_rewrites_only_between_the_markers_and_plots(
    report: Any, ops: Any, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    pages = [tmp_path / name for name in report.PAGES]
    for page in pages:
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(f"above\n{report.BEGIN}\nold\n{report.END}\nbelow\n")
    gemm = {"M x N x K": "8192x8192x8192", "rank": "16", "provider": "ours", "ms": "0.85"}
    facts = {"device": "cuda: NVIDIA H200", "copy GB/s": "4100", "÷ cublaslt": "1.01"}
    facts |= {"torch": "2.11", "commit": "abc", "check": "ok"}
    with (tmp_path / "fp8_linear_lora.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, [*gemm, *facts])
        writer.writeheader()
        writer.writerow({**gemm, **facts})
    assert report.main(["--results", str(tmp_path), "--root", str(tmp_path)]) == 0
    readme, text, recipes = (page.read_text(encoding="utf-8") for page in pages)
    for written in (readme, text, recipes):
        assert written.startswith("above\n") and written.endswith(f"\n{report.END}\nbelow\n")
        assert "old" not in written
    assert "| 1.01 | ≤ 0.98 | missed by 3% |" in text and "not measured" in readme
    assert [p.name for p in tmp_path.glob("*.png")] == ["roofline.png"], "what has no CSV"
    flops = 2 * 8192 * 8192 * (8192 + 16)
    (intensity, rate), *_ = ops.points(report.read(tmp_path))["fp8_linear_lora"]
    assert (intensity, rate) == pytest.approx((flops / (4 * 8192**2), flops / 0.85e-3 / 1e12))


@pytest.mark.parametrize(
    "text", ["", "<!-- results:end -->\n<!-- results:begin -->"], ids=["none", "swapped"]
)
def test_a_readme_without_markers_is_refused(report: Any, text: str) -> None:
    with pytest.raises(ValueError, match="results:begin"):
        report.rewritten(text, "new")
