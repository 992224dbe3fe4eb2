# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that are complete or absent, that carry their own checksums, and that PEFT opens as adapters.

    <output>/checkpoints/step-00000100/
        adapter_config.json, adapter_model.safetensors, README.md, the tokenizer's files
        state/optimizer.pt, rng.pt, fp8.pt, runtime.pt    read with weights_only=True
        state/tensors.safetensors    trained tensors that the adapter's file does not hold to the bit; may be absent
        state/trainer.json           step, data position, counters, options
        state/MANIFEST.json          format, step, size and SHA-256 of all other files, and its own; written last

The directory is filled under another name, synced and renamed. A reader takes the newest directory whose files
match its manifest.
"""

from __future__ import annotations

import io
import json
import pickle
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from lorakernels import read_adapter
from lorakernels.train.errors import CheckpointError, describe_os_error
from lorakernels.train.files.adapter_files import WEIGHTS, AdapterFiles
from lorakernels.train.files.files import recover_dir, replace_dir, write_bytes
from lorakernels.train.files.manifest import (
    MANIFEST,
    OtherFormat,
    check_files,
    entry_of,
    make_manifest,
    read_manifest,
)

FOLDER = "state"
TENSORS, TRAINER = f"{FOLDER}/tensors.safetensors", f"{FOLDER}/trainer.json"


@dataclass(frozen=True)
class Checkpoint:
    """The contents of one checkpoint.

    Attributes:
        step: the number of optimizer steps tried.
        tensors: {parameter name: tensor} of everything that is trained.
        state: the entries optimizer, rng, fp8 and runtime.
        trainer: the contents of trainer.json.
    """

    step: int
    tensors: dict[str, Tensor]
    state: dict[str, Any]
    trainer: dict[str, Any]


def rng_state(device: torch.device) -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def check_rng_state(states: Mapping[str, Tensor], device: torch.device) -> None:
    """Raise CheckpointError if `states` lack a generator that `set_rng_state` needs on `device`."""
    if device.type == "cuda" and "cuda" not in states:
        raise CheckpointError(
            "the checkpoint was made without a GPU and cannot continue on one bit for bit"
        )


def set_rng_state(states: Mapping[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(states["cpu"].cpu())
    if device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"].cpu(), device)


class Checkpoints:
    """The checkpoints of one output directory.

    Only the last ``keep`` stay, and the checkpoints of the steps ``best`` and ``way_back``. ``adapter`` writes the
    files that PEFT opens.
    """

    def __init__(self, directory: Path, keep: int, adapter: AdapterFiles | None = None) -> None:
        self.directory, self.keep, self.adapter = directory, keep, adapter
        self.best: int | None = None
        self.way_back: int | None = None

    def steps(self) -> list[int]:
        """The steps that have a directory, oldest first. The directories' contents are not checked."""
        paths = self.directory.glob("step-*") if self.directory.is_dir() else []
        steps = [int(path.name[5:]) for path in paths if path.name[5:].isdecimal()]
        return sorted(step for step in steps if self.path(step).is_dir())

    def path(self, step: int) -> Path:
        return self.directory / f"step-{step:08d}"

    def save(self, checkpoint: Checkpoint) -> Path:
        """Write a checkpoint, then delete the oldest ones beyond ``keep``. A newer checkpoint is never deleted.

        Raises:
            CheckpointError: a file could not be written. Existing checkpoints are then untouched.
        """
        target = self.path(checkpoint.step)
        try:
            with replace_dir(target) as temporary:
                self._fill(temporary, checkpoint)
        except OSError as error:
            good = [step for step in self.steps() if step != checkpoint.step]
            last = (
                f"the last checkpoint is {self.path(good[-1])}"
                if good
                else "there is no earlier checkpoint"
            )
            raise CheckpointError(
                f"checkpoint of step {checkpoint.step} not saved: {describe_os_error(error, target)}; {last}, "
                "make room and run again with --resume"
            ) from error
        older = [step for step in self.steps() if step < checkpoint.step and step != self.best]
        for step in older[: max(0, len(older) - self.keep + 1)]:
            if step != self.way_back:
                shutil.rmtree(self.path(step))
        return target

    def _fill(self, folder: Path, checkpoint: Checkpoint) -> None:
        rest = {name: tensor.detach() for name, tensor in checkpoint.tensors.items()}
        if self.adapter is not None:
            self.adapter.write(folder)
            for name, held in read_adapter(self.adapter.model, folder).items():
                if name in rest and _same(rest[name].cpu(), held):
                    del rest[name]
        (folder / FOLDER).mkdir()
        if rest:
            data = safetensors.torch.save({name: t.contiguous() for name, t in rest.items()})
            write_bytes(folder / TENSORS, data)
        for name, value in checkpoint.state.items():
            buffer = io.BytesIO()
            torch.save(value, buffer)
            write_bytes(folder / FOLDER / f"{name}.pt", buffer.getvalue())
        write_bytes(folder / TRAINER, json.dumps(checkpoint.trainer, indent=1).encode())
        write_bytes(folder / MANIFEST, make_manifest(folder, checkpoint.step))

    def remove_after(self, step: int) -> None:
        """Delete the checkpoints of later steps, the newest first, so that a kill leaves a run that can go on."""
        for later in reversed([saved for saved in self.steps() if saved > step]):
            shutil.rmtree(self.path(later))

    def load_newest(
        self, say: Callable[[str], None], device: torch.device, until: int | None = None
    ) -> Checkpoint | None:
        """The newest checkpoint that is whole, of step `until` at most if that is given.

        Broken ones are reported, skipped and renamed to broken-….

        Raises:
            OtherFormat: it was written by a version whose checkpoints this version does not read.
        """
        for old in self.directory.glob(".old-step-*") if self.directory.is_dir() else ():
            recover_dir(self.directory / old.name.removeprefix(".old-"))
        for leftover in self.directory.glob(".*-step-*") if self.directory.is_dir() else ():
            say(f"{leftover} was not finished: ignored and removed")
            shutil.rmtree(leftover, ignore_errors=True)
        for step in reversed([s for s in self.steps() if until is None or s <= until]):
            try:
                return self.load(step, device)
            except OtherFormat:
                raise
            except CheckpointError as error:
                kept = self.path(step).with_name(f"broken-{self.path(step).name}")
                say(f"{error}: skipped, kept as {kept.name}")
                shutil.rmtree(kept, ignore_errors=True)
                self.path(step).rename(kept)
        return None

    def peek(self) -> tuple[int, dict[str, Any]] | None:
        """Step and trainer.json of the newest checkpoint. None if it is not whole, which `load_newest` will report.

        Raises:
            OtherFormat: as `load_newest`.
        """
        if not (steps := self.steps()):
            return None
        directory = self.path(steps[-1])
        try:
            if read_manifest(directory, steps[-1])[TRAINER] != entry_of(directory / TRAINER):
                return None
            return steps[-1], json.loads((directory / TRAINER).read_bytes())
        except OtherFormat:
            raise
        except (CheckpointError, OSError, ValueError):
            return None

    def load(self, step: int, device: torch.device) -> Checkpoint:
        """Load the checkpoint of `step`, its state onto `device`.

        Raises:
            CheckpointError: a file is missing, short or changed; the message names it.
        """
        directory = self.path(step)
        names = check_files(directory, step)
        try:
            tensors = {}
            if WEIGHTS in names:
                model = nn.Module() if self.adapter is None else self.adapter.model
                tensors = read_adapter(model, directory)
            if TENSORS in names:
                tensors |= safetensors.torch.load((directory / TENSORS).read_bytes())
            state = {
                Path(name).stem: torch.load(
                    directory / name, map_location=device, weights_only=True
                )
                for name in sorted(names)
                if Path(name).parent.name == FOLDER and name.endswith(".pt")
            }
            trainer = json.loads((directory / TRAINER).read_bytes())
        except (
            SafetensorError,
            pickle.UnpicklingError,
            RuntimeError,
            ValueError,
            KeyError,
            EOFError,
            OSError,
        ) as error:
            raise CheckpointError(f"checkpoint {directory} cannot be read ({error})") from error
        return Checkpoint(step, tensors, state, trainer)


def _same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)
