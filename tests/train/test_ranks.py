# SPDX-License-Identifier: Apache-2.0
"""Several ranks: equal to one with their rows together, the same adapters and scales on all, resumed on any number."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from lorakernels.train.errors import FinetuneError, OptionError
from lorakernels.train.ranks import ranks as train_ranks
from lorakernels.train.ranks.ranks import RunRanks, ranks_of_environment
from tests import processes
from tests.distributed.test_split_graphs import own_rows_of_the_sum
from tests.graphs.fake import FakeBackend
from tests.train.alike import KeepingUpdater, check_gradients, check_losses
from tests.train.replays import assert_same, records
from tests.train.test_resume import adapter, steps_logged

Cli = Callable[..., int]


def test_ranks_of_environment(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert ranks_of_environment() == RunRanks()
    for lonely in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(lonely, "0")
        with pytest.raises(OptionError, match=r"torchrun sets.*'WORLD_SIZE': None"):
            ranks_of_environment()  # every process of the job would train alone
        monkeypatch.setenv("WORLD_SIZE", "1")
        assert ranks_of_environment() == RunRanks()
        monkeypatch.delenv("WORLD_SIZE")
        monkeypatch.delenv(lonely)
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(OptionError, match="torchrun sets"):
        ranks_of_environment()
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert ranks_of_environment() == RunRanks(3, 4, 1)


@pytest.mark.parametrize(
    ("error", "said"),
    [(FinetuneError("full"), "full"), (ValueError("odd"), "odd"), (KeyError(), "KeyError")],
    ids=["ours", "another", "without words"],
)
def test_what_stops_rank_0_stops_all(error, said, monkeypatch):
    """Whatever it is: the other ranks wait in the broadcast."""
    sent: list[Any] = []

    def gather(values: list[Any], own: Any, group: object) -> None:
        sent.append(own)
        values[:] = [sent[0], own]

    def work() -> None:
        raise error

    monkeypatch.setattr("torch.distributed.all_gather_object", gather)
    with pytest.raises(type(error)):
        RunRanks(0, 2).on_first(work)
    assert sent == [said]
    with pytest.raises(FinetuneError, match=f"rank 0 stopped: {said}"):
        RunRanks(1, 2).on_first(work)


def uneven(rank: int, size: int, where: dict[str, str], folder: str) -> None:
    """Gradients of a on both ranks, of b on the second alone, of c on none; a in bf16, and a loss in fp32."""
    import torch.distributed as dist

    os.environ |= where
    dist.init_process_group("gloo", rank=rank, world_size=size)
    a, b, c = (torch.nn.Parameter(torch.ones(2)) for _ in range(3))
    a = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    a.grad = torch.full((2,), 1.0 + rank, dtype=torch.bfloat16)
    if rank == 1:
        b.grad = torch.full((2,), 5.0)
    loss = torch.tensor(1 + 2.0**-20)
    grads = RunRanks(rank, size).add_up_gradients([a, b, c], loss)
    torch.save({"a": a.grad, "b": b.grad, "c": c.grad, "loss": loss, "n": len(grads)},
               f"{folder}/uneven{rank}.pt")  # fmt: skip
    dist.destroy_process_group()


def test_a_gradient_that_one_rank_has_reaches_all(tmp_path: Path) -> None:
    """Summed in fp32, whatever the first of them is in."""
    _store, where = processes.meet()
    ranks = [
        processes.start(
            uneven, rank, 2, where, str(tmp_path), on_gpu=False, said=tmp_path / f"said{rank}"
        )
        for rank in range(2)
    ]
    for process in ranks:
        process.join(120)
    said = [(tmp_path / f"said{rank}").read_text() for rank in range(2)]
    assert [p.exitcode for p in ranks] == [0, 0], said
    for rank in range(2):
        found = torch.load(tmp_path / f"uneven{rank}.pt")
        assert found["a"].tolist() == [3, 3] and found["a"].dtype == torch.bfloat16
        assert found["b"].tolist() == [5, 5] and found["c"] is None and found["n"] == 2
        assert found["loss"] == 2 + 2.0**-19


def late(rank: int, where: dict[str, str], folder: str) -> None:
    """Join ranks that give up after a second, of which the second one begins three seconds later."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", **where}
    time.sleep(3 * rank)
    train_ranks.STEP = timedelta(seconds=1)
    with train_ranks.joined(torch.device("cpu")) as ranks:
        found = ranks.from_all(rank)
    Path(folder, f"late{rank}").write_text(str(found))


