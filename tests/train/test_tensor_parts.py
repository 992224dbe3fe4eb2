# SPDX-License-Identifier: Apache-2.0
"""What finetune --tp makes of a model: documents by their starts, what it splits and says; and graphs of layers, also
with --cp."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel

from lorakernels import VocabularyHead, load_quantized, parallelize
from lorakernels.checkpoints.base.shards import Directory
from lorakernels.parallel.ranks import comm
from lorakernels.train import job
from lorakernels.train.adapted import Meshes, add_adapters, load_adapted, lora_config
from lorakernels.train.data.packing import PackedRows
from lorakernels.train.errors import FinetuneError
from lorakernels.train.layouts.context import share_rows
from lorakernels.train.layouts.parts import whole_model
from lorakernels.train.layouts.tensor import layer_mesh, split_layers
from lorakernels.train.model.model import hidden_states, load_model
from lorakernels.train.options.options import FinetuneOptions
from lorakernels.train.ranks.ranks import RunRanks
from lorakernels.train.run.loop import Trainer, evaluate
from lorakernels.train.run.reporter import Reporter
from lorakernels.train.run.runtime import Runtime, fuse_layers, make_random_state
from tests import processes
from tests.distributed.test_split_graphs import own_rows_of_the_sum
from tests.graphs.fake import FakeBackend
from tests.train.replays import assert_same, trained

pytestmark = pytest.mark.slow

PARAMETER = "model.layers.0.self_attn.q_proj.lora_B"


def packed(rank: int, device: torch.device, model_dir: str) -> dict[str, Tensor]:
    """Hidden states of fused layers that get documents by where they start, and gradients of a sum of them."""
    found, options = {}, FinetuneOptions(r=4, lora_dropout=0.0, fp8=False, fuse=True, seq_len=24)
    tokens = np.arange(160, dtype=np.uint8) % 101
    stops = np.arange(10, 161, 10)
    batch = PackedRows(tokens, np.stack([stops - 10, stops], 1), 24).batch(range(4))
    assert batch.starts is not None and len(batch.starts.unique()) > 5
    for way in ("whole", "split", "split by rows"):
        torch.manual_seed(1)
        model = load_model(Path(model_dir), torch.float32, device)
        add_adapters(model, options)
        for name, p in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(p.data)
        assert fuse_layers(model, options, device)
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        split = (
            None if way == "whole" else parallelize(model, mesh, sequence_parallel="rows" in way)
        )
        with mock.patch("lorakernels.train.model.model.takes_starts", lambda decoder, like: True):
            hidden = hidden_states(model, batch)
        (
            hidden * torch.randn(hidden.shape, generator=torch.Generator().manual_seed(2))
        ).sum().backward()
        gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        gradients = gradients if split is None else split.whole_gradients()
        found |= {f"{way}: {n}": x for n, x in {"hidden": hidden.detach(), **gradients}.items()}
    return found


def test_fused_parts_get_documents_by_where_they_start(even_model: Path) -> None:
    """As on a GPU. Sums of fp32 have another order, and gradients of q and k nearly cancel."""
    for found in processes.on_ranks(packed, 2, "gloo", str(even_model)):
        expected = {
            n.removeprefix("whole: "): x for n, x in found.items() if n.startswith("whole: ")
        }
        assert len(expected) == 1 + 2 * 7 * 2
        for name, value in expected.items():
            for way in ("split", "split by rows"):
                error = float((found[f"{way}: {name}"] - value).norm() / value.norm())
                assert error < 1e-4, (way, name)


def spoken(
    rank: int, device: torch.device, model_dir: str, cases: list[dict[str, Any]]
) -> list[Any]:
    """(what was said, whether the head was split) of each case."""
    found = []
    for case in cases:
        options = FinetuneOptions(r=4, fp8=False, tp=2, **case.get("options", {}))
        model: Any = load_model(Path(model_dir), torch.float32, device)
        if "tokens" in case:
            model.resize_token_embeddings(case["tokens"], mean_resizing=False)
        vars(model.config).update(case.get("config", {}))
        add_adapters(model, options)
        said: list[str] = []
        ranks = RunRanks(rank, 2, tp=2)
        split_layers(model, options, ranks, layer_mesh(ranks, device), said.append)
        found.append((said, isinstance(model.get_output_embeddings(), VocabularyHead)))
    return found


def test_the_run_says_what_is_split_and_why_not_the_vocabulary(even_model: Path) -> None:
    cases: list[Any] = [
        ({}, True, "; embedding and head split by tokens"),
        ({"options": {"fp8_head": True}}, False, "whole on each rank, as fp8_head multiplies by the whole head"),
        ({"tokens": 265}, False, "as the vocabulary has 265 tokens, no multiple of 2"),
        ({"config": {"logits_scaling": 8.0}}, False, "as the model changes its logits"),
        ({"options": {"sequence_parallel": False}}, True, " layers over 2 ranks, rows whole; "),
    ]  # fmt: skip
    given = [case for case, _, _ in cases]
    for found in processes.on_ranks(spoken, 2, "gloo", str(even_model), given):
        for (said, split), (case, expected, words) in zip(found, cases, strict=True):
            assert len(said) == 1 and words in said[0], case
            assert said[0].startswith(f"tp: {16 if split else 14} layers over 2 ranks, rows ")
            assert split is expected, case


def replaying(
    rank: int, device: torch.device, model_dir: str, way: str, refused: bool
) -> list[Any]:
    """(losses, what was trained, what was said, the error) with imitated graphs of layers, and eagerly.

    Two ranks have parts of the layers with `way` "tp", and of the rows with "cp". With `refused` a parameter moves on
    rank 1 after the capture, so that a replay is refused there.
    """
    axis, _, base = way.partition(", ")
    text = (b"the quick brown fox jumps over the lazy dog; " * 4)[:160]
    stops = np.arange(10, 161, 10)
    rows = PackedRows(np.frombuffer(text, dtype=np.uint8), np.stack([stops - 10, stops], 1), 24)
    options = FinetuneOptions(
        r=4, lora_dropout=0.2, seq_len=24, batch_size=2, grad_accum=2, steps=9, lr=1e-2, fuse=True,
        **{axis: 2},
    )  # fmt: skip
    ranks, found = RunRanks(rank, 2, **{axis: 2}), []
    for backend in (FakeBackend, None):
        torch.manual_seed(1)
        random = make_random_state(7, 0, device)
        given: dict[str, Any] = {"device": device, "dtype": torch.float32, "progress": False}
        if base:
            given["mesh"] = init_device_mesh("cpu", (2,), mesh_dim_names=("ranks",))
        loaded = load_quantized(model_dir, lora=lora_config(options), rng_state=random, **given)
        model: Any = loaded.model
        model.config.use_cache = False
        assert fuse_layers(model, options, device)
        said: list[str] = []
        split_layers(model, options, ranks, layer_mesh(ranks, device), said.append)
        share_rows(model, ranks, device)
        more: dict[str, Any] = {"ranks": ranks, "warmup": 2, "backend": backend, "say": said.append}
        runtime = Runtime(model, options, loaded.fp8_state, random, **more)
        trainer = Trainer(model, options, rows, loaded.fp8_state, runtime, ranks)
        losses, error = [], ""
        # gloo's scatter, and attention of torch for CPUs, end in ops that the imitated capture would record
        with mock.patch.object(comm, "sum_rows", own_rows_of_the_sum), sdpa_kernel(SDPBackend.MATH):
            try:
                for step in range(6):
                    if refused and backend and step == 4 and rank == 1:
                        parameter = model.model.layers[1].self_attn.q_proj.lora_A
                        parameter.data = parameter.data.clone()
                    losses.append(trainer.step().loss)
                    losses += [] if step % 2 else [evaluate(model, rows, options, ranks)]
                    trainer.checkpoint({})
                    with whole_model(model):  # as for its files
                        assert model.get_parameter(PARAMETER).shape == (32, 4)
            except Exception as raised:
                error = f"{type(raised).__name__}: {raised}"
        replayed = runtime.replaying
        trainer.close()
        found.append((losses, trained(trainer), said, error, replayed))
        if refused:
            break
    return found


@pytest.mark.parametrize("way", ["tp", "cp", "cp, sharded base"])
def test_fused_parts_are_replayed_as_graphs_of_layers_to_the_bit(
    way: str, even_model: Path
) -> None:
    """By default, and evaluations in between are those of eager layers."""
    for graphed, eager in processes.on_ranks(replaying, 2, "gloo", str(even_model), way, False):
        assert graphed[4] and not eager[4]
        assert any("layers replayed as CUDA graphs from step 3 on" in text for text in graphed[2])
        assert graphed[0] == eager[0] and len(eager[0]) == 9
        assert_same(graphed[1], eager[1])


@pytest.mark.parametrize("axis", ["tp", "cp"])
def test_a_rank_whose_replay_is_refused_does_not_start_the_step_anew(
    axis: str, even_model: Path
) -> None:
    """The other one is in the middle of it, and would take its rows for others."""
    (whole,), (one,) = processes.on_ranks(replaying, 2, "gloo", str(even_model), axis, True)
    assert one[3].startswith("FinetuneError: replay of layer '1'"), one[3]
    assert "the other ranks cannot repeat their step; --resume with --eager" in one[3]
    assert "gloo" in whole[3] and len(whole[0]) == len(one[0]) == 6


def read_by_finetune(rank: int, device: torch.device, model_dir: str) -> list[tuple[Any, ...]]:
    """Of each way: what it says about what is read, and whether its layers are parts, and its head."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))["tp"]
    found = []
    for more in ({}, {"fp8_recipe": "block"}, {"fp8": False}, {"fp8_head": True}):
        options = FinetuneOptions(r=4, tp=2, **more)
        reporter, said = Reporter("test", 1), []
        with mock.patch.object(reporter, "say", said.append):
            random = make_random_state(0, 0, device)
            meshes = Meshes(tp=mesh)
            given = Path(model_dir), options, torch.float32, device, random, reporter, meshes
            model, _ = load_adapted(*given)
        shape = model.get_submodule("model.layers.0.self_attn.q_proj").weight.shape
        tokens = len(model.get_output_embeddings().weight)
        found.append(([line for line in said if "base:" in line], tuple(shape), tokens))
    return found


