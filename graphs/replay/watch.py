# SPDX-License-Identifier: Apache-2.0
"""Fingerprints: what a captured layer relies on besides its arguments, compared before each of its launches.

A fingerprint holds parameters and buffers (which objects, at which address, trained or not) and the submodules and
hooks that are there. It holds plain attributes of every submodule, such as a dropout probability, a scaling, `training`
or whether an adapter is merged. It also holds attributes that are tensors or random states, and the tensors of the FP8
and random states. For a whole step it holds the numbers and state of the optimizers, too. csrc/graphs/watch.cpp
compares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..compare.attributes import Attributes, is_unchanged, says_itself
from ..compare.signature import extension
from ..interface.errors import ReplayError

MODULE_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
PARAMETER_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


class Watch:
    """One fingerprint. Whatever is added is expected to stay as it is at that moment.

    `check()` returns the index of the first difference, or -1.
    """

    def __init__(self, layer: str) -> None:
        self._layer = layer
        self._watch = self.compared = extension().Watch()
        self._dicts: list[tuple[str, Callable[[], tuple[str, str]]]] = []
        self._addresses: list[tuple[str, Tensor, int]] = []
        self._attributes: list[tuple[str, object, str, object]] = []
        self.check = self._watch.check

    def _add_dict(self, what: str, entries: dict[str, Any], keys: list[str] | None) -> None:
        before = {k: entries[k] for k in (entries if keys is None else keys)}
        self._watch.add_dict(entries, keys)
        self._dicts.append((what, partial(_change, before, entries, keys)))

    def _add_tensor(self, name: str, tensor: Tensor) -> None:
        self._addresses.append((name, tensor, tensor.data_ptr()))
        self._watch.add_address(tensor.data_ptr, tensor.data_ptr())

    def _add_attribute(self, what: str, owner: object, name: str) -> None:
        value = getattr(owner, name)
        self._attributes.append((what, owner, name, value))
        self._watch.add_attribute(owner, name, value)

    def describe(self, index: int) -> str:
        """The difference that `check` found at `index`, in words."""
        try:
            self.refuse(index)
        except ReplayError as error:
            return f"{error.what} of layer {error.layer!r}: expected {error.expected}, found {error.actual}"
        raise AssertionError(f"refuse({index}) did not raise")

    def refuse(self, index: int) -> None:
        """Raise a ReplayError for the difference that `check` found at `index`."""
        if index < len(self._dicts):
            what, describe = self._dicts[index]
            raise ReplayError(self._layer, what, *describe(), True)
        index -= len(self._dicts)
        if index < len(self._addresses):
            name, tensor, address = self._addresses[index]
            actual = f"{tensor.data_ptr():#x}"
            raise ReplayError(self._layer, f"address of {name!r}", f"{address:#x}", actual, True)
        what, owner, attribute, value = self._attributes[index - len(self._addresses)]
        actual = _short(getattr(owner, attribute))
        raise ReplayError(self._layer, what, _short(value), actual, True)


class LayerWatch(Watch):
    """The fingerprint of one layer.

    Args:
        layer: the name for errors.
        module: the layer.
        attributes: which attributes count.
        states: named objects whose tensors count too (FP8 and random states).
    """

    def __init__(
        self, layer: str, module: nn.Module, attributes: Attributes, states: Mapping[str, object]
    ) -> None:
        super().__init__(layer)
        for path, inner in module.named_modules():
            self._add_module(path, inner, inner is module, attributes.get(inner, {}))
        for name, state in states.items():
            self._add_state(name, state)

    def _add_module(
        self, path: str, module: nn.Module, is_layer: bool, attributes: dict[str, Any]
    ) -> None:
        prefix = f"{path}." if path else ""
        self._add_dict(f"attributes of {path or 'the layer'}", vars(module), list(attributes))
        kinds = ("_parameters", "_buffers", "_modules", *(() if is_layer else MODULE_HOOKS))
        for kind in kinds:
            self._add_dict(f"{kind[1:]} of {path or 'the layer'}", getattr(module, kind), None)
        for name, tensor in [
            *module._parameters.items(),
            *module._buffers.items(),
            *attributes.items(),
        ]:
            if isinstance(tensor, Tensor):
                self._add_tensor(prefix + name, tensor)
        for name, parameter in module._parameters.items():
            if parameter is not None:
                self._add_attribute(
                    f"requires_grad of {prefix + name!r}", parameter, "requires_grad"
                )

    def _add_state(self, name: str, state: object) -> None:
        tensors = {k: v for k, v in vars(state).items() if isinstance(v, Tensor)}
        self._add_dict(f"tensors of {name}", vars(state), list(tensors))
        for key, tensor in tensors.items():
            self._add_tensor(f"{name}.{key}", tensor)


class GradWatch(Watch):
    """The fingerprint of gradients that a graph adds to: their addresses, and the hooks of their parameters."""

    def __init__(self, layer: str, grads: Sequence[tuple[str, nn.Parameter, Tensor]]) -> None:
        super().__init__(layer)
        for name, parameter, grad in grads:
            self._add_tensor(f"gradient of {name}", grad)
            for kind in PARAMETER_HOOKS:
                what, hooks = f"{kind} of {name!r}", getattr(parameter, kind)
                if hooks is None:
                    self._add_attribute(what, parameter, kind)
                else:
                    self._add_dict(what, hooks, None)


class OptimizerWatch(Watch):
    """The fingerprint of an optimizer: its numbers, and the addresses of its state."""

    def __init__(self, layer: str, name: str, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(layer)
        self._add_dict(name, vars(optimizer), ["state", "param_groups"])
        for index, group in enumerate(optimizer.param_groups):
            where = f"{name}.param_groups[{index}]"
            self._add_entries(where, group, [key for key in group if key != "params"])
            for number, parameter in enumerate(group["params"]):
                if parameter in optimizer.state:
                    state = optimizer.state[parameter]
                    self._add_entries(f"{where} state {number}", state, list(state))

    def _add_entries(self, what: str, entries: dict[str, Any], keys: list[str]) -> None:
        self._add_dict(what, entries, keys)
        for key in keys:
            if isinstance(entries[key], Tensor):
                self._add_tensor(f"{what} {key}", entries[key])


def _change(
    before: dict[str, Any], now: dict[str, Any], keys: Iterable[str] | None
) -> tuple[str, str]:
    """The first difference, as (expected, found)."""
    for key, value in before.items():
        if key not in now:
            return f"{key}={_short(value)}", f"no {key}"
        if not is_unchanged(value, now[key]):
            return f"{key}={_short(value)}", f"{key}={_short(now[key])}"
    extra = [] if keys is not None else [key for key in now if key not in before]
    return f"only {list(before)}", f"also {extra}"


def _short(value: object) -> str:
    if isinstance(value, Tensor):
        return f"the tensor at {value.data_ptr():#x}"
    return repr(value) if says_itself(value) else f"a {type(value).__name__} at {id(value):#x}"
