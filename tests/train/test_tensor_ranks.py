# SPDX-License-Identifier: Apache-2.0
"""finetune --tp: ranks with parts of each layer train as one process does, resumed with or without them."""

from __future__ import annotations

import json
import re
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
from tests.train.alike import (
    TURNED_GRADIENTS,
    check_gradients,
    check_losses,
    check_moments,
    put_together,
)
from tests.train.replays import assert_same, records
from tests.train.test_ranks import losses, on_ranks
from tests.train.test_ranks_that_end import end_of
from tests.train.test_resume import adapter

pytestmark = pytest.mark.slow

Cli = Callable[..., int]
FORMS = {
    "plain": ["--no-fp8"],
    "rows on all ranks": ["--no-fp8", "--optim", "sgd"],
    "whole rows": ["--no-fp8", "--no-isolate-documents", "--fuse", "--load-best-model-at-end"],
    "LoRA+": ["--no-fp8", "--loraplus-lr-ratio", "4", "--lr", "2e-3", "--optim", "adamw_torch"],
    "checkpointed": ["--no-fp8", "--gradient-checkpointing"],
    "FP8": ["--fuse", "--save", "checkpoint"],
    "FP8 head": ["--no-fp8", "--fp8-head"],
    "FP8, unfused": [],
}
PARAMETER = "model.layers.0.self_attn.q_proj.lora_B"
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


def check_trained(form: str, found: list[float], expected: list[float]) -> None:
    """SGD follows sums. AdamW's steps are bounded by `check_losses`."""
    if "sgd" in FORMS[form]:
        np.testing.assert_allclose(found, expected, rtol=2 * FP32)
    check_losses(found, expected, "FP8" in form)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_two_parts_train_as_one_process(form: str, alone: Path, two_ranks: Path) -> None:
    expected = losses(alone / form)
    check_trained(form, losses(two_ranks / form), expected)
    assert len(expected) == 7


@pytest.mark.parametrize("form", FORMS)
def test_the_norm_of_gradients_is_that_of_the_whole_model(
    form: str, alone: Path, two_ranks: Path
) -> None:
    """In the first step: AdamW moves the parameters by which later gradients are taken."""
    found, expected = (norms(folder / form) for folder in (two_ranks, alone))
    steps, bound = (
        (4 if "sgd" in FORMS[form] else 1),
        (TURNED_GRADIENTS if "FP8" in form else 2 * FP32),
    )
    np.testing.assert_allclose(found[:steps], expected[:steps], rtol=bound)
    assert len(expected) == 4 and min(expected) > 0.05, "the norm is clipped in every step"


@pytest.mark.parametrize("form", FORMS)
def test_gradients_are_those_of_one_process(form: str, alone: Path, two_ranks: Path) -> None:
    """In the first step, where B is zero and so is A's gradient, and in the third by the same checkpoint."""
    check_gradients(two_ranks / form, 1, alone / form, 1, "FP8" in form)
    if form in RESUMED:
        check_gradients(two_ranks / f"{form} from one", 1, alone / form, 3, "FP8" in form)


def test_flops_are_those_of_the_whole_model(alone: Path, two_ranks: Path) -> None:
    per_token = []
    for folder in (two_ranks, alone):
        lines = map(json.loads, (folder / "plain" / "metrics.jsonl").read_text().splitlines())
        per_token.append([line["tflops"] / line["tokens_per_s"] for line in lines if "lr" in line])
    np.testing.assert_allclose(per_token[0], per_token[1], rtol=1e-9)


@pytest.mark.parametrize("form", FORMS)
def test_files_are_of_whole_tensors(form: str, alone: Path, two_ranks: Path) -> None:
    """As one process writes them, with the values that the ranks trained."""
    parts = [torch.load(two_ranks / form / f"rank{rank}.pt") for rank in range(2)]
    for name in ("adapter", "checkpoints/step-00000004"):
        ours, theirs = two_ranks / form / name, alone / form / name
        configs = [json.loads((p / "adapter_config.json").read_text()) for p in (ours, theirs)]
        assert configs[0] == configs[1]
        found, expected = (load_file(p / "adapter_model.safetensors") for p in (ours, theirs))
        assert {n: x.shape for n, x in found.items()} == {n: x.shape for n, x in expected.items()}
        for key, value in found.items():
            trained = key.removeprefix("base_model.model.").removesuffix(".weight")
            assert torch.equal(value, put_together([p[trained] for p in parts], value.shape)), key
    ratio = 4.0 if form == "LoRA+" else 1.0
    check_moments(two_ranks / form, alone / form, loraplus_lr_ratio=ratio)


