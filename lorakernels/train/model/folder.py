# SPDX-License-Identifier: Apache-2.0
"""Explains a path that is no folder of a model, and names the path to give instead."""

from __future__ import annotations

import json
from pathlib import Path

ADAPTER = "adapter_config.json"
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")


def why_no_model(path: Path) -> str | None:
    """A sentence about a path that is no folder with a config.json; None of one that is."""
    if path.is_file():
        return _of_file(path)
    if not path.is_dir():
        hint = f"; to download it: hf download {path} --local-dir DIR"
        return (
            f"model directory {path} does not exist or is not a directory"
            f"{hint if len(path.parts) == 2 and not path.is_absolute() else ''}"
        )
    return None if (path / "config.json").is_file() else _of_folder(path)


def _of_file(path: Path) -> str:
    if path.suffix == ".gguf":
        return (
            f"{path} is a GGUF file: give the folder of the model that it was made from, with config.json and "
            "safetensors"
        )
    what = "a file of weights" if path.suffix in WEIGHTS else "a file"
    return f"{path} is {what}, expected a folder with config.json: its own is {path.parent}"


def _of_folder(path: Path) -> str:
    if (path / ADAPTER).is_file():
        return (
            f"{path} is an adapter; its base is {_base_of(path)}: give that, or what `lorakernels export` merges of "
            "the two"
        )
    if (path / "adapter" / ADAPTER).is_file():
        merged = f": give {path / 'merged'}" if (path / "merged" / "config.json").is_file() else ""
        base = "" if merged else f": its base is {_base_of(path / 'adapter')}"
        return f"{path} is the output of a run{merged or base}"
    if snapshots := sorted((path / "snapshots").glob("*/config.json")):
        return f"{path} is a folder of the hub's cache: give {snapshots[-1].parent}"
    if files := sorted(path.glob("*.gguf")):
        return f"model directory {path} has no config.json; {_of_file(files[0])}"
    return f"model directory {path} has no config.json"


def _base_of(adapter: Path) -> str:
    try:
        base = json.loads((adapter / ADAPTER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        base = None
    name = base.get("base_model_name_or_path") if isinstance(base, dict) else None
    return str(name or f"not named in {ADAPTER}")
