# SPDX-License-Identifier: Apache-2.0
"""finetune --shard-base: the run of replicated ranks to the bit, resumed with or without it, on any number of ranks."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from lorakernels.train.errors import OptionError
from lorakernels.train.layouts.sharding import shard_mesh
from lorakernels.train.options.options import FinetuneOptions
from lorakernels.train.ranks.ranks import RunRanks
from tests import processes
from tests.train.replays import records
from tests.train.test_ranks import losses, on_ranks
from tests.train.test_resume import adapter

pytestmark = pytest.mark.slow

Cli = Callable[..., int]
SHARDED = "--shard-base"
FORMS = {
    "unfused": ["--no-fuse"],
    "recomputed": ["--gradient-checkpointing"],
    "blocks": ["--no-fuse", "--fp8-recipe", "block"],
    "fused": ["--fuse", "--save", "checkpoint", "--merge", "bf16"],
    "embeddings": ["--fuse", "--fp8-head"],
}


@pytest.fixture(scope="module")
def run(base_args: list[str], deep_model: Path) -> list[Any]:
    """With dropout, evaluations and two checkpoints. A rank evaluates fewer batches than the other."""
    return [
        *base_args,
        "--model",
        deep_model,
        "--steps",
        4,
        "--save-every",
        2,
        "--keep",
        9,
        "--eval-every",
        3,
    ]


@pytest.fixture(scope="module")
def two_ranks(run: list[Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each form with the base whole and sharded. parts: whole until step 2, then resumed with the base sharded."""
    folder = tmp_path_factory.mktemp("sharded")
    config = folder / "sharded.yaml"
    config.write_text("shard_base: true\n")
    runs: list[list[Any]] = []
    for name, form in FORMS.items():
        asked = ["--config", config] if name == "fused" else [SHARDED]
        asked += ["--shard-embeddings"] if name in ("fused", "embeddings") else []
        runs += [
            [*run, *form, "--output", folder / f"{name} whole"],
            [*run, *form, *asked, "--output", folder / f"{name} sharded"],
        ]
    runs += [
        ["copy", folder / "recomputed whole", folder / "parts", "step-00000004"],
        [*run, *FORMS["recomputed"], SHARDED, "--output", folder / "parts", "--resume"],
    ]
    on_ranks(runs, folder)
    return folder


def written(output: Path) -> dict[str, bytes]:
    """All files that the run's steps decide: without the seconds that it took, and the manifests, sums of files."""
    folders = [output / name for name in ("adapter", "checkpoints", "merged")]
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    found = {str(path.relative_to(output)): path.read_bytes() for path in files}
    for name in list(found):
        if name.endswith("state/trainer.json"):
            found[name] = json.dumps(json.loads(found[name]) | {"seconds": 0.0}).encode()
        elif name.endswith("MANIFEST.json"):
            del found[name]
    return found


@pytest.mark.parametrize("form", FORMS)
def test_losses_adapters_and_checkpoints_are_those_of_the_whole_base(
    form: str, two_ranks: Path
) -> None:
    whole, sharded = two_ranks / f"{form} whole", two_ranks / f"{form} sharded"
    assert losses(sharded) == losses(whole) and len(losses(whole)) == 7
    found, expected = written(sharded), written(whole)
    assert [name for name in expected if found.get(name) != expected[name]] == []
    assert found.keys() == expected.keys() and len(found) > 20
    assert (sharded / "merged").exists() == (form == "fused")
    options = [json.loads((o / "options.json").read_text()) for o in (whole, sharded)]
    assert [o["shard_base"] for o in options] == [False, True]
    assert options[1]["shard_embeddings"] == (form in ("fused", "embeddings"))


def test_a_run_goes_on_with_its_base_sharded(two_ranks: Path) -> None:
    parts, whole = two_ranks / "parts", two_ranks / "recomputed whole"
    assert losses(parts) == losses(whole) and adapter(parts) == adapter(whole)


