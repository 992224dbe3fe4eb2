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

from lorakernels.train.errors import OptionError
from lorakernels.train.layouts.context import sharing
from lorakernels.train.options.options import FinetuneOptions
from lorakernels.train.ranks.ranks import RunRanks
from tests.fusion.fused_models import FP32
from tests.train.alike import TURNED_GRADIENTS, check_gradients, check_losses
from tests.train.replays import assert_same, records
from tests.train.test_pipeline_ranks import norms
from tests.train.test_ranks import losses, on_ranks

pytestmark = pytest.mark.slow

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


@pytest.mark.parametrize("form", ALL)
def test_stages_of_shared_rows_train_as_without_stages(
    form: str, expected: Path, four_ranks: Path
) -> None:
    """Held-out losses among them."""
    wanted = losses(expected / form)
    check_losses(losses(four_ranks / form), wanted, form == "FP8")
    assert len(wanted) == 7


@pytest.mark.parametrize("form", ALL)
def test_the_norm_of_gradients_is_that_of_all_stages(
    form: str, expected: Path, four_ranks: Path
) -> None:
    """In the first step: AdamW moves the parameters by which later gradients are taken."""
    found, wanted = (norms(folder / form) for folder in (four_ranks, expected))
    bound = TURNED_GRADIENTS if form == "FP8" else 2 * FP32
    np.testing.assert_allclose(found[:1], wanted[:1], rtol=bound)
    assert len(wanted) == 4


@pytest.mark.parametrize("form", ALL)
def test_gradients_are_those_without_stages(form: str, expected: Path, four_ranks: Path) -> None:
    """In the first step, where B is zero and so is A's gradient, and in the third by the same checkpoint."""
    check_gradients(four_ranks / form, 1, expected / form, 1, form == "FP8")
    if (begun := four_ranks / f"{form} from expected").exists():
        check_gradients(begun, 1, expected / form, 3, form == "FP8")


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
def test_files_are_of_all_stages(form: str, expected: Path, four_ranks: Path) -> None:
    """As they are without stages, with the values that the ranks trained."""
    stages = [torch.load(four_ranks / form / f"rank{rank}.pt") for rank in (0, 3)]
    trained = stages[0] | stages[1]
    for name in ("adapter", "checkpoints/step-00000004"):
        ours, theirs = four_ranks / form / name, expected / form / name
        configs = [json.loads((p / "adapter_config.json").read_text()) for p in (ours, theirs)]
        assert configs[0] == configs[1]
        found, wanted = (load_file(p / "adapter_model.safetensors") for p in (ours, theirs))
        assert found.keys() == wanted.keys()
        for key, value in found.items():
            assert torch.equal(
                value, trained[key.removeprefix("base_model.model.").removesuffix(".weight")]
            )


@pytest.mark.parametrize("form", ["LoRA+", "FP8"])
@pytest.mark.parametrize("begun", ["four", "expected"])
def test_a_run_goes_on_from_a_checkpoint(form: str, begun: str, four_ranks: Path) -> None:
    """To the bit from one of its own layout."""
    found, wanted = losses(four_ranks / f"{form} from {begun}"), losses(four_ranks / form)
    if begun == "four":
        assert found == wanted
    check_losses(found, wanted, form == "FP8")


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
    check_losses(losses(copy), losses(four_ranks / form), form == "FP8")


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
        check_losses(found, wanted, form == "FP8")


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
    check_losses(losses(tmp_path / "two"), losses(tmp_path / "one"), fp8=False)
    check_gradients(tmp_path / "two", 1, tmp_path / "one", 1, fp8=False)


def test_a_rank_knows_its_replica_and_its_stage() -> None:
    ranks = [RunRanks(rank, 8, cp=2, pp=2) for rank in range(8)]
    assert [r.replica for r in ranks] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert {r.replicas for r in ranks} == {2} and {r.of_stage for r in ranks} == {4}
    assert [r.rank for r in ranks if r.first_of_replica] == [0, 2]


def test_ranks_that_do_not_divide_are_refused() -> None:
    with pytest.raises(OptionError, match="cp · pp must divide the number of ranks, got 4 for 2"):
        sharing(FinetuneOptions(cp=2, pp=2), RunRanks(0, 2))


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
