# SPDX-License-Identifier: Apache-2.0
"""Calls of a compiled layer's ops that pass torch's dispatcher launch what the others launch."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lorakernels import LoRALinear
from lorakernels.autograd.linear.node import Saved
from lorakernels.recorded.forms import sees_dispatch_keys
from lorakernels.recorded.routing import without_recordings
from tests.dry_cuda import dry_cuda
from tests.recorded.test_recorded_compiled import BF16, OPTIONS, K, layer, rows
from tests.recorded.test_recorded_linear import launches

FORWARD = torch.ops.lorakernels.lora_linear_forward.default
BACKWARD = torch.ops.lorakernels.lora_linear_backward.default
pytestmark = pytest.mark.skipif(
    not sees_dispatch_keys() or not hasattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback"),
    reason="all calls go through this torch's dispatcher",
)


def forward_arguments(module: LoRALinear, x: Tensor, slot: Tensor) -> tuple[Any, ...]:
    base = (module.stored, module.weight_scale_inv, module.bias)
    drawn = slot if module.lora_dropout else None
    return (x, *base, module.lora_A, module.lora_B, drawn, module.handle.tensor, True)


def backward_arguments(given: tuple[Any, ...], made: tuple[Tensor, ...]) -> tuple[Any, ...]:
    _, weight, scale_inv, _, lora_A, lora_B, slot, handle, training = given
    y, x8, x_scale_inv, s = made
    dy = torch.cos(torch.arange(y.numel(), device=y.device)).view_as(y).to(y.dtype)
    saved = Saved(weight, scale_inv, lora_A.detach(), lora_B.detach(), slot, x8, x_scale_inv, s)
    return (dy, *saved, None, handle, [True, True, True, False], training)


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Grows by an entry whenever the dispatcher reaches an op's own code, which looks for the layer's numbers."""
    module = import_module("lorakernels.autograd.compiled.linear")
    calls: list[str] = []
    found = module.numbers_of

    def counting(handle: Tensor) -> Any:
        calls.append("")
        return found(handle)

    with monkeypatch.context() as patch:
        patch.setattr(module, "numbers_of", counting)
        yield calls


def names(module: LoRALinear, slot: Tensor) -> dict[str, Tensor]:
    state = module.fp8_state
    states = {} if state is None else {"state_x": state.forward, "state_dy": state.backward}
    parameters = {name: p.data for name, p in module.named_parameters()}
    return {"slot": slot, **states, **module._buffers, **parameters, "weight": module.stored}


@pytest.mark.parametrize("name", OPTIONS)
def test_repeated_calls_pass_the_dispatcher_and_launch_the_same(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, x, slot = layer(name), torch.randn(rows(name), K, dtype=BF16), torch.tensor([5, 6])
    options = {"scaling": None, "p": None}
    with dry_cuda() as recorded, torch.no_grad(), counted(monkeypatch) as calls:
        recorded.name(**names(module, slot))

        def step() -> list[Any]:
            recorded.calls.clear()
            given = forward_arguments(module, x, slot)
            made = FORWARD(*given, **options)
            BACKWARD(*backward_arguments(given, made), None, None)  # as some torch write it
            return launches(recorded.calls)

        with without_recordings():
            expected = step()
        assert step() == expected and len(calls) == 4
        for _ in range(2):
            assert step() == expected
        assert len(calls) == 4 and recorded.runs == 6


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[Any] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.names.append(function)
        return function(*args, **(kwargs or {}))


WATCHED: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "gradients": torch.enable_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "inference mode": torch.inference_mode,
    "a dispatch mode": Seen,
    "a profiler": lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
    "no recordings": without_recordings,
}


