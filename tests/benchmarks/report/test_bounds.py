# SPDX-License-Identifier: Apache-2.0
"""report/bounds.py: each missed target has a bound or what is left to try; bytes are those that the kernels move."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.report import bounds
from lorakernels import _C
from tests.benchmarks.aliases import Load

H200 = 132  # multiprocessors


@pytest.fixture(scope="module")
def results() -> Any:
    from benchmarks.report.pages import RESULTS, records

    return records(RESULTS)


def test_every_target_s_record_has_bounds(load: Load) -> None:
    targets = list(load("report.pages").targets())
    met = {"fp8_grad_input", "bias_dropout_add", "generate", "h200x8/sharded_base"}
    assert {target.csv for target in targets} - met == set(bounds.BOUNDS)


def test_each_missed_target_is_bounded_or_says_that_it_is_not(load: Load, results: Any) -> None:
    """No bound is better than what was measured, and none lacks a number that its words speak of."""
    report, found = load("report.pages"), 0
    for target in report.targets():
        row = report.find(results[target.csv], target.where)
        measured = report.number(row[target.column]) if row else None
        if not target.line(measured)[3].startswith("missed"):
            continue
        best, why = bounds.BOUNDS[target.csv](target, results)
        found += 1
        assert why and "nan" not in why, target.what
        if isinstance(best, str):
            assert "Next: " in why or "cuBLASLt" in best, target.what
        else:
            assert (best >= measured) if target.at_least else (best <= measured), target.what
    table = bounds.bound_table(report.targets(), results)
    assert found == table.count(" |\n") - 2 and found > 20


def test_a_met_target_and_one_that_was_not_measured_have_no_line(load: Load) -> None:
    assert bounds.bound_table(load("report.pages").targets(), {}) == ""


def test_the_bytes_are_those_of_the_kernels_workspaces() -> None:
    """Sums of blocks are written once and read once."""
    side, rank = bounds.SQUARE, 16
    shares = bounds.STRIPS * side * rank + bounds.SEGMENTS * 512 * rank
    assert _C.quantize_grad_workspace(side, side, rank, True, H200) == shares
    assert _C.lora_grad_a_partial(side, side, rank, H200) == bounds.SLICES * rank * side


def test_the_plan_s_steps_are_beside_measured_ones(results: Any) -> None:
    table = bounds.plan_table(results)
    assert table.count(" |\n") == 2 + len(bounds.PLAN) - 1 and table.count("–") == 2
    where = {"model": "Llama-3.2-1B", "provider": "ours, one graph"}
    now = bounds.value(results, "end_to_end", "ms/step", **where)
    assert f"| ours, one graph | 8.8 | 7.9 | – | {now:.1f} |" in table
    assert bounds.plan_table({}) == ""
