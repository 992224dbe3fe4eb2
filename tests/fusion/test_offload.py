# SPDX-License-Identifier: Apache-2.0
"""offload_activations: what layers keep waits in host memory. Bits are those without, and nothing else stays."""

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

from lorakernels import BlockScaling, DelayedScaling, PhiloxState, fuse
from lorakernels.fusion import host_buffers
from lorakernels.fusion.offload import ActivationOffload, Visit
from tests.fusion.fused_models import LINEARS, VOCABULARY, adapted, an_adapter, tokens
from tests.fusion.test_fuse_memory import kept_bytes

LAYERS = 4
SAVES = ("fp8", "checkpoint")


# by the recipe's name, with sizes that it takes: the rows of k and v are a block
RECIPES = {
    "delayed": (DelayedScaling(), {}),
    "blocks": (BlockScaling(), {"hidden_size": 256, "intermediate_size": 128}),
}


def model_with(
    save: str,
    offload: bool,
    device: torch.device | str = "cpu",
    recipe: str = "delayed",
    **shape: int,
) -> nn.Module:
    """Equal models for equal arguments but `offload`."""
    torch.manual_seed(0)
    fp8, sizes = RECIPES[recipe]
    options: dict[str, Any] = {"dtype": torch.bfloat16} if str(device) != "cpu" else {}
    model = adapted(
        "Llama",
        LINEARS,
        model={"num_hidden_layers": LAYERS, **sizes, **shape},
        device=device,
        fp8=fp8,
        lora_dropout=0.1,
        rng_state=PhiloxState(3, device),
        **options,
    )
    fuse(model, save=save, attention="math", offload_activations=offload)
    return model.train()


def loss_of(model: nn.Module, x: Tensor, seed: int = 0) -> Tensor:
    torch.manual_seed(seed)  # of the masks
    return model(x, labels=x, use_cache=False).loss


def end(model: nn.Module) -> list[Tensor]:
    """Take the gradients and begin another iteration."""
    grads = [p.grad for p in model.parameters() if p.requires_grad]
    model.zero_grad(set_to_none=True)
    adapter = an_adapter(model)
    if adapter.fp8_state is not None:
        adapter.fp8_state.reduce_and_update()
    adapter.rng_state.advance()
    assert all(g is not None for g in grads)
    return grads


def offload_of(model: nn.Module) -> Any:
    (found,) = {layer.lorakernels.fused.offload for layer in model.model.layers}
    return found


def free_buffers(model: nn.Module) -> int:
    return sum(map(len, offload_of(model).buffers.free.values()))


@pytest.mark.slow
@pytest.mark.parametrize("order", ["one by one", "first in, last out", "first in, first out"])
@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_bits_are_those_without(device: torch.device, recipe: str, save: str, order: str) -> None:
    ours, theirs = (model_with(save, offload, device, recipe) for offload in (True, False))
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


@pytest.mark.parametrize("save", SAVES)
def test_a_graph_that_is_kept_for_a_second_backward(device: torch.device, save: str) -> None:
    found = []
    for offload in (True, False):
        model = model_with(save, offload, device)
        loss = loss_of(model, tokens(device=device))
        loss.backward(retain_graph=True)
        loss.backward()
        found.append(end(model))
    assert all(map(torch.equal, *found))


def test_inputs_leave_the_device_when_the_next_layer_ends() -> None:
    model, seen = model_with("checkpoint", True), []
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


