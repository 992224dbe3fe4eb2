# SPDX-License-Identifier: Apache-2.0
"""finetune --pp: ranks with a model's stages train as one process does, resumed with or without them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh

from lorakernels import PhiloxState, PipelineParallel
from lorakernels.train.adapted import Meshes, load_adapted
from lorakernels.train.errors import OptionError
from lorakernels.train.layouts.context import sharing
from lorakernels.train.model.checks import check_model
from lorakernels.train.options.options import FinetuneOptions
from lorakernels.train.progress import Phase
from lorakernels.train.ranks.ranks import RunRanks
from tests import processes
from tests.fusion.fused_models import FP32
from tests.train.alike import TURNED_GRADIENTS, check_gradients, check_losses
from tests.train.test_ranks import losses, on_ranks

pytestmark = pytest.mark.slow

Cli = Callable[..., int]
PP = ["--pp", 2]
FORMS = {
    "plain": ["--no-fp8", "--lora-dropout", "0"],
    "whole rows": ["--no-fp8", "--no-isolate-documents", "--fuse", "--load-best-model-at-end"],
    "LoRA+": ["--no-fp8", "--loraplus-lr-ratio", "4", "--optim", "adamw_torch"],
    "adafactor": ["--no-fp8", "--optim", "adafactor"],
    "FP8": ["--fuse", "--save", "checkpoint"],
}
RESUMED = ("LoRA+", "adafactor", "FP8")


def norms(output: Path) -> list[float]:
    lines = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
    return [line["grad_norm"] for line in lines if "grad_norm" in line]


@pytest.fixture(scope="module")
def run(base_args: list[str], deep_model: Path) -> list[Any]:
    """Three microbatches a step, dropout 0.1 unless a form says otherwise."""
    steps = ["--steps", 4, "--save-every", 2, "--keep", 9, "--eval-every", 3, "--grad-accum", 3]
    return [*base_args, "--model", deep_model, "--lora-dropout", "0.1", *steps]


@pytest.fixture(scope="module")
def alone(run: list[Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    on_ranks(
        [[*run, *form, "--output", folder / name] for name, form in FORMS.items()], folder, size=1
    )
    return folder


@pytest.fixture(scope="module")
def two_ranks(run: list[Any], alone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stages")
    runs: list[list[Any]] = [[*run, *form, *PP, "--output", folder / name] for name, form in FORMS.items()]  # fmt: skip
    for name in RESUMED:
        for begun, parts in (
            (folder, folder / f"{name} parts"),
            (alone, folder / f"{name} from one"),
        ):
            runs.append(["copy", begun / name, parts, "step-00000004"])
            runs.append([*run, *FORMS[name], *PP, "--output", parts, "--resume"])
    on_ranks(runs, folder)
    return folder


@pytest.mark.parametrize("form", FORMS)
def test_two_stages_train_as_one_process(form: str, alone: Path, two_ranks: Path) -> None:
    """The loss is divided after its sum, and the norm of gradients has another order."""
    expected = losses(alone / form)
    check_losses(losses(two_ranks / form), expected, form == "FP8")
    assert len(expected) == 7


def loaded(rank: int, device: torch.device, model: Path, ways: list[dict[str, Any]]) -> list[Any]:
    """(what a load says of the base, which layers the rank has) for each way, in bf16. What it has passes the check."""
    mesh, found = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",)), []
    for way in ways:
        options = FinetuneOptions(model=str(model), data=["d"], output="o", pp=2, **way)
        said: list[str] = []
        reporter: Any = SimpleNamespace(say=said.append, phase=Phase)
        random = PhiloxState(0, "cpu")
        given = (model, options, torch.bfloat16, device, random, reporter)
        loaded, _ = load_adapted(*given, Meshes(stages=mesh["pp"]))
        before = {n for n, _ in loaded.named_modules()}
        with PipelineParallel.own_layers_alone(loaded):
            check_model(loaded)
        assert before == {n for n, _ in loaded.named_modules()}
        names = {n for n, _ in loaded.named_parameters()}
        layers = sorted({int(n.split(".")[2]) for n in names if n.startswith("model.layers.")})
        found.append((said, layers))
    return found


def test_a_rank_reads_the_weights_of_its_stage_alone(deep_model: Path) -> None:
    """Where a part cannot be read alone, or nothing is read tensor by tensor, each rank has the whole model first."""
    weights = {n: x for f in deep_model.glob("*.safetensors") for n, x in load_file(f).items()}
    layers = sorted({int(n.split(".")[2]) for n in weights if n.startswith("model.layers.")})
    half = -(-len(layers) // 2)  # the first stage has one more
    ways = [{}, {"use_dora": True}, {"fp8": False}]
    for rank, found in enumerate(processes.on_ranks(loaded, 2, "gloo", deep_model, ways)):
        own = layers[:half] if rank == 0 else layers[half:]
        inside = [f"model.layers.{i}." for i in own]
        inside += ["model.embed_tokens."] if rank == 0 else ["model.norm.", "lm_head."]
        size = sum(x.nbytes for n, x in weights.items() if n.startswith(tuple(inside)))
        assert found[0] == ([f"base: {size / 1e6:,.3f} MB read, those of this rank's stage"], own)
        (said,), all_of_them = found[1]
        assert said.startswith("base: each rank reads the whole model first: lora.use_dora=True")
        assert all_of_them == layers and found[2] == ([], layers)


@pytest.mark.parametrize("form", FORMS)
def test_the_norm_of_gradients_is_that_of_all_stages(
    form: str, alone: Path, two_ranks: Path
) -> None:
    """In the first step: AdamW moves the parameters by which later gradients are taken."""
    found, expected = (norms(folder / form) for folder in (two_ranks, alone))
    bound = TURNED_GRADIENTS if form == "FP8" else 2 * FP32
    np.testing.assert_allclose(found[:1], expected[:1], rtol=bound)
    assert len(expected) == 4


@pytest.mark.parametrize("form", FORMS)
def test_gradients_are_those_of_one_process(form: str, alone: Path, two_ranks: Path) -> None:
    """In the first step, where B is zero and so is A's gradient, and in the third by the same checkpoint."""
    check_gradients(two_ranks / form, 1, alone / form, 1, form == "FP8")
    if form in RESUMED:
        check_gradients(two_ranks / f"{form} from one", 1, alone / form, 3, form == "FP8")


