# SPDX-License-Identifier: Apache-2.0
"""counters.py reads Nsight Compute's table; that it can be made is seen on a GPU only."""

from __future__ import annotations

import csv
import io

import pytest

from benchmarks.lib import ncu
from benchmarks.ops import counters

STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"


def printed(duration: str, unit: str) -> str:
    """What ncu prints for one kernel: lines of its own, names, units, numbers."""
    cells = {
        "ID": ("", "0"),
        "Kernel Name": (
            "",
            "void lorakernels::<unnamed>::fp8_gemm_kernel<__half, 1, 0>(CUtensorMap_st, long)",
        ),
        ncu.DURATION: (unit, duration),
        ncu.CLOCK: ("Ghz", "1.47"),
        **{metric: ("%", str(10 + i)) for i, metric in enumerate(counters.COLUMNS.values())},
        STALL.format("selected"): ("inst", "99.0"),
        STALL.format("long_scoreboard"): ("inst", "4.06"),
        STALL.format("wait"): ("inst", "1.5"),
    }
    text = io.StringIO()
    table = csv.writer(text)
    table.writerows([list(cells), [u for u, _ in cells.values()], [v for _, v in cells.values()]])
    return "==PROF== Connected\n" + text.getvalue()


@pytest.mark.parametrize(
    ("duration", "unit"), [("1,234.5", "us"), ("1.2345", "ms"), ("1234500", "nsecond")]
)
def test_a_row_for_a_kernel_in_the_table_s_units(duration: str, unit: str) -> None:
    (row,) = counters.rows_of(printed(duration, unit))
    assert row["kernel"] == "fp8_gemm_kernel<__half, 1, 0>"
    assert (row["µs"], row["GHz"]) == (1234.5, 1.47)
    assert [row[column] for column in counters.COLUMNS] == [float(10 + i) for i in range(7)]
    assert row["waits for"] == "long scoreboard (4.1)"


def test_a_template_s_numbers_stay_in_the_name() -> None:
    name = (
        "void lorakernels::<unnamed>::fp8_gemm_kernel<(lorakernels::<unnamed>::Product)1, __half, (bool)1, (int)16>"
        "(CUtensorMap_st, lorakernels::Fp8GemmParams)"
    )
    assert ncu.short_name(name) == "fp8_gemm_kernel<1, __half, 1, 16>"


def test_without_a_table_what_was_printed_is_shown() -> None:
    with pytest.raises(ValueError, match="ERR_NVGPUCTRPERM"):
        counters.rows_of("==ERROR== ERR_NVGPUCTRPERM")
