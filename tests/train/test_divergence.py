# SPDX-License-Identifier: Apache-2.0
"""`--on-divergence rollback`: back to the newest good checkpoint, without the rows of its bad steps."""

from __future__ import annotations

import copy
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lorakernels.train.data.byte_tokenizer import byte_tokenizer
from lorakernels.train.data.packing import RowOrder
from tests.train.alike import check_losses
from tests.train.conftest import Cli
from tests.train.test_ranks import on_ranks
from tests.train.test_resume import adapter, start, steps_logged, stop_after, wait_for_step
from tests.train.test_stopping import Says, folder_of, kept, lines

BAD = "~"
ENDS = ("whole", "killed")


def spoiled(model: Path, target: Path) -> Path:
    """A copy of `model` whose embedding of BAD is not a number, and so is the loss of a row that holds it."""
    copy = Path(shutil.copytree(model, target))
    weights = load_file(copy / "model.safetensors")
    (token,) = byte_tokenizer()(BAD, add_special_tokens=False)["input_ids"]
    weights["model.embed_tokens.weight"][token] = torch.nan
    save_file(weights, copy / "model.safetensors", {"format": "pt"})
    return copy


def texts(path: Path, bad: list[int], length: int = 40) -> Path:
    """24 documents of a row each, of which `bad` hold BAD."""
    rows = [f"{i:02d} " + "the quick brown fox; " * 9 for i in range(24)]
    for i in bad:
        rows[i] = f"{i:02d}{BAD}" + rows[i][3:]
    path.write_text("".join(json.dumps({"text": row[:length]}) + "\n" for row in rows))
    return path


@pytest.fixture
def run(model_dir: Path, tmp_path: Path) -> list[Any]:
    """One row a step, three of 24 bad ones; one bad step is a divergence."""
    model, data = spoiled(model_dir, tmp_path / "spoiled"), texts(tmp_path / "d.jsonl", [3, 11, 17])
    return [
        *("--model", model, "--data", data, "--device", "cpu", "--r", 4, "--lr", "1e-2"),
        *("--lora-dropout", "0.1", "--seq-len", 48, "--batch-size", 1, "--eval-fraction", 0),
        *("--log-every", 1, "--save-every", 2, "--keep", 9, "--max-bad-steps", 1),
    ]


def places_of_bad(rows: int = 24) -> list[int]:
    """The places of the bad rows in the first epoch. A row holds one document, in the documents' order."""
    order = RowOrder(rows, 0).take(0, rows)[0]
    return sorted(order.index(row) for row in (3, 11, 17))


def test_it_stops_unless_told_to_go_back(
    cli: Cli, run: list[Any], tmp_path: Path, capsys: Says
) -> None:
    first = places_of_bad()[0]
    assert cli(*run, "--output", tmp_path / "a", "--steps", 40) == 1
    assert f"not finite in 1 steps in a row (up to step {first + 1})" in capsys.readouterr().err


