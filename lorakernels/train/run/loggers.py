# SPDX-License-Identifier: Apache-2.0
"""`--logger`: a run's metrics in TensorBoard, Weights & Biases or Trackio, each through its own package.

A package is imported only if it is asked for, and its own variables count: WANDB_MODE=offline, WANDB_PROJECT,
TRACKIO_DIR and so on. The name of the run is written once into <output>/run.json, so that a resumed run goes on in it.
"""

from __future__ import annotations

import json
import math
import os
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from lorakernels.train.errors import FinetuneError, require
from lorakernels.train.files.files import replace_file
from lorakernels.train.files.written import RUN, TENSORBOARD
from lorakernels.train.options.options import FinetuneOptions

PROJECT = "lorakernels"
STEP = "train/global_step"


class Logger(Protocol):
    """A destination of metrics."""

    def write(self, step: int, values: Mapping[str, float]) -> None: ...

    def go_back(self, step: int) -> None:
        """The steps after `step` will be done again."""

    def close(self) -> None: ...


@dataclass
class Loggers:
    """The loggers of a run, by name. One that fails is reported and left out; training goes on."""

    made: dict[str, Logger] = field(default_factory=dict)
    say: Callable[[str], None] = print

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Send numbers that are finite, truth values as 0 or 1."""
        finite = {name: float(v) for name, v in values.items() if math.isfinite(v)}
        self._each(lambda logger: logger.write(step, finite))

    def go_back(self, step: int) -> None:
        """The steps after `step` will be done again."""
        self._each(lambda logger: logger.go_back(step))

    def close(self) -> None:
        self._each(lambda logger: logger.close())
        self.made.clear()

    def _each(self, work: Callable[[Logger], None]) -> None:
        for name, logger in list(self.made.items()):
            try:
                work(logger)
            except Exception as error:  # whatever a service's client raises
                del self.made[name]
                self.say(f"logger {name} failed and gets nothing from now on: {error}")


class TensorBoard:
    """Event files in <output>/tensorboard. Events of steps that are done again are dropped."""

    def __init__(self, run: Run) -> None:
        self._folder, self._opened = str(run.output / TENSORBOARD), 0
        self._open(run.step)
        if run.step == 0:
            self._writer.add_text("options", json.dumps(run.options, indent=1))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def go_back(self, step: int) -> None:
        self._writer.close()
        self._open(step)

    def close(self) -> None:
        self._writer.close()

    def _open(self, step: int) -> None:
        module = require("torch.utils.tensorboard")
        self._opened += 1
        # files are named by the second; readers take them in the order of their names
        suffix = f".{self._opened}"
        self._writer = module.SummaryWriter(
            self._folder, purge_step=step + 1, filename_suffix=suffix
        )


class Wandb:
    """A run of Weights & Biases. Steps that a resumed run does again are drawn over the same place."""

    def __init__(self, run: Run) -> None:
        self._run = require("wandb").init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=run.name,
            id=run.id,
            resume="allow",
            dir=str(run.output),
            config=run.options,
        )
        self._run.define_metric("*", step_metric=STEP)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({**values, STEP: step})

    def go_back(self, step: int) -> None:
        """Values of a step that is done again are drawn over the same place."""

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """A run of Trackio, which finds a run by its name."""

    def __init__(self, run: Run) -> None:
        self._run = require("trackio").init(
            project=os.environ.get("TRACKIO_PROJECT", PROJECT),
            name=f"{run.name}-{run.id}",
            resume="allow",
            config=run.options,
        )

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def go_back(self, step: int) -> None:
        """Values of a step that is done again are drawn over the same place."""

    def close(self) -> None:
        self._run.finish()


KINDS: dict[str, Callable[[Run], Logger]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "trackio": Trackio,
}


@dataclass(frozen=True)
class Run:
    """A run, as loggers see it.

    Attributes:
        output: the run's directory.
        name, id: for the user and for the logger; both stay the same when the run is resumed.
        step: the step that it begins or goes on at.
        options: the run's options.
    """

    output: Path
    name: str
    id: str
    step: int
    options: dict[str, Any]


def check_packages(options: FinetuneOptions) -> None:
    """Raise FinetuneError, with the command that installs it, if a logger's package is missing."""
    for name in options.logger:
        require(name)


def open_loggers(options: FinetuneOptions, step: int, say: Callable[[str], None]) -> Loggers:
    """Open the loggers of `options`.

    Raises:
        FinetuneError: one cannot be opened. Those that were opened before are closed.
    """
    loggers = Loggers(say=say)
    if not options.logger:
        return loggers
    output = Path(str(options.output))
    name = options.run_name or output.resolve().name
    identity = _identity(output / RUN, options.resume)
    run = Run(output, name, identity, step, asdict(options))
    for kind in options.logger:
        try:
            loggers.made[kind] = KINDS[kind](run)
        except Exception as error:  # whatever a service's client raises
            loggers.close()
            raise FinetuneError(f"logger {kind} cannot be opened: {error}") from error
    return loggers


def _identity(path: Path, resumed: bool) -> str:
    """The id in run.json if the run is resumed and has one; otherwise a new id, which is written there."""
    if resumed:
        with suppress(OSError, ValueError, KeyError, TypeError):
            return str(json.loads(path.read_bytes())["id"])
    made = secrets.token_hex(4)
    replace_file(path, json.dumps({"id": made}).encode())
    return made
