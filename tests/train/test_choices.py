# SPDX-License-Identifier: Apache-2.0
"""What a run says before its first step: five lines that stand together, with the reasons for what was left out."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lorakernels import ContextParallel, LoRAConfig, apply_lora
from lorakernels.autograd.attention import graphed as graphed_attention
from lorakernels.modules.marks import mark
from lorakernels.train.errors import OptionError
from lorakernels.train.model.flops import ModelCounts
from lorakernels.train.options.options import FinetuneOptions
from lorakernels.train.run.choices import NAMES, choices
from lorakernels.train.run.runtime import Fused, Runtime, fuse_layers, make_random_state
from tests.graphs.fake import FakeBackend
from tests.train.replays import CPU

Cli = Callable[..., int]
BEGINNINGS = ["device: ", "layers: ", "attention: ", "graphs: ", "kernels: "]


def block(said: str) -> list[str]:
    """The five lines, which must stand together, before anything of the run itself."""
    lines = said.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith(BEGINNINGS[0]))
    found = lines[at : at + 5]
    assert [line[: len(b)] for line, b in zip(found, BEGINNINGS, strict=True)] == BEGINNINGS, lines
    assert sum(line.startswith(tuple(BEGINNINGS)) for line in lines) == 5, "said once"
    assert not any("step 0" in line or "step 1/" in line for line in lines[:at])
    return found


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (
            [],
            [
                "float32, frozen weights in FP8; 14 adapters of rank 4, ",
                "as transformers has them: fused kernels are a GPU's",
                "torch's flash kernel for CPUs; documents apart",
                "none, every kernel is launched one by one: CUDA graphs need a GPU",
                "the same bits every time",
            ],
        ),
        (
            ["--fp8-head"],
            [
                "float32, frozen weights in FP8, output head in FP8 while training (",
                "as transformers has them",
                "documents apart",
                "none",
                "the same bits every time",
            ],
        ),
        (
            ["--no-fp8", "--dtype", "bfloat16", "--fuse", "--eager", "--no-isolate-documents"],
            [
                "bfloat16; 14 adapters",
                ", save recompute",
                "; rows causal as a whole",
                "none, every kernel is launched one by one: eager was asked for",
                "the same bits every time",
            ],
        ),
    ],
    ids=["defaults on a CPU", "an FP8 head", "asked for"],
)
def test_the_block(
    cli: Cli, base_args: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str],
    more: list[str], expected: list[str],
) -> None:  # fmt: skip
    assert cli(*base_args, "--output", tmp_path, "--steps", 1, *more) == 0
    for line, parts in zip(block(capsys.readouterr().out), expected, strict=True):
        assert any(part in line for part in parts.split("|")), line


def test_the_block_stands_after_what_is_resumed(
    cli: Cli, base_args: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli(*base_args, "--output", tmp_path, "--steps", 1) == 0
    capsys.readouterr()
    assert cli(*base_args, "--output", tmp_path, "--steps", 2, "--resume") == 0
    said = capsys.readouterr().out
    assert said.index("going on from step 1") < said.index("device: the CPU")
    block(said)


def lines_of(model_dir: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> list[str]:
    from lorakernels.train.model.model import load_model

    model = load_model(model_dir, torch.float32, CPU)
    report = apply_lora(model, LoRAConfig(r=2, target_modules=["q_proj"]))
    made = FinetuneOptions(seq_len=16, batch_size=2, **options)
    if made.cp > 1:
        group: Any = SimpleNamespace(rank=0, size=2)
        mark(model, context_parallel=ContextParallel(model, group))
    random = make_random_state(7, 0, CPU)
    runtime = Runtime(model, made, report.fp8_state, random, backend=FakeBackend)
    with monkeypatch.context() as patch:
        patch.setattr(runtime, "device", torch.device("cuda"))
        fused, sizes = fuse_layers(model, made, CPU), ModelCounts.of(model, made.seq_len)
        return choices(report, runtime, fused, "2 × a GPU", sizes, 16)


def test_graphs_and_kernels_of_a_gpu(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bits are promised by what torch was told, not by the option."""
    lines = lines_of(model_dir, monkeypatch)
    assert lines[0].startswith("device: 2 × a GPU; ")
    assert lines[3] == "graphs: whole steps, captured after 3 steps and replayed from then on"
    assert lines[4] == "kernels: the fastest; not bit-exact: --deterministic"
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    lines = lines_of(model_dir, monkeypatch, graphs="layer")
    assert lines[3] == "graphs: layers, captured after 3 steps and replayed from then on"
    assert lines[4].startswith("kernels: deterministic: equal runs and --resume are exact")
    lines = lines_of(model_dir, monkeypatch, optim="adafactor")
    assert lines[3].startswith("graphs: layers, ")
    assert lines[3].endswith("; no graph of a whole step can hold adafactor")


