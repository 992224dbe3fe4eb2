# SPDX-License-Identifier: Apache-2.0
"""finetune --tp: ranks with parts of each layer train as one process does, resumed with or without them."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel

from lorakernels import VocabularyHead, load_quantized, parallelize
from lorakernels.parallel import comm
from lorakernels.train.context import sharing
from lorakernels.train.errors import OptionError
from lorakernels.train.job import add_adapters, lora_config
from lorakernels.train.loop import Trainer
from lorakernels.train.model import hidden_states, load_model
from lorakernels.train.options import FinetuneOptions
from lorakernels.train.packing import PackedRows
from lorakernels.train.parts import whole_model
from lorakernels.train.ranks import Ranks
from lorakernels.train.runtime import Runtime, fuse_layers, make_random_state
from lorakernels.train.tensor import split_layers
from tests import processes
from tests.distributed.test_tensor_graphs import own_rows_of_the_sum
from tests.graphs.fake import FakeBackend
from tests.train.replays import assert_same, records, trained
from tests.train.test_ranks import losses, on_ranks
from tests.train.test_ranks_that_end import end_of
from tests.train.test_resume import adapter

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


def bound(form: str) -> float:
    """Of a relative difference from one process.

    Sums of fp32 have another order, and masks are the same. AdamW divides by small numbers, and over FP8 one rounding
    may turn.
    """
    if "FP8" in form:
        return 1e-3
    return 1e-6 if "sgd" in FORMS[form] else 2e-5


@pytest.mark.parametrize("form", FORMS)
def test_two_parts_train_as_one_process(form: str, alone: Path, two_ranks: Path) -> None:
    expected = losses(alone / form)
    np.testing.assert_allclose(losses(two_ranks / form), expected, rtol=bound(form))
    assert len(expected) == 7


@pytest.mark.parametrize("form", FORMS)
def test_the_norm_of_gradients_is_that_of_the_whole_model(
    form: str, alone: Path, two_ranks: Path
) -> None:
    """A gradient is a difference of larger numbers; the first step's has seen no optimizer."""
    found, expected = (norms(folder / form) for folder in (two_ranks, alone))
    np.testing.assert_allclose(found[:1], expected[:1], rtol=1e-2 if "FP8" in form else 1e-6)
    np.testing.assert_allclose(found, expected, rtol=50 * bound(form))
    assert len(expected) == 4 and min(expected) > 0.05, "the norm is clipped in every step"


def test_flops_are_those_of_the_whole_model(alone: Path, two_ranks: Path) -> None:
    per_token = []
    for folder in (two_ranks, alone):
        lines = map(json.loads, (folder / "plain" / "metrics.jsonl").read_text().splitlines())
        per_token.append([line["tflops"] / line["tokens_per_s"] for line in lines if "lr" in line])
    np.testing.assert_allclose(per_token[0], per_token[1], rtol=1e-9)


@pytest.mark.parametrize("form", FORMS)
def test_files_are_those_of_one_process(form: str, alone: Path, two_ranks: Path) -> None:
    for name in ("adapter", "checkpoints/step-00000002"):
        ours, theirs = two_ranks / form / name, alone / form / name
        configs = [json.loads((p / "adapter_config.json").read_text()) for p in (ours, theirs)]
        assert configs[0] == configs[1]
        found, expected = (load_file(p / "adapter_model.safetensors") for p in (ours, theirs))
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=1e-2, atol=1e-3)
    states = [
        torch.load(folder / form / "checkpoints/step-00000002/state/optimizer.pt")["state"]
        for folder in (two_ranks, alone)
    ]
    assert states[0].keys() == states[1].keys()
    for number, expected in states[1].items():
        for key, value in expected.items():
            torch.testing.assert_close(states[0][number][key], value, rtol=1e-2, atol=1e-3)


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
    np.testing.assert_allclose(found, expected, rtol=bound(form))
    assert found[:3] == expected[:3]


