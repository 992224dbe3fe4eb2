# SPDX-License-Identifier: Apache-2.0
"""What a run's options, model and machine make of it: documents by their starts, masks, the scope of graphs, fusing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lorakernels import LoRAConfig, apply_lora
from lorakernels.train.data.packing import PackedRows
from lorakernels.train.errors import OptionError
from lorakernels.train.model.model import summed_loss, takes_starts
from lorakernels.train.options.options import FinetuneOptions
from lorakernels.train.ranks.ranks import RunRanks
from lorakernels.train.run.runtime import Runtime, fuse_layers, make_random_state
from tests.graphs.fake import FakeBackend
from tests.train.replays import CPU, assert_same, trained


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
    assert takes_starts(decoder, SimpleNamespace(is_cuda=on_gpu)) == takes  # type: ignore[arg-type]


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


def test_several_ranks_take_graphs_of_layers(model_dir: Path) -> None:
    """A whole step would hold collectives."""
    from lorakernels.train.model.model import load_model

    model = load_model(model_dir, torch.float32, CPU)
    apply_lora(model, LoRAConfig(r=2, target_modules=["q_proj"]))
    random, two = make_random_state(7, 0, CPU), RunRanks(0, 2)
    made: dict[str, Any] = {"ranks": two, "backend": FakeBackend}
    scopes = [Runtime(model, FinetuneOptions(), None, random, **made).scope]
    scopes.append(Runtime(model, FinetuneOptions(), None, random, backend=FakeBackend).scope)
    assert scopes == ["layer", "step"]
    with pytest.raises(OptionError, match="graphs=step is for one process, found 2 ranks"):
        Runtime(model, FinetuneOptions(graphs="step"), None, random, **made)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"eager": True}, "eager was asked for"), ({}, "CUDA graphs need a GPU")],
    ids=["asked", "cpu"],
)
def test_why_not(make, changes, reason):
    trainer, _ = make(bool(changes), **changes)
    assert trainer.runtime is not None and trainer.runtime.why_not == reason
    trainer.close()


def test_replayed_layers_add_to_the_graphs_own_gradients(make):
    """Nobody else holds a gradient when a step ends: none is zeroed and copied at every replay."""
    trainer, _ = make(True, graphs="layer")
    for _ in range(3):
        trainer.step()
    expected = sum(p.nbytes for p in trainer.trainable.values())
    assert trainer.runtime.manager.report().grad_bytes == expected > 0
    trainer.close()


def test_layers_that_are_not_fused_say_why(model_dir: Path):
    from lorakernels.train.model.model import load_model

    model = load_model(model_dir, torch.float32, CPU)
    for options, said in [
        ({"fuse": True}, "LoRALinear"),
        ({"fuse": False}, "--no-fuse was asked for"),
        ({}, "fused kernels are a GPU's"),
    ]:
        done = fuse_layers(model, FinetuneOptions(**options), CPU)
        assert not done and said in str(done)
    apply_lora(model, LoRAConfig(r=2, target_modules=["q_proj"]))
    done = fuse_layers(model, FinetuneOptions(fuse=True, gradient_checkpointing=True), CPU)
    assert not done and "--save checkpoint" in done.why_not


@pytest.mark.slow
@pytest.mark.parametrize("graphs", ["step", "layer"])
def test_a_refused_replay_is_said_and_its_step_runs_again(make, graphs):
    """A parameter moves while graphs replay, in step 5, for layers between its microbatches: the run goes on with the
    eager one's bits."""
    eager, _ = make(False)
    trainer, said = make(True, graphs=graphs)
    results = [trainer.step() for _ in range(4)]
    assert results[-1].replayed and len(said) == 2, said
    parameter = trainer.model.model.layers[1].self_attn.q_proj.lora_A
    begin, calls = trainer.runtime.begin_microbatch, []

    def moves_it() -> None:
        calls.append(0)
        if len(calls) == (1 if graphs == "step" else 2):
            parameter.data = parameter.data.clone()
        begin()

    if graphs == "step":
        moves_it()
    else:
        trainer.runtime.begin_microbatch = moves_it
    results += [trainer.step() for _ in range(4)]
    whole = graphs == "step"
    assert [r.replayed for r in results[4:]] == [False, False, whole, whole], said
    refused = [line for line in said if "refused before its launch" in line]
    assert len(refused) == 1
    assert "lora_A': expected 0x" in refused[0] and ", found 0x" in refused[0]
    if whole:
        assert refused[0].startswith(
            "steps are not replayed as a whole: replay of layer 'modules[0]'"
        )
        assert refused[0].endswith("to do without it: --graphs layer, or --eager")
        assert "layers replayed as CUDA graphs from step 7 on" in said
    else:
        assert refused[0].startswith("layers run eagerly: replay of layer '1': address of ")
        assert refused[0].endswith("to do without it: --eager")
    assert [r.loss for r in results] == [eager.step().loss for _ in range(8)]
    assert_same(trained(eager), trained(trainer))
    eager.close(), trainer.close()


@pytest.mark.parametrize("rank", [0, 3])
def test_a_refused_replay_is_said_on_the_rank_where_it_is(make, rank, capsys):
    """The others' output is off."""
    trainer, said = make(True, graphs="layer", ranks=RunRanks(rank, 4))
    for _ in range(4):
        trainer.step()
    assert not capsys.readouterr().err
    parameter = trainer.model.model.layers[1].self_attn.q_proj.lora_A
    parameter.data = parameter.data.clone()
    assert not trainer.step().replayed
    assert said[-1].startswith("layers run eagerly: replay of layer '1': ")
    assert capsys.readouterr().err == (f"rank 3: {said[-1]}\n" if rank else "")
    trainer.close()


@pytest.mark.parametrize("kind", ["olmo2", "gemma2", "gemma3_text"])
def test_families_that_are_slower_fused_are_fused_when_asked(kind: str) -> None:
    model: Any = nn.Identity()
    model.config = SimpleNamespace(model_type=kind)
    on = torch.device("cuda")
    assert "--fuse takes them" in fuse_layers(model, FinetuneOptions(), on).why_not
    for asked in ({"fuse": True}, {"save": "full"}):
        found = fuse_layers(model, FinetuneOptions(**asked), on)
        assert "Identity has no decoder layer" in found.why_not
