# SPDX-License-Identifier: Apache-2.0
"""`import lorakernels` in a fresh process: no GPU, no driver, no nvcc, no optional library needed or touched."""

from __future__ import annotations

import ast
import json
import os
import pickle
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import NoReturn

import pytest

import lorakernels

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


@pytest.mark.slow
def test_import_touches_no_gpu_and_no_optional_library(tmp_path: Path) -> None:
    assert probe(tmp_path) == {
        "optional": [],
        "cuda_initialized": False,
        "cuda_devices": 0,
        "graphs": "lorakernels.graphs",
    }


@pytest.mark.slow
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


def run(code: str, *words: str) -> str:
    """What a fresh process prints that runs `code` with these words in sys.argv."""
    command = [sys.executable, "-c", code, *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


LATE = ("torch._dynamo", "torch.distributed.fsdp", "sympy")
LOADED = f"""
import sys
print([name for name in {(*LATE, "torch")!r} if name in sys.modules])
import torch
print(len([n for n in torch._C._dispatch_get_all_op_names() if n.startswith("lorakernels::")]))
"""


def test_an_import_takes_what_it_needs_and_a_name_brings_the_ops() -> None:
    """torch._dynamo, with sympy and FSDP, takes as long as the rest of torch. Compiling imports it."""
    bare = run("import lorakernels" + LOADED).split("\n")
    assert bare[:2] == ["[]", "0"]
    names = {run(f"from lorakernels import {names}" + LOADED) for names in ("MMParams", "*")}
    assert len(names) == 1, "the same ops, whatever the name"
    loaded, ops, _ = names.pop().split("\n")
    assert loaded == "['torch']" and int(ops) > 30


def test_each_public_name_is_imported_from_where_a_type_checker_finds_it() -> None:
    tree = ast.parse(Path(lorakernels.__file__).read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    checked = {alias.name: node.module for node in block.body for alias in node.names}
    assert sorted(checked) == sorted(lorakernels.__all__)
    assert set(lorakernels.__all__) < set(dir(lorakernels))
    for name, module in checked.items():
        assert getattr(lorakernels, name) is getattr(import_module(module), name), name


REACH = """
import operator, sys
import lorakernels
lorakernels.ShardPlan
for path in sys.argv[1].split():
    operator.attrgetter(path)(lorakernels)
"""


def test_submodules_are_attributes() -> None:
    """The name before brings some of their packages, but not all that is in these."""
    home = Path(lorakernels.__file__).parent
    folders = (
        "autograd",
        "checkpoints",
        "fusion",
        "kernels",
        "loops",
        "modules",
        "ops",
        "recorded",
    )
    files = [path for name in folders for path in home.glob(f"{name}/**/*.py")]
    paths = [path.relative_to(home).with_suffix("").as_posix().replace("/", ".") for path in files]
    run(REACH, " ".join(path.removesuffix(".__init__") for path in paths))


def test_a_module_that_is_not_there_is_no_attribute() -> None:
    for module in (lorakernels, lorakernels.fusion, lorakernels.state):
        with pytest.raises(AttributeError, match=f"module '{module.__name__}' has no attribute"):
            module.nothing  # noqa: B018


def test_an_error_of_a_name_s_module_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """An import drops an AttributeError's text, as another version of torch causes."""

    def broken(name: str) -> NoReturn:
        raise AttributeError("module 'torch' has no attribute 'float8_e4m3fn'")

    monkeypatch.delitem(vars(lorakernels), "fuse", raising=False)
    monkeypatch.setattr(lorakernels, "import_module", broken)
    with pytest.raises(ImportError, match=r"cannot import 'fuse' .* no attribute 'float8_e4m3fn'"):
        from lorakernels import fuse  # noqa: F401


def test_public_classes_are_pickled_by_name() -> None:
    """A process that has imported nothing of lorakernels reads what another one wrote."""
    axes, lora = lorakernels.PlanAxes(2), lorakernels.LoRAConfig(r=4)
    written = pickle.dumps((axes, lora, lorakernels.LoRALinear)).hex()
    code = "import pickle, sys\nprint(*pickle.loads(bytes.fromhex(sys.argv[1])))"
    assert run(code, written) == f"{axes} {lora} {lorakernels.LoRALinear}\n"