@pytest.mark.slow
@pytest.mark.parametrize("hosted", ["by who starts them", "by rank 0"])
def test_a_rank_that_begins_late_is_waited_for(hosted: str, tmp_path: Path) -> None:
    """Longer than a step may take: a loaded machine starts processes minutes apart."""
    store, where = processes.meet()
    if hosted == "by rank 0":  # as without torchrun
        del store, where["TORCHELASTIC_USE_AGENT_STORE"]
    said = [tmp_path / f"said{rank}" for rank in range(2)]
    ranks = [
        processes.start(late, rank, where, str(tmp_path), on_gpu=False, said=said[rank])
        for rank in range(2)
    ]
    for process in ranks:
        process.join(120)
    assert [p.exitcode for p in ranks] == [0, 0], [path.read_text() for path in said]
    assert [(tmp_path / f"late{rank}").read_text() for rank in range(2)] == ["[0, 1]"] * 2


def drive(rank: int, size: int, places: list[dict[str, str]], runs: list[list[str]]) -> None:
    """The runs one after the other, each at a place to meet of its own. After each, what this rank trained and its
    scales are in `rank<i>.pt`, how many layers' weights it had in parts in `held<i>.txt`, and on the CPU each step's
    gradients in files of their own."""
    from lorakernels.cli.finetune import add_arguments, run
    from lorakernels.modules.marks import is_held
    from lorakernels.parallel.ranks import comm
    from lorakernels.train import job
    from lorakernels.train.run import loop

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    real = job.adapt

    def adapt(options: Any, *rest: Any) -> Any:
        result = real(options, *rest)
        trainer = result.session.trainer
        state = trainer.fp8_state
        scales = () if state is None else (state.forward, state.backward)
        kept = {"scales": torch.stack(scales) if scales else torch.zeros(0)}
        kept |= {name: p.detach() for name, p in trainer.trainable.items()}
        torch.save(kept, f"{options.output}/rank{rank}.pt")
        held = sum(is_held(module) for module in trainer.model.modules())
        Path(f"{options.output}/held{rank}.txt").write_text(str(held))
        return result

    job.adapt = adapt
    if not torch.cuda.is_available():  # where a graph would hold the optimizer
        loop.Updater = KeepingUpdater
    if any("--graphs" in arguments for arguments in runs) and not torch.cuda.is_available():
        # imitated graphs, which cannot replay the CPU's flash attention: all of these runs have another one, and gloo's
        # scatter ends in ops that they would record
        job.Runtime = partial(job.Runtime, backend=FakeBackend)
        comm.sum_rows = own_rows_of_the_sum
        sdpa_kernel(SDPBackend.MATH).__enter__()
    for where, arguments in zip(places, runs, strict=True):
        os.environ |= where
        if arguments[0] == "copy":
            if rank == 0:
                shutil.copytree(*arguments[1:3])
                shutil.rmtree(f"{arguments[2]}/checkpoints/{arguments[3]}")
            continue
        parser = argparse.ArgumentParser()
        add_arguments(parser)
        if code := run(parser.parse_args(arguments)):
            sys.exit(code)


def on_ranks(runs: list[list[Any]], folder: Path, size: int = 2) -> None:
    """The runs one after the other, on processes with the variables that torchrun gives them."""
    words = [[str(word) for word in run] for run in runs]
    on_gpu = any("cuda" in run for run in words)
    stores, places = zip(*(processes.meet() for _ in runs), strict=True)
    said = [folder / f"said{rank}" for rank in range(size)]
    ranks = [
        processes.start(drive, rank, size, [*places], words, on_gpu=on_gpu, said=said[rank])
        for rank in range(size)
    ]
    for process in ranks:
        process.join(300)
    assert [p.exitcode for p in ranks] == [0] * size, [path.read_text() for path in said]
    del stores  # kept until here


