# SPDX-License-Identifier: Apache-2.0
"""finetune --merge: the merged model beside the adapter at the end of a run, also of one that goes on."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lorakernels import export_model
from lorakernels.train import job


@pytest.mark.slow
def test_a_run_that_goes_on_writes_the_merged_model_of_its_last_adapter(
    cli: Callable[..., int],
    base_args: list[str],
    model_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    output = tmp_path / "run"
    assert cli(*base_args, "--output", output, "--steps", 2) == 0
    assert not (output / "merged").exists()
    for steps in (3, 4):
        more = ["--steps", steps, "--resume", "--merge", "bf16"]
        assert cli(*base_args, "--output", output, *more) == 0
        assert f"merged model (bf16) in {output / 'merged'}" in capsys.readouterr().out
        export_model(model_dir, output / "adapter", tmp_path / "expected", overwrite=True)
        found, expected, base = (
            load_file(folder / "model.safetensors")
            for folder in (output / "merged", tmp_path / "expected", model_dir)
        )
        assert all(torch.equal(found[name], value) for name, value in expected.items())
        name = "model.layers.0.self_attn.q_proj.weight"
        assert not torch.equal(found[name], base[name].bfloat16())
    model = AutoModelForCausalLM.from_pretrained(output / "merged", dtype="auto")
    ids = AutoTokenizer.from_pretrained(output / "merged")("the quick", return_tensors="pt")
    assert model.dtype == torch.bfloat16 and bool(model(**ids).logits.isfinite().all())


def test_a_full_disk_while_merging_leaves_the_adapter_and_says_where(
    cli: Callable[..., int],
    base_args: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path))

    monkeypatch.setattr(job, "export_model", full)
    run = [*base_args, "--output", tmp_path / "run", "--steps", 1, "--merge", "bf16"]
    assert cli(*run) == 1
    said = capsys.readouterr().err
    assert f"the adapter is in {tmp_path / 'run' / 'adapter'}, but was not merged: no space" in said
    assert said.count("\n") == 1 and "lorakernels export merges it later" in said
    assert (tmp_path / "run" / "adapter" / "adapter_model.safetensors").is_file()
