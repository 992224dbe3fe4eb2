# SPDX-License-Identifier: Apache-2.0
"""Memory for the gradients of parameters, to which captured backwards add.

The memory stays in place. It is `main_grad` where a parameter has one, a `.grad` that other code holds too, or a piece
of a slab that the manager has allocated. A graph always adds, so the memory must start at zero: if `.grad` is None at a
launch, as after `zero_grad`, the memory is zeroed and installed as `.grad` first.

A gradient that other code still holds, as an object or by a view of it, is never overwritten. The extension's
`GradTarget` has our only reference to the tensor, so that any other shows in its reference count. Views hold its
storage, whose holders are counted when a slab is made. If an old gradient is held, or `.grad` was replaced by another
tensor, the launch makes a detour: it adds to zeroed memory, copies the sum to `.grad`, and puts the old content back.
A reference that nobody uses, such as that of a debugger's frame, costs no more than the detour.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ..errors import ReplayError
from ..signature import extension
from .buffers import storage_uses
from .watch import GradWatch

NamedParameters = Sequence[tuple[str, nn.Parameter]]
GradTarget = Any  # of the extension: csrc/graphs/grad_slots.h
INSTALLED, FREE = 0, 1  # `GradSlots.state`


def _target(parameter: nn.Parameter, grad: Tensor, kind: str) -> GradTarget:
    return extension().GradTarget(parameter, grad, kind)


def _uses(x: Tensor) -> int:
    return storage_uses(x.untyped_storage()._cdata)


class GradSlab:
    """One piece of memory with the gradients of several parameters, all of one dtype and device."""

    def __init__(self, memory: Tensor, parameters: Sequence[nn.Parameter]) -> None:
        self.memory = memory
        self.targets = _targets_in(memory, parameters)
        self._slots = extension().GradSlots(self.targets, [], extension().Watch())
        self._held = memory.untyped_storage()
        # How the extension counts who holds the storage: with which function, of what, and how many are our own
        self.count = (storage_uses, self._held._cdata, storage_uses(self._held._cdata))

    def alone(self) -> bool:
        """Whether no other code has a view of it."""
        uses, storage, ours = self.count
        return uses(storage) <= ours

    def zero(self) -> bool:
        """Zero all of it at once. False, and nothing is done, if a piece is a `.grad` or other code holds one."""
        if self._slots.state() != FREE or not self.alone():
            return False
        self.memory.zero_()
        self._slots.set_zeroed(True)
        return True


def _targets_in(memory: Tensor, parameters: Sequence[nn.Parameter]) -> list[GradTarget]:
    pieces = memory.split([p.numel() for p in parameters])
    pairs = zip(parameters, pieces, strict=True)
    return [_target(p, piece.view(p.shape).detach(), "own") for p, piece in pairs]


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
        self._new: list[GradTarget] = []  # since the last capture that succeeded
        self.bytes = 0

    def prepare(self, parameters: NamedParameters) -> None:
        """Before a capture: a target for each parameter; those without gradients of their own share a slab a dtype."""
        new = list({id(p): p for _, p in parameters if id(p) not in self._by_id}.values())
        pieces = _pieces(new)
        for parameter in new:
            main, grad = getattr(parameter, "main_grad", None), parameter.grad
            if main is not None:
                self._by_id[id(parameter)] = _target(parameter, main, "main")
                continue
            if grad is not None and not _alone(parameter, pieces[grad.untyped_storage()._cdata], 1):
                self._by_id[id(parameter)] = _target(parameter, grad, "given")
        new = [p for p in new if id(p) not in self._by_id]
        for dtype, device in dict.fromkeys((p.dtype, p.device) for p in new):
            group = [p for p in new if (p.dtype, p.device) == (dtype, device)]
            memory = torch.zeros(sum(p.numel() for p in group), dtype=dtype, device=device)
            self.bytes += memory.nbytes
            self._slabs.append(GradSlab(memory, group))
            self._by_id |= {id(t.parameter): t for t in self._slabs[-1].targets}
            self._new += self._slabs[-1].targets

    def adopt(self) -> None:
        """After a capture that succeeded: gradients that exist move into the slabs."""
        for target in self._new:
            grad = target.parameter.grad
            if grad is not None and grad is not target.grad:
                target.grad.copy_(grad)
                target.parameter.grad = target.grad
        self._new.clear()

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
        self._new.clear()
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
        self._addresses = [target.grad.data_ptr() for target in targets]
        self._detour: list[tuple[GradTarget, Tensor]] = []
        parameters = [target.parameter for target in targets]
        self._watch = GradWatch(layer, zip(names, parameters, strict=True))
        counts = [slab.count for slab in slabs]
        self._slots = extension().GradSlots(self.targets, counts, self._watch.compared)
        # Whether the graph may be launched. Gradients that are None are installed, if nothing else has to be done first
        self.ready: Callable[[], bool] = self._slots.ready

    def make_ready(self) -> None:
        """Make sure that what the graph adds to is each parameter's gradient, where `ready` has found otherwise.

        Raises:
            ReplayError: a parameter's `main_grad` is another tensor than at capture, a gradient's data have moved, or
                a parameter has a hook by now.
        """
        if (changed := self._watch.check()) >= 0:
            self._watch.refuse(changed)
        if (moved := self._slots.moved()) >= 0:
            self._refuse_moved(moved)
        if (state := self._slots.state()) != INSTALLED:
            self._install(state)

    def after_launch(self) -> None:
        """Complete a detour, if `before_launch` has begun one."""
        if self._detour:
            self._finish_detour()

    def _install(self, state: int) -> None:
        if state == FREE and self._slots.alone():
            zeroed = all([t.zeroed for t in self._installed])
            if not zeroed and not all([slab.zero() for slab in self._slabs]):
                torch._foreach_zero_([t.grad for t in self._installed])
            self._slots.install()
            return
        self._install_one_by_one()
        self._slots.set_zeroed(False)

    def _install_one_by_one(self) -> None:
        fresh, alone = [], self._slots.alone()
        for target in self._installed:
            if target.parameter.grad is target.grad:
                continue
            if target.parameter.grad is not None or not alone or target.held():
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

    def _refuse_moved(self, index: int) -> NoReturn:
        name, target = self.names[index], self.targets[index]
        expected, found = self._addresses[index], target.grad.data_ptr()
        if expected != found:
            what = f"address of 'gradient of {name}'"
            raise ReplayError(self.layer, what, f"{expected:#x}", f"{found:#x}", True)
        parameter = target.parameter
        main = getattr(parameter, "main_grad", None)
        other = "none" if main is None else f"another tensor at {main.data_ptr():#x}"
        there = f"the tensor at {expected:#x}"
        raise ReplayError(self.layer, f"main_grad of {name!r}", there, other, True)