def losses(output: Path) -> list[float]:
    lines = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
    return [r.get("loss", r.get("eval_loss")) for r in lines]


@pytest.fixture(scope="module")
def run(base_args: list[str]) -> list[Any]:
    """No dropout: ranks draw other masks than one process with their rows."""
    return [*base_args, "--lora-dropout", "0", "--steps", 6, "--save-every", 3, "--keep", 9]


@pytest.fixture(scope="module")
def two_ranks(run: list[Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """whole: 6 steps. parts: as if stopped after 3, then resumed. plain: without FP8. dropout: with it."""
    folder = tmp_path_factory.mktemp("ranks")
    plain = ["--no-fp8", "--eval-fraction", "0", "--grad-accum", 2]
    on_ranks(
        [
            [*run, "--output", folder / "whole"],
            ["copy", folder / "whole", folder / "parts", "step-00000006"],
            [*run, "--output", folder / "parts", "--resume"],
            [*run, "--output", folder / "plain", *plain],
            [*run, "--output", folder / "dropout", "--lora-dropout", "0.5", "--steps", 2],
        ],
        folder,
    )
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", ["whole", "parts", "plain", "dropout"])
def test_ranks_end_with_the_same_adapters_and_scales(two_ranks: Path, name: str) -> None:
    one, other = (torch.load(two_ranks / name / f"rank{rank}.pt") for rank in range(2))
    assert_same(one, other)
    assert name == "plain" or bool((one["scales"][0, -1] > 0).all())
    assert steps_logged(two_ranks / name) == list(range(1, 3 if name == "dropout" else 7))


@pytest.mark.slow
def test_two_ranks_are_one_with_the_doubled_batch(
    cli: Cli, run: list[Any], two_ranks: Path, tmp_path: Path
) -> None:
    """Up to the order of fp32 sums and, in the first step, activations scaled by their own rows' amax instead of
    delayed scales. Without FP8 up to sums alone."""
    assert cli(*run, "--output", tmp_path / "fp8", "--batch-size", 4) == 0
    np.testing.assert_allclose(losses(two_ranks / "whole"), losses(tmp_path / "fp8"), rtol=2e-3)
    plain = ["--no-fp8", "--eval-fraction", "0", "--grad-accum", 4]
    on_ranks([[*run, *plain, "--output", tmp_path / "plain"]], tmp_path, size=1)
    check_losses(losses(two_ranks / "plain"), losses(tmp_path / "plain"), fp8=False, untrained=1)
    check_gradients(two_ranks / "plain", 1, tmp_path / "plain", 1, fp8=False)


def test_two_ranks_resumed_are_the_whole_run_and_one_rank_can_go_on(
    cli: Cli, run: list[Any], two_ranks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts, whole = two_ranks / "parts", two_ranks / "whole"
    assert losses(parts) == losses(whole) and adapter(parts) == adapter(whole)
    copy = Path(shutil.copytree(whole, tmp_path / "copy"))
    shutil.rmtree(copy / "checkpoints" / "step-00000006")
    assert cli(*run, "--output", copy, "--resume") == 1
    said = capsys.readouterr().err
    assert "rows_per_step was 8, now it is 4; it is batch_size · grad_accum · ranks" in said
    assert cli(*run, "--output", copy, "--grad-accum", 4, "--resume") == 0
    np.testing.assert_allclose(losses(copy), losses(whole), rtol=2e-3)
    assert adapter(copy) != adapter(whole), "other sums: the comparison was of two runs"


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_are_one_with_the_doubled_batch(
    cli: Cli, gpu_run: list[Any], tmp_path: Path
) -> None:
    """NCCL, graphs and FP8 on: bf16 and FP8 rounding of the first step's own scales."""
    run = [*gpu_run, "--lora-dropout", "0", "--steps", 12]
    assert cli(*run, "--output", tmp_path / "one", "--grad-accum", 4) == 0
    on_ranks([[*run, "--output", tmp_path / "two"]], tmp_path)
    found, expected = ([r["loss"] for r in records(tmp_path / n)] for n in ("two", "one"))
    np.testing.assert_allclose(found, expected, rtol=1e-2)
