# SPDX-License-Identifier: Apache-2.0
"""Fused, replayed, resumed and parallel runs: equal to the plain one, to the bit where nothing else is promised."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from lorakernels import LoRAConfig, apply_lora, load_quantized
from lorakernels.train.checkpoint import Checkpoint
from lorakernels.train.loop import Trainer
from lorakernels.train.model import _takes_starts, summed_loss
from lorakernels.train.options import FinetuneOptions
from lorakernels.train.packing import PackedRows
from lorakernels.train.runtime import Runtime, fuse_layers, make_random_state
from tests.graphs.fake import FakeBackend
from tests.train.test_resume import adapter, start, steps_logged, wait_for_step

Cli = Callable[..., int]
CPU = torch.device("cpu")


@pytest.fixture
def rows() -> PackedRows:
    """Two documents a row, and padding."""
    text = (b"the quick brown fox jumps over the lazy dog; " * 4)[:160]
    stops = np.arange(10, 161, 10)
    return PackedRows(np.frombuffer(text, dtype=np.uint8), np.stack([stops - 10, stops], 1), 24)


@pytest.fixture
def plain_attention() -> Iterator[None]:
    """The imitated graphs cannot replay the CPU's flash attention, one op with memory of its own."""
    with sdpa_kernel(SDPBackend.MATH):
        yield