@pytest.mark.parametrize("form", FORMS)
def test_ranks_end_with_one_scale_and_equal_factors(form: str, two_ranks: Path) -> None:
    """A of q, k, v, gate and up, and B of o and down, are whole on each."""
    ranks = [torch.load(two_ranks / form / f"rank{rank}.pt") for rank in range(2)]
    replicated = (
        "q_proj.lora_A",
        "k_proj.lora_A",
        "gate_proj.lora_A",
        "o_proj.lora_B",
        "down_proj.lora_B",
        "scales",
    )
    kept = [{n: x for n, x in found.items() if n.endswith(replicated)} for found in ranks]
    assert len(kept[0]) == 11
    assert_same(*kept)
    own = [found[PARAMETER] for found in ranks]
    assert own[0].shape == (16, 4) and not torch.equal(*own)
    file = load_file(two_ranks / form / "adapter" / "adapter_model.safetensors")
    assert torch.equal(torch.cat(own), file[f"base_model.model.{PARAMETER}.weight"])


@pytest.mark.parametrize("form", RESUMED)
def test_parts_resumed_are_the_whole_run(form: str, two_ranks: Path) -> None:
    """To the bit."""
    parts, whole = two_ranks / f"{form} parts", two_ranks / form
    assert losses(parts) == losses(whole) and adapter(parts) == adapter(whole)
    for rank in range(2):
        assert_same(*(torch.load(run / f"rank{rank}.pt") for run in (parts, whole)))


@pytest.mark.parametrize("form", RESUMED)
def test_two_parts_go_on_from_the_checkpoint_of_one_process(
    form: str, alone: Path, two_ranks: Path
) -> None:
    found, expected = losses(two_ranks / f"{form} from one"), losses(alone / form)
    check_trained(form, found, expected)
    assert found[:3] == expected[:3]


@pytest.mark.parametrize("form", RESUMED)
def test_one_process_goes_on_from_the_checkpoint_of_two_parts(
    form: str, cli: Cli, run: list[Any], two_ranks: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(two_ranks / form, tmp_path / "copy"))
    shutil.rmtree(copy / "checkpoints" / "step-00000004")
    assert cli(*run, *FORMS[form], "--output", copy, "--resume") == 0
    check_trained(form, losses(copy), losses(two_ranks / form))
    assert adapter(copy) != adapter(two_ranks / form), "other sums: the comparison was of two runs"


@pytest.mark.slow
def test_parts_take_the_best_step(run: list[Any], tmp_path: Path) -> None:
    """Of a run whose steps are too large, so that its last one is not the best."""
    steps = ["--optim", "sgd", "--lr", 100, "--lr-scheduler-type", "constant", "--eval-every", 1]
    output = tmp_path / "two"
    best = ["--load-best-model-at-end", "--tp", 2, "--output", output]
    on_ranks([[*run, "--no-fp8", *steps, *best]], tmp_path)
    lines = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
    evaluated = [(line["eval_loss"], line["step"]) for line in lines if "eval_loss" in line]
    step = min(evaluated[1:])[1]
    assert step < 4, "the test needs another run"
    file = load_file(output / "adapter" / "adapter_model.safetensors")
    expected = load_file(output / f"checkpoints/step-{step:08d}" / "adapter_model.safetensors")
    assert_same(file, expected)
    name = "model.layers.1.mlp.down_proj.lora_A"
    ranks = [torch.load(output / f"rank{rank}.pt")[name] for rank in range(2)]
    assert torch.equal(torch.cat(ranks, 1), file[f"base_model.model.{name}.weight"])


@pytest.mark.slow
def test_two_replicas_of_two_parts(run: list[Any], tmp_path: Path) -> None:
    """Each replica has rows of its own, which one process has in another microbatch."""
    form = ["--no-fp8", "--lora-dropout", "0"]
    on_ranks([[*run, *form, "--output", tmp_path / "one"]], tmp_path, size=1)
    four = ["--tp", 2, "--grad-accum", 1]
    on_ranks([[*run, *form, *four, "--output", tmp_path / "four"]], tmp_path, size=4)
    check_losses(losses(tmp_path / "four"), losses(tmp_path / "one"), fp8=False)
    np.testing.assert_allclose(
        norms(tmp_path / "four")[0], norms(tmp_path / "one")[0], rtol=2 * FP32
    )