@pytest.mark.parametrize("form", RESUMED)
def test_one_process_goes_on_from_the_checkpoint_of_two_parts(
    form: str, cli: Cli, run: list[Any], two_ranks: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(two_ranks / form, tmp_path / "copy"))
    shutil.rmtree(copy / "checkpoints" / "step-00000004")
    assert cli(*run, *FORMS[form], "--output", copy, "--resume") == 0
    np.testing.assert_allclose(losses(copy), losses(two_ranks / form), rtol=bound(form))
    assert adapter(copy) != adapter(two_ranks / form), "other sums: the comparison was of two runs"


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


def test_two_replicas_of_two_parts(run: list[Any], tmp_path: Path) -> None:
    """Each replica has rows of its own, which one process has in another microbatch."""
    form = ["--no-fp8", "--lora-dropout", "0"]
    on_ranks([[*run, *form, "--output", tmp_path / "one"]], tmp_path, size=1)
    four = ["--tp", 2, "--grad-accum", 1]
    on_ranks([[*run, *form, *four, "--output", tmp_path / "four"]], tmp_path, size=4)
    np.testing.assert_allclose(losses(tmp_path / "four"), losses(tmp_path / "one"), rtol=2e-5)
    np.testing.assert_allclose(norms(tmp_path / "four"), norms(tmp_path / "one"), rtol=1e-3)


def test_parts_of_layers_and_of_rows(run: list[Any], tmp_path: Path) -> None:
    """Two times two ranks are two that share rows alone, with their masks and scales."""
    form = ["--fuse", "--cp", 2]
    on_ranks([[*run, *form, "--output", tmp_path / "two"]], tmp_path)
    on_ranks([[*run, *form, "--tp", 2, "--output", tmp_path / "four"]], tmp_path, size=4)
    np.testing.assert_allclose(losses(tmp_path / "four"), losses(tmp_path / "two"), rtol=1e-3)
    np.testing.assert_allclose(norms(tmp_path / "four"), norms(tmp_path / "two"), rtol=1e-2)


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


@pytest.mark.parametrize(
    "form",
    [
        ["--fp8-recipe", "block"],
        ["--fp8-recipe", "block", "--fuse"],
        ["--weight-layout", "both", "--target-modules", "q_proj", "down_proj"],
    ],
    ids=["blocks", "blocks, fused", "some layers, and both layouts"],
)  # fmt: skip
def test_other_bases(form: list[str], run: list[Any], wide_model: Path, tmp_path: Path) -> None:
    run = [*run, *form, "--model", wide_model, "--steps", 2]
    on_ranks([[*run, "--output", tmp_path / "one"]], tmp_path, size=1)
    on_ranks([[*run, "--tp", 2, "--output", tmp_path / "two"]], tmp_path)
    np.testing.assert_allclose(losses(tmp_path / "two"), losses(tmp_path / "one"), rtol=1e-3)
    np.testing.assert_allclose(norms(tmp_path / "two"), norms(tmp_path / "one"), rtol=1e-2)


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
        sharing(FinetuneOptions(**more), Ranks(0, ranks))  # type: ignore[arg-type]


def test_a_rank_knows_its_replica_and_who_counts() -> None:
    ranks = [Ranks(rank, 8, cp=2, tp=2) for rank in range(8)]
    assert [r.replica for r in ranks] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert {r.replicas for r in ranks} == {2}
    assert [r.counts for r in ranks] == [True, False] * 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pp": 2}, "tp 2 does not go with pp 2"),
        ({"shard_base": True}, "tp 2 does not go with shard_base True"),
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