@pytest.fixture
def make(
    plain_attention, model_dir: Path, rows: PackedRows
) -> Callable[..., tuple[Trainer, list[str]]]:
    """A trainer over FP8 with dropout, and what its runtime said. `replay` imitates CUDA graphs on the CPU."""

    def make(
        replay: bool, fused: bool = False, targets: Any = "all-linear", **options: Any
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
        assert fuse_layers(loaded.model, made, CPU, said.append) == fused, said
        backend = FakeBackend if replay else None
        runtime = Runtime(
            loaded.model, made, loaded.fp8_state, random, warmup=2, backend=backend, say=said.append
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
    monkeypatch.setattr("lorakernels.train.model._takes_starts", lambda decoder, batch: True)


@pytest.mark.parametrize("fused", [False, True], ids=["as they are", "fused"])
def test_replayed_steps_are_the_eager_ones(make, fused, request):
    """Dropout, FP8 scales, two microbatches a step, an evaluation in between."""
    if fused:
        request.getfixturevalue("by_starts")
    eager, _ = make(False, fused)
    graphed, said = make(True, fused)
    results = []
    for trainer in (eager, graphed):
        results.append([trainer.step() for _ in range(3)])
        trainer.model.eval()
        with torch.no_grad():
            trainer.model(input_ids=torch.arange(10)[None])
        results[-1] += [trainer.step() for _ in range(3)]
    assert [r.replayed for r in results[1]] == [False, False, True, True, True, True]
    assert [r.loss for r in results[0]] == [r.loss for r in results[1]]
    assert_same(trained(eager), trained(graphed))
    assert said[-2] == "layers replayed as CUDA graphs from step 3 on"
    eager.close(), graphed.close()


def test_a_run_resumed_between_replays_warms_up_to_the_same_bits(make):
    whole, _ = make(True)
    for _ in range(4):
        whole.step()
    checkpoint = whole.checkpoint({})
    saved = Checkpoint(
        checkpoint.step,
        {n: t.detach().clone() for n, t in checkpoint.tensors.items()},
        torch.load(_dumped(checkpoint.state), weights_only=True),
        checkpoint.trainer,
    )
    losses = [whole.step().loss for _ in range(4)]
    again, said = make(True)
    again.restore(saved)
    results = [again.step() for _ in range(4)]
    assert [r.loss for r in results] == losses
    assert [r.replayed for r in results] == [False, False, True, True]
    assert "from step 7 on" in said[-2]
    assert_same(trained(whole), trained(again))
    whole.close(), again.close()


def _dumped(state: dict[str, Any]) -> Any:
    import io

    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return file


def test_rows_as_one_sequence_replay_too(make, rows: PackedRows):
    """Without isolation, attention has no mask: a row's loss is the model's own on that row."""
    graphed, _ = make(True, isolate_documents=False)
    eager, _ = make(False, isolate_documents=False)
    assert [graphed.step().loss for _ in range(4)] == [eager.step().loss for _ in range(4)]
    batch = rows.batch([0])
    assert len(set(batch.segments[0].tolist())) > 2, "two documents and padding"
    graphed.close(), eager.close()
    model = eager.model.eval()
    with torch.no_grad():
        found = summed_loss(model, batch, 1000, isolate=False)
        logits = model(input_ids=batch.input_ids).logits.flatten(0, 1)
        expected = torch.nn.functional.cross_entropy(
            logits, batch.labels.flatten(), ignore_index=-100, reduction="sum"
        )
        isolated = summed_loss(model, batch, 1000)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
    assert abs(isolated - found) > 1e-3


def test_fused_layers_keep_documents_apart_by_where_they_start(
    make, rows: PackedRows, by_starts: None
) -> None:
    """As the mask does: no mask of T × T, the same losses up to fp32 sums."""
    trainer, _ = make(False, True)
    model, batch = trainer.model.eval(), rows.batch([0, 1, 2])
    seen: list[Any] = []
    hook = model.model.layers[0].register_forward_pre_hook(
        lambda layer, args, kwargs: seen.append(kwargs), with_kwargs=True
    )
    with torch.no_grad():
        by_starts = summed_loss(model, batch, 1000)
        by_mask = summed_loss(model, replace(batch, starts=None), 1000)
    hook.remove()
    trainer.close()
    assert seen[0]["attention_mask"].numel() == 1 and seen[0]["cu_seq_lens_q"] is not None
    assert seen[1]["attention_mask"].shape == (3, 1, 24, 24)
    torch.testing.assert_close(by_starts, by_mask, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("fused", "on_gpu", "dtype", "takes"),
    [
        (True, True, torch.bfloat16, True),
        (True, True, torch.float32, False),
        (True, False, torch.bfloat16, False),
        (False, True, torch.bfloat16, False),
    ],
    ids=["flash takes it", "fp32", "cpu", "not fused"],
)
def test_documents_come_by_starts_where_flash_takes_them(fused, on_gpu, dtype, takes):
    class FusedDecoderLayer(nn.Module):
        pass

    decoder = nn.Module()
    decoder.layers = nn.ModuleList([FusedDecoderLayer() if fused else nn.Module()])
    decoder.embed_tokens = nn.Embedding(2, 2, dtype=dtype)
    batch = SimpleNamespace(input_ids=SimpleNamespace(is_cuda=on_gpu))
    assert _takes_starts(decoder, batch) == takes


def test_masks_are_new_every_microbatch_and_differ_by_rank(make):
    trainer, _ = make(False)
    layer = trainer.model.model.layers[0].self_attn.q_proj
    slots = []
    real = layer.rng_state.slot
    layer.rng_state.slot = lambda: slots.append(real()) or slots[-1]
    trainer.step()
    trainer.step()
    per_microbatch = len(slots) // 4
    assert len(slots) == 4 * per_microbatch and len({tuple(s.tolist()) for s in slots}) == len(
        slots
    )
    seeds = {make_random_state(7, rank, CPU).seed for rank in range(4)}
    assert len(seeds) == 4 and make_random_state(7, 0, CPU).seed in seeds
    trainer.close()


def test_what_cannot_be_captured_runs_eagerly_and_says_why(make):
    """A layer that waits for the device."""
    trainer, said = make(True)
    layer = trainer.model.model.layers[1]
    real = layer.mlp.forward

    def waits(x: torch.Tensor) -> torch.Tensor:
        return real(x) if x.sum().item() < 1e30 else x

    layer.mlp.forward = waits
    results = [trainer.step() for _ in range(4)]
    assert not any(r.replayed for r in results)
    assert any(line.startswith("layers run eagerly: ") and "1" in line for line in said), said
    trainer.close()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"eager": True}, "eager was asked for"), ({}, "CUDA graphs need a GPU")],
    ids=["asked", "cpu"],
)
def test_why_not(make, changes, reason):
    trainer, _ = make(bool(changes), **changes)
    assert trainer.runtime is not None and trainer.runtime.why_not == reason
    trainer.close()


