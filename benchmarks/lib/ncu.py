# SPDX-License-Identifier: Apache-2.0
"""What Nsight Compute counts of the kernels that a command launches."""

from __future__ import annotations

import csv
import io
import re
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

DURATION, CLOCK = "gpu__time_duration.sum", "gpc__cycles_elapsed.avg.per_second"
TO_MICROSECONDS = {
    "nsecond": 1e-3,
    "ns": 1e-3,
    "usecond": 1.0,
    "us": 1.0,
    "msecond": 1e3,
    "ms": 1e3,
}
TO_GHZ = {
    "cycle/nsecond": 1.0,
    "Ghz": 1.0,
    "GHz": 1.0,
    "cycle/usecond": 1e-3,
    "Mhz": 1e-3,
    "MHz": 1e-3,
}


class Kernel:
    """What `ncu` says of one launch: its name, and numbers by their metrics."""

    def __init__(self, values: dict[str, str], units: dict[str, str]) -> None:
        self.values, self._units, self.name = values, units, short_name(values["Kernel Name"])

    def number(self, metric: str) -> float:
        return float(self.values[metric].replace(",", ""))

    @property
    def microseconds(self) -> float:
        return self.number(DURATION) * TO_MICROSECONDS[self._units[DURATION]]

    @property
    def ghz(self) -> float:
        return self.number(CLOCK) * TO_GHZ[self._units[CLOCK]]


def kernels_of(text: str) -> list[Kernel]:
    """The kernels in `ncu --page raw --csv`: a line of names, a line of units, a line per kernel.

    Raises:
        ValueError: there is no such table in `text`.
    """
    lines = list(csv.reader(io.StringIO(text)))
    start = next((i for i, line in enumerate(lines) if "Kernel Name" in line), None)
    if start is None:
        raise ValueError(f"ncu printed no table of kernels, but: {text[:500]}")
    names, units = lines[start], lines[start + 1]
    unit = dict(zip(names, units, strict=True))
    return [
        Kernel(dict(zip(names, line, strict=True)), unit)
        for line in lines[start + 2 :]
        if len(line) == len(names)
    ]


def short_name(kernel: str) -> str:
    """A kernel's name without namespace, arguments and the types of its template's numbers."""
    name = kernel.replace("(anonymous namespace)::", "").replace("<unnamed>::", "")
    name = re.sub(r"\([\w: ]+\)(?=-?\d)", "", name)
    return name.removeprefix("void ").replace("lorakernels::", "").partition("(")[0][:70]


def counted(again: list[str], asked: list[str]) -> str:
    """What `ncu --page raw --csv` prints of what the command `again` runs between start and stop of the profiler.

    `asked` are ncu's options that name sections or metrics.
    """
    with TemporaryDirectory() as folder:
        report = str(Path(folder) / "report")
        options = ["--clock-control", "none", "--profile-from-start", "off", *asked]
        profile = ["ncu", *options, "-o", report, *again]
        subprocess.run(profile, check=True, stdout=subprocess.DEVNULL)
        show = ["ncu", "-i", report + ".ncu-rep", "--page", "raw", "--csv"]
        return subprocess.run(show, check=True, capture_output=True, text=True).stdout