@pytest.mark.slow
def test_two_replicas_of_two_parts_keep_one_base(run: list[Any], tmp_path: Path) -> None:
    """To the bit, and a run goes on with the base sharded."""
    whole, sharded, parts = (tmp_path / name for name in ("whole", "sharded", "parts"))
    four = [*run, "--fuse", "--tp", 2, "--grad-accum", 1]
    runs: list[list[Any]] = [
        [*four, "--output", whole],
        [*four, "--shard-base", "--output", sharded],
        ["copy", whole, parts, "step-00000004"],
        [*four, "--shard-base", "--output", parts, "--resume"],
    ]
    on_ranks(runs, tmp_path, size=4)
    for found in (sharded, parts):
        assert losses(found) == losses(whole) and adapter(found) == adapter(whole)
        for rank in range(4):
            assert_same(*(torch.load(run / f"rank{rank}.pt") for run in (found, whole)))


@pytest.mark.slow
def test_parts_of_layers_and_of_rows(run: list[Any], tmp_path: Path) -> None:
    """Two times two ranks are two that share rows alone, with their scales."""
    form = ["--fuse", "--cp", 2]
    on_ranks([[*run, *form, "--output", tmp_path / "two"]], tmp_path)
    on_ranks([[*run, *form, "--tp", 2, "--output", tmp_path / "four"]], tmp_path, size=4)
    check_losses(losses(tmp_path / "four"), losses(tmp_path / "two"), fp8=True)
    found, expected = (norms(tmp_path / name)[0] for name in ("four", "two"))
    np.testing.assert_allclose(found, expected, rtol=TURNED_GRADIENTS)