@pytest.mark.slow
def test_rows_are_left_out_for_good(
    cli: Cli, run: list[Any], tmp_path: Path, capsys: Says, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two bad rows, trained for more than one epoch: the second epoch does not meet them either. A kill after the first
    rollback, or one before the second, changes nothing."""
    texts(tmp_path / "d.jsonl", [3, 17])
    run += ["--on-divergence", "rollback", "--steps", 30]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert cli(*run, "--output", whole) == 0
    said = capsys.readouterr().out
    order = RowOrder(24, 0).take(0, 24)[0]
    first, second = sorted(order.index(row) for row in (3, 17))
    back = first // 2 * 2
    assert f"not finite up to step {first + 1}: back to step {back} (" in said
    assert "1 rows are left out from now on; rollback 1 of 2" in said
    assert "2 rows are left out from now on; rollback 2 of 2" in said
    # The first rollback has taken a row out, so that the second bad row is met a step earlier.
    assert f"not finite up to step {second}: back to step {(second - 1) // 2 * 2} (" in said
    found = lines(whole)
    assert [line["diverged_at"] for line in found if "diverged_at" in line] == [first + 1, second]
    assert steps_logged(whole) == list(range(1, 31))
    assert all(line["loss"] is not None for line in found if "lr" in line)
    counters = json.loads((folder_of(whole, 30) / "state" / "trainer.json").read_text())["counters"]
    assert counters["left_out"] == [3, 17] and counters["rollbacks"] == 2
    assert counters["bad_rows"] == [] and counters["skipped"] == 0
    # 22 rows an epoch: 30 steps pass over 2 in the first, and over those that the second began with.
    assert 32 <= counters["rows"] <= 34

    with monkeypatch.context() as patch:
        stop_after(patch, second - 1)
        assert cli(*run, "--output", cut) == 130
    assert cli(*run, "--output", cut, "--resume") == 0
    assert adapter(cut) == adapter(whole) and steps_logged(cut) == steps_logged(whole)


def test_twice_at_most(cli: Cli, run: list[Any], tmp_path: Path, capsys: Says) -> None:
    assert cli(*run, "--output", tmp_path / "a", "--steps", 40, "--on-divergence", "rollback") == 1
    said = capsys.readouterr()
    assert "The run has gone back 2 times already" in said.err
    assert "rollback 2 of 2" in said.out and not (tmp_path / "a" / "adapter").exists()


def test_without_a_checkpoint_from_before_it_stops(
    cli: Cli, run: list[Any], tmp_path: Path, capsys: Says
) -> None:
    more = ["--on-divergence", "rollback", "--save-every", 30]
    assert cli(*run, "--output", tmp_path / "a", "--steps", 40, *more) == 1
    assert "There is no good checkpoint from before to go back to" in capsys.readouterr().err


@pytest.mark.slow
def test_checkpoints_within_the_bad_steps_are_not_gone_back_to(
    cli: Cli, run: list[Any], tmp_path: Path, capsys: Says
) -> None:
    """Three bad rows in a row, and two checkpoints kept. Bad steps make none, but for a run's last one. What their rows
    were is known after a resume, too."""
    bad = RowOrder(24, 0).take(5, 3)[0]
    texts(tmp_path / "d.jsonl", bad)
    run += ["--on-divergence", "rollback", "--save-every", 1, "--max-bad-steps", 3, "--keep", 2]
    run += ["--output"]
    assert cli(*run, tmp_path / "a", "--steps", 7) == 0
    assert kept(tmp_path / "a") == [5, 7]
    assert cli(*run, tmp_path / "a", "--steps", 12, "--resume") == 0
    said = capsys.readouterr().out
    assert "up to step 8: back to step 5 (" in said and "3 rows are left out" in said
    found = [line for line in lines(tmp_path / "a") if "lr" in line]
    assert [line["step"] for line in found] == list(range(1, 13))
    assert not any(line["skipped"] for line in found)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["best", "signal"])
def test_the_way_back_is_kept_within_the_bad_steps(
    cli: Cli, run: list[Any], tmp_path: Path, capsys: Says, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:  # fmt: skip
    """One checkpoint is kept, of step 5. A best one or a stop after step 6 saves another, amid bad steps."""
    texts(tmp_path / "d.jsonl", RowOrder(24, 0).take(5, 3)[0])
    run += ["--on-divergence", "rollback", "--save-every", 5, "--max-bad-steps", 3, "--keep", 1]
    run += ["--steps", 12, "--output", tmp_path / "a"]
    if what == "best":
        monkeypatch.setattr("lorakernels.train.run.session.evaluate", lambda *_: losses.pop(0))
        losses = [9.0, 5.0, 4.0, 8.0, 7.0, 6.0, 6.0]
        good = [{"text": "the quick brown fox; " * 9}] * 2
        held = tmp_path / "held.jsonl"
        held.write_text("".join(json.dumps(row) + "\n" for row in good))
        run += ["--eval-data", held, "--eval-every", 3, "--load-best-model-at-end"]
        assert cli(*run) == 0
    else:
        with monkeypatch.context() as patch:
            stop_after(patch, 6)
            assert cli(*run) == 130
        assert kept(tmp_path / "a") == [5, 6]
        assert cli(*run, "--resume") == 0
    assert "up to step 8: back to step 5 (" in capsys.readouterr().out


@pytest.mark.slow
def test_replayed_steps_start_anew(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an eager run does that goes back at the same place: graphs hold no moment of what was left."""
    found = []
    for replay, graphs in ((False, "auto"), (True, "auto"), (True, "layer")):
        trainer, said = make(replay, graphs=graphs)
        for _ in range(4):
            trainer.step()
        checkpoint = copy.deepcopy(trainer.checkpoint({}))  # later steps do not write into it
        for _ in range(3):
            trainer.step()
        trainer.go_back(checkpoint, [2], 1)
        results = [trainer.step() for _ in range(6)]
        assert results[-1].replayed is replay, said
        assert trainer.counters.step == 10 and trainer.counters.left_out == [2]
        found.append([result.loss for result in results])
        trainer.close()
    assert found[0] == found[1] == found[2]


def test_a_run_that_went_back_twice_is_resumed_again_and_again(make: Any) -> None:
    """Into its fourth epoch: checkpoints know of all rows that are left out, and of the place in the order."""
    whole, _ = make(False)
    for left_out in ([2], [2, 5]):
        checkpoint = copy.deepcopy(whole.checkpoint({}))
        whole.step()
        whole.go_back(checkpoint, left_out, len(left_out))
        whole.step()
    state = copy.deepcopy(whole.checkpoint({}))
    expected = [whole.step().loss for _ in range(6)]
    found, taken = [], set()
    for _ in range(3):
        resumed, _ = make(False)
        resumed.restore(replace(state, trainer=json.loads(json.dumps(state.trainer))))
        assert (resumed.counters.left_out, resumed.counters.rollbacks) == ([2, 5], 2)
        taken |= {*resumed.order.take(resumed.counters.rows, 8)[0]}
        found += [resumed.step().loss for _ in range(2)]
        state = copy.deepcopy(resumed.checkpoint({}))
        resumed.close()
    assert found == expected and taken == {*range(8)} - {2, 5}
    assert state.trainer == whole.checkpoint({}).trainer
    whole.close()


@pytest.mark.slow
def test_ranks_go_back_together(cli: Cli, run: list[Any], tmp_path: Path) -> None:
    """Only one of two ranks has the bad row; the run is that of one rank with both rows, to rounding."""
    texts(tmp_path / "d.jsonl", [3])
    run += ["--on-divergence", "rollback", "--steps", 14, "--lora-dropout", 0, "--no-fp8"]
    assert cli(*run, "--batch-size", 2, "--output", tmp_path / "one") == 0
    on_ranks([[*run, "--output", tmp_path / "two"]], tmp_path)
    one, two = (lines(tmp_path / name) for name in ("one", "two"))
    assert all([line["diverged_at"] for line in run if "diverged_at" in line] for run in (one, two))
    found, expected = ([line for line in run if "loss" in line] for run in (two, one))
    assert [line["step"] for line in found] == [line["step"] for line in expected]
    values = ([line["loss"] for line in steps] for steps in (found, expected))
    check_losses(*values, fp8=False, untrained=1)


@pytest.mark.slow
def test_kill_9_after_a_rollback(cli: Cli, run: list[Any], tmp_path: Path) -> None:
    texts(tmp_path / "d.jsonl", [RowOrder(24, 0).take(5, 1)[0][0]])
    run += ["--on-divergence", "rollback", "--steps", 30, "--output"]
    assert cli(*run, tmp_path / "whole") == 0
    process = start([*run, tmp_path / "killed"], tmp_path / "said")
    wait_for_step(process, tmp_path / "said", tmp_path / "killed", 9)
    process.kill()
    process.join()
    assert len(steps_logged(tmp_path / "killed")) < 30
    assert cli(*run, tmp_path / "killed", "--resume") == 0
    assert adapter(tmp_path / "killed") == adapter(tmp_path / "whole")
    found = [[n["diverged_at"] for n in lines(tmp_path / k) if "diverged_at" in n] for k in ENDS]
    assert found == [[6], [6]]


@pytest.mark.gpu
def test_a_gpu_goes_back_as_it_resumes(
    cli: Cli, gpu_model: Path, tmp_path: Path, capsys: Says
) -> None:
    """Whole steps are replayed before and after. A run that is resumed after the rollback ends as the whole one."""
    model = spoiled(gpu_model, tmp_path / "spoiled")
    data = texts(tmp_path / "d.jsonl", [RowOrder(24, 0).take(12, 1)[0][0]], length=120)
    run = ["--model", model, "--data", data, "--device", "cuda", "--r", 8, "--lr", "1e-2"]
    run += ["--seq-len", 128, "--batch-size", 1, "--eval-fraction", 0, "--save-every", 4]
    run += ["--max-bad-steps", 1, "--on-divergence", "rollback", "--steps", 24, "--keep", 9]
    run += ["--deterministic", "--output", tmp_path / "out"]
    assert cli(*run) == 0
    said = capsys.readouterr().out
    assert "up to step 13: back to step 12 (" in said and said.count("whole steps replayed") == 2
    whole = adapter(tmp_path / "out")
    for step in (16, 20, 24):
        shutil.rmtree(folder_of(tmp_path / "out", step))
    assert cli(*run, "--resume") == 0
    assert adapter(tmp_path / "out") == whole
