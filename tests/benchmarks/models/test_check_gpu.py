# SPDX-License-Identifier: Apache-2.0
"""check_gpu.py: what is red, what is recorded, that a part which crashes or hangs is one red row, and each part."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("peft")

OK = {"tokens_per_s": 100.0, "first_loss": 5.0, "host_share": 0.1, "seconds": 1.0}
SKIPPED = {"skipped": "not installed", "seconds": 0.1}


@pytest.fixture
def check(load) -> ModuleType:
    return load("models.check_gpu")


def rows_of(check: ModuleType, peft: dict[str, Any], own: dict[str, Any], record: Any) -> list[Any]:
    parts = [check.Part(check.PEFT, "1b", ""), check.Part("drop-in", "1b")]
    found = {"1b: PEFT bf16": peft, "1b: drop-in": own}
    return check.judged(parts, found, {} if record is None else {"1b: drop-in": record})


@pytest.mark.parametrize(
    ("peft", "own", "recorded", "verdict"),
    [
        (OK, OK | {"tokens_per_s": 95.1}, 1.0, "ok"),
        (OK, OK | {"tokens_per_s": 94.9}, 1.0, "RED: slower: 5.1 % behind the record, 5 % are allowed"),
        (OK, OK | {"tokens_per_s": 90.1, "host_share": 0.9}, 1.0, "ok"),
        (OK | {"host_share": 0.9}, OK | {"tokens_per_s": 90.1}, 1.0, "ok"),
        (OK, OK | {"tokens_per_s": 89.0, "host_share": 0.9}, 1.0, "RED: slower: 11.0 % behind the record"),
        (OK, OK | {"tokens_per_s": 300.0}, 1.0, "ok"),
        (OK, OK, None, "ok, not recorded"),
        (OK, OK | {"first_loss": 5.2}, 1.0, "RED: first loss 5.2000, PEFT's is 5.0000"),
        (OK, OK | {"first_loss": float("nan")}, 1.0, "RED: first loss nan"),
        (OK, {"failed": "boom", "seconds": 1.0}, 1.0, "RED: boom"),
        (OK, SKIPPED, 1.0, "skipped: not installed"),
        ({"failed": "boom", "seconds": 1.0}, OK, 1.0, "ok, nothing to compare"),
    ],
    ids=[
        "within 5 %", "beyond 5 %", "its host bounds", "the peer's host bounds", "beyond 10 %", "faster",
        "no record", "another loss", "no loss", "failed", "skipped", "the peer failed",
    ],
)  # fmt: skip
def test_what_is_red(check, peft, own, recorded, verdict) -> None:
    record = None if recorded is None else {"ratio": recorded}
    row = rows_of(check, peft, own, record)[1]
    assert row["verdict"].startswith(verdict)
    assert check.show([row]) == (not verdict.startswith("RED"))


@pytest.mark.parametrize(
    ("rate", "before", "after"),
    [
        (120.0, {"ratio": 1.0}, {"ratio": 1.2}),
        (97.0, {"ratio": 1.0}, {"ratio": 1.0}),
        (50.0, {"ratio": 1.0}, {"ratio": 0.5, "was": 1.0, "reason": "a new driver"}),
        (40.0, {"ratio": 0.5, "was": 1.0, "reason": "x"}, {"ratio": 0.4, "was": 1.0, "reason": "a new driver"}),
        (60.0, {"ratio": 0.5, "was": 1.0, "reason": "x"}, {"ratio": 0.6, "was": 1.0, "reason": "x"}),
        (110.0, {"ratio": 0.5, "was": 1.0, "reason": "x"}, {"ratio": 1.1}),
        (100.0, None, {"ratio": 1.0}),
    ],
    ids=["rises", "noise", "falls", "falls again", "rises a little", "is reached again", "first"],
)  # fmt: skip
def test_records_rise_by_themselves_and_fall_with_a_reason(check, rate, before, after) -> None:
    rows = rows_of(check, OK, OK | {"tokens_per_s": rate}, before)
    recorded = {} if before is None else {"1b: drop-in": before}
    assert check.updated(rows, recorded, "a new driver") == {"1b: drop-in": after}


def test_where_the_host_bounds_a_rate_another_host_may_be_faster(check) -> None:
    rows = rows_of(check, OK, OK | {"tokens_per_s": 300.0}, {"ratio": 1.0})
    for row in rows:
        row["bound by"] = "host"
    assert check.updated(rows, {"1b: drop-in": {"ratio": 1.0}}, "") == {
        "1b: drop-in": {"ratio": 2.0}
    }
    assert check.updated(rows, {"1b: drop-in": {"ratio": 2.5}}, "") == {
        "1b: drop-in": {"ratio": 2.5}
    }


def test_a_record_does_not_fall_without_a_reason_nor_with_a_wrong_loss(check) -> None:
    recorded = {"1b: drop-in": {"ratio": 1.0}}
    slower = rows_of(check, OK, OK | {"tokens_per_s": 50.0}, {"ratio": 1.0})
    with pytest.raises(
        ValueError, match=r"0.5 is less than the recorded 1.0: --record needs --reason"
    ):
        check.updated(slower, recorded, "")
    wrong = rows_of(check, OK, OK | {"tokens_per_s": 500.0, "first_loss": 9.0}, {"ratio": 1.0})
    assert check.updated(wrong, recorded, "a reason") == recorded


def test_records_are_read_as_written_with_their_reasons(check, tmp_path: Path) -> None:
    records = {"1b: drop-in": {"ratio": 0.5, "was": 1.0, "reason": "a new driver"}}
    rows = rows_of(check, OK, OK, {"ratio": 0.5})
    assert check.read_records(tmp_path) == {}
    check.write_records(tmp_path, rows, records, "cpu")
    assert check.read_records(tmp_path) == records
    assert {path.name for path in tmp_path.iterdir()} == {"check_gpu.csv", "check_gpu.json"}


def test_a_part_that_dies_or_hangs_is_one_red_row(check, tmp_path: Path, monkeypatch) -> None:
    """With a worker in the place of check_gpu.py's that does as its part's name says."""
    worker = tmp_path / "worker.py"
    worker.write_text(
        "import os, sys, time\n"
        f"sys.path.insert(0, {str(check.ROOT)!r})\n"
        "from benchmarks.lib.workers import serve\n"
        "def run(part, **options):\n"
        "    if part == 'dies': print('the last words'); sys.stdout.flush(); os._exit(7)\n"
        "    if part == 'hangs': time.sleep(600)\n"
        "    return {'tokens_per_s': 1.0}\n"
        "serve({'run': run})\n"
    )
    monkeypatch.setattr(check, "__file__", str(worker))
    limits = {"dies": 30.0, "hangs": 2.0, "lives": 30.0, "comes too late": 0.0}
    parts = [check.Part(name, "1b", "", timeout=limit) for name, limit in limits.items()]
    runner = check.Runner(parts, "cpu", 1000.0, tmp_path)
    found = runner.run()
    assert "ended with code 7: the last words" in found["1b: dies"]["failed"]
    assert "no answer within 2 s" in found["1b: hangs"]["failed"]
    assert found["1b: lives"]["tokens_per_s"] == 1.0
    assert "--budget-s was spent" in found["1b: comes too late"]["failed"]
    assert not [p for p in tmp_path.iterdir() if p.is_dir()]


def test_a_named_part_comes_with_its_peer(check) -> None:
    names = [p.name for p in check.chosen("short", ["compiled"], "cuda")]
    assert names == [check.COMPILED, "drop-in, compiled by layer"]
    assert all(p.full is False for p in check.chosen("short", None, "cuda"))
    for device in ("cuda", "cpu"):
        assert sorted(p.name for p in check.chosen("quick", None, device)) == sorted(check.QUICK)
    assert {p.key for p in check.chosen("full", None, "cuda")} == {p.key for p in check.ON_GPU}
    for parts in (check.ON_GPU, check.ON_CPU):
        keys = {p.key for p in parts}
        assert len(keys) == len(parts)
        assert all(f"{p.shape}: {p.peer}" in keys for p in parts if p.peer)


@pytest.mark.parametrize("name", ["PEFT bf16", "drop-in, fused", "drop-in, attached"])
def test_the_loops_train_the_same_model(load, name: str) -> None:
    parts, full = load("lib.check_parts"), load("lib.check_full")
    parts.SECONDS = 0.01
    found = full.run(name, "tiny 2x32", "cpu", "", 60.0)
    assert found["tokens_per_s"] > 0 and 0 < found["host_share"] <= 1
    assert found["first_loss"] == pytest.approx(5.773, rel=0.01)


@pytest.mark.slow
def test_finetune_runs_through_the_command_line(load, tmp_path: Path) -> None:
    full = load("lib.check_full")
    found = full.run("finetune", "tiny 2x32", "cpu", str(tmp_path), 120.0)
    assert found["tokens_per_s"] > 0 and found["note"].startswith("0 of 20 steps replayed, loss")
    assert (tmp_path / "run" / "adapter" / "adapter_config.json").is_file()


def test_a_command_that_fails_says_its_last_line(load, tmp_path: Path) -> None:
    parts, full = load("lib.check_parts"), load("lib.check_full")
    with pytest.raises(RuntimeError, match=r"exit code 2: .*model and data are missing"):
        parts.run_cli(["finetune", "--output", str(tmp_path)], tmp_path / "log", 1e12)
    with pytest.raises(RuntimeError, match="exit code 2 after 0 steps, expected 143 before 20"):
        full._interrupted(["finetune", "--output", str(tmp_path)], tmp_path, tmp_path / "log", 1e12)


@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on_as_if_it_was_not(load, tmp_path: Path) -> None:
    full = load("lib.check_full")
    found = full.run("resume", "tiny 2x32", "cpu", str(tmp_path), 300.0)
    assert found["note"].endswith("the same losses to the bit")


@pytest.mark.slow
def test_trainer_runs_our_layers(load, tmp_path: Path) -> None:
    full = load("lib.check_full")
    part = "Trainer, fused, callback"
    found = full.run(part, "tiny 2x32", "cpu", str(tmp_path), 60.0)
    assert found["tokens_per_s"] > 0 and "the model is on cpu" in found["note"]


@pytest.mark.slow
def test_sft_trainer_trains_the_model_of_the_peer(load, tmp_path: Path) -> None:
    pytest.importorskip("trl")
    pytest.importorskip("datasets")
    full, found = load("lib.check_full"), {}
    for name in ("SFTTrainer, PEFT bf16", "SFTTrainer, fused, callback"):
        (tmp_path / name).mkdir()
        found[name] = full.run(name, "tiny 2x32", "cpu", str(tmp_path / name), 60.0)
    peft, ours = found.values()
    assert ours["tokens_per_s"] > 0 and "CUDA graphs need a GPU" in ours["note"]
    assert ours["first_loss"] == pytest.approx(peft["first_loss"], rel=0.005)
    assert "eager" not in peft["note"]


def test_gpu_tests_are_counted_and_stop_when_the_time_is_up(
    load, tmp_path: Path, monkeypatch
) -> None:
    """On files of three tests, of which the second or none fails."""
    full = load("lib.check_full")
    monkeypatch.setattr(full, "ROOT", tmp_path)
    (tmp_path / "pyproject.toml").write_text("")
    (tmp_path / "tests").mkdir()
    tests = tmp_path / "tests" / "test_layering.py"
    tests.write_text("def test_a(): pass\ndef test_b(): pass\ndef test_c(): pass\n")
    assert full.run("gpu tests", "", "cpu", "", 60.0) == {"note": "3 passed"}
    assert full.run("gpu tests", "", "cpu", "", 0.0) == {
        "note": "1 passed; stopped before the last"
    }
    monkeypatch.delitem(sys.modules, "test_layering")
    tests.write_text("def test_a(): pass\ndef test_b(): assert 0\ndef test_c(): pass\n")
    with pytest.raises(RuntimeError, match=r"2 passed, 1 failed: .*test_b"):
        full.run("gpu tests", "", "cpu", "", 60.0)


def test_gpu_tests_have_what_is_left_and_one_process_a_core(check, load) -> None:
    (part,) = check.chosen("full", ["gpu tests"], "cuda")
    assert part == check.ON_GPU[-1] and part.timeout == float("inf")
    processes_on = load("lib.check_full").processes_on
    assert [processes_on(cores) for cores in (1, 3, 8, 14, 16, 128)] == [1, 1, 6, 12, 12, 12]