@pytest.fixture
def wide_model(even_model: Path, tmp_path: Path) -> Path:
    """Of each weight two ranks have whole blocks of 128."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = Path(shutil.copytree(even_model, tmp_path / "wide"))
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1, "head_dim": 128}
    config = LlamaConfig.from_pretrained(even_model, **sizes)
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "form",
    [
        ["--fp8-recipe", "block"],
        ["--fp8-recipe", "block", "--fuse"],
        ["--target-modules", "q_proj", "down_proj"],
    ],
    ids=["blocks", "blocks, fused", "some layers"],
)  # fmt: skip
def test_other_bases(form: list[str], run: list[Any], wide_model: Path, tmp_path: Path) -> None:
    run = [*run, *form, "--model", wide_model, "--steps", 2]
    on_ranks([[*run, "--output", tmp_path / "one"]], tmp_path, size=1)
    on_ranks([[*run, "--tp", 2, "--output", tmp_path / "two"]], tmp_path)
    check_losses(losses(tmp_path / "two"), losses(tmp_path / "one"), fp8=True)
    check_gradients(tmp_path / "two", 1, tmp_path / "one", 1, fp8=True)


@pytest.mark.parametrize(
    ("more", "ranks", "message"),
    [
        ({"tp": 2}, 3, "tp must divide the number of ranks, got 2 for 3"),
        ({"tp": 2, "cp": 2}, 2, "cp · tp must divide the number of ranks, got 4 for 2"),
    ],
)
def test_ranks_that_do_not_divide_are_refused(
    more: dict[str, int], ranks: int, message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        sharing(FinetuneOptions(**more), RunRanks(0, ranks))  # type: ignore[arg-type]


def test_a_rank_knows_its_replica_and_who_counts() -> None:
    ranks = [RunRanks(rank, 8, cp=2, tp=2) for rank in range(8)]
    assert [r.replica for r in ranks] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert {r.replicas for r in ranks} == {2}
    assert [r.counts for r in ranks] == [True, False] * 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pp": 2}, "tp 2 does not go with pp 2"),
        (
            {"shard_base": True, "shard_embeddings": True},
            "tp 2 does not go with shard_embeddings True",
        ),
        ({"offload": 0.5}, "tp 2 does not go with offload 0.5"),
        ({"graphs": "step"}, "tp 2 does not go with graphs step"),
        ({"use_dora": True}, "tp 2 does not go with use_dora True"),
        ({"init_lora_weights": "olora"}, "tp 2 does not go with init_lora_weights olora"),
        ({"optim": "adafactor"}, "tp 2 does not go with optim adafactor"),
        ({"optim": "adamw_8bit"}, "tp 2 does not go with optim adamw_8bit"),
        ({"memory_budget": 1.0}, "tp 2 does not go with memory_budget 1.0"),
        ({"target_parameters": ["experts.down_proj"]}, "tp 2 does not go with target_parameters"),
        ({"attention": "fp8", "isolate_documents": False}, "tp 2 does not go with attention fp8"),
        ({"jobs": "jobs.yml", "data": [], "lora_dropout": 0.0}, "tp must be 1 with jobs, got 2"),
        ({"layout": "auto"}, "tp 2 does not go with layout auto"),
        ({"seq_len": 63}, "seq_len must be a multiple of 2, cp · tp"),
        (
            {"seq_len": 62, "cp": 2, "tp": 1, "sequence_parallel": False},
            "seq_len must be a multiple of 4",
        ),
        ({"tp": 1, "sequence_parallel": False}, "sequence_parallel is for tp above 1"),
        ({"tp": 0}, "tp must be at least 1, got 0"),
    ],
)
def test_options_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"model": "m", "data": ["d"], "output": "o", "tp": 2, "grad_accum": 2}
    options = FinetuneOptions(**{**given, "seq_len": 64, **changes})
    with pytest.raises(OptionError, match=re.escape(message)):
        options.check()


def test_a_row_of_any_length_where_rows_are_whole() -> None:
    given: dict[str, Any] = {"model": "m", "data": ["d"], "output": "o", "tp": 2}
    FinetuneOptions(**given, seq_len=63, sequence_parallel=False).check()


def test_heads_that_ranks_do_not_divide_are_refused_before_a_weight_is_read(
    base_args: list[str], tmp_path: Path
) -> None:
    """The model of `base_args` has one key head."""
    for text in said_by_both([*base_args, "--steps", 1], tmp_path):
        assert "tp must divide the model's num_key_value_heads, 1, got 2" in text


def test_what_parallelize_refuses_is_said_by_all_ranks(run: list[Any], tmp_path: Path) -> None:
    """Blocks of 128 do not end where a part of these small weights ends."""
    for text in said_by_both([*run, "--fp8-recipe", "block"], tmp_path):
        assert "tp 2: " in text and "must be a multiple of 2 ranks · 128" in text


def said_by_both(args: list[Any], folder: Path) -> list[str]:
    """The errors of two ranks, which save nothing."""
    output = folder / "out"
    codes, said = end_of("", [[*args, "--tp", 2, "--output", output]] * 2, folder)
    assert 0 not in codes and all("error: " in text and "Traceback" not in text for text in said)
    assert not (output / "checkpoints").exists() and not (output / "metrics.jsonl").exists()
    return said


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("how", [["--eager"], []], ids=["eager", "default"])
def test_two_gpus_with_parts_are_one(
    how: list[str], cli: Cli, gpu_run: list[Any], tmp_path: Path
) -> None:
    """NCCL, fused layers and FP8, in bf16: roundings of bf16, and of FP8 that turn after them.

    With gpu_run's lr of 1e-2 one process in bf16 and one in fp32 are 5 % apart after three steps.
    """
    run = [*gpu_run, "--lr", "1e-3", "--steps", 12, "--keep", 9]
    one, two, parts = (tmp_path / name for name in ("one", "two", "parts"))
    assert cli(*run, "--output", one) == 0
    tp = [*run, *how, "--tp", 2]
    on_ranks(
        [
            [*tp, "--output", two],
            ["copy", one, parts, "step-00000012"],
            [*tp, "--output", parts, "--resume"],
        ],
        tmp_path,
    )
    assert records(two)[-1]["replayed"] == (not how)
    expected = losses(one)
    for found in (two, parts):
        np.testing.assert_allclose(losses(found), expected, rtol=1e-2)
    shutil.rmtree(two / "checkpoints" / "step-00000012")
    assert cli(*run, "--output", two, "--resume") == 0
    np.testing.assert_allclose(losses(two), expected, rtol=1e-2)
