# SPDX-License-Identifier: Apache-2.0
"""Where a captured backward puts the parameters' gradients: added, inside the graph, to memory that stays in place.

The memory is `main_grad` where a parameter has one, a `.grad` that somebody else holds too, or a slab of the manager's.
The graph always adds, so the sum over microbatches is right if the memory starts at zero: whenever `.grad` is None at a
launch (`zero_grad`), it is zeroed and installed first. What somebody else still holds is never overwritten: if an old
gradient has been kept, or `.grad` replaced by another tensor, that launch takes the long way, with copies.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..errors import ReplayError
from ..signature import extension
from .watch import GradWatch

NamedParameters = Sequence[tuple[str, nn.Parameter]]
INSTALLED, FREE = 0, 1  # `GradSlots.state`


@dataclass(eq=False)
class GradTarget:
    """One parameter's gradient memory. Its `kind`: "main" (`parameter.main_grad`), "given" (a `.grad` that others hold
    as well) or "own" (a piece of a slab)."""

    parameter: nn.Parameter
    grad: Tensor
    kind: str
    references: int = 0
    uses: int = 0
    zeroed: bool = False  # its content, ahead of time; `.grad` is None

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


class GradSlab:
    """The memory of several "own" targets."""

    def __init__(self, memory: Tensor, parameters: Sequence[nn.Parameter]) -> None:
        self.memory = memory
        self.targets = []
        pieces = memory.split([p.numel() for p in parameters])
        for parameter, flat in zip(parameters, pieces, strict=True):
            grad = flat.view(parameter.shape).detach()
            self.targets.append(GradTarget(parameter, grad, "own"))
        self._slots = extension().GradSlots(self.targets)
        self._held = memory.untyped_storage()
        self._cdata = self._held._cdata
        self._uses = self._before = 0

    def _count(self) -> int:
        return torch._C._storage_Use_Count(self._cdata)

    def note(self) -> None:
        """Before a capture: who has it."""
        self._before = self._count() if self._uses else 0

    def calibrate(self) -> None:
        """After it: the graphs have come to that."""
        self._uses += self._count() - self._before

    def alone(self) -> bool:
        """Whether nobody outside has a view of it."""
        return self._count() <= self._uses

    def zero(self) -> bool:
        """Zero all of it at once, if no `.grad` is in it and nobody has one that was."""
        if self._slots.state() != FREE or not self.alone():
            return False
        self.memory.zero_()
        for target in self.targets:
            target.zeroed = True
        return True


def _alone(parameter: nn.Parameter, pieces: int, callers: int) -> bool:
    """Whether `.grad` is held by the parameter and the `callers` alone, its memory by as many gradients as it has
    `pieces`."""
    probe = nn.Parameter(torch.zeros(1))
    probe.grad = torch.zeros(1)
    counts = []
    for one, held, others in ((probe, 0, 0), (parameter, callers, pieces - 1)):
        grad = one.grad
        assert grad is not None
        counts.append((sys.getrefcount(grad) - held, _uses(grad) - others))
    return counts[0] == counts[1]


def _pieces(parameters: Iterable[nn.Parameter]) -> dict[int, int]:
    """How many gradients lie in one storage, by its address: in a slab of a manager that is gone, several."""
    return Counter(p.grad.untyped_storage()._cdata for p in parameters if p.grad is not None)


class GradMemory:
    """Gradient memory of all trained parameters; parameters that layers share have one target."""

    def __init__(self) -> None:
        self._by_id: dict[int, GradTarget] = {}
        self._slabs: list[GradSlab] = []
        self._before: dict[int, tuple[int, int]] = {}
        self.bytes = 0

    def prepare(self, parameters: NamedParameters) -> None:
        """Before a capture: targets for all parameters, what they have, else a slab for each dtype."""
        self._before = {  # who holds what the sets of graphs before this one add to
            key: (sys.getrefcount(target.grad), _uses(target.grad))
            for key, target in self._by_id.items()
            if target.references
        }
        for slab in self._slabs:
            slab.note()
        new = list({id(p): p for _, p in parameters if id(p) not in self._by_id}.values())
        pieces = _pieces(new)
        for parameter in new:
            main, grad = getattr(parameter, "main_grad", None), parameter.grad
            if main is not None:
                self._by_id[id(parameter)] = GradTarget(parameter, main, "main")
                continue
            if grad is not None and not _alone(parameter, pieces[grad.untyped_storage()._cdata], 1):
                self._by_id[id(parameter)] = GradTarget(parameter, grad, "given")
        new = [p for p in new if id(p) not in self._by_id]
        for dtype, device in dict.fromkeys((p.dtype, p.device) for p in new):
            group = [p for p in new if (p.dtype, p.device) == (dtype, device)]
            memory = torch.zeros(sum(p.numel() for p in group), dtype=dtype, device=device)
            self.bytes += memory.nbytes
            self._slabs.append(GradSlab(memory, group))
            self._by_id |= {id(t.parameter): t for t in self._slabs[-1].targets}

    def adopt(self) -> None:
        """The capture has succeeded: from now on the slabs are the gradients."""
        for key, target in self._by_id.items():
            if target.kind == "own":
                target.calibrate(self._before.get(key))
        for slab in self._slabs:
            slab.calibrate()
        for key, target in self._by_id.items():
            grad = target.parameter.grad
            new = target.kind == "own" and key not in self._before
            if new and grad is not None and grad is not target.grad:
                target.grad.copy_(grad)
                target.parameter.grad, target.zeroed = target.grad, False

    def of(self, parameters: Sequence[nn.Parameter]) -> list[GradTarget]:
        """The targets of parameters that a backward reaches."""
        return [self._by_id[id(p)] for p in parameters]

    def slabs_of(self, targets: Sequence[GradTarget]) -> list[GradSlab]:
        """The slabs that some of the targets are in."""
        return [slab for slab in self._slabs if any(t in slab.targets for t in targets)]

    def release(self) -> None:
        """Drop the memory; gradients that are installed stay with their parameters."""
        self._by_id.clear()
        self._slabs.clear()
        self.bytes = 0


class LayerGrads:
    """The targets of the parameters that one layer's backward reaches, and the slabs that those are in."""

    def __init__(
        self,
        layer: str,
        names: Sequence[str],
        targets: Sequence[GradTarget],
        slabs: Sequence[GradSlab],
    ) -> None:
        self.layer, self.names, self.targets = layer, list(names), list(targets)
        self._slabs = list(slabs)
        self._installed = [target for target in targets if target.kind != "main"]
        self._slots = extension().GradSlots(self._installed)
        self._state = self._slots.state
        self._main = [(t.parameter, t.grad) for t in targets if t.kind == "main"]
        self._detour: list[tuple[GradTarget, Tensor]] = []
        named = zip(self.names, self.targets, strict=True)
        self._watch = GradWatch(layer, [(name, t.parameter, t.grad) for name, t in named])
        self._changed = self._watch.check

    def before_launch(self) -> None:
        """Make sure that what the graph adds to is each parameter's gradient.

        Raises:
            ReplayError: a parameter's `main_grad` is another tensor than at capture, a gradient's data have moved, or
                a parameter has a hook by now.
        """
        if (changed := self._changed()) >= 0:
            self._watch.refuse(changed)
        for parameter, grad in self._main:
            if getattr(parameter, "main_grad", None) is not grad:
                self._refuse_main(parameter)
        if state := self._state():
            self._install(state)

    def after_launch(self) -> None:
        if self._detour:
            self._finish_detour()

    def _install(self, state: int) -> None:
        if state == FREE and all([slab.alone() for slab in self._slabs]):
            zeroed = all([t.zeroed for t in self._installed])
            if not zeroed and not all([slab.zero() for slab in self._slabs]):
                torch._foreach_zero_([t.grad for t in self._installed])
            self._slots.install()
        else:
            self._install_one_by_one()
        for target in self._installed:
            target.zeroed = False

    def _install_one_by_one(self) -> None:
        fresh = []
        for target in self._installed:
            if target.parameter.grad is target.grad:
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