def test_dropout_outside_of_the_layers_rules_graphs_out(make):
    """The head would draw the first layer's nonce once the layers are replayed."""
    trainer, _ = make(True, targets=["q_proj", "lm_head"])
    assert trainer.runtime.why_not == "lm_head has dropout 0.2 outside of the decoder layers"
    trainer.close()


def test_replayed_layers_add_to_the_graphs_own_gradients(make):
    """Nobody else holds a gradient when a step ends: none is zeroed and copied at every replay."""
    trainer, _ = make(True)
    for _ in range(3):
        trainer.step()
    expected = sum(p.nbytes for p in trainer.trainable.values())
    assert trainer.runtime.manager.report().grad_bytes == expected > 0
    trainer.close()


def test_a_model_that_cannot_be_fused_says_why(model_dir: Path):
    from lorakernels.train.model import load_model

    model = load_model(model_dir, torch.float32, CPU)
    said: list[str] = []
    assert not fuse_layers(model, FinetuneOptions(fuse=True), CPU, said.append)
    assert said[0].startswith("layers not fused: ")
    apply_lora(model, LoRAConfig(r=2, target_modules=["q_proj"]))
    options = FinetuneOptions(fuse=True, gradient_checkpointing=True)
    assert not fuse_layers(model, options, CPU, said.append) and "--save checkpoint" in said[1]


# On a GPU


def records(output: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
    return [r for r in lines if "lr" in r]


@pytest.mark.gpu
@pytest.mark.parametrize("fuse", ["--fuse", "--no-fuse"])
def test_replayed_on_a_gpu_is_eager_to_the_bit(
    cli: Cli, gpu_run: list[Any], tmp_path: Path, fuse, capsys
):
    run = [*gpu_run, "--steps", 12, fuse]
    assert cli(*run, "--output", tmp_path / "graphs") == 0
    said = capsys.readouterr().out
    assert "layers replayed as CUDA graphs from step 4 on" in said
    assert ("not fused" in said) is False
    assert [r["replayed"] for r in records(tmp_path / "graphs")] == [False] * 3 + [True] * 9
    assert cli(*run, "--output", tmp_path / "eager", "--eager") == 0
    assert not any(r["replayed"] for r in records(tmp_path / "eager"))
    both = [[r["loss"] for r in records(tmp_path / name)] for name in ("graphs", "eager")]
    assert both[0] == both[1]
    assert adapter(tmp_path / "graphs") == adapter(tmp_path / "eager")


@pytest.mark.gpu
def test_killed_between_replays_and_resumed_is_the_whole_run(
    cli: Cli, gpu_run: list[Any], tmp_path: Path
) -> None:
    """kill -9 of a process that replays; the one that goes on warms up, captures and replays again."""
    steps = 60
    run = [*gpu_run, "--steps", steps]
    assert cli(*run, "--output", tmp_path / "whole") == 0
    output = tmp_path / "killed"
    process = start([*run, "--output", output])
    wait_for_step(process, output, 14)
    process.kill()
    process.communicate()
    killed = records(output)
    assert killed[-1]["replayed"] and len(killed) < steps, "killed while it replayed"
    assert cli(*run, "--output", output, "--resume") == 0
    assert steps_logged(output) == list(range(1, steps + 1))
    found, expected = ([r["loss"] for r in records(p)] for p in (output, tmp_path / "whole"))
    assert found == expected and adapter(output) == adapter(tmp_path / "whole")
    again = [r["step"] for r in records(output) if not r["replayed"]]
    assert len(again) == 6, "two warm-ups"


@pytest.mark.gpu
def test_fp8_head_trains(cli: Cli, gpu_run: list[Any], tmp_path: Path) -> None:
    """Step by step within 2 % of the bf16 head's loss: e4m3 moves a logit by 3.7 % of its size, a mean of 256 tokens'
    losses by far less; a small learning rate keeps the two runs together."""
    found = []
    for head in ("--fp8-head", "--no-fp8-head"):
        run = [*gpu_run, "--lr", "1e-3", "--steps", 20, head]
        assert cli(*run, "--output", tmp_path / head) == 0
        found.append([r["loss"] for r in records(tmp_path / head)])
    np.testing.assert_allclose(*found, rtol=0.02)
    assert found[0] != found[1] and found[0][-1] < found[0][0]
