# SPDX-License-Identifier: Apache-2.0
"""finetune --tp: ranks with parts of each layer train as one process does, resumed with or without them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.train.replays import assert_same
from tests.train.test_ranks import losses, on_ranks

Cli = Callable[..., int]
FORMS = {
    "plain": ["--no-fp8"],
    "rows on all ranks": ["--no-fp8", "--optim", "sgd"],
    "whole rows": ["--no-fp8", "--no-isolate-documents", "--fuse", "--load-best-model-at-end"],
    "LoRA+": ["--no-fp8", "--loraplus-lr-ratio", "4", "--optim", "adamw_torch"],
    "checkpointed": ["--no-fp8", "--gradient-checkpointing"],
    "FP8": ["--fuse", "--save", "checkpoint"],
    "FP8, unfused": [],
}
RESUMED = ("plain", "rows on all ranks", "LoRA+", "FP8")


def over_two(form: str) -> list[Any]:
    """The form's options with --tp 2."""
    whole = ["--no-sequence-parallel"] if form == "rows on all ranks" else []
    return [*FORMS[form], "--tp", 2, *whole]


def norms(output: Path) -> list[float]:
    lines = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
    return [line["grad_norm"] for line in lines if "grad_norm" in line]


@pytest.fixture(scope="module")
def run(base_args: list[str], even_model: Path) -> list[Any]:
    """Two microbatches a step, dropout 0.1, and a norm that is clipped in every step."""
    steps = ["--steps", 4, "--save-every", 2, "--keep", 9, "--eval-every", 3]
    return [*base_args, "--model", even_model, "--max-grad-norm", "0.05", *steps]


@pytest.fixture(scope="module")
def alone(run: list[Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    on_ranks(
        [[*run, *form, "--output", folder / name] for name, form in FORMS.items()], folder, size=1
    )
    return folder


@pytest.fixture(scope="module")
def two_ranks(run: list[Any], alone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parts")
    runs: list[list[Any]] = [[*run, *over_two(name), "--output", folder / name] for name in FORMS]  # fmt: skip
    for name in RESUMED:
        for begun, parts in (
            (folder, folder / f"{name} parts"),
            (alone, folder / f"{name} from one"),
        ):
            runs.append(["copy", begun / name, parts, "step-00000004"])
            runs.append([*run, *over_two(name), "--output", parts, "--resume"])
    on_ranks(runs, folder)
    return folder


@pytest.mark.parametrize("form", FORMS)
def test_two_parts_train_as_one_process(form: str, alone: Path, two_ranks: Path) -> None:
    expected = losses(alone / form)
    np.testing.assert_allclose(losses(two_ranks / form), expected, rtol=1e-3 if "FP8" in form else 2e-5)
    assert len(expected) == 7


@pytest.mark.parametrize("form", FORMS)
def test_the_norm_of_gradients_is_that_of_the_whole_model(
    form: str, alone: Path, two_ranks: Path
) -> None:
    found, expected = (norms(folder / form) for folder in (two_ranks, alone))
    np.testing.assert_allclose(found, expected, rtol=1e-2 if "FP8" in form else 1e-4)
    assert len(expected) == 4 and min(expected) > 0.05
