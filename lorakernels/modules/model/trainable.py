# SPDX-License-Identifier: Apache-2.0
"""`model.print_trainable_parameters()` and `get_nb_trainable_parameters()`, as PEFT's models have them."""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn

from lorakernels.modules.marks import SplitModule

_COUNT, _PRINT = "get_nb_trainable_parameters", "print_trainable_parameters"


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """(trained, all) elements of the parameters of `model`, each once. An FP8 weight counts as the weight it holds.

    Parameters that ranks hold in parts count whole. In stages only those of this rank count.
    """
    trained, total, seen = 0, 0, set[int]()
    for module in model.modules():
        split = module if isinstance(module, SplitModule) else None
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            parts = split.ranks.size if split and name in split.dimensions else 1
            count = parameter.numel() * parts
            total += count
            trained += count * parameter.requires_grad
    return trained, total


class _Counts:
    """Stands on a model for a method that its class lacks. A copy of the model gets one of its own."""

    def __init__(self, model: nn.Module, name: str) -> None:
        self._model, self._name = weakref.ref(model), name

    def __reduce__(self) -> tuple[Any, ...]:
        return _Counts, (self._model(), self._name)

    def __call__(self) -> tuple[int, int] | None:
        """(trained, all), or None after printing them in PEFT's words."""
        model = self._model()
        if model is None:
            raise ReferenceError(f"{self._name}: the model is gone; keep it in a variable")
        trained, total = count_parameters(model)
        if self._name == _COUNT:
            return trained, total
        share = 100 * trained / max(total, 1)
        print(
            f"trainable params: {trained:,d} || all params: {total:,d} || trainable%: {share:.4f}"
        )
        return None


def add_counts(model: nn.Module) -> None:
    """Give `model` the two methods. A class that has them keeps its own."""
    for name in (_COUNT, _PRINT):
        if not hasattr(type(model), name):
            model.__dict__[name] = _Counts(model, name)


def remove_counts(model: nn.Module) -> None:
    """Undo `add_counts`, wherever it was called in `model`."""
    for module in model.modules():
        for name in (_COUNT, _PRINT):
            if isinstance(module.__dict__.get(name), _Counts):
                del module.__dict__[name]
