# SPDX-License-Identifier: Apache-2.0
"""finetune --cp with --pp: stages whose rows ranks share train as one process, or as shared rows, and are resumed."""

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

from lorakernels.train.context import sharing
from lorakernels.train.errors import OptionError
from lorakernels.train.options import FinetuneOptions
from lorakernels.train.ranks import Ranks
from tests.train.replays import assert_same, records
from tests.train.test_pipeline_ranks import norms
from tests.train.test_ranks import losses, on_ranks

Cli = Callable[..., int]
CP, PP = ["--cp", 2], ["--pp", 2]
BOTH = [*CP, *PP]
# of which one process has the losses
FORMS = {
    "plain": ["--no-fp8"],
    "LoRA+": ["--no-fp8", "--loraplus-lr-ratio", "4", "--optim", "adamw_torch"],
}
# of which two ranks that share rows have the scales in the first step
OF_ROWS = {
    "whole rows": ["--no-fp8", "--no-isolate-documents", "--fuse", "--load-best-model-at-end"],
    "FP8": ["--fuse", "--save", "checkpoint"],
}
ALL = FORMS | OF_ROWS


@pytest.fixture(scope="module")
def run(base_args: list[str], deep_model: Path) -> list[Any]:
    """Three microbatches a step, dropout 0.1 unless a form says otherwise."""
    steps = ["--steps", 4, "--save-every", 2, "--keep", 9, "--eval-every", 3, "--grad-accum", 3]
    return [*base_args, "--model", deep_model, "--lora-dropout", "0.1", *steps]


