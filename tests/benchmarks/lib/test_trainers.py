# SPDX-License-Identifier: Apache-2.0
"""trainers.py: what its clock and its counts say, and that SFTTrainer gets the layers and the batches it is to get."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lorakernels.fusion.layer import FusedDecoderLayer
from tests.benchmarks.aliases import Load
from tests.graphs.fake import FakeBackend

pytest.importorskip("transformers")
pytest.importorskip("peft")

CPU = torch.device("cpu")


@pytest.fixture
def trainers(load: Load) -> Any:
    return load("lib.trainers")


def test_rates_are_of_the_last_half_and_of_each_step_with_its_own_batch(
    trainers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stamps = iter([100.0, 160.0, 169.0, 170.0, 172.0])  # steps of 60, 9, 1 and 2 seconds
    monkeypatch.setattr(trainers.time, "perf_counter", lambda: next(stamps))
    clock, counted = trainers.Clock(CPU), trainers.Counted(lambda examples: examples)
    clock.on_train_begin()
    for _ in range(4):
        clock.on_step_end()
    counted.tokens, counted.positions = [7, 7, 10, 30, 9999], [8, 8, 16, 64, 9999]
    found = trainers.rates(clock, counted)
    assert found == {
        "seconds": 1.5,
        "training": 72.0,
        "tokens_per_s": 12.5,
        "positions_per_s": 24.0,
    }


def test_replays_are_kept_when_the_callback_lets_go_of_the_layers(trainers: Any) -> None:
    kernels = SimpleNamespace(attached=None)
    clock = trainers.Clock(CPU, kernels)
    clock.on_train_begin()
    kernels.attached = SimpleNamespace(replayed=3)
    clock.on_step_end()
    kernels.attached = None
    clock.on_step_end()
    assert clock.replayed == 3


def test_padding_and_the_first_token_of_a_document_are_not_trained_tokens(trainers: Any) -> None:
    trl = pytest.importorskip("trl.trainer.sft_trainer")
    packing = trl.DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
    counted = trainers.Counted(trainers.FixedShapes(packing, 32, longest=16))
    counted(
        [
            {"input_ids": list(range(9)), "seq_lengths": [5, 4]},
            {"input_ids": [1] * 6, "seq_lengths": [6]},
        ]
    )
    assert (counted.tokens, counted.positions) == ([4 + 3 + 5], [32])


@pytest.mark.skipif(torch.cuda.is_available(), reason="imitated graphs are the CPU's")
@pytest.mark.parametrize("ours", [False, True], ids=["PEFT's layers", "ours"])
def test_sft_trainer_trains_those_layers_on_packed_rows(
    trainers: Any, load: Load, tmp_path: Path, monkeypatch: Any, ours: bool
) -> None:
    """Graphs are imitated: all steps are replayed but those that warm up, as every batch has one shape."""
    pytest.importorskip("trl")
    pytest.importorskip("datasets")
    callback = partial(trainers.LoRAKernelsCallback, backend=FakeBackend)
    monkeypatch.setattr(trainers, "LoRAKernelsCallback", callback)
    files, models = load("lib.finetune_files"), load("peers.models")
    spec, kept = files.JOBS["tiny"], []

    class Kept(trainers.Counted):  # type: ignore[misc]
        def __init__(self, collator: Any) -> None:
            super().__init__(collator)
            kept.append(self)

    monkeypatch.setattr(trainers, "Counted", Kept)
    model = models.plain_model(spec.config(), CPU)
    texts = tmp_path / "texts.jsonl"
    lengths = [62, 39, 23, 31, 31, 49, 13]  # four rows of at most 64 with their ends
    texts.write_text("".join(f'{{"text": "{"a" * length}"}}\n' for length in lengths))
    found = trainers.sft(spec, model, texts, 6, tmp_path / "sft", ours)
    fused = [isinstance(layer, FusedDecoderLayer) for layer in model.model.layers]
    assert fused == [ours] * len(fused)
    assert (found.get("replayed"), found.get("why_not")) == ((3, "") if ours else (None, None))
    (counted,) = kept
    assert sum(counted.tokens[:6]) == 3 * sum(lengths), "three epochs, each document's end a token"
    positions = counted.positions[:6]
    assert all(count == 128 for count in positions) if ours else max(positions) <= 128
