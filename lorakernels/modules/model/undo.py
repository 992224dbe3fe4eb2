# SPDX-License-Identifier: Apache-2.0
"""all_or_nothing: change a model completely, or restore it if an exception interrupts the change."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lorakernels.modules.linear.frozen import FrozenFP8Linear

_T = TypeVar("_T")


class _Object:
    """The class, attributes and containers of one object. Tensors in them are kept by reference."""

    def __init__(self, owner: Any) -> None:
        self.owner, self.kind, self.values = owner, type(owner), dict(vars(owner))
        held = [v for v in self.values.values() if isinstance(v, (dict, list, set))]
        self.containers: list[tuple[Any, Any]] = [(entries, entries.copy()) for entries in held]

    def restore(self) -> None:
        attributes = vars(self.owner)
        if type(self.owner) is not self.kind:
            self.owner.__class__ = self.kind
        for name in attributes.keys() - self.values.keys():
            del attributes[name]
        attributes.update(self.values)
        for container, entries in self.containers:
            container.clear()
            container.extend(entries) if isinstance(container, list) else container.update(entries)


class Before:
    """A record of a model: its modules, parameters, `requires_grad` flags and FP8 states. Weights are not copied."""

    def __init__(self, model: nn.Module, others: Iterable[Any]) -> None:
        self.model = model
        modules = list(model.modules())
        layers = (m for m in modules if isinstance(m, FrozenFP8Linear))
        by_id = {id(m.fp8_state): m.fp8_state for m in layers if m.fp8_state is not None}
        states = by_id.values()
        self._modules = modules
        self._values = [
            (s.forward, s.forward.clone(), s.backward, s.backward.clone()) for s in states
        ]
        self._objects = [_Object(owner) for owner in (*modules, *states, *others)]
        self._trained = [(p, p.requires_grad) for p in model.parameters()]
        self._away: list[tuple[Tensor, torch.device]] = []

    @torch.no_grad()
    def restore(self) -> None:
        for kept in self._objects:
            kept.restore()
        for parameter, trained in self._trained:
            if parameter.requires_grad != trained:
                parameter.requires_grad_(trained)
        for forward, old_forward, backward, old_backward in self._values:
            forward.copy_(old_forward)
            backward.copy_(old_backward)
        while self._away:
            tensor, device = self._away[-1]
            tensor.data = tensor.data.to(device)
            self._away.pop()

    def patiently(self, make: Callable[[], _T]) -> _T:
        """Return `make()`. If the device is full, move tensors that only `restore` needs to the host and try again."""
        try:
            return make()
        except torch.OutOfMemoryError:
            if not self._make_room():
                raise
        return make()

    @torch.no_grad()
    def _make_room(self) -> bool:
        """Move tensors that the model no longer uses to the host. Returns False if there are none."""
        now = set(self.model.modules())
        used = {_memory(t) for module in now for t in _tensors(module)}
        before = len(self._away)
        for module in self._modules:
            for tensor in () if module in now else _tensors(module):
                if tensor.is_cuda and _memory(tensor) not in used:
                    device, tensor.data = tensor.device, tensor.data.cpu()
                    self._away.append((tensor, device))
        return len(self._away) > before


@contextmanager
def all_or_nothing(model: nn.Module, others: Iterable[Any] = ()) -> Iterator[Before]:
    """Change `model` inside this context. An exception restores it, its FP8 states and the attributes of `others`.

    Replaced modules are held until the context ends. `Before.patiently` moves them to the host if the device is full.
    """
    before = Before(model, others)
    try:
        yield before
    except BaseException:
        before.restore()
        raise


def _tensors(module: nn.Module) -> list[Tensor]:
    tables = (module._parameters, module._buffers)
    return [tensor for table in tables for tensor in table.values() if tensor is not None]


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