@pytest.fixture(scope="module")
def expected(run: list[Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One process, or two ranks that share rows."""
    folder = tmp_path_factory.mktemp("expected")
    alone = [[*run, *form, "--output", folder / name] for name, form in FORMS.items()]
    on_ranks(alone, folder, size=1)
    rows = [[*run, *form, *CP, "--output", folder / name] for name, form in OF_ROWS.items()]
    on_ranks(rows, folder)
    return folder


@pytest.fixture(scope="module")
def four_ranks(run: list[Any], expected: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("four")
    runs: list[list[Any]] = [[*run, *form, *BOTH, "--output", folder / name] for name, form in ALL.items()]  # fmt: skip
    for name, begun in (("LoRA+", folder), ("FP8", folder), ("LoRA+", expected), ("FP8", expected)):
        parts = folder / f"{name} from {begun.name.rstrip('0123456789')}"
        runs.append(["copy", begun / name, parts, "step-00000004"])
        runs.append([*run, *ALL[name], *BOTH, "--output", parts, "--resume"])
    on_ranks(runs, folder, size=4)
    return folder


def bound(form: str) -> float:
    """Sums of fp32 have another order, and AdamW divides by small numbers. Over FP8 one rounding may turn."""
    return 1e-4 if form == "FP8" else 2e-5


@pytest.mark.parametrize("form", ALL)
def test_stages_of_shared_rows_train_as_without_stages(
    form: str, expected: Path, four_ranks: Path
) -> None:
    """Held-out losses among them."""
    wanted = losses(expected / form)
    np.testing.assert_allclose(losses(four_ranks / form), wanted, rtol=bound(form))
    assert len(wanted) == 7


@pytest.mark.parametrize("form", ALL)
def test_the_norm_of_gradients_is_that_of_all_stages(
    form: str, expected: Path, four_ranks: Path
) -> None:
    found, wanted = (norms(folder / form) for folder in (four_ranks, expected))
    np.testing.assert_allclose(found, wanted, rtol=1e-2 if form == "FP8" else 1e-4)
    assert len(wanted) == 4


@pytest.mark.parametrize("form", ALL)
def test_ranks_of_a_stage_end_with_the_same_adapters_and_all_with_the_same_scales(
    form: str, four_ranks: Path
) -> None:
    ranks = [torch.load(four_ranks / form / f"rank{rank}.pt") for rank in range(4)]
    assert_same(*ranks[:2])
    assert_same(*ranks[2:])
    assert torch.equal(ranks[0]["scales"], ranks[3]["scales"])
    assert ranks[0].keys() & ranks[3].keys() == {"scales"}


@pytest.mark.parametrize("form", ALL)
def test_files_are_those_without_stages(form: str, expected: Path, four_ranks: Path) -> None:
    """AdamW steps by up to 1e-2, and divides by small numbers. A rounding of FP8 that turns changes one such step."""
    for name in ("adapter", "checkpoints/step-00000002"):
        ours, theirs = four_ranks / form / name, expected / form / name
        configs = [json.loads((p / "adapter_config.json").read_text()) for p in (ours, theirs)]
        assert configs[0] == configs[1]
        found, wanted = (load_file(p / "adapter_model.safetensors") for p in (ours, theirs))
        assert found.keys() == wanted.keys()
        for key, value in wanted.items():
            torch.testing.assert_close(
                found[key], value, rtol=1e-2, atol=1e-3 if form == "FP8" else 1e-4
            )


@pytest.mark.parametrize("form", ["LoRA+", "FP8"])
@pytest.mark.parametrize("begun", ["four", "expected"])
def test_a_run_goes_on_from_a_checkpoint(form: str, begun: str, four_ranks: Path) -> None:
    """To the bit from one of its own layout."""
    found, wanted = losses(four_ranks / f"{form} from {begun}"), losses(four_ranks / form)
    np.testing.assert_allclose(found, wanted, rtol=0 if begun == "four" else bound(form))


def rest_of(folder: Path, form: str, to: Path) -> Path:
    """A copy of a run, as if stopped after two steps."""
    copy = Path(shutil.copytree(folder / form, to))
    shutil.rmtree(copy / "checkpoints" / "step-00000004")
    return copy


@pytest.mark.parametrize("form", FORMS)
def test_one_process_goes_on_from_the_checkpoint_of_four_ranks(
    form: str, cli: Cli, run: list[Any], four_ranks: Path, tmp_path: Path
) -> None:
    copy = rest_of(four_ranks, form, tmp_path / "copy")
    assert cli(*run, *FORMS[form], "--output", copy, "--resume") == 0
    np.testing.assert_allclose(losses(copy), losses(four_ranks / form), rtol=bound(form))


def test_other_layouts_go_on_from_the_checkpoint_of_four_ranks(
    run: list[Any], four_ranks: Path, tmp_path: Path
) -> None:
    """Two ranks that share rows, also with the masks of four; and two stages."""
    ways = {"FP8": CP, "plain": PP}
    runs = []
    for form, layout in ways.items():
        copy = rest_of(four_ranks, form, tmp_path / form)
        runs.append([*run, *ALL[form], *layout, "--output", copy, "--resume"])
    on_ranks(runs, tmp_path)
    for form in ways:
        found, wanted = losses(tmp_path / form), losses(four_ranks / form)
        np.testing.assert_allclose(found, wanted, rtol=bound(form))


def test_replayed_stages_of_shared_rows_train_as_eager_ones(run: list[Any], tmp_path: Path) -> None:
    """To the bit. Three steps are recorded."""
    form = [*run, "--fuse", *BOTH, "--steps", 6]
    graphs = [*form, "--graphs", "layer"]
    on_ranks(
        [[*form, "--output", tmp_path / "eager"], [*graphs, "--output", tmp_path / "replayed"]],
        tmp_path,
        size=4,
    )
    assert losses(tmp_path / "replayed") == losses(tmp_path / "eager")
    replayed = [line["replayed"] for line in records(tmp_path / "replayed")]
    assert replayed == [False] * 3 + [True] * 3
    for rank in range(4):
        assert_same(*(torch.load(tmp_path / n / f"rank{rank}.pt") for n in ("replayed", "eager")))


def test_two_replicas_of_two_stages_of_shared_rows(run: list[Any], tmp_path: Path) -> None:
    """Each replica has rows and masks of its own, and one replica has these rows in more microbatches."""
    form = [*FORMS["plain"], *BOTH, "--lora-dropout", "0", "--steps", 2]
    on_ranks([[*run, *form, "--grad-accum", 4, "--output", tmp_path / "one"]], tmp_path, size=4)
    on_ranks([[*run, *form, "--grad-accum", 2, "--output", tmp_path / "two"]], tmp_path, size=8)
    np.testing.assert_allclose(losses(tmp_path / "two"), losses(tmp_path / "one"), rtol=2e-5)


def test_a_rank_knows_its_replica_and_its_stage() -> None:
    ranks = [Ranks(rank, 8, cp=2, pp=2) for rank in range(8)]
    assert [r.replica for r in ranks] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert {r.replicas for r in ranks} == {2} and {r.of_stage for r in ranks} == {4}
    assert [r.rank for r in ranks if r.first_of_replica] == [0, 2]


def test_ranks_that_do_not_divide_are_refused() -> None:
    with pytest.raises(OptionError, match="cp · pp must divide the number of ranks, got 4 for 2"):
        sharing(FinetuneOptions(cp=2, pp=2), Ranks(0, 2))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four GPUs")
@pytest.mark.parametrize("how", [[], ["--graphs", "layer"]], ids=["eager", "replayed"])
def test_four_gpus_with_stages_of_shared_rows_are_one(
    how: list[str], cli: Cli, gpu_run: list[Any], tmp_path: Path
) -> None:
    """NCCL, fused layers and FP8, in bf16: roundings of bf16, and of FP8 that turn after them."""
    run = [*gpu_run, "--lr", "1e-3", "--steps", 12]
    assert cli(*run, "--output", tmp_path / "one") == 0
    on_ranks([[*run, *how, *BOTH, "--output", tmp_path / "four"]], tmp_path, size=4)
    assert records(tmp_path / "four")[-1]["replayed"] == bool(how)
    np.testing.assert_allclose(losses(tmp_path / "four"), losses(tmp_path / "one"), rtol=1e-2)
