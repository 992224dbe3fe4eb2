# SPDX-License-Identifier: Apache-2.0
"""The main of every benchmark of an op: its options, its rows, and what they are held against.

A script says what is its own in a `Bench` and ends with `sys.exit(main(BENCH))`. Its rows come from `against_floor`
where bytes bound the op, and from `against_cublaslt` where it multiplies matrices. Both check what a provider computes
before they time it, and do not time what is wrong.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from benchmarks.lib.energy import joules_of, shown
from benchmarks.lib.rows import Row, arguments, environment, finish, parser, ratio
from benchmarks.lib.timing import NOT_TIMED, heat, measured_floor, time_of


@dataclass(frozen=True)
class Option:
    """An option of the command line, and what it is on a GPU and on a CPU where it is not given.

    A list is an option with several values. `cpu` None means: as on a GPU.
    """

    name: str
    gpu: Any
    cpu: Any = None
    choices: Collection[str] | None = None
    metavar: str | None = None
    help: str | None = None

    def add_to(self, options: argparse.ArgumentParser) -> None:
        many = isinstance(self.gpu, list)
        first = self.gpu[0] if many else self.gpu
        options.add_argument(
            f"--{self.name}",
            nargs="+" if many else None,
            type=type(first),
            choices=self.choices,
            metavar=self.metavar,
            help=self.help,
        )

    def value(self, given: Any, on_gpu: bool) -> Any:
        if given is not None:
            return given
        return self.gpu if on_gpu or self.cpu is None else self.cpu


@dataclass(frozen=True)
class Setting:
    """What the rows of one run are made with: options, device, bytes per second of a copy (nan if not measured)."""

    args: argparse.Namespace
    device: torch.device
    bandwidth: float
    given: frozenset[str]  # names of the options that the command line has

    def time(self, step: Callable[[], object]) -> Row:
        return time_of(step, self.device, self.args.repetitions).columns()

    def floor_ms(self, size: int) -> float:
        """Of moving `size` bytes."""
        return size / self.bandwidth * 1e3


@dataclass(frozen=True)
class Bench:
    """A benchmark: its name is that of its files, `floor` whether a copy's bandwidth is measured for it."""

    name: str
    description: str
    options: tuple[Option, ...]
    rows: Callable[[Setting], Iterable[Row]]
    floor: bool = True


@dataclass(frozen=True)
class Call:
    """A provider's call. `check` makes columns of its result; "check" among them is "ok" or why it is not timed."""

    run: Callable[[], Any]
    check: Callable[[Any], Row]
    operations: int = 0


def verdict(fault: str) -> Row:
    """The column for a result; `fault` names what is wrong with it, "" if nothing is."""
    return {"check": f"WRONG: {fault}" if fault else "ok"}


def calls_of(
    providers: Mapping[str, Callable[[Any], Any]],
    names: Iterable[str],
    inputs: Any,
    fault: Callable[[Any, Any], str],
) -> dict[str, Call]:
    """The calls of those names; `fault(inputs, result)` names what is wrong."""

    def check(result: Any) -> Row:
        return verdict(fault(inputs, result))

    return {name: Call(partial(providers[name], inputs), check) for name in names}


def against_floor(case: Row, calls: dict[str, Call], size: int, setting: Setting) -> list[Row]:
    """A row for each provider of an op that has to move `size` bytes."""
    timed: dict[str, Row] = {}
    for name, call in calls.items():
        check = call.check(call.run())
        columns = setting.time(call.run) if check["check"] == "ok" else NOT_TIMED
        timed[name] = {**check, **columns}
    own, floor = timed.get("ours", NOT_TIMED)["ms"], setting.floor_ms(size)
    return [
        {
            **case,
            "provider": name,
            **columns,
            "floor ms": round(floor, 5),
            "÷ floor": ratio(columns["ms"], floor),
            "÷ ours": ratio(columns["ms"], own),
        }
        for name, columns in timed.items()
    ]


def against_cublaslt(
    case: Row, calls: dict[str, Call], base: Callable[[], object], setting: Setting, digits: int
) -> list[Row]:
    """A row for each provider of a product; `base` is cuBLASLt's, timed before and after each of them.

    An H200 under load lowers its clock within a second: the ratio is to the mean of those two. `digits` is of TFLOP/s.
    "mJ" is the board's energy of one call among calls that follow each other. These come behind all times: they heat
    the GPU, and a provider that is timed behind them took up to a quarter longer beside a base that was not.
    """
    rows: list[Row] = []
    heat(setting.device)
    before = setting.time(base)["ms"]
    for name, call in calls.items():
        check = call.check(call.run())
        columns, after = NOT_TIMED, before
        if check["check"] == "ok":
            columns = setting.time(call.run)
            after = setting.time(base)["ms"]
        ms, beside = columns["ms"], before
        if isinstance(before, float) and isinstance(after, float):
            beside = (before + after) / 2
        rows.append(
            {
                **case,
                "provider": name,
                **check,
                **columns,
                "TFLOP/s": ratio(call.operations / 1e9, ms, digits),
                "÷ cublaslt": ratio(ms, beside),
            }
        )
        before = after
    for row, call in zip(rows, calls.values(), strict=True):
        is_timed = row["check"] == "ok"
        energy = joules_of(call.run, setting.device) if is_timed else math.nan
        row["mJ"] = shown(energy * 1e3, 2)
    return rows


def main(bench: Bench) -> int:
    """Run `bench` as the command line says; the exit code is 1 if a result is wrong."""
    options = parser(bench.description)
    for option in bench.options:
        option.add_to(options)
    args, device = arguments(options)
    given = frozenset(o.name for o in bench.options if getattr(args, o.name) is not None)
    for option in bench.options:
        value = option.value(getattr(args, option.name), device.type == "cuda")
        setattr(args, option.name, value)
    bandwidth, facts = math.nan, dict[str, str]()
    if bench.floor:
        bandwidth, facts = measured_floor(device, args.repetitions)
    rows = list(bench.rows(Setting(args, device, bandwidth, given)))
    return finish(bench.name, rows, {**environment(device), **facts}, args.output)
