# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import errno
import hashlib
import json
import os
import pickle
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from lorakernels import LoRAConfig, apply_lora
from lorakernels.train.errors import CheckpointError
from lorakernels.train.files.adapter_files import WEIGHTS, AdapterFiles
from lorakernels.train.files.checkpoint import TENSORS, TRAINER, Checkpoint, Checkpoints
from lorakernels.train.files.files import replace_dir
from lorakernels.train.files.manifest import FORMAT, MANIFEST, OtherFormat, make_manifest

CPU = torch.device("cpu")
OPTIMIZER = "state/optimizer.pt"
STATES = {f"{name}.pt" for name in ("optimizer", "rng", "fp8", "runtime")}


def make(step: int) -> Checkpoint:
    optimizer = {"state": {}, "param_groups": [{"lr": 0.1}]}
    rng = {"cpu": torch.get_rng_state()}
    state = {"optimizer": optimizer, "rng": rng, "fp8": None, "runtime": {}}
    tensors = {"a": torch.full((3,), float(step)), "b": torch.zeros(2, 2).T}
    return Checkpoint(step, tensors, state, {"counters": {"step": step}})


def files_of_a_layer() -> AdapterFiles:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(6, 4))
    apply_lora(model, LoRAConfig(r=2, target_modules=["0"], fp8=None))
    beside = {"README.md": b"# card", "more/tokenizer.json": b"{}"}
    return AdapterFiles(model, Path("base"), beside)


def repaired(directory: Path) -> None:
    """The manifest of what is there now, as if it had been written so."""
    (directory / MANIFEST).write_bytes(make_manifest(directory, int(directory.name[5:])))


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
    fsync, rename, rmtree = os.fsync, Path.rename, shutil.rmtree
    monkeypatch.setattr(
        os,
        "fsync",
        lambda fd: (events.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name), fsync(fd)),
    )
    monkeypatch.setattr(
        Path, "rename", lambda self, target: (events.append("rename"), rename(self, target))[1]
    )
    monkeypatch.setattr(
        shutil,
        "rmtree",
        lambda path, **_: (events.append(f"rmtree {path.name}"), rmtree(path, **_)),
    )
    store.adapter = files_of_a_layer()
    store.save(make(4))
    staging = [event for event in events if event.startswith("rmtree .")]
    events = [event for event in events if event not in staging]
    at = events.index("rename")
    adapter = {WEIGHTS, "adapter_config.json", "README.md", "tokenizer.json", "more"}
    state = {*STATES, "tensors.safetensors", "trainer.json", "MANIFEST.json", "state"}
    assert adapter | state <= set(events[:at])
    assert events[at - 1] == ".tmp-step-00000004", "its own entries are synced last"
    assert events[at + 1 :] == ["checkpoints", "rmtree step-00000002"], (
        "evicted when the new one is on disk"
    )


def test_saving_a_step_again_replaces_it(store: Checkpoints) -> None:
    store.save(make(3))
    assert store.steps() == [2, 3] and newest(store) == (3, [])


@pytest.mark.parametrize("name", [TENSORS, OPTIMIZER, TRAINER, MANIFEST])
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
    (half / "state").mkdir(parents=True)
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
    (store.path(3) / OPTIMIZER).write_bytes(b"short")
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

    (store.path(3) / OPTIMIZER).write_bytes(pickle.dumps(Evil(), protocol=2))
    repaired(store.path(3))
    step, said = newest(store)
    assert step == 2 and "cannot be read" in said[0] and not (tmp_path / "pwned").exists()


def test_every_damaged_byte_of_a_manifest_is_noticed_or_harmless(store: Checkpoints) -> None:
    """One bit of each. The newest falls back to the one before it, with a line, and never to a traceback."""
    path = store.path(3) / MANIFEST
    whole, expected = path.read_bytes(), store.load(3, CPU)
    harmless = 0
    generator = random.Random(7)
    for at in range(len(whole)):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << generator.randrange(8)
        path.write_bytes(bytes(damaged))
        try:
            found = store.load(3, CPU)
        except CheckpointError as error:
            assert str(store.path(3)) in str(error) and not isinstance(error, OtherFormat)
        else:
            harmless += 1
            assert torch.equal(found.tensors["a"], expected.tensors["a"])
            assert found.trainer == expected.trainer and found.step == 3
    assert harmless <= 0.01 * len(whole), "white space may change, nothing else"
    path.write_bytes(whole.replace(b'"bytes"', b'"bytds"'))
    step, said = newest(store)
    assert step == 2 and "does not match its own SHA-256): skipped, kept as broken-" in said[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"files": 3}, "does not say size and SHA-256 of each file"),
        ({"files": {"a": 3}}, "does not say size and SHA-256 of each file"),
        ({"files": {"a": {"bytes": 3}}}, "does not say size and SHA-256 of each file"),
        ({"files": {"a": {"bytes": "3", "sha256": ""}}}, "does not say size and SHA-256"),
        ({"files": {}}, "does not list state/optimizer.pt, state/rng.pt"),
        ({"step": 2}, "is of step 2"),
        (None, "does not match its own SHA-256"),
    ],
    ids=["number", "entry", "no sum", "text for bytes", "none listed", "other step", "a list"],
)
def test_a_manifest_of_another_shape_is_passed_over(
    store: Checkpoints, change: dict[str, object] | None, message: str
) -> None:
    """With the right sum over itself: what a program wrote that is not ours."""
    path = store.path(3) / MANIFEST
    body = {**json.loads(path.read_text()), **(change or {})}
    del body["sha256"]
    own = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps({**body, "sha256": own} if change else [body]))
    step, said = newest(store)
    assert step == 2 and message in said[0]


