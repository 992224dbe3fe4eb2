# SPDX-License-Identifier: Apache-2.0
"""`lorakernels export`: exit codes, one line, and `finetune --merge`."""

from __future__ import annotations

import json
import os
import signal

import pytest

from lorakernels.cli.__main__ import main
from lorakernels.train.errors import OptionError
from lorakernels.train.options.options import FinetuneOptions
from tests.checkpoints.exported import reload, write_adapter, write_base


@pytest.fixture
def made(tmp_path):
    base = write_base(tmp_path / "base")
    write_adapter(base, tmp_path / "adapter")
    return [f"--{n}={tmp_path / n}" for n in ("model", "adapter", "output")], tmp_path


def run(made, *options: str) -> int:
    arguments, folder = made
    arguments[0] = f"--model={folder / 'base'}"
    return main(["export", *arguments, *options])


@pytest.mark.parametrize("format", ["bf16", "fp8"])
def test_export_writes_what_it_says(made, format, capsys):
    assert run(made, "--format", format) == 0
    out = capsys.readouterr().out
    assert f"{made[1] / 'output'}: {format}" in out and "4 layers merged" in out
    assert ("kept in bf16: lm_head" in out) == (format == "fp8")
    reload(made[1] / "output")
    assert run(made) == 1
    assert "lorakernels export: error: output" in capsys.readouterr().err
    assert run(made, "--overwrite") == 0


def test_export_s_options_are_checked_first(made, capsys):
    with pytest.raises(SystemExit) as stop:
        run(made, "--format", "int4")
    assert stop.value.code == 2 and "invalid choice: 'int4'" in capsys.readouterr().err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_it_and_leaves_nothing(made, number, code, capsys, monkeypatch):
    monkeypatch.setattr(
        "lorakernels.checkpoints.export.model.copy_files", lambda *a: os.kill(os.getpid(), number)
    )
    before = signal.getsignal(signal.SIGTERM)
    interrupt = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a job in background ignores it
    try:
        assert run(made) == code
    finally:
        signal.signal(signal.SIGINT, interrupt)
    assert "nothing was written" in capsys.readouterr().err
    assert {p.name for p in made[1].iterdir()} == {"base", "adapter"}
    assert signal.getsignal(signal.SIGTERM) == before


def test_finetune_s_merge_is_checked_before_anything_is_loaded(tmp_path):
    given = {"model": str(tmp_path), "data": ["x"], "merge": "bf16"}
    FinetuneOptions(**given, output=str(tmp_path.parent / "run")).check()
    with pytest.raises(OptionError, match=r"merge: output .* must not be inside model"):
        FinetuneOptions(**given, output=str(tmp_path / "run")).check()
    with pytest.raises(OptionError, match="merge must be one of bf16, fp8, got 'yes'"):
        FinetuneOptions(**given | {"merge": "yes"}, output=str(tmp_path.parent / "run")).check()


def test_the_merged_model_of_a_run_is_beside_its_adapter(made):
    from lorakernels.train.errors import FinetuneError
    from lorakernels.train.job import write_merged

    _, folder = made
    for _ in range(2):
        assert write_merged(folder / "base", folder / "adapter", "fp8") == folder / "merged"
    assert "quantization_config" in json.loads((folder / "merged" / "config.json").read_text())
    (folder / "merged" / "config.json").unlink()
    with pytest.raises(FinetuneError, match=r"the adapter is in .*adapter, but was not merged"):
        write_merged(folder / "base", folder / "adapter", "bf16")