@pytest.mark.parametrize("axis", ["cp", "tp"])
def test_unfused_layers_over_ranks_run_eagerly(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, axis: str
) -> None:
    lines = lines_of(model_dir, monkeypatch, **{axis: 2})
    kind = {"cp": "with rows over ranks (cp)", "tp": "split over ranks (tp)"}[axis]
    assert lines[3].endswith(f"launched one by one: unfused layers {kind} are not captured")
    gathers = "attention: 2 ranks gather the keys and values of their rows; documents apart"
    assert (lines[2] == gathers) == (axis == "cp")


def test_an_attention_that_takes_no_rows_is_refused_before_the_run(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lorakernels.train.run import choices as module

    def declines(*_: Any) -> str:
        raise ValueError("attention='cudnn' does not take q (1, 2)")

    monkeypatch.setattr(module, "attention_backend", declines)
    with pytest.raises(OptionError, match="documents apart: attention='cudnn' does not take"):
        lines_of(model_dir, monkeypatch)


@pytest.mark.parametrize("attention", ["cudnn", "efficient", "cudnn_graph", "fp8"])
@pytest.mark.parametrize("isolates", [True, False], ids=["documents", "rows"])
def test_a_gpu_s_attention_is_refused_on_a_cpu(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, attention: str, isolates: bool
) -> None:
    options = {"attention": attention, "isolate_documents": isolates, "fuse": True}
    with pytest.raises(
        OptionError, match=f"attention='{attention}' (is for a GPU|does not take)|--attention would"
    ):
        lines_of(model_dir, monkeypatch, **options)


def test_an_attention_that_takes_no_heads_of_the_model_is_refused_beside_fuse(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`fuse` declines heads of 16. Without --fuse the run goes on, and says what has no effect."""
    given = {"attention": "fp8", "isolate_documents": False}
    message = "the layers cannot be fused, without which --attention would have no effect: "
    with pytest.raises(OptionError, match=message):
        lines_of(model_dir, monkeypatch, fuse=True, **given)
    said = lines_of(model_dir, monkeypatch, **given)[1]
    assert said.endswith("; without effect on them: --attention")


@pytest.mark.parametrize("attention", ["auto", "flash", "math"])
def test_fused_layers_name_a_cpu_s_attention(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, attention: str
) -> None:
    """Told by what runs: a kernel that torch lacks would raise in the forward."""
    name = {"auto": "flash"}.get(attention, attention)
    said = lines_of(model_dir, monkeypatch, attention=attention, fuse=True)[2]
    assert said == f"attention: torch's {name} kernel for CPUs; documents apart"


def test_a_run_that_attention_refuses_writes_no_results(
    cli: Cli, base_args: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--fuse", "--attention", "efficient", "--output", tmp_path / "out", "--steps", 1]
    assert cli(*base_args, *given) == 2
    assert "attention='efficient' is for a GPU, found q on cpu" in capsys.readouterr().err
    assert {path.name for path in (tmp_path / "out").iterdir()} <= {
        ".lock",
        ".tokens.lock",
        "tokens",
    }


@pytest.mark.parametrize(
    ("options", "rows"),
    [
        ({}, "packed"),
        ({"isolate_documents": False}, "causal"),
        ({"dtype": "float32"}, (2, 1, 16, 16)),
    ],
    ids=["packed", "dense", "no variable lengths"],
)
def test_fused_layers_are_asked_for_the_rows_they_get(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], rows: Any
) -> None:
    """On a GPU, which a parameter here pretends to be on."""
    from lorakernels.fusion.fuse import ChosenBackend
    from lorakernels.train.model.model import load_model
    from lorakernels.train.run import choices as module

    model: Any = load_model(model_dir, torch.float32, CPU)
    asked: list[Any] = []

    class Report:
        def backend_for(self, q: Any, k: Any, v: Any, rows: Any, longest: int) -> ChosenBackend:
            assert longest == 9
            assert q.shape == (2, 2, 16, 16) and k.shape == v.shape == (2, 1, 16, 16)
            asked.append(rows if isinstance(rows, str) else tuple(rows.shape))
            return ChosenBackend("cudnn", "no reason")

    class Weight:
        is_cuda, dtype, device = True, torch.float32, CPU

    monkeypatch.setattr(
        model.model, "get_input_embeddings", lambda: type("", (), {"weight": Weight})
    )
    monkeypatch.setattr(module, "takes_starts", lambda *_: rows != (2, 1, 16, 16))
    made = FinetuneOptions(seq_len=16, batch_size=2, **options)
    fused = Fused(report=Report())  # type: ignore[arg-type]
    assert module.attention_backend(model, made, fused, 9) == ("cudnn", "no reason")
    assert asked == [rows]


def test_a_budget_takes_what_may_be_offloaded(deep_model: Path) -> None:
    """Of five layers, two have their input on the device."""
    from lorakernels.train.model.model import load_model

    model = load_model(deep_model, torch.float32, CPU)
    apply_lora(model, LoRAConfig(r=2, target_modules="all-linear"))
    batch = {"batch_size": 4, "seq_len": 32}
    budget = 2 * 4 * 32 * 4 * model.config.hidden_size / 2**30
    options = FinetuneOptions(fuse=True, memory_budget=budget, offload_activations=True, **batch)
    report = fuse_layers(model, options, CPU).report
    assert report is not None and {row.save for row in report.layers} == {"checkpoint-offload"}
    assert not any(parts.checks_longest for parts in report.parts), (
        "packing.py compares on the host"
    )


def test_a_budget_that_does_not_fit_is_not_a_run_that_takes_more(model_dir: Path) -> None:
    from lorakernels.train.model.model import load_model

    model = load_model(model_dir, torch.float32, CPU)
    apply_lora(model, LoRAConfig(r=2, target_modules="all-linear"))
    options = FinetuneOptions(fuse=True, memory_budget=1e-6, seq_len=32)
    with pytest.raises(OptionError, match="memory_budget = 1073 bytes is too little for 2 layers"):
        fuse_layers(model, options, CPU)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"attention": "cudnn", "memory_budget": 1.0}, "--memory-budget, --attention"),
        ({"fuse": True, "gradient_checkpointing": True, "save": "checkpoint"}, "--save"),
        ({"fuse": False}, None),
    ],
    ids=["default on a CPU", "gradient checkpointing", "nothing asked for"],
)
def test_options_of_fused_layers_are_named_where_layers_are_not_fused(
    options: dict[str, Any], said: str | None
) -> None:
    found = str(fuse_layers(torch.nn.Identity(), FinetuneOptions(**options), CPU))
    assert found.startswith("as transformers has them: ")
    assert found.partition("; without effect on them: ")[2] == (said or "")


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("more", "backend"),
    [
        ([], "FlashAttention-2 by where documents begin; documents apart"),
        (["--no-isolate-documents"], "cuDNN; rows causal as a whole"),
        (["--no-isolate-documents", "--deterministic"], "FlashAttention-2; rows causal as a whole"),
    ],
    ids=["packed", "dense", "dense deterministic"],
)
def test_attention_on_a_gpu_is_the_one_that_is_named(
    cli: Cli, gpu_run: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch, more: list[str], backend: str,
) -> None:  # fmt: skip
    """And fused layers take it, in captured steps too."""
    from lorakernels import fuse
    from lorakernels.train.run import runtime as module

    if torch.cuda.get_device_capability() < (9, 0) and "cuDNN" in backend:
        pytest.skip("cuDNN is preferred on Hopper and later")
    reports: list[Any] = []
    monkeypatch.setattr(module, "fuse", lambda *a, **k: reports.append(fuse(*a, **k)) or reports[0])
    run = [word for word in gpu_run if word != "--deterministic"]
    run += ["--steps", 6, "--eval-fraction", "0", "--seq-len", 256, *more]
    assert cli(*run, "--output", tmp_path / "out") == 0
    said = capsys.readouterr().out
    if not graphed_attention.why_not_here(torch.device("cuda")):
        backend = re.sub("FlashAttention-2( by where .*begin)?;", "cuDNN's graphs;", backend)
    line, _, why = block(said)[2].partition("; not cuDNN: ")
    assert line == f"attention: {backend}" and bool(why) == ("FlashAttention-2" in backend)
    assert "whole steps replayed as CUDA graphs" in said
    assert reports[0].backends == [
        key for key, name in NAMES.items() if backend.startswith(f"{name};")
    ]
