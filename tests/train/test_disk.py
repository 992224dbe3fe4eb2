# SPDX-License-Identifier: Apache-2.0
"""What a run writes is known before its first step, and is compared with the room that there is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lorakernels.train import job
from lorakernels.train.errors import FinetuneError
from lorakernels.train.model import disk
from lorakernels.train.model.disk import Written
from lorakernels.train.options.options import FinetuneOptions

Cli = Callable[..., int]
MIB = 2**20


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize(
    "more",
    [[], ["--optim", "sgd", "--no-fp8"], ["--init-lora-weights", "pissa", "--r", 16]],
    ids=["AdamW over FP8", "SGD, plain", "PiSSA"],
)
def test_the_sizes_are_those_of_the_files(
    cli: Cli, base_args: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: list[str]
) -> None:
    """Within a tenth: headers, counters and the card are not counted one by one."""
    expected: list[Written] = []
    real = job.written_by

    def written_by(*given: Any) -> Written:
        expected.append(real(*given))
        return expected[0]

    monkeypatch.setattr(job, "written_by", written_by)
    out = tmp_path / "out"
    words = ["--r", 64, "--lora-dropout", 0, "--merge", "bf16", "--output", out, "--steps", 1]
    assert cli(*base_args, *words, *more) == 0
    (written,) = expected
    assert size_of(out / "checkpoints") == pytest.approx(written.checkpoint, rel=0.1)
    assert size_of(out / "adapter") == pytest.approx(written.adapter, rel=0.1)
    merged = (out / "merged" / "model.safetensors").stat().st_size
    assert merged == pytest.approx(written.merged, rel=0.1)


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets how many MiB are free on every disk, and that a checkpoint takes 8 and an adapter 2."""
    monkeypatch.setattr(job, "written_by", lambda *given: Written(8 * MIB, 2 * MIB))

    def setting(mib: float) -> None:
        usage = SimpleNamespace(free=int(mib * MIB))
        monkeypatch.setattr(disk.shutil, "disk_usage", lambda path: usage)

    return setting


def test_no_room_for_a_checkpoint_ends_the_run_before_its_first_step(
    cli: Cli, base_args: list[str], tmp_path: Path, free: Callable[[float], None],
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    free(9.5)
    out = tmp_path / "out"
    assert cli(*base_args, "--output", out) == 1
    told = capsys.readouterr().err
    assert f"no room in {out}: a checkpoint takes 8.0 MiB, the adapter 2.0 MiB, and 9.5 MiB" in told
    assert not (out / "tokens").exists() and not (out / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("values", "held", "at_once"),
    [
        ({"steps": 300}, 0, 3),
        ({"steps": 300, "keep": 1}, 0, 2),
        ({"steps": 300}, 2, 1),
        ({"steps": 150}, 0, 2),
        ({"save_every": 0}, 0, 1),
        ({"steps": 300, "load_best_model_at_end": True}, 0, 4),
    ],
    ids=["two kept", "one kept", "two are there", "two are written", "one at the end", "the best"],
)
def test_little_room_is_said(
    free: Callable[[float], None], tmp_path: Path, values: dict[str, Any], held: int, at_once: int
) -> None:
    options = FinetuneOptions(output=str(tmp_path), **values)
    said: list[str] = []
    free(8 * at_once + 2)
    disk.check_room(options, Written(8 * MIB, 2 * MIB), held, said.append)
    assert not said
    if at_once > 1:
        free(8 * at_once + 1.5)
        disk.check_room(options, Written(8 * MIB, 2 * MIB), held, said.append)
        assert (
            f"with {at_once} checkpoints at once the run takes {8 * at_once + 2}.0 MiB" in said[0]
        )


def test_a_merged_model_counts(free: Callable[[float], None], tmp_path: Path) -> None:
    free(100)
    options = FinetuneOptions(output=str(tmp_path / "new" / "out"))
    with pytest.raises(FinetuneError, match=r"merged model 95\.0 MiB, and 100\.0 MiB are"):
        disk.check_room(options, Written(8 * MIB, 2 * MIB, 95 * MIB), 0, print)