@pytest.mark.parametrize("save", SAVES)
def test_saved_bytes_are_what_stays_on_the_device(
    save: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What autograd saves, with the copies that are on the device whenever a layer ends: two layers' at most."""
    model = adapted(
        "Llama", LINEARS, model={"num_hidden_layers": LAYERS}, fp8=DelayedScaling(), dtype=torch.bfloat16
    )  # fmt: skip
    x, most = tokens(2, 32), 0
    report = fuse(model, save=save, offload_activations=True, tokens=x.numel())
    assert {layer.save for layer in report.layers} == {f"{save}-offload"}
    end_of_layer = Visit.end

    def end(visit: Visit) -> None:
        nonlocal most
        here = (k._here for each in visit.offload._live(None) for k in each.kept())
        most = max(most, sum(t.nbytes for t in here if t is not None))
        end_of_layer(visit)

    monkeypatch.setattr(Visit, "end", end)
    saved = kept_bytes(model, x)
    loss_of(model, x).backward()
    slots = 2 * LAYERS * (16 + 8)  # masks' slots and FP8 scales, not in the formula
    assert abs(saved + most - report.saved_bytes) <= 0.02 * report.saved_bytes + slots


def fuse_report_of(save: str, count: int) -> Any:
    model = adapted("Llama", LINEARS, fp8=DelayedScaling(), dtype=torch.bfloat16)
    return fuse(model, save=save, tokens=count)


@pytest.mark.parametrize("save", SAVES)
def test_host_memory_is_used_again(save: str) -> None:
    model = model_with(save, True)
    for _ in range(3):
        loss_of(model, tokens(2, 8)).backward()
        end(model)
    assert free_buffers(model) == LAYERS - 1  # what the last layer keeps never leaves
    abandoned = loss_of(model, tokens(2, 8))  # no backward
    assert free_buffers(model) == 0
    del abandoned
    gc.collect()
    assert free_buffers(model) == LAYERS - 1


@pytest.mark.parametrize("save", SAVES)
def test_batches_of_many_lengths_take_no_more_than_the_longest(save: str) -> None:
    """With evaluations of other lengths between them."""
    found = []
    for lengths in (range(2, 24, 3), [23]):
        model = model_with(save, True)
        for length in lengths:
            loss_of(model, tokens(2, length)).backward()
            end(model)
            with torch.no_grad():
                loss_of(model.eval(), tokens(1, 25 - length))
            model.train()
        (free,) = offload_of(model).buffers.free.values()
        assert len(free) == LAYERS - 1
        found.append(sum(buffer.numel() for buffer in free))
    assert found[0] == found[1] > 0


@pytest.mark.parametrize("save", SAVES)
def test_memory_that_is_copied_to_is_not_freed(save: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backward ends where its gradients are complete, while the input of the layer before is on its way."""
    model, running = model_with(save, True), []

    class Copy:
        def __init__(self, to: Tensor) -> None:
            self.to = weakref.ref(to)
            running.append(self)

        def synchronize(self) -> None:
            assert self.to() is not None
            running.remove(self)

    def copy_later(self: Any, to: Tensor, source: Tensor, device: torch.device) -> Copy:
        to.copy_(source)
        return Copy(to)

    monkeypatch.setattr(ActivationOffload, "copy", copy_later)
    monkeypatch.setattr("torch.cuda.current_stream", lambda device=None: Stream(running))
    loss = loss_of(model, tokens())
    last = [p for p in model.model.layers[-1].parameters() if p.requires_grad]
    torch.autograd.grad(loss, last)
    assert running
    del loss
    gc.collect()
    assert not running


class Stream:
    """Waits for the copies that `Copy` stands for."""

    def __init__(self, running: list[Any]) -> None:
        self.running = running

    def wait_event(self, copy: Any) -> None:
        self.running.remove(copy)


class Runtime:
    """Counts what is pinned; `code` is what a pin returns."""

    def __init__(self, code: int) -> None:
        self.code, self.pinned = code, dict[int, int]()

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.pinned |= {} if self.code else {address: size}
        return self.code

    def cudaHostUnregister(self, address: int) -> None:
        del self.pinned[address]


@pytest.mark.parametrize("code", [0, 2])
def test_buffers_are_pinned_while_they_live(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime(code)
    monkeypatch.setattr("torch.cuda.cudart", lambda: runtime)
    if code:
        with pytest.raises(RuntimeError, match=r"4,096 bytes .* cannot be pinned: CUDA error 2"):
            host_buffers._pinned(4096, torch.device("cuda", 0))
        assert runtime.pinned == {}
        return
    found = host_buffers._pinned(4096, torch.device("cuda", 0))
    assert runtime.pinned == {found.data_ptr(): 4096}
    del found
    assert runtime.pinned == {}


def test_evaluation_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_with("checkpoint", True).eval()
    monkeypatch.setattr(type(offload_of(model)), "visit", lambda *_: 1 / 0)
    with torch.no_grad():
        loss_of(model, tokens())
    with pytest.raises(ZeroDivisionError):
        loss_of(model, tokens())


@pytest.mark.parametrize("way", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copied_model_keeps_its_own(way: Any) -> None:
    model, x = model_with("fp8", True), tokens()
    loss = loss_of(model, x)
    twin = way(model)
    assert offload_of(twin) is not offload_of(model)
    loss_of(twin, x).backward()
    loss.backward()
    assert all(map(torch.equal, end(model), end(twin)))


def test_a_budget_may_choose_what_is_offloaded() -> None:
    model = adapted("Llama", LINEARS, model={"num_hidden_layers": 4}, fp8=DelayedScaling())
    x = tokens()
    fp8 = fuse_report_of("fp8", x.numel()).layers[0].bytes
    options = {"tokens": x.numel(), "offload_activations": True}
    two = 2 * x.numel() * 32 * 4  # fp32 inputs of the layers whose copies are on the device
    with pytest.raises(ValueError, match=f"at least {two} bytes together"):
        fuse(model, memory_budget=two - 1, **options)
    report = fuse(model, memory_budget=two, **options)
    assert {layer.save for layer in report.layers} == {"checkpoint-offload"}
    assert report.saved_bytes == two < fp8
    loss_of(model, x).backward()


def test_forms_that_stay_on_the_device_are_refused() -> None:
    model = adapted("Llama", LINEARS, fp8=DelayedScaling())
    with pytest.raises(ValueError, match=r'needs save="fp8" or "checkpoint".*found save="full"'):
        fuse(model, save="full", offload_activations=True)


def trained(
    save: str, offload: bool, device: torch.device, graphs: str, recipe: str
) -> tuple[list[list[Tensor]], int]:
    """(losses and gradients of six steps, bytes that the last step needed at most)."""
    shape = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 8}
    model = model_with(save, offload, device, recipe, **shape)
    adapter = an_adapter(model)
    states = {"fp8_state": adapter.fp8_state, "rng_states": [adapter.rng_state]}
    x = torch.randint(VOCABULARY, (8, 1024), device=device)
    parameters = [p for p in model.parameters() if p.requires_grad]

    def step() -> Tensor:
        model.zero_grad(set_to_none=True)
        loss = loss_of(model, x)
        loss.backward()
        if adapter.fp8_state is not None:
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
@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_graphs_replay_the_copies(recipe: str, save: str, graphs: str) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    ours, theirs = (trained(save, offload, device, graphs, recipe) for offload in (True, False))
    for step, (a, b) in enumerate(zip(ours[0], theirs[0], strict=True)):
        assert all(map(torch.equal, a, b)), step
    if graphs == "eager":  # what two of eight layers keep stays
        one = 8 * 1024 * (256 * 2 if save == "checkpoint" else 2 * 512)
        assert theirs[1] - ours[1] >= 4 * one


@pytest.mark.gpu
def test_another_librarys_graph_is_refused() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    model = model_with("fp8", True, device)
    x = tokens(device=device)
    loss_of(model, x).backward()
    with (
        pytest.raises(RuntimeError, match=r"lorakernels\.graphs"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        loss_of(model, x)
