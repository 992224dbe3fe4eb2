# SPDX-License-Identifier: Apache-2.0
"""The numbers of one layer, and the `LoRASpec`s of its calls."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lorakernels.autograd.linear.projections import OverRanks
from lorakernels.autograd.linear.values import Call, LoRASpec
from lorakernels.recipes import Recipe
from lorakernels.state.fp8 import FP8State

MOST_SPECS = 16  # that a layer remembers


class Numbers:
    """The numbers that the calls of one layer need. A layer makes a new object when one of them changes.

    Attributes:
        name: the layer's name.
        recipe: what x and dy follow; None over a plain base.
        state: the layer's FP8State, and `column` its place there; None where the recipe has no state.
        default: the LoRASpec of the layer's own adapter in evaluation. A layer without one has scaling 1 and p 0.
        specs: {the arguments of `spec`: what it returned}.
        made: {name of an op: what its recorded calls depend on} (autograd/compiled/call.py).
    """

    def __init__(
        self,
        name: str,
        recipe: Recipe | None,
        state: FP8State | None,
        column: int,
        default: LoRASpec,
    ) -> None:
        self.name, self.recipe, self.state, self.column = name, recipe, state, column
        self.default = default.following(recipe, column, False)
        self.specs: dict[tuple[bool, float | None, float | None], LoRASpec] = {}
        self.made: dict[str, tuple[Any, ...]] = {}

    def spec(
        self, training: bool, scaling: float | None = None, p: float | None = None
    ) -> LoRASpec:
        """The spec of a call. `scaling` and `p`, if given, replace the layer's own, as for an adapter of PEFT's."""
        spec = self.specs.get((training, scaling, p))
        return self._made(training, scaling, p) if spec is None else spec

    def call(self, spec: LoRASpec, slot: Tensor | None, over: OverRanks | None = None) -> Call:
        """`spec` with the tensors that it refers to."""
        state = self.state
        state_x, state_dy = (None, None) if state is None else (state.forward, state.backward)
        return Call(spec, slot, state_x, state_dy, over)

    def _made(self, training: bool, scaling: float | None, p: float | None) -> LoRASpec:
        changes: dict[str, Any] = {"scaling": scaling, "p": p}
        spec = replace(self.default, **{k: v for k, v in changes.items() if v is not None})
        spec = spec.following(self.recipe, self.column, training)
        if not torch.compiler.is_compiling():  # an export takes it for a side effect
            if len(self.specs) >= MOST_SPECS:
                self.specs.clear()
            self.specs[training, scaling, p] = spec
        return spec