def packed(rank: int, device: torch.device, model_dir: str) -> dict[str, Tensor]:
    """Hidden states of fused layers that get documents by where they start, and gradients of a sum of them."""
    found, options = {}, FinetuneOptions(r=4, lora_dropout=0.0, fp8=False, fuse=True, seq_len=24)
    tokens = np.arange(160, dtype=np.uint8) % 101
    stops = np.arange(10, 161, 10)
    batch = PackedRows(tokens, np.stack([stops - 10, stops], 1), 24).batch(range(4))
    assert batch.starts is not None and len(batch.starts.unique()) > 5
    for way in ("whole", "split", "split by rows"):
        torch.manual_seed(1)
        model = load_model(Path(model_dir), torch.float32, device)
        add_adapters(model, options)
        for name, p in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(p.data)
        assert fuse_layers(model, options, device)
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        split = (
            None if way == "whole" else parallelize(model, mesh, sequence_parallel="rows" in way)
        )
        with mock.patch("lorakernels.train.model.takes_starts", lambda decoder, like: True):
            hidden = hidden_states(model, batch)
        (
            hidden * torch.randn(hidden.shape, generator=torch.Generator().manual_seed(2))
        ).sum().backward()
        gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        gradients = gradients if split is None else split.whole_gradients()
        found |= {f"{way}: {n}": x for n, x in {"hidden": hidden.detach(), **gradients}.items()}
    return found


def test_fused_parts_get_documents_by_where_they_start(even_model: Path) -> None:
    """As on a GPU. Sums of fp32 have another order, and gradients of q and k nearly cancel."""
    for found in processes.on_ranks(packed, 2, "gloo", str(even_model)):
        expected = {
            n.removeprefix("whole: "): x for n, x in found.items() if n.startswith("whole: ")
        }
        assert len(expected) == 1 + 2 * 7 * 2
        for name, value in expected.items():
            for way in ("split", "split by rows"):
                error = float((found[f"{way}: {name}"] - value).norm() / value.norm())
                assert error < 1e-4, (way, name)


def spoken(
    rank: int, device: torch.device, model_dir: str, cases: list[dict[str, Any]]
) -> list[Any]:
    """(what was said, whether the head was split) of each case."""
    found = []
    for case in cases:
        options = FinetuneOptions(r=4, fp8=False, tp=2, **case.get("options", {}))
        model: Any = load_model(Path(model_dir), torch.float32, device)
        if "tokens" in case:
            model.resize_token_embeddings(case["tokens"], mean_resizing=False)
        vars(model.config).update(case.get("config", {}))
        add_adapters(model, options)
        said: list[str] = []
        ranks = Ranks(rank, 2, tp=2)
        split_layers(model, options, ranks, device, said.append)
        found.append((said, isinstance(model.get_output_embeddings(), VocabularyHead)))
    return found


def test_the_run_says_what_is_split_and_why_not_the_vocabulary(even_model: Path) -> None:
    cases: list[Any] = [
        ({}, True, "; embedding and head split by tokens"),
        ({"options": {"fp8_head": True}}, False, "whole on each rank, as fp8_head multiplies by the whole head"),
        ({"tokens": 265}, False, "as the vocabulary has 265 tokens, no multiple of 2"),
        ({"config": {"logits_scaling": 8.0}}, False, "as the model changes its logits"),
        ({"options": {"sequence_parallel": False}}, True, " layers over 2 ranks, rows whole; "),
    ]  # fmt: skip
    given = [case for case, _, _ in cases]
    for found in processes.on_ranks(spoken, 2, "gloo", str(even_model), given):
        for (said, split), (case, expected, words) in zip(found, cases, strict=True):
            assert len(said) == 1 and words in said[0], case
            assert said[0].startswith(f"tp: {16 if split else 14} layers over 2 ranks, rows ")
            assert split is expected, case


