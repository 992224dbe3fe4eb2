# SPDX-License-Identifier: Apache-2.0
"""bench_end_to_end: the shapes are the models', all providers train one model, what breaks or does not fit says so."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.benchmarks.aliases import Load, RowsOf, Run

CPU = torch.device("cpu")


@pytest.fixture
def bench(load: Load) -> Any:
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    return load("models.bench_end_to_end")


@pytest.fixture
def models(load: Load) -> Any:
    pytest.importorskip("transformers")
    return load("peers.models")


@pytest.mark.parametrize(
    ("key", "adapted", "base", "trained"),
    [("1b", "qkvo", 1_235_814_400, 16 * 16 * (4 * 2048 + 2 * (2048 + 512))),
     ("8b", "qkvo", 8_030_261_248, 32 * 16 * (4 * 4096 + 2 * (4096 + 1024))),
     ("8b", "all", 8_030_261_248, 41_943_040),
     ("70b", "qkvo", 68_976_648_192, 80 * 16 * (4 * 8192 + 2 * (8192 + 1024)))],
    ids=["1b", "8b", "8b-all", "70b"],
)  # fmt: skip
def test_the_shapes_are_the_models(
    key: str, adapted: str, base: int, trained: int, models: Any
) -> None:
    """Parameters of the published models, and the formula R (K + N) for each projection."""
    spec = models.SPECS[key]
    found_base, found_trained, flops = models.sizes(spec, adapted)
    assert (found_base, found_trained) == (base, trained)
    shape = spec.shape
    embedding = shape["vocab_size"] * shape["hidden_size"]
    layers, width = shape["num_hidden_layers"], shape["hidden_size"]
    untied = 0 if shape["tie_word_embeddings"] else embedding
    norms = (2 * layers + 1) * width
    attention = 12 * layers * spec.length * width
    assert flops == 4 * (base - untied - norms) + 6 * trained + attention


def test_every_provider_trains_one_model(bench: Any, models: Any) -> None:
    training, spec = sys.modules["benchmarks.peers.training"], models.SPECS["tiny"]
    peft = training.HfPeft(spec, "all", CPU)
    fused, plain = (training.Ours(spec, "all", CPU, save=save) for save in ("recompute", None))
    ids = models.token_rows(spec.length, 4)
    a = {
        name.replace(".default.weight", ""): p.detach()
        for name, p in peft.model.named_parameters()
        if "lora_A" in name
    }
    for ours in (fused, plain):
        parameters = dict(ours.model.named_parameters())
        assert len(a) == 14 and all(torch.equal(p, parameters[name]) for name, p in a.items())
    losses = [[float(t.step(ids[i : i + 1])) for i in range(4)] for t in (peft, fused, plain)]
    for ours in losses[1:]:
        # rounding to FP8: some 0.1 % of the loss
        assert all(0 < abs(x / y - 1) < 5e-3 for x, y in zip(ours, losses[0], strict=True))
    assert all(p.grad is not None for p in fused.trained)
    assert any(bool(p.any()) for n, p in fused.model.named_parameters() if "lora_B" in n)


def test_weights_depend_on_their_name_alone(models: Any) -> None:
    config, source = models.SPECS["tiny"].config(), None
    model = models.plain_model(config, CPU)
    source = models.Random(config, CPU)
    with source.open("all") as read:
        for name, parameter in model.named_parameters():
            assert torch.equal(read(name), parameter), name
    matrices = [p for p in model.parameters() if p.ndim == 2]
    assert abs(float(matrices[0].std()) / models.STD - 1) < 0.05
    assert not torch.equal(model.model.layers[0].mlp.up_proj.weight,
                           model.model.layers[0].mlp.gate_proj.weight)  # fmt: skip


def test_what_the_budget_does_not_cover_is_not_run(
    bench: Any,
    run: Run,
    rows_of: RowsOf,
) -> None:
    chosen = ["--adapted", "qkvo", "--providers", "hf + peft bf16", "ours, eager"]
    assert run(bench, *chosen, "--budget-s", 0) == 0
    rows = rows_of("end_to_end")
    assert {row["check"] for row in rows} == {"not run: --budget-s 0 was spent before"}
    assert len(rows) == 2 and not any(row["tokens/s"] for row in rows)


def test_an_error_as_the_budget_ends_is_not_laid_to_it(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(bench, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    args = argparse.Namespace(budget_s=20.0, timeout=40.0, output=None)
    found = []
    for error in (bench.WorkerTimeout("no answer within 20 s"), bench.WorkerError("OSError: late")):
        now[0] = 0.0
        asker = bench.Asker(args, CPU, [("tiny", "ours, eager")])

        def receive(timeout: float, error: Exception = error) -> None:
            now[0] += timeout
            raise error

        monkeypatch.setattr(asker.next, "receive", receive)
        monkeypatch.setattr(asker.next, "send", lambda *_, **__: None)
        found.append(asker.ask("ours, eager")["check"])
    assert found[0] == "not finished: --budget-s 20 was spent"
    assert found[1].endswith(": OSError: late")


def test_rates_are_of_tokens_and_flops(bench: Any) -> None:
    found = {
        "seconds": 0.5, "host": 0.01, "joules": 114.0, "losses": [2.0, 1.5], "start": 3.0, "note": "",
        "peak": ["a chip", 200.0], "allocated": 1 << 30, "reserved": 3 << 29,
    }  # fmt: skip
    row = bench.numbers(found, tokens=1000, flops=5e10)
    assert (row["tokens/s"], row["TFLOP/s"], row["MFU %"]) == (2000.0, 100.0, 50.0)
    assert (row["peak GiB"], row["reserved GiB"], row["CPU ms"]) == (1.0, 1.5, 10.0)
    assert row["J/step"] == 114.0


def in_blocks(models: Any) -> Any:
    """A model whose projections end with blocks of 128."""
    spec = models.SPECS["tiny"]
    sizes = {"hidden_size": 256, "intermediate_size": 384, "num_key_value_heads": 2}
    return dataclasses.replace(spec, shape={**spec.shape, **sizes})


def test_a_model_in_blocks_trains_as_with_one_scale(bench: Any, models: Any) -> None:
    training, spec = sys.modules["benchmarks.peers.training"], in_blocks(models)
    ids = models.token_rows(spec.length, 3)
    losses = []
    for kind in (training.Ours, training.OursInBlocks):
        torch.manual_seed(0)
        ours = kind(spec, "qkvo", torch.device("cpu"))
        assert (ours.state is None) == (kind is training.OursInBlocks)
        losses.append([float(ours.step(ids[i : i + 1]).detach()) for i in range(3)])
    assert losses[0] == pytest.approx(losses[1], rel=0.01) and losses[0] != losses[1]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["Ours", "OursInBlocks"])
def test_graphs_and_eager_steps_train_alike(kind: str, bench: Any, models: Any) -> None:
    training, spec = sys.modules["benchmarks.peers.training"], in_blocks(models)
    device = torch.device("cuda")
    ids = models.token_rows(spec.length, 8).to(device)
    losses = {}
    for graphs in (None, "layer", "iteration"):
        torch.manual_seed(0)
        ours = getattr(training, kind)(spec, "qkvo", device, graphs=graphs)
        losses[graphs] = [float(ours.step(ids[i : i + 1])) for i in range(8)]
    for graphs in ("layer", "iteration"):
        # other masks after the capture: the losses of a model of this size move by less than 1 %
        assert losses[graphs] == pytest.approx(losses[None], rel=0.01)
