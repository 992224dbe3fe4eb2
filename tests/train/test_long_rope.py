# SPDX-License-Identifier: Apache-2.0
"""Layouts of one step are the same step under LongRoPE, whose angles depend on a document's length."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.conftest import Cli
from tests.train.replays import records

TRAINED = 40  # tokens: some rows of 48 have a longer document, and some have not


@pytest.fixture(scope="module")
def long_rope(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama with LongRoPE."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    config = json.loads((model_dir / "config.json").read_text())
    rope: dict[str, Any] = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 8,
        "long_factor": [8.0] * 8,
        "original_max_position_embeddings": TRAINED,
        "factor": 8.0,
    }
    torch.manual_seed(3)
    model = LlamaForCausalLM(LlamaConfig(**config | {"rope_parameters": rope}))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(5.0)  # attention is not uniform
    directory = tmp_path_factory.mktemp("long_rope")
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(model_dir).save_pretrained(directory)
    return directory


@pytest.mark.parametrize("fuse", ["--no-fuse", "--fuse"])
def test_rows_of_one_step_are_as_in_microbatches_of_one_row(
    cli: Cli, long_rope: Path, data_file: Path, tmp_path: Path, fuse: str
) -> None:
    """The last loss differs where angles do, as the steps before it have had other gradients."""
    result = []
    for rows, times in ((4, 1), (1, 4)):
        output = tmp_path / f"{rows}x{times}"
        arguments = ["--model", long_rope, "--data", data_file, "--device", "cpu", "--no-fp8", fuse]
        arguments += ["--seq-len", 48, "--batch-size", rows, "--grad-accum", times, "--steps", 2]
        arguments += ["--eval-every", 0, "--log-every", 1, "--lora-dropout", 0, "--output", output]
        assert cli(*arguments) == 0
        result.append(
            [record[name] for record in records(output) for name in ("loss", "grad_norm")]
        )
    # orders of fp32 sums; angles of a microbatch's longest document change a loss by 1e-3
    assert result[0] == pytest.approx(result[1], rel=1e-5)
