# SPDX-License-Identifier: Apache-2.0
"""save="offload": layers' inputs wait in host memory. Bits are those of "checkpoint", and nothing else stays."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from lorakernels.graphs import GraphManager, StepGraph
from torch import Tensor, nn

from lorakernels import DelayedScaling, PhiloxState, fuse
from tests.fusion.fused_models import LINEARS, VOCABULARY, adapted, an_adapter, tokens

LAYERS = 4


def model_with(save: str, device: torch.device | str = "cpu", **shape: int) -> nn.Module:
    """Equal models for equal arguments but `save`."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"dtype": torch.bfloat16} if str(device) != "cpu" else {}
    model = adapted(
        "Llama",
        LINEARS,
        model={"num_hidden_layers": LAYERS, **shape},
        device=device,
        fp8=DelayedScaling(),
        lora_dropout=0.1,
        rng_state=PhiloxState(3, device),
        **options,
    )
    fuse(model, save=save, attention="math")
    return model.train()


def loss_of(model: nn.Module, x: Tensor, seed: int = 0) -> Tensor:
    torch.manual_seed(seed)  # of the masks
    return model(x, labels=x, use_cache=False).loss


def end(model: nn.Module) -> list[Tensor]:
    """Take the gradients and begin another iteration."""
    grads = [p.grad for p in model.parameters() if p.requires_grad]
    model.zero_grad(set_to_none=True)
    adapter = an_adapter(model)
    adapter.fp8_state.reduce_and_update()
    adapter.rng_state.advance()
    assert all(g is not None for g in grads)
    return grads


def inputs_of(model: nn.Module) -> Any:
    (found,) = {layer._fused.inputs for layer in model.model.layers}
    return found


@pytest.mark.parametrize("order", ["one by one", "first in, last out", "first in, first out"])
def test_bits_are_those_of_a_checkpoint(device: torch.device, order: str) -> None:
    ours, theirs = model_with("offload", device), model_with("checkpoint", device)
    for step in range(3):
        found = []
        for model in (ours, theirs):
            torch.manual_seed(step)
            batches = [tokens(2, 8 + step + i, device) for i in range(2)]
            losses = []
            for i, x in enumerate(batches):
                losses.append(loss_of(model, x, 2 * step + i))
                if order == "one by one":
                    losses[-1].backward()
            if order != "one by one":
                for loss in losses if order == "first in, first out" else losses[::-1]:
                    loss.backward()
            found.append([*(loss.detach() for loss in losses), *end(model)])
        assert all(map(torch.equal, *found)), step


def test_a_graph_that_is_kept_for_a_second_backward(device: torch.device) -> None:
    found = []
    for save in ("offload", "checkpoint"):
        model = model_with(save, device)
        loss = loss_of(model, tokens(device=device))
        loss.backward(retain_graph=True)
        loss.backward()
        found.append(end(model))
    assert all(map(torch.equal, *found))


def test_only_the_newest_input_stays_on_the_device() -> None:
    model, seen = model_with("offload"), []
    for layer in model.model.layers:
        layer.register_forward_pre_hook(
            lambda _, args: seen.append(weakref.ref(args[0].untyped_storage()))
        )
    loss = loss_of(model, tokens())
    gc.collect()
    assert [ref() is not None for ref in seen] == [False] * (LAYERS - 1) + [True]
    loss.backward()
    gc.collect()
    assert [ref() is not None for ref in seen] == [False] * LAYERS


def test_host_memory_is_used_again() -> None:
    model = model_with("offload")
    places = set()
    for _ in range(3):
        loss = loss_of(model, tokens(2, 8))
        kept = [ref() for ref in inputs_of(model)._waiting]
        places |= {x._host.data_ptr() for x in kept}
        del kept
        loss.backward()
        del loss
        end(model)
    assert len(places) == LAYERS
    abandoned = loss_of(model, tokens(2, 8))  # no backward
    del abandoned
    gc.collect()
    loss_of(model, tokens(2, 8)).backward()
    free = inputs_of(model)._buffers._free
    assert sum(map(len, free.values())) == LAYERS


def test_evaluation_copies_nothing() -> None:
    model = model_with("offload").eval()
    with torch.no_grad():
        loss_of(model, tokens())
    assert inputs_of(model)._waiting == []


@pytest.mark.parametrize("way", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copied_model_has_inputs_of_its_own(way: Any) -> None:
    model, x = model_with("offload"), tokens()
    loss = loss_of(model, x)
    twin = way(model)
    assert inputs_of(twin) is not inputs_of(model)
    loss_of(twin, x).backward()
    loss.backward()
    assert all(map(torch.equal, end(model), end(twin)))


def trained(save: str, device: torch.device, graphs: str) -> tuple[list[list[Tensor]], int]:
    """(losses and gradients of six steps, bytes that the last step needed at most)."""
    model = model_with(save, device, hidden_size=256, intermediate_size=512, num_hidden_layers=8)
    adapter = an_adapter(model)
    states = {"fp8_state": adapter.fp8_state, "rng_states": [adapter.rng_state]}
    x = torch.randint(VOCABULARY, (8, 1024), device=device)
    parameters = [p for p in model.parameters() if p.requires_grad]

    def step() -> Tensor:
        model.zero_grad(set_to_none=True)
        loss = loss_of(model, x)
        loss.backward()
        adapter.fp8_state.reduce_and_update()
        return loss.detach()

    layers, run, found = None, step, []
    if graphs == "layer":
        layers = GraphManager(model.model.layers, **states)
    if graphs == "step":
        run = StepGraph(step, modules=[model], **states)
    for _ in range(6):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss = run()
        peak = torch.cuda.max_memory_allocated() - before
        found.append([loss.clone(), *(p.grad.clone() for p in parameters)])
        if layers is not None:
            layers.end_iteration()
    if layers is not None:
        layers.close()
    if isinstance(run, StepGraph):
        run.reset()
    return found, peak


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", ["eager", "layer", "step"])
def test_graphs_replay_the_copies(graphs: str) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    ours, theirs = (trained(save, device, graphs) for save in ("offload", "checkpoint"))
    for step, (a, b) in enumerate(zip(ours[0], theirs[0], strict=True)):
        assert all(map(torch.equal, a, b)), step
    if graphs == "eager":  # two of eight inputs, and what comes and goes
        one = 8 * 1024 * 256 * 2
        assert theirs[1] - ours[1] >= 4 * one


@pytest.mark.gpu
def test_another_librarys_graph_is_refused() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    model = model_with("offload", device)
    x = tokens(device=device)
    loss_of(model, x).backward()
    with (
        pytest.raises(RuntimeError, match=r"lorakernels\.graphs"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        loss_of(model, x)
