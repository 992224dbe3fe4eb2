# SPDX-License-Identifier: Apache-2.0
"""`import lorakernels` in a fresh process: no GPU, no driver, no nvcc, no optional library needed or touched."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

OPTIONAL = (
    "transformers",
    "peft",
    "tokenizers",
    "transformer_engine",
    "matplotlib",
    "rich",
    "yaml",
)
PROBE = f"""
import json, sys
for name in {OPTIONAL!r}:
    if "block" in sys.argv:
        sys.modules[name] = None
import lorakernels, lorakernels.graphs
from lorakernels import _C
import torch
print(json.dumps({{
    "optional": [n for n in {OPTIONAL!r} if sys.modules.get(n) is not None],
    "cuda_initialized": torch.cuda.is_initialized(),
    "cuda_devices": len(_C.cuda_runtime_info()["devices"]),
    "graphs": lorakernels.graphs.__name__,
}}))
"""


def probe(tmp_path: Path, *arguments: str) -> dict[str, object]:
    environment = {k: v for k, v in os.environ.items() if k not in ("CUDA_HOME", "CUDA_PATH")}
    environment |= {"PATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", PROBE, *arguments]
    result = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    return json.loads(result.stdout)


def test_import_touches_no_gpu_and_no_optional_library(tmp_path: Path) -> None:
    assert probe(tmp_path) == {
        "optional": [],
        "cuda_initialized": False,
        "cuda_devices": 0,
        "graphs": "lorakernels.graphs",
    }


def test_import_works_where_the_optional_libraries_are_missing(tmp_path: Path) -> None:
    assert probe(tmp_path, "block")["optional"] == []


FIRST = {
    "the package": ["-c", "import lorakernels"],
    "graphs": ["-c", "import lorakernels.graphs"],
    "the command": ["-m", "lorakernels.cli", "--version"],
}


@pytest.mark.parametrize("other", [True, False], ids=["another tree installed", "none installed"])
@pytest.mark.parametrize("words", FIRST.values(), ids=FIRST)
def test_a_source_tree_that_is_not_installed_says_so(
    tmp_path: Path, words: list[str], other: bool
) -> None:
    """Beside its lorakernels/ lies graphs/, which only an install calls lorakernels.graphs."""
    root = Path(__file__).parents[1]
    for folder in ("lorakernels", "graphs"):
        shutil.copytree(root / folder, tmp_path / folder, ignore=shutil.ignore_patterns("*.so"))
    alone = [] if other else ["-S"]  # without site-packages
    command = [sys.executable, *alone, *words]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode
    error = result.stderr.strip().splitlines()[-1]
    assert f"ImportError: lorakernels was imported from {tmp_path / 'lorakernels'}" in error
    assert "install this tree by `pip install -e .`" in error
