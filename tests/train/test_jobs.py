# SPDX-License-Identifier: Apache-2.0
"""``finetune --jobs``: adapters that train at once, each as it would alone."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from lorakernels.train.adapted import load_adapted, lora_config
from lorakernels.train.data.packing import IGNORE
from lorakernels.train.data.prepare import load_data
from lorakernels.train.errors import OptionError
from lorakernels.train.files.written import WRITTEN
from lorakernels.train.jobs import (
    Job,
    JobRows,
    JobsTrainer,
    add_jobs,
    job_options,
    load_jobs,
    read_jobs,
)
from lorakernels.train.model.model import load_tokenizer
from lorakernels.train.options.options import FinetuneOptions
from lorakernels.train.ranks.ranks import RunRanks
from lorakernels.train.run.loop import Trainer, evaluate, evaluation_batches
from lorakernels.train.run.reporter import Reporter

Cli = Callable[..., int]
SEQ_LEN = 48


def text_file(path: Path, words: str, documents: int) -> Path:
    texts = [f"{words} {i}: " + f"{words} again; " * (i % 5) for i in range(documents)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("jobs")
    return {
        "fox": text_file(folder / "fox.jsonl", "the quick brown fox", 24),
        "dog": text_file(folder / "dog.jsonl", "a lazy dog", 9),
    }


def jobs_file(path: Path, files: dict[str, Path], **more: dict[str, Any]) -> Path:
    entries = {name: {"data": [str(file)], **more.get(name, {})} for name, file in files.items()}
    path.write_text(yaml.safe_dump(entries, sort_keys=False))
    return path


@pytest.fixture
def arguments(model_dir: Path) -> list[str]:
    return [
        *("--model", str(model_dir), "--device", "cpu", "--r", "4", "--lr", "1e-2", "--lora-dropout", "0"),
        *("--seq-len", str(SEQ_LEN), "--batch-size", "2", "--grad-accum", "2", "--eval-fraction", "0.2"),
        *("--eval-every", "0", "--log-every", "1"),
    ]  # fmt: skip


def options_of(model_dir: Path, **more: Any) -> FinetuneOptions:
    given: dict[str, Any] = {
        "model": str(model_dir),
        "output": "unused",
        "device": "cpu",
        "fp8": False,
    }
    given |= {
        "r": 4,
        "lora_dropout": 0.0,
        "seq_len": SEQ_LEN,
        "batch_size": 2,
        "eval_fraction": 0.0,
    }
    given |= {"max_grad_norm": 0.5, **more}
    return FinetuneOptions(**given, steps=4, lr=1e-2, optim="sgd")


@pytest.mark.parametrize("clipped", [0.5, 1e6, 0.0], ids=["clipped", "below", "not clipped"])
def test_gradients_norms_and_rates_are_those_of_each_alone(
    model_dir: Path, files: dict[str, Path], tmp_path: Path, clipped: float
) -> None:
    """Over a plain base, by SGD, which shows every factor. Only the divisions by numbers of tokens round otherwise."""
    options = options_of(model_dir, data=["unused"], max_grad_norm=clipped)
    reporter = Reporter("finetune", 1, quiet=True)
    cpu = torch.device("cpu")
    model, _ = load_adapted(model_dir, options, torch.float32, cpu, None, reporter)  # type: ignore[arg-type]
    tokenizer = load_tokenizer(model_dir)
    jobs = [Job(n, [str(f)], [], lr=1e-2 if n == "fox" else 2e-3) for n, f in files.items()]
    adapters = add_jobs(model, jobs)
    each = [
        load_data(replace(options, data=job.data), tokenizer, tmp_path, print, RunRanks()).train
        for job in jobs
    ]
    shared = min(map(len, each))  # as many rows of each, so that both take them in one order
    for rows in each:
        rows.rows = rows.rows[:shared]
    singles = {}
    for job, rows in zip(jobs, each, strict=True):
        with adapters.only(job.name):
            alone = copy.deepcopy(model)
        singles[job.name] = Trainer(alone, replace(options, lr=job.lr), rows, None)
    together = JobsTrainer(adapters, jobs, model, options, JobRows(each, SEQ_LEN), None)  # type: ignore[arg-type]
    for _ in range(4):
        together.step()
        for single in singles.values():
            single.step()
    for name, single in singles.items():
        for path, value in adapters.parameters(name).items():
            torch.testing.assert_close(value, single.trainable[path], rtol=1e-4, atol=1e-6)
    for trainer in (together, *singles.values()):
        trainer.close()


def test_a_job_has_its_own_rate_where_another_s_name_begins_as_its_own() -> None:
    jobs = [Job("fox", ["a"], [], lr=1e-3), Job("fox: dog", ["b"], [], lr=2e-3)]
    trainer: Any = SimpleNamespace(jobs=jobs, options=SimpleNamespace(lr=1e-3))
    names = [f"{job.name}: layers.0.q_proj.lora_A" for job in jobs]
    assert [JobsTrainer._ratio(trainer, name) for name in names] == [1.0, 2.0]


def adapters_in(output: Path) -> dict[str, dict[str, torch.Tensor]]:
    found = output.glob("*/adapter/adapter_model.safetensors")
    return {path.parts[-3]: load_file(path) for path in found}


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["delayed", "block"])
def test_a_run_writes_an_adapter_for_each_and_resumes_exactly(
    recipe: str,
    cli: Cli,
    arguments: list[str],
    files: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    peft = pytest.importorskip("peft")
    jobs = jobs_file(tmp_path / "jobs.yaml", files, dog={"r": 2, "lr": 5e-3})
    given = [*arguments, "--jobs", jobs, "--save-every", 2, "--fp8-recipe", recipe]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert cli(*given, "--output", whole, "--steps", 4, "--lr-scheduler-type", "constant") == 0
    said = capsys.readouterr().out
    assert "job fox:" in said and "job dog: validation loss" in said
    assert cli(*given, "--output", parts, "--steps", 2, "--lr-scheduler-type", "constant") == 0
    more = ("--steps", 4, "--lr-scheduler-type", "constant", "--resume")
    assert cli(*given, "--output", parts, *more) == 0
    others = {path.name for path in whole.iterdir()} - {"fox", "dog"}
    assert {name for name in others if not name.startswith(".")} <= {*WRITTEN}
    one, other = adapters_in(whole), adapters_in(parts)
    assert one.keys() == other.keys() == {"fox", "dog"}
    for name, tensors in one.items():
        assert all(torch.equal(value, other[name][key]) for key, value in tensors.items())
        assert any(value.count_nonzero() for key, value in tensors.items() if "lora_B" in key)
    for name, rank in (("fox", 4), ("dog", 2)):
        config = peft.PeftConfig.from_pretrained(whole / name / "adapter")
        assert config.r == rank
        card = (whole / name / "adapter" / "README.md").read_text()
        assert f"Job {name}, one of 2 at once" in card
        settings = dict(re.findall(r"^- (\w+): (.*)$", card, re.MULTILINE))
        assert (int(settings["r"]), float(settings["lora_alpha"])) == (rank, config.lora_alpha)


@pytest.mark.parametrize("use_rslora", [False, True])
def test_the_options_of_a_job_of_a_smaller_rank_have_the_run_s_scaling(use_rslora: bool) -> None:
    options = FinetuneOptions(r=8, lora_alpha=12.0, use_rslora=use_rslora, lr=1e-3)
    for job in (Job("a", ["d"], []), Job("b", ["d"], [], lr=2e-3, r=2)):
        own = job_options(job, options)
        assert (own.r, own.lr, own.data) == (job.r or 8, job.lr or 1e-3, ["d"])
        scaling = [lora_config(each).scaling_for("q_proj") for each in (own, options)]
        assert scaling[0] == pytest.approx(scaling[1], rel=1e-12)  # one rounding of a quotient


def test_three_jobs_run(
    cli: Cli, arguments: list[str], files: dict[str, Path], tmp_path: Path
) -> None:
    """The model is tried on two rows before it is trained, which no three adapters divide."""
    three = {**files, "cat": files["dog"]}
    given = [*arguments, "--jobs", jobs_file(tmp_path / "jobs.yaml", three), "--output", tmp_path]
    assert cli(*given, "--steps", 1) == 0
    assert adapters_in(tmp_path).keys() == three.keys()


def test_jobs_in_another_order_are_not_resumed(
    cli: Cli,
    arguments: list[str],
    files: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """An optimizer's state goes by numbers: the other order would hand each job the moments of another."""
    jobs, output = jobs_file(tmp_path / "jobs.yaml", files), tmp_path / "out"
    given = [*arguments, "--jobs", jobs, "--output", output, "--lr-scheduler-type", "constant"]
    assert cli(*given, "--steps", 1) == 0
    jobs_file(jobs, dict(reversed(files.items())))
    capsys.readouterr()
    assert cli(*given, "--steps", 2, "--resume") == 1
    said = capsys.readouterr().err
    assert "the order of jobs was ['fox', 'dog'], now it is ['dog', 'fox']; restore it" in said


