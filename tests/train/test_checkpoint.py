# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lorakernels.train import checkpoint as module
from lorakernels.train.checkpoint import MANIFEST, STATE, TENSORS, TRAINER, Checkpoint, Checkpoints
from lorakernels.train.errors import CheckpointError

CPU = torch.device("cpu")


def make(step: int) -> Checkpoint:
    optimizer = {"state": {}, "param_groups": [{"lr": 0.1}]}
    state = {"optimizer": optimizer, "rng": {"cpu": torch.get_rng_state()}, "fp8": None}
    tensors = {"a": torch.full((3,), float(step)), "b": torch.zeros(2, 2).T}
    return Checkpoint(step, tensors, state, {"counters": {"step": step}})


@pytest.fixture
def store(tmp_path: Path) -> Checkpoints:
    store = Checkpoints(tmp_path / "checkpoints", keep=2)
    for step in (1, 2, 3):
        store.save(make(step))
    return store


def newest(store: Checkpoints) -> tuple[int | None, list[str]]:
    said: list[str] = []
    found = store.load_newest(said.append, CPU)
    return (None if found is None else found.step), said


def test_round_trip_keeps_the_last(store: Checkpoints) -> None:
    assert store.steps() == [2, 3]
    found = store.load(3, CPU)
    assert torch.equal(found.tensors["a"], torch.full((3,), 3.0)) and found.trainer == {
        "counters": {"step": 3}
    }
    assert torch.equal(found.state["rng"]["cpu"], torch.get_rng_state())
    assert newest(store) == (3, [])


@pytest.mark.skipif(sys.platform != "linux", reason="names of open files are read from /proc")
def test_everything_is_on_disk_before_the_rename(
    store: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut after the rename must not find empty files: files, then their directory, then its parent."""
    events: list[str] = []
    fsync, rename = os.fsync, Path.rename
    monkeypatch.setattr(
        os,
        "fsync",
        lambda fd: (events.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name), fsync(fd)),
    )
    monkeypatch.setattr(
        Path, "rename", lambda self, target: (events.append("rename"), rename(self, target))[1]
    )
    store.save(make(4))
    at = events.index("rename")
    assert set(events[:at]) == {TENSORS, STATE, TRAINER, MANIFEST, ".tmp-step-00000004"}
    assert events[at - 1] == ".tmp-step-00000004" and events[at + 1 :] == ["checkpoints"]


def test_saving_a_step_again_replaces_it(store: Checkpoints) -> None:
    store.save(make(3))
    assert store.steps() == [2, 3] and newest(store) == (3, [])


@pytest.mark.parametrize("name", [TENSORS, STATE, MANIFEST])
@pytest.mark.parametrize("damage", ["truncate", "flip", "delete"])
def test_broken_file_falls_back_to_the_one_before(
    store: Checkpoints, name: str, damage: str
) -> None:
    path = store.path(3) / name
    content = bytearray(path.read_bytes())
    if damage == "delete":
        path.unlink()
    else:
        content[len(content) // 2] ^= 0x55
        path.write_bytes(
            bytes(content) if damage == "flip" else bytes(content[: len(content) // 2])
        )
    step, said = newest(store)
    assert step == 2 and len(said) == 1
    assert str(store.path(3)) in said[0] and said[0].endswith(
        ": skipped, kept as broken-step-00000003"
    )


def test_half_written_checkpoint_is_ignored_and_removed(store: Checkpoints) -> None:
    """What a kill between two writes leaves: a temporary directory."""
    half = store.directory / ".tmp-step-00000004"
    half.mkdir()
    (half / TENSORS).write_bytes(b"\0" * 10)
    step, said = newest(store)
    assert (
        step == 3
        and said == [f"{half} was not finished: ignored and removed"]
        and not half.exists()
    )


def test_killed_between_the_two_renames(store: Checkpoints) -> None:
    """Saving a step again moves the old one aside first; if that is all that happened, it comes back."""
    store.path(3).rename(store.directory / ".old-step-00000003")
    shutil.copytree(store.path(2), store.directory / ".tmp-step-00000003")
    assert newest(store)[0] == 3


def test_an_error_between_the_two_renames_puts_the_old_one_back(
    store: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Path.rename

    def interrupted(self: Path, target: Path) -> Path:
        if self.name.startswith(".tmp-"):
            raise KeyboardInterrupt
        return real(self, target)

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        store.save(make(3))
    monkeypatch.undo()
    assert newest(store)[0] == 3


def test_a_broken_newer_checkpoint_does_not_push_out_a_good_one(store: Checkpoints) -> None:
    """Step 3 is broken: it is put aside, and saving an older step again keeps that one."""
    (store.path(3) / STATE).write_bytes(b"short")
    store.keep = 1
    step, said = newest(store)
    assert step == 2 and "kept as broken-step-00000003" in said[0]
    store.path(2).rename(store.path(9))  # a newer one that nobody has looked at
    store.save(make(3))
    assert store.path(3).is_dir() and store.path(9).is_dir()


def test_pickle_in_a_checkpoint_is_not_run(store: Checkpoints, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (Path.touch, (tmp_path / "pwned",))  # type: ignore[return-value]

    path = store.path(3) / STATE
    path.write_bytes(pickle.dumps(Evil(), protocol=2))
    manifest = json.loads((store.path(3) / MANIFEST).read_text())
    data = path.read_bytes()
    manifest["files"][STATE] = {"bytes": len(data), "sha256": module._sha256(data)}
    (store.path(3) / MANIFEST).write_text(json.dumps(manifest))
    step, said = newest(store)
    assert step == 2 and "cannot be read" in said[0] and not (tmp_path / "pwned").exists()


@pytest.mark.parametrize("after", [0, 1, 2, 3])
def test_full_disk_leaves_the_earlier_ones(
    store: Checkpoints, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    """The disk is full at each of the four files in turn."""
    real, calls = module.write_bytes, iter(range(4))

    def full(path: Path, data: bytes) -> None:
        if next(calls) == after:
            path.write_bytes(data[:5])
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        real(path, data)

    monkeypatch.setattr(module, "write_bytes", full)
    with pytest.raises(CheckpointError) as caught:
        store.save(make(4))
    assert "checkpoint of step 4 not saved: no space left while writing" in str(caught.value)
    assert f"the last checkpoint is {store.path(3)}" in str(caught.value)
    assert sorted(p.name for p in store.directory.iterdir()) == ["step-00000002", "step-00000003"]
    assert newest(store) == (3, [])


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 64 KiB, where mounting one is allowed."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = shutil.which("mount")
    if (
        mount is None
        or subprocess.run(
            [mount, "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)], capture_output=True
        ).returncode
    ):
        pytest.skip("mounting a tmpfs needs root")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_really_full_disk(small_disk: Path) -> None:
    store = Checkpoints(small_disk / "checkpoints", keep=2)
    store.save(make(1))
    large = make(2)
    large.tensors["a"] = torch.zeros(50_000)
    with pytest.raises(CheckpointError, match="no space left while writing"):
        store.save(large)
    assert newest(store) == (1, [])


def test_nothing_to_load(tmp_path: Path) -> None:
    assert newest(Checkpoints(tmp_path / "nothing", keep=1)) == (None, [])