def test_one_rank_goes_on_from_the_checkpoint_of_two(
    cli: Cli, run: list[Any], two_ranks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the rows of both, its base whole. Other rows a step are refused, as without sharding."""
    whole = two_ranks / "unfused sharded"
    copy = Path(shutil.copytree(whole, tmp_path / "copy"))
    shutil.rmtree(copy / "checkpoints" / "step-00000004")
    one = [*run, *FORMS["unfused"], "--lora-dropout", "0.1", "--output", copy, "--resume", SHARDED]
    assert cli(*one) == 1
    said = capsys.readouterr().err
    assert "rows_per_step was 8, now it is 4; it is batch_size · grad_accum · ranks" in said
    assert cli(*one, "--grad-accum", 4) == 0
    said = capsys.readouterr().out
    assert "base: whole, as there is one process on this machine" in said
    np.testing.assert_allclose(losses(copy), losses(whole), rtol=2e-2)


def test_four_ranks_go_on_from_the_checkpoint_of_two(
    run: list[Any], two_ranks: Path, tmp_path: Path
) -> None:
    """With half the microbatches; their bases sharded as well as whole."""
    runs: list[list[Any]] = []
    for name, more in (("whole", []), ("sharded", [SHARDED])):
        output = tmp_path / name
        args = [*run, *FORMS["unfused"], *more, "--grad-accum", 1, "--output", output, "--resume"]
        runs += [["copy", two_ranks / "unfused sharded", output, "step-00000004"], args]
    on_ranks(runs, tmp_path, size=4)
    whole, sharded = tmp_path / "whole", tmp_path / "sharded"
    assert losses(sharded) == losses(whole) and adapter(sharded) == adapter(whole)
    np.testing.assert_allclose(losses(whole), losses(two_ranks / "unfused whole"), rtol=2e-2)
    assert adapter(whole) != adapter(two_ranks / "unfused whole"), "other sums"


def meshes(rank: int, device: torch.device) -> list[Any]:
    """The mesh's ranks on two machines of two ranks."""
    import os

    os.environ["LOCAL_WORLD_SIZE"] = "2"
    options = FinetuneOptions(shard_base=True)
    mesh = shard_mesh(options, RunRanks(rank, 4, rank % 2), device, pytest.fail)
    assert mesh is not None
    sums = torch.tensor(float(rank))
    dist.all_reduce(sums, group=mesh.get_group())
    return [mesh.mesh.tolist(), mesh.get_local_rank(), sums.item()]


def test_the_base_is_sharded_over_the_ranks_of_one_machine() -> None:
    found = processes.on_ranks(meshes, 4, "gloo")
    assert found == [[[0, 1], 0, 1.0], [[0, 1], 1, 1.0], [[2, 3], 0, 5.0], [[2, 3], 1, 5.0]]


@pytest.mark.parametrize(
    ("local", "message"), [("3", "found LOCAL_WORLD_SIZE 3 of 4 ranks"), ("x", "SIZE x of 4")]
)
def test_uneven_machines_are_refused(
    local: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    options = FinetuneOptions(shard_base=True)
    with pytest.raises(OptionError, match=message):
        shard_mesh(options, RunRanks(0, 4), torch.device("cpu"), pytest.fail)


def test_parts_of_layers_are_sharded_within_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    options, said = FinetuneOptions(shard_base=True, tp=4), []
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert shard_mesh(options, RunRanks(0, 8, tp=4), torch.device("cpu"), said.append) is None
    assert "each rank keeps its parts whole" in said[0]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(OptionError, match="needs all 4 ranks of tp on one machine, found 2"):
        shard_mesh(options, RunRanks(0, 8, tp=4), torch.device("cpu"), pytest.fail)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("form", [[], ["--eager"], ["--no-fuse", "--eager"]], ids=" ".join)
def test_two_gpus_with_a_sharded_base_are_two_with_whole_ones(
    form: list[str], gpu_run: list[Any], tmp_path: Path
) -> None:
    """Deterministic kernels: the same losses and adapters to the bit, layers replayed or not."""
    run = [*gpu_run, *form, "--steps", 10]
    on_ranks(
        [
            [*run, "--output", tmp_path / "whole"],
            [*run, SHARDED, "--shard-embeddings", "--output", tmp_path / "sharded"],
        ],
        tmp_path,
    )
    found, expected = ([r["loss"] for r in records(tmp_path / n)] for n in ("sharded", "whole"))
    assert found == expected
    assert adapter(tmp_path / "sharded") == adapter(tmp_path / "whole")
