# SPDX-License-Identifier: Apache-2.0
"""A warm-up on synthetic data that leaves no trace: kernels are compiled, communicators made, memory has its size."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lorakernels.loops.parts import adapters
from lorakernels.parallel import ShardedAdamW
from lorakernels.state.fp8 import FP8State
from lorakernels.state.philox import PhiloxState, PhiloxStates


@contextmanager
def rehearsal(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Iterator[None]:
    """Train and evaluate inside, on any data; afterwards everything is as it was, bit for bit.

    This covers trained values, gradients, buffers, modes, the optimizer's state, FP8 scales and histories, the
    adapters' random states, and torch's generators on the CPU and on the model's GPUs. Tensors keep their addresses.
    Synthetic data leave the position in real data alone, too. Over ranks all of them rehearse, with equal steps.

        with rehearsal(model, optimizer):
            for _ in range(2):
                step(torch.randint(vocabulary, (batch, length), device=device))

    Args:
        model: with or without adapters, split over ranks or not.
        optimizer: may step inside, if it is given. Call this before `attach` and before graphs are captured.

    Raises:
        RuntimeError: a graph holds the FP8 state's memory.
        ValueError: the optimizer is a ShardedAdamW, which is not supported yet, or it has hooks, as `attach` adds them.
    """
    layers = adapters(model)
    states = {id(s): s for m in model.modules() if (s := getattr(m, "fp8_state", None)) is not None}
    _check([*states.values()], optimizer)
    random = {id(m.rng_state): m.rng_state for m in layers if m.rng_state is not None}
    tensors = [p for p in model.parameters() if p.requires_grad] + [*model.buffers()]
    tensors += [x for state in random.values() for x in _tensors_of(state)]
    back = [
        *(_value(x) for x in tensors),
        *(_gradient(p) for p in model.parameters() if p.requires_grad),
        *(_fp8(state) for state in states.values()),
        _generators({p.device for p in model.parameters() if p.is_cuda}),
        _modes(model),
    ]
    if optimizer is not None:
        back.append(_optimizer(optimizer))
    try:
        yield
    finally:
        with torch.no_grad():
            for put_back in back:
                put_back()


def _check(states: list[FP8State], optimizer: torch.optim.Optimizer | None) -> None:
    for state in states:
        if state.pinned_by:
            raise RuntimeError(
                f"the FP8 state's memory is pinned by {state.pinned_by}: rehearse before graphs are captured"
            )
    if isinstance(optimizer, ShardedAdamW):
        raise ValueError(
            "optimizer must be one of torch's, found a ShardedAdamW, which is not supported yet"
        )
    hooks: Any = {} if optimizer is None else vars(optimizer)
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        if hooks.get(name):
            raise ValueError("optimizer must have no hooks: rehearse before attach")


def _tensors_of(state: PhiloxState | PhiloxStates) -> list[Tensor]:
    states = state.get_states().values() if isinstance(state, PhiloxStates) else (state,)
    return [one.tensor for one in states]


def _value(x: Tensor) -> Callable[[], Any]:
    value = x.detach().clone()
    return lambda: x.copy_(value)


def _gradient(p: nn.Parameter) -> Callable[[], None]:
    grad = p.grad
    value = None if grad is None else grad.detach().clone()

    def put_back() -> None:
        if grad is not None and value is not None:
            grad.copy_(value)
        p.grad = grad

    return put_back


def _fp8(state: FP8State) -> Callable[[], None]:
    saved = state.save()
    return lambda: state.restore(saved)


def _generators(devices: set[torch.device]) -> Callable[[], None]:
    cpu = torch.get_rng_state()
    others = {device: torch.cuda.get_rng_state(device) for device in devices}

    def put_back() -> None:
        torch.set_rng_state(cpu)
        for device, state in others.items():
            torch.cuda.set_rng_state(state, device)

    return put_back


def _modes(model: nn.Module) -> Callable[[], None]:
    before = [(module, module.training) for module in model.modules()]

    def put_back() -> None:
        for module, training in before:
            module.training = training

    return put_back


def _optimizer(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    state = {
        p: {key: (x, x.clone() if isinstance(x, Tensor) else x) for key, x in values.items()}
        for p, values in optimizer.state.items()
    }
    groups = [
        {k: _copied(v) for k, v in g.items() if k != "params"} for g in optimizer.param_groups
    ]

    def put_back() -> None:
        for p in [*optimizer.state]:
            if p not in state:
                del optimizer.state[p]
        for p, values in state.items():
            for x, value in values.values():
                if isinstance(x, Tensor):
                    x.copy_(value)
            optimizer.state[p] = {key: x for key, (x, _) in values.items()}
        for group, before in zip(optimizer.param_groups, groups, strict=True):
            for key, value in before.items():
                if isinstance(value, Tensor) and isinstance(group[key], Tensor):
                    group[key].copy_(value)
                else:
                    group[key] = value

    return put_back


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
