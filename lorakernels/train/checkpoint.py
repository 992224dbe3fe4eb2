# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that are complete or absent, and say so themselves.

    <output>/checkpoints/step-00000100/
        tensors.safetensors   every trainable tensor
        state.pt              optimizer, RNG, FP8 state; read with weights_only=True
        trainer.json          step, data position, counters, options
        MANIFEST.json         size and SHA-256 of the others, written last

The directory is filled under another name, synced, renamed. A reader takes the newest one whose manifest holds.
"""

from __future__ import annotations

import hashlib
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
from torch import Tensor

from lorakernels.train.errors import CheckpointError, describe_os_error
from lorakernels.train.files import recover_dir, replace_dir, write_bytes

TENSORS, STATE, TRAINER, MANIFEST = (
    "tensors.safetensors",
    "state.pt",
    "trainer.json",
    "MANIFEST.json",
)


@dataclass(frozen=True)
class Checkpoint:
    """What one holds. ``state`` has the keys optimizer, rng and fp8."""

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
    """CheckpointError if `set_rng_state` would lack a generator of `device`."""
    if device.type == "cuda" and "cuda" not in states:
        raise CheckpointError(
            "the checkpoint was made without a GPU and cannot continue on one bit for bit"
        )


def set_rng_state(states: Mapping[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(states["cpu"].cpu())
    if device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"].cpu(), device)


class Checkpoints:
    """The checkpoints of one output directory; the last ``keep`` are kept."""

    def __init__(self, directory: Path, keep: int) -> None:
        self.directory, self.keep = directory, keep

    def steps(self) -> list[int]:
        """Steps that have a directory, oldest first; whether it is good is not looked at."""
        found = self.directory.glob("step-*") if self.directory.is_dir() else []
        return sorted(int(path.name[5:]) for path in found if path.name[5:].isdigit())

    def path(self, step: int) -> Path:
        return self.directory / f"step-{step:08d}"

    def save(self, checkpoint: Checkpoint) -> Path:
        """Write, then delete the oldest beyond ``keep``; never a newer one. On failure nothing that was
        there is touched."""
        target = self.path(checkpoint.step)
        tensors = {
            name: tensor.detach().contiguous() for name, tensor in checkpoint.tensors.items()
        }
        state = io.BytesIO()
        torch.save(checkpoint.state, state)
        files = {
            TENSORS: safetensors.torch.save(tensors),
            STATE: state.getvalue(),
            TRAINER: json.dumps(checkpoint.trainer, indent=1).encode(),
        }
        manifest = {
            name: {"bytes": len(data), "sha256": _sha256(data)} for name, data in files.items()
        }
        files[MANIFEST] = json.dumps(
            {"step": checkpoint.step, "files": manifest}, indent=1
        ).encode()
        try:
            with replace_dir(target) as temporary:
                for name, data in files.items():
                    write_bytes(temporary / name, data)
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
        older = [step for step in self.steps() if step < checkpoint.step]
        for step in older[: max(0, len(older) - self.keep + 1)]:
            shutil.rmtree(self.path(step))
        return target

    def load_newest(self, say: Callable[[str], None], device: torch.device) -> Checkpoint | None:
        """The newest checkpoint that is whole; broken ones are named, passed over and renamed to broken-…."""
        for old in self.directory.glob(".old-step-*") if self.directory.is_dir() else ():
            recover_dir(self.directory / old.name.removeprefix(".old-"))
        for leftover in self.directory.glob(".*-step-*") if self.directory.is_dir() else ():
            say(f"{leftover} was not finished: ignored and removed")
            shutil.rmtree(leftover, ignore_errors=True)
        for step in reversed(self.steps()):
            try:
                return self.load(step, device)
            except CheckpointError as error:
                kept = self.path(step).with_name(f"broken-{self.path(step).name}")
                say(f"{error}: skipped, kept as {kept.name}")
                shutil.rmtree(kept, ignore_errors=True)
                self.path(step).rename(kept)
        return None

    def load(self, step: int, device: torch.device) -> Checkpoint:
        """CheckpointError says which file is missing, short or changed."""
        directory = self.path(step)
        files = {
            name: _checked(directory, name, want) for name, want in _manifest(directory).items()
        }
        try:
            tensors = safetensors.torch.load(files[TENSORS])
            state = torch.load(io.BytesIO(files[STATE]), map_location=device, weights_only=True)
            trainer = json.loads(files[TRAINER])
        except (
            SafetensorError,
            pickle.UnpicklingError,
            RuntimeError,
            ValueError,
            KeyError,
        ) as error:
            raise CheckpointError(f"checkpoint {directory} cannot be read ({error})") from error
        return Checkpoint(step, tensors, state, trainer)


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _manifest(directory: Path) -> dict[str, Any]:
    try:
        files: dict[str, Any] = json.loads((directory / MANIFEST).read_bytes())["files"]
    except FileNotFoundError as error:
        raise CheckpointError(
            f"checkpoint {directory} is not complete ({MANIFEST} is missing)"
        ) from error
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise CheckpointError(f"checkpoint {directory} is broken ({MANIFEST}: {error})") from error
    if set(files) != {TENSORS, STATE, TRAINER}:
        raise CheckpointError(
            f"checkpoint {directory} is broken ({MANIFEST} lists {sorted(files)})"
        )
    return files


def _checked(directory: Path, name: str, want: dict[str, Any]) -> bytes:
    try:
        data = (directory / name).read_bytes()
    except OSError as error:
        raise CheckpointError(
            f"checkpoint {directory} is broken ({name}: {error.strerror})"
        ) from error
    if len(data) != want["bytes"]:
        raise CheckpointError(
            f"checkpoint {directory} is broken ({name} has {len(data)} of {want['bytes']} bytes)"
        )
    if _sha256(data) != want["sha256"]:
        raise CheckpointError(
            f"checkpoint {directory} is broken ({name} does not match its SHA-256)"
        )
    return data
