# SPDX-License-Identifier: Apache-2.0
"""A tiny Llama in a model directory, a small data file, and the command line as a function."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

for _module in ("rich", "matplotlib", "yaml", "transformers", "tokenizers"):
    pytest.importorskip(_module, reason="finetune needs the extras hf and train")

from tests.train.replays import by_starts, make, plain_attention, rows  # noqa: E402, F401

Cli = Callable[..., int]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Sums of several threads depend on their number; the runs compared here must not."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def save_model(directory: Path, layers: int, kv_heads: int = 1) -> Path:
    """Byte-level Llama, hidden 32, untrained."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from lorakernels.train.data.byte_tokenizer import VOCABULARY, byte_tokenizer
    from lorakernels.train.model.model import quiet_transformers

    quiet_transformers()
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=kv_heads,
        max_position_embeddings=128,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), 2)


@pytest.fixture(scope="session")
def deep_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """More layers than a sharded base has slots."""
    return save_model(tmp_path_factory.mktemp("deep"), 5)


@pytest.fixture(scope="session")
def even_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sizes that two tensor-parallel ranks divide."""
    return save_model(tmp_path_factory.mktemp("even"), 2, kv_heads=2)


@pytest.fixture(scope="session")
def data_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty documents of 3 to 151 bytes."""
    path = tmp_path_factory.mktemp("data") / "texts.jsonl"
    texts = [f"{i}: " + "the quick brown fox; " * (i % 8) for i in range(1, 21)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.fixture(scope="session")
def cli() -> Cli:
    """``lorakernels finetune`` in this process; returns the exit code."""
    from lorakernels.cli.finetune import add_arguments, run

    def call(*argv: object) -> int:
        parser = argparse.ArgumentParser()
        add_arguments(parser)
        return run(parser.parse_args([str(word) for word in argv]))

    return call


@pytest.fixture(scope="session")
def base_args(model_dir: Path, data_file: Path) -> list[str]:
    """A short run with FP8 and dropout."""
    return [
        *(
            "--model",
            str(model_dir),
            "--data",
            str(data_file),
            "--device",
            "cpu",
            "--r",
            "4",
            "--lr",
            "1e-2",
        ),
        *("--lora-dropout", "0.1", "--seq-len", "48", "--batch-size", "2", "--grad-accum", "2"),
        *("--eval-fraction", "0.2", "--eval-every", "0", "--log-every", "1"),
    ]


@pytest.fixture
def gpu_model(tmp_path: Path) -> Path:
    """Sizes that every kernel takes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from lorakernels.train.data.byte_tokenizer import VOCABULARY, byte_tokenizer

    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def gpu_run(gpu_model: Path, data_file: Path) -> list[Any]:
    return [
        *("--model", gpu_model, "--data", data_file, "--device", "cuda", "--r", 8, "--lr", "1e-2"),
        *("--lora-dropout", "0.1", "--seq-len", 128, "--batch-size", 2, "--grad-accum", 2),
        *("--eval-fraction", "0.2", "--eval-every", 0, "--log-every", 1, "--save-every", 4),
        "--deterministic",
    ]
