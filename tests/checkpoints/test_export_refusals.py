# SPDX-License-Identifier: Apache-2.0
"""What export_model refuses before it writes, and what an error or a kill in the middle leaves behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from lorakernels import export_model
from lorakernels.checkpoints.export import model as export
from lorakernels.checkpoints.export import writer
from tests.checkpoints.exported import tensors_of, write_adapter, write_base


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    base = write_base(folder / "base")
    torch.manual_seed(0)
    write_adapter(base, folder / "adapter")
    return folder


@pytest.fixture
def place(made, tmp_path) -> Path:
    """A base and an adapter of this test's own."""
    return Path(shutil.copytree(made, tmp_path / "place"))


def names(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*")}


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("base", "output .* is model"),
        ("base/../adapter", "output .* is adapter"),
        ("base/inside/deep", "output .* is inside model"),
        ("adapter/inside", "output .* is inside adapter"),
        (".", "output .* contains model"),
        ("link/inside", "output .* is inside model"),
    ],
)
def test_output_must_lie_apart(output, message, place):
    (place / "link").symlink_to(place / "base")
    before = names(place)
    for overwrite in (False, True):
        with pytest.raises(ValueError, match=message):
            export_model(place / "base", place / "adapter", place / output, overwrite=overwrite)
    assert names(place) == before


def test_a_mount_point_is_refused_before_anything_is_written(place, monkeypatch):
    """Its directory cannot be renamed, so that the whole work would be for nothing."""
    (place / "merged").mkdir()
    before = names(place)
    monkeypatch.setattr(Path, "is_mount", lambda self: self.name == "merged")
    with pytest.raises(ValueError, match="merged is where a file system is mounted"):
        export_model(place / "base", place / "adapter", place / "merged")
    assert names(place) == before


def test_output_that_is_not_empty_needs_overwrite_and_a_model(place):
    output = place / "out"
    export_model(place / "base", place / "adapter", output)
    (output / "stale.json").write_text("{}")
    before = names(place)
    with pytest.raises(ValueError, match="not empty: give --overwrite"):
        export_model(place / "base", place / "adapter", output)
    assert names(place) == before
    export_model(place / "base", place / "adapter", output, format="fp8", overwrite=True)
    assert not (output / "stale.json").exists()
    assert "quantization_config" in json.loads((output / "config.json").read_text())
    other = place / "photos"
    other.mkdir()
    (other / "cat.jpg").write_text("")
    with pytest.raises(ValueError, match=r"no config\.json, so it is no model to replace"):
        export_model(place / "base", place / "adapter", other, overwrite=True)
    with pytest.raises(ValueError, match="is a file"):
        export_model(place / "base", place / "adapter", other / "cat.jpg", overwrite=True)
    (place / "empty").mkdir()
    export_model(place / "base", place / "adapter", place / "empty")


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def set_tensors(folder: Path, change) -> None:
    tensors = tensors_of(folder)
    change(tensors)
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})


KEY = "base_model.model.model.layers.1.mlp.down_proj"


def shapes(place):
    set_tensors(place / "adapter", lambda t: t.update({f"{KEY}.lora_A.weight": torch.zeros(4, 8)}))


def stranger(place):
    set_tensors(place / "adapter", lambda t: t.update({"base_model.model.x.y": torch.zeros(1)}))


def missing(place):
    set_tensors(place / "adapter", lambda t: t.pop(f"{KEY}.lora_B.weight"))


def other_modules(place):
    edit(place / "adapter" / "adapter_config.json", target_modules=["query"])


def dora(place):
    edit(place / "adapter" / "adapter_config.json", use_dora=True)


def other_quantization(place):
    edit(place / "base" / "config.json", quantization_config={"quant_method": "bitsandbytes"})


def no_config(place):
    (place / "base" / "config.json").unlink()


def lost_shard(place):
    next((place / "base").glob("*.safetensors")).unlink()


def not_the_config(place):
    edit(place / "base" / "config.json", vocab_size=97)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (shapes, r"1 of another shape:\s+.*down_proj.lora_A.weight: \(4, 8\), expected \(4, 256\)"),
        (stranger, r"1 unexpected:\s+base_model.model.x.y"),
        (missing, r"1 missing:\s+.*down_proj.lora_B.weight"),
        (other_modules, "does not fit this model: .*'query'"),
        (dora, r"adapter_config.json: use_dora=True is not supported"),
        (
            other_quantization,
            "says that the base's weights are in bitsandbytes, which is not read here",
        ),
        (no_config, "has no config.json"),
        (lost_shard, "lacks 1 of"),
        (not_the_config, r"\[96, 128\] in the base, \[97, 128\] by its config.json"),
    ],
)
@pytest.mark.parametrize("format", ["bf16", "fp8"])
def test_what_does_not_fit_is_refused_before_anything_is_written(change, message, format, place):
    change(place)
    before = names(place)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        export_model(place / "base", place / "adapter", place / "out", format=format)
    assert names(place) == before