def test_over_fp8_a_rank_reads_its_parts_alone(even_model: Path) -> None:
    """And its rows of embedding and head, unless the FP8 head needs all of them."""
    infos = Directory(even_model).tensors
    n, k = infos["model.layers.0.self_attn.q_proj.weight"].shape
    tokens = infos["lm_head.weight"].shape[0]

    def said(*cut: str) -> list[str]:
        size = sum(i.bytes // (2 if name.endswith(cut) else 1) for name, i in infos.items())
        return [f"base: {size / 1e6:,.3f} MB read, those of this rank's parts of layers"]

    for own, blocks, plain, head in processes.on_ranks(
        read_by_finetune, 2, "gloo", str(even_model)
    ):
        rows = ("_proj.weight", "embed_tokens.weight", "lm_head.weight")
        assert own == (said(*rows), (n // 2, k), tokens // 2)
        assert head == (said("_proj.weight"), (n // 2, k), tokens)
        assert "each rank reads the whole model first" in blocks[0][0]
        assert blocks[1:] == ((n, k), tokens)
        assert plain == ([], (n, k), tokens)


@pytest.mark.parametrize("fails", [False, True], ids=["ends", "raises"])
def test_graphs_go_before_the_process_group(
    fails: bool,
    base_args: list[str],
    cli: Callable[..., int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A graph that outlives its communicator waits for it for good."""
    order, close, step = [], Runtime.close, Trainer.step

    @contextmanager
    def group(device: torch.device) -> Iterator[RunRanks]:
        try:
            yield RunRanks()
        finally:
            order.append("group")

    def closed(runtime: Runtime) -> None:
        order.append("graphs")
        close(runtime)

    def stepped(trainer: Trainer, *args: Any) -> Any:
        if fails and trainer.counters.step == 1:
            raise FinetuneError("a rank is gone")
        return step(trainer, *args)

    monkeypatch.setattr(job, "joined", group)
    monkeypatch.setattr(Runtime, "close", closed)
    monkeypatch.setattr(Trainer, "step", stepped)
    assert (cli(*base_args, "--steps", 2, "--output", tmp_path / "out") != 0) == fails
    assert order == ["graphs", "group"]