@pytest.mark.parametrize("name", [*WRITTEN, "Options.json", ".lock", ".."])
def test_a_job_is_not_named_as_what_the_run_writes(
    model_dir: Path, tmp_path: Path, name: str
) -> None:
    path = jobs_file(tmp_path / "jobs.yaml", {name: tmp_path / "x.jsonl"})
    options = options_of(model_dir, jobs=str(path))
    with pytest.raises(OptionError, match="must not begin with a dot or be one that a run writes"):
        read_jobs(options, RunRanks())


def test_a_job_s_data_folder_must_not_hold_the_output(model_dir: Path, tmp_path: Path) -> None:
    path = jobs_file(tmp_path / "jobs.yaml", {"fox": tmp_path})
    options = options_of(model_dir, jobs=str(path))
    options.output = str(tmp_path / "out")
    with pytest.raises(OptionError, match=r"fox: data: the folder .* holds output .*out, whose"):
        read_jobs(options, RunRanks())


def test_rows_of_the_shorter_job_repeat(
    model_dir: Path, files: dict[str, Path], tmp_path: Path
) -> None:
    options, tokenizer = options_of(model_dir, data=["unused"]), load_tokenizer(model_dir)
    each = [
        load_data(replace(options, data=[str(f)]), tokenizer, tmp_path, print, RunRanks()).train
        for f in files.values()
    ]
    rows = JobRows(each, SEQ_LEN)
    long, short = map(len, each)
    assert len(rows) == long > short
    batch = rows.batch([0, short, long - 1])
    assert batch.input_ids.shape == (6, SEQ_LEN)
    assert torch.equal(batch.input_ids[3], batch.input_ids[4])
    assert batch.targets == sum(rows.targets_of_each([0, short, long - 1]))
    own = [part.batch([0]) for part in each]
    both = rows.batch([0])
    ends = [b.starts[b.starts < SEQ_LEN] for b in own if b.starts is not None]
    assert both.starts is not None
    assert both.starts[: len(torch.cat(ends))].tolist() == [
        *ends[0].tolist(),
        *(ends[1] + SEQ_LEN).tolist(),
    ]
    assert set(both.starts[len(torch.cat(ends)) :].tolist()) <= {2 * SEQ_LEN}
    alone = rows.only(1).batch([0])
    assert torch.equal(alone.labels[1], both.labels[1])
    assert set(alone.labels[0].tolist()) == {IGNORE}