@pytest.mark.parametrize("how", WATCHED)
def test_what_watches_or_changes_a_call_sees_it(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, x, slot = layer("dropout"), torch.randn(96, K, dtype=BF16), torch.tensor([5, 6])
    with dry_cuda(), torch.no_grad(), counted(monkeypatch) as calls:
        given = forward_arguments(module, x, slot)
        for _ in range(2):
            made = FORWARD(*given)
        assert len(calls) == 1
        with WATCHED[how]() as watching:
            found = FORWARD(*given)
        assert len(calls) == 2
        assert [t.shape for t in found] == [t.shape for t in made]
        if isinstance(watching, Seen):
            assert FORWARD in watching.names
        FORWARD(*given)
        assert len(calls) == 2


OTHER: dict[str, Callable[[tuple[Any, ...]], tuple[Any, ...]]] = {
    "more rows": lambda a: (torch.randn(128, K, dtype=BF16), *a[1:]),
    "another dtype": lambda a: (a[0].half(), *a[1:]),
    "with gaps": lambda a: (torch.randn(96, 2 * K, dtype=BF16)[:, :K], *a[1:]),
    "no dropout": lambda a: (*a[:6], None, *a[7:]),
    "evaluation": lambda a: (*a[:8], False),
    "a copy of the handle": lambda a: (*a[:7], a[7].clone(), a[8]),
}


@pytest.mark.parametrize("how", OTHER)
def test_a_call_of_another_form_goes_through_the_dispatcher(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, x, slot = layer("dropout"), torch.randn(96, K, dtype=BF16), torch.tensor([5, 6])
    with dry_cuda(), torch.no_grad(), counted(monkeypatch) as calls:
        given = forward_arguments(module, x, slot)
        for _ in range(2):
            FORWARD(*given)
        FORWARD(*OTHER[how](given))
        assert len(calls) == 2
        FORWARD(*given)
        assert len(calls) == 2


def test_an_own_scaling_goes_through_the_dispatcher(monkeypatch: pytest.MonkeyPatch) -> None:
    module, x, slot = layer("dropout"), torch.randn(96, K, dtype=BF16), torch.tensor([5, 6])
    with dry_cuda() as recorded, torch.no_grad(), counted(monkeypatch) as calls:
        given = forward_arguments(module, x, slot)
        for _ in range(2):
            FORWARD(*given)
        recorded.calls.clear()
        FORWARD(*given, scaling=0.25)
        assert len(calls) == 2
        (up,) = [c.arguments for c in recorded.calls if "scaling" in c.arguments]
        assert up["scaling"] == 0.25


def test_other_needs_go_through_the_dispatcher_even_in_a_list_that_was_given_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module, x, slot = layer("dropout"), torch.randn(96, K, dtype=BF16), torch.tensor([5, 6])
    with dry_cuda(), torch.no_grad(), counted(monkeypatch) as calls:
        given = forward_arguments(module, x, slot)
        back = backward_arguments(given, FORWARD(*given))
        assert len(BACKWARD(*back)[0]) == 96 and len(calls) == 2
        back[-2][0] = False
        assert len(BACKWARD(*back)[0]) == 0 and len(calls) == 3


def test_a_misaligned_x_runs_by_the_ops_and_updates_the_scales_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module, slot = layer("dropout"), torch.tensor([5, 6])
    state = module.fp8_state
    assert state is not None
    memory = torch.randn(96 * K + 1, dtype=BF16)
    with dry_cuda() as recorded, torch.no_grad(), counted(monkeypatch) as calls:
        updates = []
        for x in (memory[:-1], memory[:-1], memory[1:]):
            before = state.updates
            FORWARD(*forward_arguments(module, x.view(96, K), slot))
            updates.append(state.updates - before)
        assert updates == [1, 1, 1]
        assert (
            len(calls) == 2 and recorded.runs == 2
        )  # the first through the dispatcher, the third by the ops


def test_a_changed_number_makes_a_new_handle(monkeypatch: pytest.MonkeyPatch) -> None:
    module, x, slot = layer("dropout"), torch.randn(96, K, dtype=BF16), torch.tensor([5, 6])
    with dry_cuda(), torch.no_grad(), counted(monkeypatch) as calls:
        for _ in range(2):
            FORWARD(*forward_arguments(module, x, slot))
        module.scaling = 3.0
        FORWARD(*forward_arguments(module, x, slot))
        assert len(calls) == 2


def test_no_call_keeps_a_tensor() -> None:
    module, slot = layer("dropout"), torch.tensor([5, 6])
    with dry_cuda() as recorded, torch.no_grad():
        x = torch.randn(96, K, dtype=BF16)
        for _ in range(2):
            FORWARD(*forward_arguments(module, x, slot))
        recorded.calls.clear()
        recorded.memory.storages.clear()
        gone = weakref.ref(x)
        del x
        assert gone() is None


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPTIONS)
def test_repeated_calls_compute_what_the_ops_compute(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = layer(name, "cuda")
    x = torch.randn(rows(name), K, dtype=BF16, device="cuda")
    slot, state = torch.tensor([5, 6], device="cuda"), module.fp8_state
    before = None if state is None else state.save()

    def step() -> list[Tensor]:
        if state is not None:
            state.restore(before)
        given = forward_arguments(module, x, slot)
        made = FORWARD(*given)
        return [*made, *BACKWARD(*backward_arguments(given, made))]

    with torch.no_grad(), counted(monkeypatch) as calls:
        with without_recordings():
            expected = step()
        for _ in range(3):
            assert all(map(torch.equal, step(), expected))
        assert len(calls) == 4
