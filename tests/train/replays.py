# SPDX-License-Identifier: Apache-2.0
"""Small trainers whose steps are replayed by imitated CUDA graphs, and what they trained."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from lorakernels import LoRAConfig, linear_cross_entropy, load_quantized
from lorakernels.train.data.packing import PackedRows
from lorakernels.train.options.options import FinetuneOptions
from lorakernels.train.ranks.ranks import RunRanks
from lorakernels.train.run.loop import Trainer
from lorakernels.train.run.runtime import Runtime, fuse_layers, make_random_state
from tests.graphs.fake import FakeBackend

Cli = Callable[..., int]
CPU = torch.device("cpu")


@pytest.fixture
def rows() -> PackedRows:
    """Two documents a row, and padding."""
    text = (b"the quick brown fox jumps over the lazy dog; " * 4)[:160]
    stops = np.arange(10, 161, 10)
    return PackedRows(np.frombuffer(text, dtype=np.uint8), np.stack([stops - 10, stops], 1), 24)


@pytest.fixture
def plain_attention(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The imitated graphs cannot replay the CPU's flash attention, one op with memory of its own, nor its look at the
    labels, which a GPU's kernel does for itself."""
    loss = sys.modules[linear_cross_entropy.__module__]
    monkeypatch.setattr(loss, "_check_range", lambda *_: None)
    with sdpa_kernel(SDPBackend.MATH):
        yield


@pytest.fixture
def make(
    plain_attention, model_dir: Path, rows: PackedRows
) -> Callable[..., tuple[Trainer, list[str]]]:
    """A trainer over FP8 with dropout, and what its runtime said. `replay` imitates CUDA graphs on the CPU."""

    def make(
        replay: bool,
        fused: bool = False,
        targets: Any = "all-linear",
        ranks: RunRanks = RunRanks(),  # noqa: B008  (frozen)
        **options: Any,
    ) -> tuple[Trainer, list[str]]:
        said: list[str] = []
        torch.manual_seed(1)
        random = make_random_state(7, 0, CPU)
        lora = LoRAConfig(r=4, lora_dropout=0.2, target_modules=targets)
        loaded = load_quantized(
            model_dir,
            device="cpu",
            dtype=torch.float32,
            lora=lora,
            rng_state=random,
            progress=False,
        )
        loaded.model.config.use_cache = False
        made = FinetuneOptions(
            seq_len=24, batch_size=2, grad_accum=2, steps=20, lr=1e-2, fuse=fused, **options
        )
        done = fuse_layers(loaded.model, made, CPU)
        assert bool(done) == fused, done.why_not
        backend = FakeBackend if replay else None
        told: dict[str, Any] = {"ranks": ranks, "say": said.append}
        runtime = Runtime(
            loaded.model, made, loaded.fp8_state, random, warmup=2, backend=backend, **told
        )
        return Trainer(loaded.model, made, rows, loaded.fp8_state, runtime), said

    return make


def trained(trainer: Trainer) -> dict[str, torch.Tensor]:
    state = trainer.fp8_state
    assert state is not None
    found = {name: p.detach().clone() for name, p in trainer.trainable.items()}
    return found | {"scales": torch.stack((state.forward, state.backward))}


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


@pytest.fixture
def by_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: fused layers get documents by where they start."""
    monkeypatch.setattr("lorakernels.train.model.model.takes_starts", lambda decoder, like: True)


# On a GPU


def records(output: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
    return [r for r in lines if "lr" in r]
