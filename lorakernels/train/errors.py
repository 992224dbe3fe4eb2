# SPDX-License-Identifier: Apache-2.0
"""Errors that stop a run. Every message names what was found and what was expected."""

from __future__ import annotations

import errno
import importlib
import shutil
import signal
from pathlib import Path
from types import ModuleType


class FinetuneError(RuntimeError):
    """A run cannot start or go on; the message is for the user and needs no traceback."""


class OptionError(FinetuneError):
    """An option is unknown, of the wrong type or out of range."""


class DataError(FinetuneError):
    """A data file cannot be used."""


class ModelError(FinetuneError):
    """A model directory cannot be used."""


class CheckpointError(FinetuneError):
    """A checkpoint is missing, broken or belongs to another run."""


class Diverged(FinetuneError):
    """Too many steps in a row had a loss or gradient that is not finite."""


class Interrupted(FinetuneError):
    """SIGINT or SIGTERM stopped the run. The message says whether the state was saved."""

    def __init__(self, signum: int, message: str) -> None:
        super().__init__(message)
        self.exit_code = 128 + signum
        self.signal_name = signal.Signals(signum).name


# Packages that no extra brings, each for one value of an option
ON_DEMAND = ("bitsandbytes", "tensorboard", "trackio", "wandb")
EXTRAS = {
    "rich": "train",
    "matplotlib": "train",
    "yaml": "train",
    "transformers": "hf",
    "tokenizers": "hf",
    "datasets": "data",
    "pyarrow": "data",
}


def require(module: str) -> ModuleType:
    """Import an optional dependency. Raises FinetuneError, which names the command that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.split(".")[0]
        where = f' ({package} is in the extra "{EXTRAS[package]}")' if package in EXTRAS else ""
        if package in ON_DEMAND:
            raise FinetuneError(
                f"this option needs {package}, which cannot be imported ({error}): pip install {package}"
            ) from error
        extras = "train,data" if EXTRAS.get(package) == "data" else "hf,train"
        raise FinetuneError(
            f"finetune needs {package}, which cannot be imported ({error}): "
            f'pip install "lorakernels[{extras}]"{where}'
        ) from error


def describe_os_error(error: OSError, path: Path) -> str:
    """The message for `error`. A full disk is the common cause; its message names the path and the space left."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        existing = next(p for p in [path, *path.absolute().parents] if p.exists())
        free = shutil.disk_usage(existing).free
        return f"no space left while writing {path} ({free / 2**20:.1f} MiB free)"
    return f"cannot write {path}: {error.strerror or error}"