@pytest.mark.parametrize("form", FORMS)
def test_files_are_of_all_stages(form: str, alone: Path, two_ranks: Path) -> None:
    """As one process writes them, with the values that the ranks trained."""
    stages = [torch.load(two_ranks / form / f"rank{rank}.pt") for rank in range(2)]
    trained = stages[0] | stages[1]
    for name in ("adapter", "checkpoints/step-00000004"):
        ours, theirs = two_ranks / form / name, alone / form / name
        configs = [json.loads((p / "adapter_config.json").read_text()) for p in (ours, theirs)]
        assert configs[0] == configs[1]
        found, expected = (load_file(p / "adapter_model.safetensors") for p in (ours, theirs))
        assert found.keys() == expected.keys()
        for key, value in found.items():
            assert torch.equal(
                value, trained[key.removeprefix("base_model.model.").removesuffix(".weight")]
            ), key


@pytest.mark.parametrize("form", RESUMED)
@pytest.mark.parametrize("begun", ["parts", "from one"])
def test_a_run_goes_on_from_a_checkpoint(form: str, begun: str, two_ranks: Path) -> None:
    found, expected = losses(two_ranks / f"{form} {begun}"), losses(two_ranks / form)
    if begun == "parts":
        assert found == expected
    check_losses(found, expected, form == "FP8")


@pytest.mark.parametrize("form", RESUMED)
def test_one_process_goes_on_from_the_checkpoint_of_two_stages(
    form: str, cli: Cli, run: list[Any], two_ranks: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(two_ranks / form, tmp_path / "copy"))
    shutil.rmtree(copy / "checkpoints" / "step-00000004")
    assert cli(*run, *FORMS[form], "--output", copy, "--resume") == 0
    check_losses(losses(copy), losses(two_ranks / form), form == "FP8")


def test_replayed_stages_train_as_eager_ones(run: list[Any], tmp_path: Path) -> None:
    """To the bit, and a replayed run goes on with graphs of its own. Three steps are recorded."""
    form = [*run, "--fuse", *PP, "--steps", 6]
    graphs = [*form, "--graphs", "layer"]
    on_ranks(
        [
            [*form, "--output", tmp_path / "eager"],
            [*graphs, "--output", tmp_path / "replayed"],
            ["copy", tmp_path / "replayed", tmp_path / "parts", "step-00000006"],
            [*graphs, "--output", tmp_path / "parts", "--resume"],
        ],
        tmp_path,
    )
    expected = losses(tmp_path / "eager")
    assert losses(tmp_path / "replayed") == losses(tmp_path / "parts") == expected
    lines = map(json.loads, (tmp_path / "replayed" / "metrics.jsonl").read_text().splitlines())
    assert [r["replayed"] for r in lines if "replayed" in r] == [False] * 3 + [True] * 3
    for rank in range(2):
        ours, theirs = (torch.load(tmp_path / n / f"rank{rank}.pt") for n in ("replayed", "eager"))
        assert all(torch.equal(ours[n], theirs[n]) for n in theirs)


def test_two_replicas_of_two_stages(run: list[Any], tmp_path: Path) -> None:
    """Each replica has rows of its own, which one replica has in more microbatches."""
    form = [*FORMS["plain"], *PP]
    on_ranks([[*run, *form, "--grad-accum", 4, "--output", tmp_path / "two"]], tmp_path)
    on_ranks([[*run, *form, "--grad-accum", 2, "--output", tmp_path / "four"]], tmp_path, size=4)
    check_losses(losses(tmp_path / "four"), losses(tmp_path / "two"), fp8=False)
    check_gradients(tmp_path / "four", 1, tmp_path / "two", 1, fp8=False)


def test_ranks_that_do_not_divide_are_refused() -> None:
    with pytest.raises(OptionError, match="pp must divide the number of ranks, got 2 for 3"):
        sharing(FinetuneOptions(pp=2), RunRanks(0, 3))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cp": 2, "seq_len": 62}, "seq_len must be a multiple of 4 with cp 2, got 62"),
        ({"shard_base": True}, "pp 2 does not go with shard_base True"),
        ({"graphs": "step"}, "pp 2 does not go with graphs step"),
        ({"gradient_checkpointing": True}, "pp 2 does not go with gradient_checkpointing True"),
        ({"fp8_head": True}, "pp 2 does not go with fp8_head True"),
        ({"init_lora_weights": "olora"}, "pp 2 does not go with init_lora_weights olora"),
        ({"grad_accum": 1}, "grad_accum must be at least pp, 2"),
    ],
)
def test_options_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    options = FinetuneOptions(
        model="m",
        data=["d"],
        output="o",
        pp=2,
        **{"grad_accum": 2, "batch_size": 2, "seq_len": 64, **changes},
    )
    with pytest.raises(OptionError, match=message):
        options.check()
