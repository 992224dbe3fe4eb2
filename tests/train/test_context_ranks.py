# SPDX-License-Identifier: Apache-2.0
"""finetune --cp: ranks that share rows train as one process does, resumed with or without it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lorakernels import ContextParallel
from lorakernels.train.data.packing import PackedBatch
from lorakernels.train.errors import OptionError
from lorakernels.train.layouts.context import own_part, sharing
from lorakernels.train.options.options import FinetuneOptions
from lorakernels.train.ranks.ranks import RunRanks
from tests.train.alike import check_gradients, check_losses
from tests.train.replays import assert_same, records
from tests.train.test_ranks import losses, on_ranks

pytestmark = pytest.mark.slow

Cli = Callable[..., int]
CP = ["--cp", 2]
PLAIN = ["--no-fp8", "--lora-dropout", "0"]
FORMS = {
    "plain": PLAIN,
    "whole rows": [*PLAIN, "--no-isolate-documents", "--fuse"],
    "checkpointed": [*PLAIN, "--gradient-checkpointing"],
    "dropout": ["--no-fp8", "--lora-dropout", "0.3"],
}
FP8 = ["--fuse", "--save", "checkpoint", "--lora-dropout", "0.1"]


def difference(found: Path, expected: Path) -> float:
    """The root of the mean square, over all evaluations and steps, of how far losses are apart."""
    return float(np.sqrt(np.mean((np.array(losses(found)) - losses(expected)) ** 2)))


@pytest.fixture(scope="module")
def run(base_args: list[str], deep_model: Path) -> list[Any]:
    """Two microbatches a step."""
    steps = ["--steps", 4, "--save-every", 2, "--keep", 9, "--eval-every", 3]
    return [*base_args, "--model", deep_model, *steps]


@pytest.fixture(scope="module")
def two_ranks(run: list[Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("context")
    runs: list[list[Any]] = [[*run, *form, *CP, "--output", folder / name] for name, form in FORMS.items()]  # fmt: skip
    runs.append(
        [*run, *FP8, *CP, "--shard-base", "--shard-embeddings", "--output", folder / "sharded"]
    )
    on_ranks(runs, folder)
    return folder


@pytest.mark.parametrize("form", FORMS)
def test_two_ranks_train_as_one_process(
    form: str, run: list[Any], two_ranks: Path, tmp_path: Path
) -> None:
    """Sums of fp32 have another order."""
    on_ranks([[*run, *FORMS[form], "--output", tmp_path / "one"]], tmp_path, size=1)
    expected = losses(tmp_path / "one")
    check_losses(losses(two_ranks / form), expected, fp8=False)
    check_gradients(two_ranks / form, 1, tmp_path / "one", 1, fp8=False)
    assert len(expected) == 7


@pytest.mark.parametrize("name", [*FORMS, "sharded"])
def test_ranks_end_with_the_same_adapters_and_scales(two_ranks: Path, name: str) -> None:
    assert_same(*(torch.load(two_ranks / name / f"rank{rank}.pt") for rank in range(2)))


def test_fp8_over_a_sharded_base_is_close_to_one_process(
    cli: Cli, run: list[Any], two_ranks: Path, tmp_path: Path
) -> None:
    """Other scales in the first step, and in evaluations. AdamW takes steps of one size of what follows."""
    assert cli(*run, *FP8, "--output", tmp_path / "one") == 0
    np.testing.assert_allclose(losses(two_ranks / "sharded"), losses(tmp_path / "one"), rtol=4e-3)


def test_one_process_goes_on_from_the_checkpoint_of_two_ranks(
    cli: Cli, run: list[Any], two_ranks: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(two_ranks / "plain", tmp_path / "copy"))
    shutil.rmtree(copy / "checkpoints" / "step-00000004")
    assert cli(*run, *PLAIN, "--output", copy, "--resume") == 0
    check_losses(losses(copy), losses(two_ranks / "plain"), fp8=False)


def test_two_replicas_of_two_ranks(
    cli: Cli, run: list[Any], two_ranks: Path, tmp_path: Path
) -> None:
    """Each replica has rows of its own, which one replica has in two microbatches."""
    form = [*PLAIN, *CP, "--grad-accum", 1]
    on_ranks([[*run, *form, "--output", tmp_path / "four"]], tmp_path, size=4)
    expected = losses(two_ranks / "plain")
    check_losses(losses(tmp_path / "four"), expected, fp8=False)
    check_gradients(tmp_path / "four", 1, two_ranks / "plain", 1, fp8=False)


@pytest.mark.parametrize("count", [2, 4])
def test_a_sharded_base_changes_no_bit(count: int, run: list[Any], tmp_path: Path) -> None:
    """Four ranks keep the base together: two replicas of two ranks, or one of four."""
    form = [*run, *FP8, "--cp", count, "--grad-accum", 1, "--output"]
    more = ["--shard-base", "--eager"]
    on_ranks(
        [[*form, tmp_path / "whole", "--eager"], [*form, tmp_path / "parts", *more]],
        tmp_path,
        size=4,
    )
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    for rank in range(4):
        held = [int((tmp_path / n / f"held{rank}.txt").read_text()) for n in ("parts", "whole")]
        assert held == [5 * 7, 0]  # every linear layer of five
        assert_same(
            *(torch.load(tmp_path / name / f"rank{rank}.pt") for name in ("parts", "whole"))
        )


def test_ranks_that_do_not_divide_are_refused() -> None:
    with pytest.raises(OptionError, match="cp must divide the number of ranks, got 2 for 3"):
        sharing(FinetuneOptions(cp=2), RunRanks(0, 3))
    assert sharing(FinetuneOptions(), RunRanks(1, 3)) == RunRanks(1, 3)


def test_a_rank_takes_its_tokens_of_a_batch() -> None:
    whole = torch.arange(16).view(2, 8)
    labels = torch.tensor([[5, -100, 5, 5, -100, -100, 5, 5]]).repeat(2, 1)
    starts = torch.tensor([0, 3, 8, 16], dtype=torch.int32)
    batch = PackedBatch(whole, labels, whole % 3, whole % 2, 10, starts)
    contexts = [ContextParallel(nn.Module(), SimpleNamespace(rank=r, size=2)) for r in range(2)]  # type: ignore[arg-type]
    own = own_part(batch, contexts[1], isolate=True)
    assert own.input_ids.tolist() == [[2, 3, 4, 5], [10, 11, 12, 13]]
    assert own.positions.tolist() == [[2, 0, 1, 2], [1, 2, 0, 1]]
    assert own.targets == 4 and own.starts is starts
    own = own_part(batch, contexts[0], isolate=False)
    assert own.positions.tolist() == [[0, 1, 6, 7]] * 2
    assert own.starts is None and own.targets == 6


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(
    "how",
    [["--eager"], [], ["--no-isolate-documents"], ["--shard-base"], ["--save", "checkpoint"]],
    ids=["eager", "default", "whole rows", "sharded", "checkpointed"],
)
def test_two_gpus_with_parts_of_rows_are_one(
    how: list[str], cli: Cli, gpu_run: list[Any], tmp_path: Path
) -> None:
    """NCCL, fused layers and FP8, in bf16. Masks would be those of other rows, and there are none.

    Sums in another order round to other values of bf16, and single roundings to FP8 turn after them. All roundings to
    FP8 together are more: by what they change, the losses of one GPU, the others are judged.
    """
    whole = [each for each in how if each == "--no-isolate-documents"]
    run = [*gpu_run, "--lora-dropout", "0", "--lr", "1e-3", "--steps", 12, "--keep", 9]
    one, two, parts, unrounded = (tmp_path / n for n in ("one", "two", "parts", "unrounded"))
    assert cli(*run, *whole, "--output", one) == 0
    assert cli(*run, *whole, "--no-fp8", "--output", unrounded) == 0
    cp = [*run, *how, *CP]
    on_ranks(
        [
            [*cp, "--output", two],
            ["copy", one, parts, "step-00000012"],
            [*cp, "--output", parts, "--resume"],
        ],
        tmp_path,
    )
    assert records(two)[-1]["replayed"] == (how != ["--eager"])
    for found in (two, parts):
        assert difference(found, one) <= difference(unrounded, one)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_replayed_rows_over_two_gpus_are_the_eager_ones(gpu_run: list[Any], tmp_path: Path) -> None:
    """To the bit: the same masks, and deterministic sums."""
    run = [*gpu_run, "--lr", "1e-3", "--steps", 12, *CP, "--output"]
    eager, replayed = tmp_path / "eager", tmp_path / "replayed"
    on_ranks([[*run, eager, "--eager"], [*run, replayed]], tmp_path)
    assert records(replayed)[-1]["replayed"] and not records(eager)[-1]["replayed"]
    assert losses(replayed) == losses(eager)
