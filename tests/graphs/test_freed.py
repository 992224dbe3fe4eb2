# SPDX-License-Identifier: Apache-2.0
"""Graphs go with what holds them: a manager and its layers that are dropped without close() leave nothing behind."""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from lorakernels.graphs import GraphManager
from lorakernels.graphs.capture.states import PINNED_BY
from lorakernels.graphs.compare.signature import extension, flatten
from lorakernels.graphs.device.pool import Pool
from torch import Tensor, nn

from lorakernels import DelayedScaling, FP8State
from tests.graphs.fake import FakeBackend
from tests.graphs.layers import batches, managed, run, stack, warm
from tests.graphs.steps import Sgd, graphed

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def only_when_asked() -> Iterator[None]:
    """No collection but the tests' own."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def refs_to(*things: Any) -> list[weakref.ref[Any]]:
    return [weakref.ref(x) for x in things]


def replayed(**options: Any) -> tuple[GraphManager, nn.ModuleList, list[FakeBackend]]:
    """Captured, and past the trial."""
    backends: list[FakeBackend] = []

    def backend() -> FakeBackend:
        backends.append(FakeBackend())
        return backends[-1]

    layers = stack(CPU)
    manager = managed(layers, CPU, backend=backend, **options)
    warm(manager, layers, CPU)
    for _ in range(3):
        for x in batches(CPU, manager.num_microbatches):
            run(layers, x).sum().backward()
        manager.end_iteration()
    return manager, layers, backends


OPTIONS: dict[str, dict[str, Any]] = {
    "grads added": {"grads": "add"},
    "grads by autograd": {"grads": "autograd"},
    "two microbatches": {"num_microbatches": 2},
    "several shapes": {"on_new_shape": "capture"},
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:replay of layer")  # a new shape
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_manager_that_is_dropped_goes_with_its_layers(options: dict[str, Any]) -> None:
    manager, layers, backends = replayed(**options)
    if "on_new_shape" in options:
        run(layers, torch.randn(5, 8)).sum().backward()
        manager.end_iteration()
        assert len(backends) == 2
    calls = [call for one in manager._blocks.captured for call in one.graphs.calls]
    gone = refs_to(manager, manager.graphs, *layers, *layers.parameters(), *calls)
    gone += [ref for backend in backends for ref in backend.graphs]
    gone += refs_to(*[p.grad for p in layers.parameters()])
    del manager, layers, calls
    gc.collect()
    alive = [ref() for ref in gone if ref() is not None]
    assert not alive, [type(x).__name__ for x in alive]


@pytest.mark.gpu
def test_device_memory_goes_too() -> None:
    """Without a wait for the device: launches are under way when the graphs go."""
    device = torch.device("cuda")
    layers = stack(device)
    manager = managed(layers, device)
    warm(manager, layers, device)
    pool = manager.graphs.backend._pool.id
    assert any(s["segment_pool_id"] == pool for s in torch.cuda.memory_snapshot())
    for x in batches(device, 3):
        run(layers, x).sum().backward()
        manager.end_iteration()
    del manager, layers
    gc.collect()
    torch.cuda.empty_cache()
    assert not any(s["segment_pool_id"] == pool for s in torch.cuda.memory_snapshot())
    torch.cuda.synchronize()


def test_layers_that_stay_keep_their_manager() -> None:
    manager, layers, backends = replayed()
    kept = weakref.ref(manager)
    del manager
    gc.collect()
    launches = [g.launches for ref in backends[0].graphs if (g := ref())]
    run(layers, torch.randn(3, 8)).sum().backward()
    now = [g.launches for ref in backends[0].graphs if (g := ref())]
    assert now == [n + 1 for n in launches] and kept() is not None


def test_a_whole_step_that_is_dropped() -> None:
    """Although the model stays; its gradients keep their values."""
    model, backend = nn.Linear(8, 8), FakeBackend()
    graph = graphed(Sgd(model), CPU, backend=lambda: backend)
    for x in batches(CPU, 4):
        graph(x)
    assert graph.phase == "replaying"
    before = [p.grad.clone() for p in model.parameters()]
    gone = [*refs_to(graph, graph._steps[0]), *backend.graphs]
    del graph
    gc.collect()
    assert not any(ref() for ref in gone)
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), before, strict=True))


def test_pins_go_too() -> None:
    """An FP8 state that outlives what relied on its addresses may move again; a later manager's pin stays."""
    state = FP8State(("x",), DelayedScaling())

    def loop() -> tuple[GraphManager, nn.ModuleList]:
        layers = stack(CPU, 2)
        manager = managed(layers, CPU, fp8_state=state)
        state.reduce_and_update()
        warm(manager, layers, CPU)
        return manager, layers

    first = loop()
    assert PINNED_BY in str(state.pinned_by)
    first[0].close()
    second = loop()
    del first
    gc.collect()
    assert PINNED_BY in str(state.pinned_by), "the second's, although the first is gone"
    del second
    gc.collect()
    assert state.pinned_by is None


class Collecting(FakeBackend):
    """As on CUDA: looks for garbage before it captures, and what runs under capture makes the state pin itself."""

    def __init__(self, state: FP8State) -> None:
        super().__init__()
        self.state = state

    @contextmanager
    def session(self) -> Iterator[None]:
        gc.collect()
        with super().session():
            yield

    @contextmanager
    def capture(self, replaced: Any = None) -> Iterator[Any]:
        self.state.pin("a CUDA graph")
        with super().capture(replaced) as captured:
            yield captured