def test_peeking_reads_the_newest_and_believes_nothing_damaged(store: Checkpoints) -> None:
    assert store.peek() == (3, {"counters": {"step": 3}})
    path = store.path(3) / TRAINER
    path.write_bytes(path.read_bytes().replace(b"3", b"4"))
    assert store.peek() is None, "its manifest says otherwise"
    path.unlink()
    assert store.peek() is None
    assert Checkpoints(store.directory / "nothing", keep=1).peek() is None


def test_a_file_that_no_manifest_lists_is_not_read(store: Checkpoints) -> None:
    (store.path(3) / "state" / "other.pt").write_bytes(b"not torch's")
    (store.path(3) / "note.txt").write_text("the good one")
    assert newest(store) == (3, [])


def test_a_file_outside_of_the_checkpoint_is_not_asked_for(store: Checkpoints) -> None:
    manifest = json.loads((store.path(3) / MANIFEST).read_text())
    body = {key: manifest[key] for key in ("format", "step", "files")}
    body["files"]["../step-00000002/" + TRAINER] = body["files"][TRAINER]
    own = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    (store.path(3) / MANIFEST).write_text(json.dumps({**body, "sha256": own}))
    step, said = newest(store)
    assert step == 2 and "../step-00000002/state/trainer.json is missing" in said[0]


@pytest.mark.parametrize("first", [True, False], ids=["format 1", "a later one"])
def test_another_format_is_refused_by_its_number(store: Checkpoints, first: bool) -> None:
    """Nothing of it is renamed, and no older one is taken in its place: the run belongs to another version."""
    path = store.path(3) / MANIFEST
    if first:
        shutil.rmtree(path.parent)
        (store.path(3) / "MANIFEST.json").write_text('{"step": 3, "files": {}}')
    else:
        body = {"format": FORMAT + 1, "step": 3, "files": {}}
        own = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
        path.write_text(json.dumps({**body, "sha256": own}))
    number = 1 if first else FORMAT + 1
    with pytest.raises(OtherFormat, match=f"has format {number}, this version reads format 2"):
        newest(store)
    assert store.steps() == [2, 3]


def test_the_adapter_is_stored_once_and_what_else_is_trained_beside_it(store: Checkpoints) -> None:
    """A value that the adapter's file holds to the bit comes from there; any other from the state."""
    store.adapter = files_of_a_layer()
    layer = store.adapter.model[0]  # type: ignore[index]
    with torch.no_grad():
        layer.lora_B.normal_()
    tensors = {"0.lora_A": layer.lora_A, "0.lora_B": layer.lora_B + 1, "norm": torch.ones(3)}
    store.save(Checkpoint(4, tensors, make(4).state, {}))
    beside = load_file(store.path(4) / TENSORS)
    assert set(beside) == {"0.lora_B", "norm"}
    found = store.load(4, CPU).tensors
    assert set(found) == set(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype
    store.save(Checkpoint(5, {"0.lora_A": layer.lora_A.double()}, make(5).state, {}))
    assert store.load(5, CPU).tensors["0.lora_A"].dtype == torch.float64
    del tensors["norm"], tensors["0.lora_B"]
    store.save(Checkpoint(5, tensors, make(5).state, {}))
    assert not (store.path(5) / TENSORS).exists()
    assert (store.path(5) / "more" / "tokenizer.json").read_bytes() == b"{}"


def test_full_disk_leaves_the_earlier_ones(
    store: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full at each sync in turn, those of the adapter's files and of directories too."""
    store.adapter, store.keep, real = files_of_a_layer(), 5, os.fsync
    count, after, failures = 1, 0, 0

    def full(descriptor: int) -> None:
        nonlocal count
        count += 1
        if count == after:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    while count >= after:
        count, after = 0, after + 1
        try:
            store.save(make(4))
        except CheckpointError as error:
            failures += 1
            assert "checkpoint of step 4 not saved: no space left while writing" in str(error)
            assert f"the last checkpoint is {store.path(3)}" in str(error)
        left = {p.name for p in store.directory.iterdir()} - {"step-00000004"}
        assert left == {"step-00000002", "step-00000003"} and store.load(3, CPU).step == 3
        if store.path(4).exists():  # whole, whatever could not be synced behind it
            assert store.load(4, CPU).step == 4
            shutil.rmtree(store.path(4))
    assert failures > 10, "each file of the adapter and of the state, and the directories"


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


def test_a_link_in_the_place_of_a_directory_stays_and_what_it_names_is_replaced(
    tmp_path: Path,
) -> None:
    """Such as an output's adapter/ that leads to another disk. It is written as often as the run goes on."""
    link, real = tmp_path / "adapter", tmp_path / "disk" / "kept"
    link.symlink_to(real)
    for text in ("one", "two", "three"):
        with replace_dir(link) as folder:
            (folder / "a").write_text(text)
        assert link.is_symlink() and (real / "a").read_text() == text
        assert [p.name for p in tmp_path.iterdir() if p.name[0] == "."] == []
        assert [p.name for p in real.parent.iterdir()] == ["kept"]