def test_the_held_out_loss_counts_every_row_once(
    model_dir: Path, files: dict[str, Path], tmp_path: Path
) -> None:
    """It is the mean of the jobs' own losses, by their tokens. Shorter jobs are spread, so that a few rows have all."""
    options, cpu = options_of(model_dir, data=["unused"]), torch.device("cpu")
    reporter = Reporter("finetune", 1, quiet=True)
    model, _ = load_adapted(model_dir, options, torch.float32, cpu, None, reporter)  # type: ignore[arg-type]
    jobs = [Job(name, [str(file)], [str(file)]) for name, file in files.items()]
    adapters = add_jobs(model, jobs)
    for job in jobs:
        for value in adapters.parameters(job.name).values():
            torch.nn.init.normal_(value.data, std=0.2)
    held: Any = load_jobs(jobs, options, load_tokenizer(model_dir), tmp_path, reporter).held
    long, short = map(len, held.by_job)
    assert long > short > 1
    trainer: Any = SimpleNamespace(jobs=jobs, model=model, options=options)
    each = JobsTrainer.evaluate_each(trainer, held, reporter)
    tokens = [sum(map(rows.targets_of, range(len(rows)))) for rows in held.by_job]
    expected = sum(n * each[job.name] for n, job in zip(tokens, jobs, strict=True)) / sum(tokens)
    assert evaluate(model, held, options) == pytest.approx(expected, rel=1e-6)
    assert held.targets_of_each(range(long)) == tokens
    some = replace(options, eval_rows=long // 2)
    seen = [batch.labels for batch in evaluation_batches(held, some.eval_rows, 1)]
    assert {tuple((labels != IGNORE).any(1).tolist()) for labels in seen} == {
        (True, True),
        (True, False),
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must map a name to each job, found None"),
        ("- a", "must map a name to each job"),
        ("a: 1", "a must hold data, eval_data, lr, r, found 1"),
        ("a: {date: x}", "a: unknown 'date', expected one of data, eval_data, lr, r"),
        ("a: {}", "a: data is missing"),
        ("a: {data: 3}", "a: data must be files, found 3"),
        ("a: {data: x, lr: -1}", "a: lr must be positive and finite, found -1"),
        ("a: {data: x, r: 5}", "a: r must be 1 to 4, the run's --r, found 5"),
        ("a/b: {data: x}", "must be the name of a directory in output"),
        ("checkpoints: {data: x}", "must not begin with a dot or be one that a run writes there"),
        ("a: {data: [x]}\n'a': {data: [y]}", "found 'a' twice in one mapping"),
        ("a: {data: [x], r: 2, data: [y]}", "found 'data' twice in one mapping"),
        ("a: [", "cannot be read"),
    ],
    ids=["empty", "list", "number", "typo", "no data", "data", "lr", "r", "path", "reserved", "twice", "both", "yaml"],
)  # fmt: skip
def test_a_file_that_cannot_be_used_is_refused_by_name(
    cli: Cli,
    arguments: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    text: str,
    message: str,
) -> None:
    jobs = tmp_path / "jobs.yaml"
    jobs.write_text(text)
    assert cli(*arguments, "--jobs", jobs, "--output", tmp_path / "out") == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--data", "x"], "data must be [] with jobs, got ['x']"),
        (["--lora-dropout", "0.1"], "lora_dropout must be 0.0 with jobs, got 0.1"),
        (["--use-dora"], "use_dora must be False with jobs, got True"),
        (["--merge", "bf16"], "merge must be None with jobs, got 'bf16'"),
        (["--init-lora-weights", "pissa"], "init_lora_weights must be true or gaussian with jobs"),
    ],
    ids=["data", "dropout", "dora", "merge", "pissa"],
)  # fmt: skip
def test_options_that_do_not_go_with_jobs_are_refused(
    cli: Cli,
    arguments: list[str],
    files: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    more: list[str],
    message: str,
) -> None:
    jobs = jobs_file(tmp_path / "jobs.yaml", files)
    assert cli(*arguments, "--jobs", jobs, "--output", tmp_path / "out", *more) == 2
    assert message in capsys.readouterr().err
