# SPDX-License-Identifier: Apache-2.0
"""Recomputation, by whatever checkpoint, is no forward: the recorder tells it apart."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lorakernels.graphs import OrderRecorder
from tests.graphs.recorded import Block, blocks, chain, gradients, recording
from tests.graphs.schedules import gpipe


def each(reentrant: bool, layers: nn.ModuleList, x: Tensor) -> Tensor:
    for layer in layers:
        x = checkpoint(layer, x, use_reentrant=reentrant)
    return x


def halves(reentrant: bool, layers: nn.ModuleList, x: Tensor) -> Tensor:
    x = checkpoint(partial(chain, layers[:2]), x, use_reentrant=reentrant)
    return chain(layers[2:], x)


def nested(outer: bool, inner: bool, layers: nn.ModuleList, x: Tensor) -> Tensor:
    return checkpoint(partial(each, inner, layers), x, use_reentrant=outer)


CHECKPOINTS = [
    pytest.param(chain, id="none"),
    pytest.param(partial(each, False), id="each-layer"),
    pytest.param(partial(each, True), id="each-layer-reentrant"),
    pytest.param(partial(halves, False), id="two-of-three"),
    pytest.param(partial(halves, True), id="two-of-three-reentrant"),
    pytest.param(partial(nested, False, False), id="nested"),
    pytest.param(partial(nested, True, True), id="nested-reentrant"),
    pytest.param(partial(nested, True, False), id="nested-in-reentrant"),
]


@pytest.mark.parametrize("run", CHECKPOINTS)
def test_recomputation_is_no_forward_and_no_bit_changes(
    run: Callable, device: torch.device
) -> None:
    """On CUDA the engine runs the backward, and so the recomputation, in a thread of its own."""
    layers = blocks(3).to(device)
    expected = gradients(layers, partial(chain, layers))
    with recording(layers, 2) as recorder:
        for _ in range(2):
            found = gradients(layers, partial(run, layers))
            assert recorder.end_iteration() == gpipe(3, 2)
            assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("run", CHECKPOINTS)
def test_a_backward_in_another_thread(run: Callable) -> None:
    layers = blocks(3)
    with recording(layers) as recorder, ThreadPoolExecutor(1) as pool:
        loss = run(layers, torch.randn(2, 4, requires_grad=True)).sum()
        pool.submit(loss.backward).result()
        assert recorder.end_iteration() == gpipe(3, 1)


@pytest.mark.parametrize("reentrant", [False, True], ids=["plain", "reentrant"])
def test_a_checkpoint_inside_a_layer_is_the_layers_own_business(reentrant: bool) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Block()

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, use_reentrant=reentrant)

    layers = nn.ModuleList([Outer(), Outer()])
    with recording(layers) as recorder:
        chain(layers, torch.randn(2, 4, requires_grad=True)).sum().backward()
        assert recorder.end_iteration() == gpipe(2, 1)


@pytest.mark.parametrize("run", CHECKPOINTS)
def test_evaluation_between_two_microbatches_leaves_no_trace(run: Callable) -> None:
    layers = blocks(3)
    x = torch.randn(2, 4, requires_grad=True)
    with recording(layers, 2) as recorder:
        for _ in range(2):
            with torch.no_grad():
                run(layers, x)
            layers.eval()
            run(layers, x)
            layers.train()
            run(layers, x).sum().backward()
        assert len(recorder.end_iteration()) == 12


def test_a_discarded_checkpointed_run_is_freed() -> None:
    layers = blocks(2)
    with recording(layers) as recorder:
        x = layers[0](torch.randn(2, 4))
        y = checkpoint(layers[1], x, use_reentrant=True)
        inputs = weakref.ref(x)
        del x, y
        recorder.discard_iteration()
        gc.collect()
        assert inputs() is None


def test_two_microbatches_inside_one_checkpoint() -> None:
    layers = blocks(1)

    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        return layers[0](x), layers[0](2 * x)

    with recording(layers, 2) as recorder:
        first, second = checkpoint(both, torch.randn(2, 4, requires_grad=True), use_reentrant=True)
        (first + second).sum().backward()
        assert recorder.end_iteration() == gpipe(1, 2)


def test_a_function_that_keeps_its_own_graph_is_no_checkpoint() -> None:
    layers = blocks(1)

    class Keep(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor) -> Tensor:
            with torch.enable_grad():
                ctx.x = x.detach().requires_grad_()
                ctx.y = layers[0](ctx.x)
            return ctx.y.detach()

        @staticmethod
        def backward(ctx, dy: Tensor) -> Tensor:
            ctx.y.backward(dy)
            return ctx.x.grad

    with recording(layers) as recorder:
        Keep.apply(torch.randn(2, 4, requires_grad=True)).sum().backward()
        assert recorder.end_iteration() == gpipe(1, 1)


@pytest.mark.parametrize("reentrant", [False, True], ids=["plain", "reentrant"])
def test_hf_llama_with_gradient_checkpointing(reentrant: bool) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=3,
        num_attention_heads=2,
        use_cache=False,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    runs: list[object] = []
    model.model.layers[0].self_attn.register_forward_pre_hook(lambda *found: runs.append(found))
    tokens = torch.arange(10).view(2, 5)
    with OrderRecorder(3, 2).attach(list(model.model.layers)) as recorder:
        losses = [model(tokens, labels=tokens).loss for _ in range(2)]
        for loss in reversed(losses):
            loss.backward()
        assert recorder.end_iteration() == gpipe(3, 2)
    assert len(runs) == 4, "two microbatches, each recomputed"
