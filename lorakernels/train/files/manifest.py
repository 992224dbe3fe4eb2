# SPDX-License-Identifier: Apache-2.0
"""state/MANIFEST.json of a checkpoint, which records its files and its format.

    {"format": 2, "step": 100, "files": {"state/rng.pt": {"bytes": 5613, "sha256": "…"}, …}, "sha256": "…"}

The last "sha256" is the hash of the other three entries as JSON with sorted keys. Later versions may add files under
the same format. A change that this version could not read gets another format number.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from lorakernels.train.errors import CheckpointError

FORMAT = 2
MANIFEST = "state/MANIFEST.json"
_STATES = ("optimizer", "rng", "fp8", "runtime")
NEEDED = (*(f"state/{name}.pt" for name in _STATES), "state/trainer.json")
_FIRST_FORMAT = "MANIFEST.json"  # its place in format 1


class OtherFormat(CheckpointError):
    """A checkpoint has a format that this version does not read."""


def make_manifest(folder: Path, step: int) -> bytes:
    """The manifest of all files that are in `folder` now."""
    files = {name: entry_of(folder / name) for name in _names(folder)}
    body = {"format": FORMAT, "step": step, "files": files}
    return json.dumps({**body, "sha256": _own(body)}, indent=1).encode()


def check_files(directory: Path, step: int) -> set[str]:
    """Check all files against the manifest. Returns their names.

    Raises:
        CheckpointError: a file is missing or differs from what was written.
        OtherFormat: the checkpoint has a format that this version does not read.
    """
    files = read_manifest(directory, step)
    present = set(_names(directory))
    for name, want in files.items():
        if name not in present:
            raise _broken(directory, f"{name} is missing")
        try:
            entry = entry_of(directory / name)
        except OSError as error:
            raise _broken(directory, f"{name}: {error.strerror}") from error
        if entry["bytes"] != want["bytes"]:
            raise _broken(directory, f"{name} has {entry['bytes']} of {want['bytes']} bytes")
        if entry != want:
            raise _broken(directory, f"{name} does not match its SHA-256")
    return set(files)


def read_manifest(directory: Path, step: int) -> dict[str, dict[str, Any]]:
    """The manifest's entries, one per file, each of the right form. Raises as `check_files` does."""
    try:
        body = json.loads((directory / MANIFEST).read_bytes())
    except FileNotFoundError as error:
        if (directory / _FIRST_FORMAT).is_file():
            raise _other_format(directory, 1) from error
        raise CheckpointError(
            f"checkpoint {directory} is not complete ({MANIFEST} is missing)"
        ) from error
    except (ValueError, RecursionError, OSError) as error:
        raise _broken(directory, f"{MANIFEST}: {error}") from error
    if not isinstance(body, dict) or body.pop("sha256", None) != _own(body):
        raise _broken(directory, f"{MANIFEST} does not match its own SHA-256")
    if body.get("format") != FORMAT:
        raise _other_format(directory, body.get("format"))
    if body.get("step") != step:
        raise _broken(directory, f"{MANIFEST} is of step {body.get('step')}")
    files = body.get("files")
    if not isinstance(files, dict) or not all(map(_is_entry, files.values())):
        raise _broken(directory, f"{MANIFEST} does not say size and SHA-256 of each file")
    if missing := [name for name in NEEDED if name not in files]:
        raise _broken(directory, f"{MANIFEST} does not list {', '.join(missing)}")
    return files


def _is_entry(entry: Any) -> bool:
    kinds = {"bytes": int, "sha256": str}
    return isinstance(entry, dict) and {k: type(v) for k, v in entry.items()} == kinds


def _names(folder: Path) -> list[str]:
    """The names of all files but the manifest."""
    paths = (p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
    return sorted(name for name in paths if name != MANIFEST)


def entry_of(path: Path) -> dict[str, Any]:
    """The manifest's entry for a file: its size in bytes and its SHA-256."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
        return {"bytes": file.tell(), "sha256": digest.hexdigest()}


def _own(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _broken(directory: Path, why: str) -> CheckpointError:
    return CheckpointError(f"checkpoint {directory} is broken ({why})")


def _other_format(directory: Path, format_: Any) -> OtherFormat:
    return OtherFormat(
        f"checkpoint {directory} has format {format_!r}, this version reads format {FORMAT}: finish its run with the "
        "version that began it, or start in another output directory"
    )