def test_a_full_disk_is_seen_before_anything_is_written(place, monkeypatch):
    before = names(place)
    free = shutil.disk_usage(place)
    monkeypatch.setattr(export.shutil, "disk_usage", lambda path: free._replace(free=1 << 24))
    with pytest.raises(OSError, match=r"the merged model takes 0\.00 GB, 0\.02 are free"):
        export_model(place / "base", place / "adapter", place / "new" / "out")
    assert names(place) == before
    with pytest.raises(ValueError, match="format must be 'bf16' or 'fp8', found 'int4'"):
        export_model(place / "base", place / "adapter", place / "out", format="int4")


def test_a_merged_weight_that_is_not_finite_is_named_and_nothing_is_left(place):
    set_tensors(
        place / "adapter", lambda t: t[f"{KEY}.lora_B.weight"].fill_(torch.finfo(torch.float32).max)
    )
    before = names(place)
    for format in ("bf16", "fp8"):
        with pytest.raises(ValueError, match=r"layers.1.mlp.down_proj.weight: .* not finite"):
            export_model(place / "base", place / "adapter", place / "out", format=format)
    assert names(place) == before


def test_what_was_trained_whole_is_finite_too(place):
    write_adapter(place / "base", place / "whole", modules_to_save=["embed_tokens"])
    key = "base_model.model.model.embed_tokens.weight"
    set_tensors(place / "whole", lambda t: t[key][3].fill_(torch.nan))
    with pytest.raises(ValueError, match=r"model.embed_tokens.weight: .* not finite"):
        export_model(place / "base", place / "whole", place / "out")


@pytest.mark.parametrize("what", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_an_error_in_the_middle_leaves_what_was_there(what, place):
    export_model(place / "base", place / "adapter", place / "out")
    before = {p: (place / p).read_bytes() for p in names(place) if (place / p).is_file()}

    def stop(done, total):
        if done > total / 2:
            raise what

    with pytest.raises(what if isinstance(what, type) else OSError):
        export_model(
            place / "base", place / "adapter", place / "out", overwrite=True, progress=stop
        )
    assert {p: (place / p).read_bytes() for p in names(place) if (place / p).is_file()} == before


KILLED = """
import os, signal, sys
from pathlib import Path
from lorakernels import export_model
from lorakernels.checkpoints.export import model as export, writer

point, place = sys.argv[1], Path(sys.argv[2])

def kill(*args):
    os.kill(os.getpid(), signal.SIGKILL)

def before(owner, name, when=lambda *args: True):
    real = getattr(owner, name)
    def instead(*args, **kwargs):
        if when(*args):
            kill()
        return real(*args, **kwargs)
    setattr(owner, name, instead)

options = {}
if point == "a shard":
    options["progress"] = lambda done, total: done > total / 2 and kill()
elif point == "config.json":
    before(export, "write_config")
elif point == "sync":
    before(writer, "_sync")
elif point == "between the renames":
    before(Path, "rename", lambda path, new: path.name.startswith(".partial"))
elif point == "after the renames":
    before(writer, "_sync_one", lambda path: path == place)
export_model(place / "base", place / "adapter", place / "out", overwrite=True, format="fp8", **options)
"""


@pytest.mark.slow
@pytest.mark.parametrize("there", [False, True], ids=["new", "over another"])
@pytest.mark.parametrize(
    "point", ["a shard", "config.json", "sync", "between the renames", "after the renames"]
)
def test_a_kill_leaves_the_old_model_or_the_new_one_or_none(point, there, place):
    if there:
        export_model(place / "base", place / "adapter", place / "out")
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", KILLED, point, str(place)],
        cwd=root,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    loadable = {p.parent.name for p in place.rglob("config.json")} - {"base"}
    late = point == "after the renames"
    between = point == "between the renames"
    if between or point == "sync":
        loadable.discard(".partial-out")  # whole, and not in its place yet: config.json comes last
    expected = {".old-out"} if there and (late or between) else set()
    if late or (there and not between):
        expected = expected | {"out"}
    assert loadable == expected
    is_fp8 = (place / "out" / "config.json").exists() and "quantization_config" in (
        place / "out" / "config.json"
    ).read_text()
    assert is_fp8 == late
    writer.recover(place / "out")
    if there:
        assert (place / "out" / "config.json").exists()
    export_model(place / "base", place / "adapter", place / "out", overwrite=True)
    assert {p.name for p in place.iterdir()} == {"base", "adapter", "out"}


def test_two_at_once_do_not_write_one_directory(place):
    with writer.new_directory(place / "out") as partial:
        (partial / "mine").write_text("")
        with pytest.raises(BlockingIOError, match="another process is writing"):
            export_model(place / "base", place / "adapter", place / "out")
        assert (partial / "mine").exists()


def test_a_model_left_beside_its_place_is_put_back_and_not_replaced_unasked(place):
    """As a kill between the two renames leaves it."""
    export_model(place / "base", place / "adapter", place / "out")
    (place / "out").rename(place / ".old-out")
    with pytest.raises(ValueError, match="not empty: give --overwrite"):
        export_model(place / "base", place / "adapter", place / "out")
    assert (place / "out" / "config.json").exists() and not (place / ".old-out").exists()
