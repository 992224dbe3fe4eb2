# SPDX-License-Identifier: Apache-2.0
"""SFTTrainer with chats, packed, over fused and replayed layers; batches whose shapes repeat."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.graphs.fake import FakeBackend

transformers = pytest.importorskip("transformers")
from lorakernels.integrations.collators import FixedShapes  # noqa: E402

EXAMPLE = Path(__file__).parents[2] / "examples" / "trl_sft.py"


def flattening() -> Any:
    return transformers.DataCollatorWithFlattening(
        return_flash_attn_kwargs=True, return_position_ids=True
    )


def documents(*lengths: int) -> list[dict[str, list[int]]]:
    return [{"input_ids": list(range(1, n + 1)), "labels": list(range(1, n + 1))} for n in lengths]


def test_every_batch_has_one_shape() -> None:
    collator = FixedShapes(flattening(), 32, longest=10, documents=8)
    shapes = set()
    for lengths in ((10, 10, 3), (1,), (10, 10, 10, 2), (5, 5)):
        plain, batch = flattening()(documents(*lengths)), collator(documents(*lengths))
        tokens = sum(lengths)
        for key in ("input_ids", "labels", "position_ids"):
            assert torch.equal(batch[key][:, :tokens], torch.as_tensor(plain[key])), key
        assert (batch["labels"][0, tokens:] == -100).all()
        starts = batch["cu_seq_lens_q"]
        assert starts.tolist()[: len(lengths) + 1] == plain["cu_seq_lens_q"].tolist()
        assert starts[-1] == 32 and 0 <= int(starts.diff().min()) <= int(starts.diff().max()) <= 10
        begins = [start for start in starts.tolist() if start < 32]
        assert begins == (batch["position_ids"][0] == 0).nonzero().flatten().tolist()
        tensors = {k: (tuple(v.shape), v.dtype) for k, v in batch.items() if hasattr(v, "shape")}
        shapes.add(str(tensors) + str([batch["max_length_q"], batch["max_length_k"]]))
    assert len(shapes) == 1


def test_more_documents_are_rounded_up_too() -> None:
    collator = FixedShapes(flattening(), 32, documents=4)
    assert [len(collator(documents(*[1] * n))["cu_seq_lens_q"]) for n in (1, 3, 4, 7)] == [
        5,
        5,
        9,
        9,
    ]


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((0,), {}, "tokens must be a positive integer, found 0"),
        ((32,), {"documents": 0}, "documents must be a positive integer"),
        ((32,), {"longest": 8}, "documents of 8, found 9 and 9"),
        ((8,), {}, "at most 8 tokens .* found 9 and 9"),
    ],
    ids=["tokens", "documents", "a long document", "too many tokens"],
)
def test_refused(arguments: Any, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FixedShapes(flattening(), *arguments, **options)(documents(9))


def test_a_collator_that_pads_is_refused() -> None:
    padding = transformers.DefaultDataCollator()
    with pytest.raises(ValueError, match="must pack documents into one row"):
        FixedShapes(padding, 32)(documents(9, 9))


def losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def sft(output: Path, **options: Any) -> Any:
    pytest.importorskip("trl")
    pytest.importorskip("datasets")
    main = runpy.run_path(str(EXAMPLE))["main"]
    main.__globals__["LORA"]["lora_dropout"] = 0.0
    main.__globals__["EPOCHS"] = 2
    return main(None, str(output), **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="imitated graphs are the CPU's")
def test_sft_trainer_replays_to_the_same_losses(tmp_path: Path, capsys: Any) -> None:
    """Eager, and with imitated graphs: equal; the loss is of the assistant's turns, the adapter file is PEFT's."""
    with sdpa_kernel(SDPBackend.MATH):
        eager = sft(tmp_path / "eager")
        assert "CUDA graphs need a GPU" in capsys.readouterr().out
        graphed = sft(tmp_path / "graphs", backend=FakeBackend)
        assert "layers replayed as graphs" in capsys.readouterr().out
    found = losses(eager)
    assert found == losses(graphed) and found[-1] < found[0] - 0.5
    batch = next(iter(eager.get_train_dataloader()))
    labels = batch["labels"][0]
    text = eager.processing_class.decode(labels[labels >= 0])
    assert "plus" in text and "What is" not in text and "You add" not in text
    assert (tmp_path / "eager" / "adapter_model.safetensors").is_file()


@pytest.mark.gpu
def test_sft_trainer_on_the_gpu(tmp_path: Path, capsys: Any) -> None:
    found = losses(sft(tmp_path))
    assert "layers replayed as graphs" in capsys.readouterr().out
    assert found[-1] < found[0] - 0.5