def replaying(rank: int, device: torch.device, model_dir: str, refused: bool) -> list[Any]:
    """(losses, what was trained, what was said, the error) with imitated graphs of layers, and eagerly.

    With `refused` a parameter moves on rank 1 after the capture, so that a replay is refused there.
    """
    text = (b"the quick brown fox jumps over the lazy dog; " * 4)[:160]
    stops = np.arange(10, 161, 10)
    rows = PackedRows(np.frombuffer(text, dtype=np.uint8), np.stack([stops - 10, stops], 1), 24)
    options = FinetuneOptions(
        r=4, lora_dropout=0.2, seq_len=24, batch_size=2, grad_accum=2, steps=9, lr=1e-2, fuse=True,
        tp=2, graphs="layer",
    )  # fmt: skip
    ranks, found = Ranks(rank, 2, tp=2), []
    for backend in (FakeBackend, None):
        torch.manual_seed(1)
        random = make_random_state(7, 0, device)
        given: dict[str, Any] = {"device": device, "dtype": torch.float32, "progress": False}
        loaded = load_quantized(model_dir, lora=lora_config(options), rng_state=random, **given)
        model: Any = loaded.model
        model.config.use_cache = False
        assert fuse_layers(model, options, device)
        said: list[str] = []
        split_layers(model, options, ranks, device, said.append)
        more: dict[str, Any] = {"ranks": ranks, "warmup": 2, "backend": backend, "say": said.append}
        runtime = Runtime(model, options, loaded.fp8_state, random, **more)
        trainer = Trainer(model, options, rows, loaded.fp8_state, runtime, ranks)
        losses, error = [], ""
        # gloo's scatter, and attention of torch for CPUs, end in ops that the imitated capture would record
        with mock.patch.object(comm, "sum_rows", own_rows_of_the_sum), sdpa_kernel(SDPBackend.MATH):
            try:
                for step in range(6):
                    if refused and backend and step == 4 and rank == 1:
                        parameter = model.model.layers[1].self_attn.q_proj.lora_A
                        parameter.data = parameter.data.clone()
                    losses.append(trainer.step().loss)
                    trainer.checkpoint({})
                    with whole_model(model):  # as for its files
                        assert model.get_parameter(PARAMETER).shape == (32, 4)
            except Exception as raised:
                error = f"{type(raised).__name__}: {raised}"
        replayed = runtime.replaying
        trainer.close()
        found.append((losses, trained(trainer), said, error, replayed))
        if refused:
            break
    return found


def test_fused_parts_are_replayed_as_graphs_of_layers_to_the_bit(even_model: Path) -> None:
    for graphed, eager in processes.on_ranks(replaying, 2, "gloo", str(even_model), False):
        assert graphed[4] and not eager[4]
        assert any("layers replayed as CUDA graphs from step 3 on" in text for text in graphed[2])
        assert graphed[0] == eager[0] and len(eager[0]) == 6
        assert_same(graphed[1], eager[1])


def test_a_rank_whose_replay_is_refused_does_not_start_the_step_anew(even_model: Path) -> None:
    """The other one is in the middle of it, and would take its rows for others."""
    (whole,), (one,) = processes.on_ranks(replaying, 2, "gloo", str(even_model), True)
    assert one[3].startswith("FinetuneError: replay of layer '1'"), one[3]
    assert "cannot start a step anew: go on from the last checkpoint with --resume" in one[3]
    assert "gloo" in whole[3] and len(whole[0]) == len(one[0]) == 4


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("how", [["--eager"], ["--graphs", "layer"]], ids=["eager", "graphs"])
def test_two_gpus_with_parts_are_one(
    how: list[str], cli: Cli, gpu_run: list[Any], tmp_path: Path
) -> None:
    """NCCL, fused layers and FP8, in bf16: roundings of bf16, and of FP8 that turn after them."""
    run = [*gpu_run, "--steps", 12, "--keep", 9]
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
    assert records(two)[-1]["replayed"] == (how[0] == "--graphs")
    expected = losses(one)
    for found in (two, parts):
        np.testing.assert_allclose(losses(found), expected, rtol=1e-2)
    shutil.rmtree(two / "checkpoints" / "step-00000012")
    assert cli(*run, "--output", two, "--resume") == 0
    np.testing.assert_allclose(losses(two), expected, rtol=1e-2)