@pytest.mark.slow
@pytest.mark.parametrize("others", [[], ["a CUDA graph"]], ids=["ours", "another graph's too"])
def test_the_pins_of_a_step_that_goes_while_the_next_one_captures(others: list[str]) -> None:
    state, model = FP8State(("x",), DelayedScaling()), nn.Linear(8, 8)
    state.reduce_and_update()
    for pin in others:
        state.pin(pin)
    for _ in range(3):
        graph = graphed(Sgd(model), CPU, backend=lambda: Collecting(state), fp8_state=state)
        for x in batches(CPU, 4):
            graph(x)
        assert set(str(state.pinned_by).split(", ")) == {"a CUDA graph", PINNED_BY}
        graph.itself = graph  # so that only the collector finds it
    state.pin("the demo")
    del graph
    gc.collect()
    assert state.pinned_by == ", ".join([*others, "the demo"])
    state.unpin()
    state.register("y")


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, 1], ids=["the older goes first", "the younger goes first"])
def test_two_managers_pin_one_state(first: int) -> None:
    state = FP8State(("x",), DelayedScaling())
    state.reduce_and_update()

    def loop() -> tuple[GraphManager, nn.ModuleList]:
        layers = stack(CPU, 2)
        manager = managed(layers, CPU, fp8_state=state, backend=lambda: Collecting(state))
        warm(manager, layers, CPU)
        return manager, layers

    loops = [loop(), loop()]
    for left in (1, 0):
        with pytest.raises(RuntimeError, match=f"by a CUDA graph, {PINNED_BY}; drop what"):
            state.register("y")
        del loops[first * left]
        gc.collect()
    assert state.pinned_by is None and state.register("y") == 1


class Target:
    """As GradSlots takes them; looks for garbage while it is asked, before the slots' constructor is through."""

    references = 3

    def __init__(self) -> None:
        self.own = nn.Parameter(torch.zeros(2))
        self.grad = torch.zeros(2)

    @property
    def parameter(self) -> nn.Parameter:
        gc.collect()
        return self.own


def three_holders() -> dict[str, tuple[Any, list[object]]]:
    """Each type of the extension that holds Python's objects, and which."""
    watch, slots_of = extension().Watch(), Target()
    layer, x = nn.Linear(2, 2), torch.zeros(2)
    entries, data_ptr = {"a": x, "b": layer}, x.data_ptr
    watch.add_dict(entries, ["a"])
    watch.add_address(data_ptr, data_ptr())
    watch.add_attribute(layer, "training", layer.training)
    like, given, cast = object(), object(), (len, "cpu", False, repr, None)
    spec = [tuple, 0, dict, 0]
    match = extension().matcher(spec, Tensor, [(0, given)], [], [(0, like)], cast, watch)
    held = [entries, "a", x, "b", None, data_ptr, layer, "training", True]
    return {
        "Watch": (watch, held),
        "Matcher": (match.__self__, [Tensor, watch, *spec, *cast, given, like]),
        "GradSlots": (extension().GradSlots([slots_of]), [slots_of, slots_of.own, slots_of.grad]),
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Watch", "Matcher", "GradSlots"])
def test_the_collector_sees_each_reference_once(kind: str) -> None:
    """One more would be as bad as one less: what is in use would be freed."""
    holder, held = three_holders()[kind]
    found = gc.get_referents(holder)
    assert sorted(map(id, found)) == sorted(map(id, [type(holder), *held]))
    unmade = type(holder).__new__(type(holder))
    assert gc.get_referents(unmade) == [type(holder)]
    gc.collect()


def test_what_the_collector_has_cleared_takes_no_call() -> None:
    """Destructors may run Python code while a cycle is taken apart."""
    slot = ctypes.pythonapi.PyType_GetSlot
    slot.restype, slot.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_int]

    def clear(holder: Any) -> None:
        tp_clear = slot(type(holder), 51)
        assert tp_clear
        assert ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object)(tp_clear)(holder) == 0
        assert gc.get_referents(holder) == [type(holder)]

    cast = (torch.is_autocast_enabled, "cpu", False, torch.get_autocast_dtype, None)
    watch, slots = extension().Watch(), extension().GradSlots([Target()])
    _, spec = flatten(((), {}))
    both = [extension().matcher(spec, Tensor, [], [], [], cast, watch) for _ in range(2)]
    assert all(match((), {}) == [] for match in both)
    clear(both[0].__self__), clear(watch), clear(slots)
    assert both[0]((), {}) is None
    for call in (watch.check, slots.state, lambda: both[1]((), {})):
        with pytest.raises(RuntimeError, match="garbage collector has cleared it"):
            call()


def test_a_pool_gives_its_references_back_when_it_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    released = []
    monkeypatch.setattr(
        torch._C, "_cuda_releasePool", lambda *args: released.append(args), raising=False
    )
    pool = Pool.__new__(Pool)
    pool.device, pool.id, pool._references = 3, (0, 7), 2
    del pool
    assert released == [(3, (0, 7))] * 2
    Pool.__new__(Pool)  # as when its constructor has refused
    assert len(released) == 2
