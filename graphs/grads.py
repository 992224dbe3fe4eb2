# SPDX-License-Identifier: Apache-2.0
"""Where a captured backward puts the parameters' gradients: added, inside the graph, to memory that stays in place.

The memory is `main_grad` where a parameter has one, a `.grad` that somebody else holds too, or a slab of the manager's.
The graph always adds, so the sum over microbatches is right if the memory starts at zero: whenever `.grad` is None at a
launch (`zero_grad`), it is zeroed and installed first. What somebody else still holds is never overwritten: if an old
gradient has been kept, or `.grad` replaced by another tensor, that launch takes the long way, with copies.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .errors import CaptureError, ReplayError
from .signature import extension
from .watch import PARAMETER_HOOKS, GradWatch

NamedParameters = Sequence[tuple[str, nn.Parameter]]


@dataclass(eq=False)
class Target:
    """One parameter's gradient memory. Its `kind`: "main" (`parameter.main_grad`), "given" (a `.grad` that others hold
    as well) or "own" (a piece of a slab)."""

    parameter: nn.Parameter
    grad: Tensor
    kind: str
    references: int = 0
    uses: int = 0

    def calibrate(self, before: tuple[int, int] | None) -> None:
        """Note how many hold the tensor and its memory while nobody outside does: now, if it is new; else with those
        that have come since `before`, when somebody outside perhaps did."""
        references, uses = before or (self.references, self.uses)
        self.references += sys.getrefcount(self.grad) - references
        self.uses += _uses(self.grad) - uses

    def held(self) -> bool:
        """Whether somebody outside has this gradient, as an object or as a view, while `.grad` is None."""
        return (
            self.kind == "given"
            or sys.getrefcount(self.grad) > self.references
            or _uses(self.grad) > self.uses
        )


def _uses(x: Tensor) -> int:
    return torch._C._storage_Use_Count(x.untyped_storage()._cdata)


def _alone(parameter: nn.Parameter) -> bool:
    """Whether `.grad` is held by the parameter alone."""
    probe = nn.Parameter(torch.zeros(1))
    probe.grad = torch.zeros(1)
    counts = []
    for one in (probe, parameter):
        grad = one.grad
        assert grad is not None
        counts.append((sys.getrefcount(grad), _uses(grad)))
    return counts[0] == counts[1]


class GradTargets:
    """Gradient memory of all trained parameters; parameters that layers share have one target."""

    def __init__(self) -> None:
        self._by_id: dict[int, Target] = {}
        self._slabs: list[Tensor] = []
        self._before: dict[int, tuple[int, int]] = {}
        self.bytes = 0

    def prepare(self, parameters: NamedParameters) -> None:
        """Before a capture: targets for all parameters, what they have, else a slab for each dtype."""
        self._before = {  # who holds what the sets of graphs before this one add to
            key: (sys.getrefcount(target.grad), _uses(target.grad))
            for key, target in self._by_id.items()
            if target.references
        }
        new = list({id(p): p for _, p in parameters if id(p) not in self._by_id}.values())
        for parameter in new:
            main = getattr(parameter, "main_grad", None)
            if main is not None:
                self._by_id[id(parameter)] = Target(parameter, main, "main")
            elif parameter.grad is not None and not _alone(parameter):
                self._by_id[id(parameter)] = Target(parameter, parameter.grad, "given")
        new = [p for p in new if id(p) not in self._by_id]
        for dtype, device in dict.fromkeys((p.dtype, p.device) for p in new):
            group = [p for p in new if (p.dtype, p.device) == (dtype, device)]
            slab = torch.zeros(sum(p.numel() for p in group), dtype=dtype, device=device)
            self.bytes += slab.nbytes
            self._slabs.append(slab)
            for parameter, flat in zip(group, slab.split([p.numel() for p in group]), strict=True):
                grad = flat.view(parameter.shape).detach()
                self._by_id[id(parameter)] = Target(parameter, grad, "own")

    def adopt(self) -> None:
        """The capture has succeeded: from now on the slabs are the gradients."""
        for key, target in self._by_id.items():
            if target.kind == "own":
                target.calibrate(self._before.get(key))
        for key, target in self._by_id.items():
            grad = target.parameter.grad
            new = target.kind == "own" and key not in self._before
            if new and grad is not None and grad is not target.grad:
                target.grad.copy_(grad)
                target.parameter.grad = target.grad

    def of(self, parameters: Sequence[nn.Parameter]) -> list[Target]:
        """The targets of parameters that a backward reaches."""
        return [self._by_id[id(p)] for p in parameters]

    def release(self) -> None:
        """Drop the memory; gradients that are installed stay with their parameters."""
        self._by_id.clear()
        self._slabs.clear()
        self.bytes = 0


class LayerGrads:
    """The targets of the parameters that one layer's backward reaches."""

    def __init__(self, layer: str, names: Sequence[str], targets: Sequence[Target]) -> None:
        self.layer, self.names, self.targets = layer, list(names), list(targets)
        self._installed = extension().Watch()
        for target in targets:
            if target.kind != "main":
                self._installed.add_attribute(target.parameter, "grad", target.grad)
        self._main = [(t.parameter, t.grad) for t in targets if t.kind == "main"]
        self._detour: list[tuple[Target, Tensor]] = []
        named = zip(self.names, self.targets, strict=True)
        self._watch = GradWatch(layer, [(name, t.parameter, t.grad) for name, t in named])

    def before_launch(self) -> None:
        """Make sure that what the graph adds to is each parameter's gradient.

        Raises:
            ReplayError: a parameter's `main_grad` is another tensor than at capture, a gradient's data have moved, or
                a parameter has a hook by now.
        """
        if (changed := self._watch.check()) >= 0:
            self._watch.refuse(changed)
        for parameter, grad in self._main:
            if getattr(parameter, "main_grad", None) is not grad:
                self._refuse_main(parameter)
        if self._installed.check() >= 0:
            self._install()

    def after_launch(self) -> None:
        if self._detour:
            self._finish_detour()

    def _install(self) -> None:
        fresh = []
        for target in self.targets:
            if target.kind == "main" or target.parameter.grad is target.grad:
                continue
            if target.parameter.grad is not None or target.held():
                self._detour.append((target, target.grad.clone()))
            else:
                fresh.append(target)
        torch._foreach_zero_([t.grad for t in fresh] + [t.grad for t, _ in self._detour])
        for target in fresh:
            target.parameter.grad = target.grad

    def _finish_detour(self) -> None:
        """The graph has added to zeros: give the sum to `.grad`, and the memory back its content."""
        for target, content in self._detour:
            if target.parameter.grad is None:
                target.parameter.grad = target.grad.clone()
            else:
                target.parameter.grad.add_(target.grad)
            target.grad.copy_(content)
        self._detour.clear()

    def _refuse_main(self, parameter: nn.Parameter) -> None:
        index = [t.parameter for t in self.targets].index(parameter)
        main = getattr(parameter, "main_grad", None)
        found = "none" if main is None else f"another tensor at {main.data_ptr():#x}"
        expected = f"the tensor at {self.targets[index].grad.data_ptr():#x}"
        raise ReplayError(self.layer, f"main_grad of {self.names[index]!r}", expected, found, True)


def check_hooks(layer: str, parameters: NamedParameters) -> None:
    """CaptureError for hooks on parameters, which do not fire when gradients are added inside the graph."""
    for name, parameter in parameters:
        for attribute in PARAMETER_HOOKS:
            if getattr(parameter, attribute, None):
                reason = f"parameter {name!r} has a hook ({attribute}) that would not fire"
                raise CaptureError(
                    layer, "check", reason, "Use grads='autograd', or remove the hook"
                )
