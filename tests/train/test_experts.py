# SPDX-License-Identifier: Apache-2.0
"""finetune on a mixture of experts: with adapters on the experts, and as transformers has them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.train.conftest import Cli

BOTH = ["--target-parameters", "experts.gate_up_proj", "experts.down_proj"]


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import MixtralConfig, MixtralForCausalLM

    from lorakernels.train.data.byte_tokenizer import VOCABULARY, byte_tokenizer
    from lorakernels.train.model.model import quiet_transformers

    quiet_transformers()
    folder = tmp_path_factory.mktemp("mixture")
    torch.manual_seed(3)
    config = MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=4,
        max_position_embeddings=128,
    )
    MixtralForCausalLM(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def arguments(mixture: Path, data_file: Path, out: Path) -> list[object]:
    sizes = ["--seq-len", 32, "--batch-size", 2, "--steps", 3, "--r", 4, "--device", "cpu"]
    return ["--model", mixture, "--data", data_file, "--output", out, *sizes]


def test_experts_train_and_their_adapter_is_peft_s(
    cli: Cli, mixture: Path, data_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    given = arguments(mixture, data_file, tmp_path / "out")
    assert cli(*given, *BOTH, "--lora-dropout", 0, "--save-every", 2) == 0, capsys.readouterr()
    said = capsys.readouterr().out
    assert "mixture of experts" not in said and "loaded by transformers" not in said
    tensors = load_file(tmp_path / "out/adapter/adapter_model.safetensors")
    (down,) = (v for k, v in tensors.items() if "layers.1.mlp.experts.lora_B" in k)
    assert down.shape == (32, 4 * 4) and down.abs().max() > 0
    base = AutoModelForCausalLM.from_pretrained(mixture, dtype=torch.float32)
    ids = torch.arange(40, 72)[None]
    before = base(ids).logits.detach()
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "out/adapter")
    assert not torch.equal(adapted(ids).logits, before)
    assert cli(*given, *BOTH, "--lora-dropout", 0, "--save-every", 2, "--steps", 4, "--resume") == 0
    rows = (tmp_path / "out/metrics.jsonl").read_text().splitlines()
    assert max(json.loads(row).get("step", 0) for row in rows) == 4


def test_without_the_option_experts_stay_as_they_are(
    cli: Cli, mixture: Path, data_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli(*arguments(mixture, data_file, tmp_path / "out")) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "--target-parameters adapts experts" in said
    assert "instead of into FP8 tensor by tensor" not in said
    first = said[said.index("device: ") : said.index("layers: ")]
    assert "by PEFT 0.21 these targets are 12,832 adapter parameters, here 1,792" in first
    assert "model.layers.{0-1}.mlp.experts.{gate_up,down}_proj" in first
    tensors = load_file(tmp_path / "out/adapter/adapter_model.safetensors")
    assert tensors and not any("experts" in name for name in tensors)


def test_dropout_is_refused_by_name(
    cli: Cli, mixture: Path, data_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli(*arguments(mixture, data_file, tmp_path / "out"), *BOTH) != 0
    caught = capsys.readouterr()
    assert "lora_dropout must be 0 with target_parameters" in caught.out + caught.err
