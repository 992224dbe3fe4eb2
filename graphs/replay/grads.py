# SPDX-License-Identifier: Apache-2.0
"""Memory for the gradients of parameters, to which captured backwards add.

The memory stays in place. It is one of three: `main_grad` where a parameter has one, a `.grad` that other code holds
too, or a piece of a slab that the manager has allocated. A graph always adds, so the memory must start at zero. If
`.grad` is None at a launch, as after `zero_grad`, the memory is zeroed and installed as `.grad` first.

A gradient that other code still holds is never overwritten. Whether it does is seen from reference counts: of the
tensor object, and of the storage, which views hold. If an old gradient is held, or `.grad` was replaced by another
tensor, the launch makes a detour. It adds to zeroed memory, copies the sum to `.grad`, and puts the old content back.
Our own references are counted when a capture ends. A later one that nobody uses, such as that of a debugger's frame,
costs no more than the detour. A plainer rule, by which the extension has the only reference, was taken back (ea3b460).
With it, a whole step under DDP on two ranks was not equal to the bit.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..compare.signature import extension
from ..interface.errors import ReplayError
from .watch import GradWatch

NamedParameters = Sequence[tuple[str, nn.Parameter]]
INSTALLED, FREE = 0, 1  # `GradSlots.state`


@dataclass(eq=False)
class GradTarget:
    """The gradient memory of one parameter.

    Attributes:
        kind: "main" (`parameter.main_grad`), "given" (`.grad`, which other code holds too) or "own" (in a slab).
        references, uses: how many references to the tensor and to its storage are our own.
        zeroed: the memory is zero already, and `.grad` is None.
    """

    parameter: nn.Parameter
    grad: Tensor
    kind: str
    references: int = 0
    uses: int = 0
    zeroed: bool = False

    def calibrate(self, before: tuple[int, int] | None) -> None:
        """Record the reference counts that our own code accounts for, so that `held` can detect others.

        For a new tensor these are the counts now. Otherwise other code may have held the gradient already. So `before`
        has the counts before the capture, and only what the capture has added is added here.
        """
        references, uses = before or (self.references, self.uses)
        self.references += sys.getrefcount(self.grad) - references
        self.uses += _uses(self.grad) - uses

    def held(self) -> bool:
        """Whether other code holds this gradient, as an object or through a view. Asked while `.grad` is None."""
        return (
            self.kind == "given"
            or sys.getrefcount(self.grad) > self.references
            or _uses(self.grad) > self.uses
        )


def _uses(x: Tensor) -> int:
    return torch._C._storage_Use_Count(x.untyped_storage()._cdata)


class GradSlab:
    """One piece of memory with the gradients of several parameters, all of one dtype and device."""

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
        """Before a capture: count who holds the storage."""
        self._before = self._count() if self._uses else 0

    def calibrate(self) -> None:
        """After a capture: the holders that it has added are our own."""
        self._uses += self._count() - self._before

    def alone(self) -> bool:
        """Whether no other code has a view of it."""
        return self._count() <= self._uses

    def zero(self) -> bool:
        """Zero all of it at once. False, and nothing is done, if a piece is a `.grad` or other code holds one."""
        if self._slots.state() != FREE or not self.alone():
            return False
        self.memory.zero_()
        for target in self.targets:
            target.zeroed = True
        return True


def _alone(parameter: nn.Parameter, pieces: int, callers: int) -> bool:
    """Whether only the parameter, and `callers` references of ours, hold its `.grad`.

    `pieces`: how many gradients lie in the same storage, each of which holds it once. A probe that nothing else holds
    gives the counts to compare with.
    """
    probe = nn.Parameter(torch.zeros(1))
    probe.grad = torch.zeros(1)
    counts = []
    for one, held, others in ((probe, 0, 0), (parameter, callers, pieces - 1)):
        grad = one.grad
        assert grad is not None
        counts.append((sys.getrefcount(grad) - held, _uses(grad) - others))
    return counts[0] == counts[1]


def _pieces(parameters: Iterable[nn.Parameter]) -> dict[int, int]:
    """How many gradients lie in each storage: several in a slab that an earlier manager has left behind."""
    return Counter(p.grad.untyped_storage()._cdata for p in parameters if p.grad is not None)


class GradMemory:
    """The gradient memory of all trained parameters. A parameter that several layers share has one target."""

    def __init__(self) -> None:
        self._by_id: dict[int, GradTarget] = {}
        self._slabs: list[GradSlab] = []
        self._before: dict[int, tuple[int, int]] = {}
        self.bytes = 0

    def prepare(self, parameters: NamedParameters) -> None:
        """Before a capture: a target for each parameter; those without gradients of their own share a slab a dtype."""
        self._before = {  # counts of the targets that earlier captures have made
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
        """After a capture that succeeded: gradients that exist move into the slabs."""
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
    """The gradient memory that one layer's backward adds to."""

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
        """Complete a detour, if `before_launch` has begun one."""
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
        """The graph has added to zeros: add the sum to `.grad`, and restore the memory's content."""
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
        actual = "none" if main is None else f"another tensor at {main.data_ptr():#x}"
        expected = f"the tensor at {self.targets[index].grad.data_ptr():#x}"
        raise ReplayError(self.layer, f"main_grad of {self.names[index]!r}", expected, actual, True)
