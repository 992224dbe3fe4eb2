# SPDX-License-Identifier: Apache-2.0
"""Files of tests beside each other: what fails, hangs or has no time is named, and takes nothing else with it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests import spread
from tests.spread import files_of, gpus_of, run_all

pytestmark = pytest.mark.slow

MARKED = "import os, time, pytest\npytestmark = pytest.mark.gpu\ndef test_it():\n    "
FILES = {
    "test_one.py": "assert os.environ['CUDA_VISIBLE_DEVICES'] in '01'",
    "test_all.py": "# of device_count()\n    assert 'CUDA_VISIBLE_DEVICES' not in os.environ",
    "test_fails.py": "assert 1 == 2",
    "test_hangs.py": "# of backend_on_gpus(4)\n    time.sleep(99)",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(spread, "ROOT", tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu: for these tests\n")
    for name, line in FILES.items():
        (tmp_path / name).write_text(f"{MARKED}{line}\n")
    (tmp_path / "test_cpu.py").write_text("def test_it():\n    pass\n")
    return tmp_path


def test_files_of_several_gpus_come_first_and_others_without_one_are_left_out(folder: Path) -> None:
    names = [file.name for file in files_of([folder])]
    assert names == ["test_all.py", "test_hangs.py", "test_fails.py", "test_one.py"]


@pytest.mark.slow
def test_what_fails_or_hangs_is_named_and_leaves_the_others_alone(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = run_all(files_of([folder]), 4, ["0", "1"], 20.0, folder / "logs")
    assert sorted(bad) == ["test_fails.py", "test_hangs.py"]
    said = capsys.readouterr().out
    assert "test_one.py: passed" in said and "test_all.py: passed" in said
    assert "test_fails.py: failed" in said and "assert 1 == 2" in said
    assert "test_hangs.py: ended after 20 s" in said


def test_what_has_no_time_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_all([folder / "test_one.py"], 1, ["0"], 0.0, folder / "logs") == ["test_one.py"]
    assert "test_one.py: not begun" in capsys.readouterr().out
    assert os.listdir(folder / "logs") == []


@pytest.mark.parametrize(
    ("given", "count", "names"),
    [
        (None, 2, ["0", "1"]),
        ("4,5,6", 3, ["4", "5", "6"]),
        ("4,nothing", 1, ["4"]),
        ("", 0, []),
    ],
    ids=["all", "some", "one that is not there", "none"],
)
def test_a_file_sees_a_gpu_that_this_process_sees(
    given: str | None, count: int, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if given is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    assert gpus_of(count) == names
