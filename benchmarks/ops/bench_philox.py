# SPDX-License-Identifier: Apache-2.0
"""What drawing a dropout mask costs: ours with p = 0.1 against p = 0, and the draw alone against PyTorch's.

    python benchmarks/ops/bench_philox.py --output DIR [--shapes 8192x8192 …]

"÷ p = 0" divides by the same op, inputs and direction without a draw; "draw ms" is their difference. Backward without
a draw writes no dx, which is dout, so that its difference holds that write too. "÷ floor" counts what is moved, as
bench_bias_dropout_add.py does. `drawn_mask` writes a bool for each element. F.dropout reads and writes bf16 and writes
a mask. torch.bernoulli writes bf16. Each is checked before it is timed: the keep rate is to be within 6 σ. The exit
code is 1 if one is wrong.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.lib.bias_dropout_add import make_inputs, moved, timed
from benchmarks.lib.op_bench import Bench, Option, Setting, main
from benchmarks.lib.rows import Row, ratio
from benchmarks.lib.timing import NOT_TIMED
from lorakernels.numerics.dropout import drawn_mask
from lorakernels.values import Dropout

P = 0.1
# Per element. On a GPU F.dropout writes a bool mask as well; torch.bernoulli only writes
BYTES = {"drawn_mask": 1, "F.dropout": 5, "torch.bernoulli": 2}
OPTIONS = (Option("shapes", ["8192x8192", "8192x8191"], cpu=["256x512"], metavar="MxN"),)


def row(
    shape: str, what: str, p: float, check: str, timing: Row, floor: float, draw_ms: object
) -> Row:
    rows, cols = map(int, shape.split("x"))
    rate = ratio(rows * cols / 1e6, timing["ms"])
    return {
        "shape": shape,
        "what": what,
        "p": p,
        "check": check,
        **timing,
        "Gelement/s": rate,
        "floor ms": round(floor, 5),
        "÷ floor": ratio(timing["ms"], floor),
        "draw ms": draw_ms,
        "÷ p = 0": "",
    }


def with_and_without(shape: str, setting: Setting) -> list[Row]:
    """bias_dropout_add, both directions, without and with a draw."""
    device, repetitions = setting.device, setting.args.repetitions
    inputs = {p: make_inputs(shape, p, True, torch.bfloat16, device) for p in (0.0, P)}
    outcomes = {p: timed("ours", i, device, repetitions) for p, i in inputs.items()}
    result = []
    for direction in ("forward", "backward"):
        without: Row = NOT_TIMED
        for p, (outcome, timings) in outcomes.items():
            columns = timings[direction].columns() if timings else NOT_TIMED
            floor = setting.floor_ms(moved(direction, inputs[p]))
            entry = row(shape, f"bias_dropout_add {direction}", p, outcome, columns, floor, "")
            if p:
                pair = columns["ms"], without["ms"]
                entry["÷ p = 0"] = ratio(*pair)
                if all(isinstance(ms, float) for ms in pair):
                    entry["draw ms"] = round(pair[0] - pair[1], 5)
            without = columns
            result.append(entry)
    return result


def draws(shape: str, device: torch.device) -> dict[str, Callable[[], Tensor]]:
    """Draws of a mask alone; what they return is nonzero where an element is kept."""
    rows, cols = map(int, shape.split("x"))
    dropout = Dropout(torch.tensor([7, 0], dtype=torch.int64, device=device), P, 0)
    x = torch.ones(rows, cols, dtype=torch.bfloat16, device=device)
    return {
        "drawn_mask": lambda: drawn_mask(dropout, rows, cols),
        "F.dropout": lambda: functional.dropout(x, P, True),
        "torch.bernoulli": lambda: torch.bernoulli(x, 1 - P),
    }


def rate_fault(kept: Tensor) -> str:
    rate = float((kept != 0).double().mean())
    sigma = (P * (1 - P) / kept.numel()) ** 0.5
    # drawn_mask keeps 65536 − round(6553.6) of 65536: off by 6·10⁻⁶, which 6 σ has room for up to 10¹⁰ elements
    return "ok" if abs(rate - (1 - P)) <= 6 * sigma else f"WRONG: keeps {rate:.5f}, not {1 - P:.5f}"


def alone(shape: str, setting: Setting) -> Iterator[Row]:
    rows, cols = map(int, shape.split("x"))
    for what, draw in draws(shape, setting.device).items():
        outcome = rate_fault(draw())
        columns = setting.time(draw) if outcome == "ok" else NOT_TIMED
        floor = setting.floor_ms(BYTES[what] * rows * cols)
        yield row(shape, what, P, outcome, columns, floor, "")


def rows(setting: Setting) -> Iterator[Row]:
    for shape in setting.args.shapes:
        yield from with_and_without(shape, setting)
        yield from alone(shape, setting)


BENCH = Bench("philox", "the cost of drawing dropout masks", OPTIONS, rows)

if __name__ == "__main__":
    sys.exit(main(BENCH))
