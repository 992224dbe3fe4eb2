# SPDX-License-Identifier: Apache-2.0
"""State that warm-up and capture must leave as it was: module buffers, FP8 state, random states, torch's generators.

This package does not import the states' classes. It relies on their tensors, which are attributes, and on a few names.
An FP8 state has `save`, `restore`, `pin`, `unpin` and `in_charge`. A random state has `advance`. A tracker of several
random states has `get_states`, which gives them by name. A random state may have `place(layer)`: it moves torch's CPU
generator to where that layer draws, from where the generator was as the capture began.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import Tensor, nn

from ..interface.errors import CaptureError

PINNED_BY = "lorakernels.graphs"


def named_states(fp8_state: Any, rng_states: Iterable[Any]) -> dict[str, Any]:
    """Every state under a name for errors; a tracker of several random states gives its own."""
    named = {} if fp8_state is None else {"fp8_state": fp8_state}
    for index, state in enumerate(rng_states):
        inner = state.get_states() if hasattr(state, "get_states") else {"": state}
        for name, one in inner.items():
            named[f"rng_states[{index}]" + (f"[{name!r}]" if name else "")] = one
    return named


def tensors_of(state: Any) -> list[Tensor]:
    return [x for x in vars(state).values() if isinstance(x, Tensor)]


class Snapshot:
    """A copy of all such state, taken when it is made; `restore` writes it back in place: no address changes."""

    def __init__(self, modules: Sequence[nn.Module], fp8_state: Any, states: Iterable[Any]) -> None:
        tensors: dict[int, Tensor] = {}
        for module in modules:
            tensors.update((id(b), b) for b in module.buffers())
        for state in states:
            if state is not fp8_state:
                tensors.update((id(x), x) for x in tensors_of(state))
        self._tensors = [(x, x.detach().clone()) for x in tensors.values()]
        self._fp8 = None if fp8_state is None else (fp8_state, fp8_state.save())
        self.cpu_rng = torch.get_rng_state()
        devices = {x.device.index for x in tensors.values() if x.is_cuda}
        for module in modules:
            devices |= {p.device.index for p in module.parameters() if p.is_cuda}
        self._cuda_rng = {d: torch.cuda.get_rng_state(d) for d in devices}

    def restore(self) -> None:
        with torch.no_grad():
            for tensor, value in self._tensors:
                tensor.copy_(value)
        if self._fp8 is not None:
            self._fp8[0].restore(self._fp8[1])
        torch.set_rng_state(self.cpu_rng)
        for device, state in self._cuda_rng.items():
            torch.cuda.set_rng_state(state, device)


class _Pinned:
    """The pins that captures have put on one FP8 state, which counts each name once. All its `Pins` share this."""

    def __init__(self, fp8_state: Any) -> None:
        self.state, self.by, self.holders = fp8_state, set[str](), 0

    def now(self) -> set[str]:
        holders = self.state.pinned_by
        return set(holders.split(", ")) if holders else set()


_PINNED: WeakValueDictionary[int, _Pinned] = WeakValueDictionary()  # by the state's id


class Pins:
    """Keeps an FP8 state's tensors from moving while graphs hold their addresses.

    Make it before a capture and call `add` after it: pins that appeared in between belong to the capture. `remove`, or
    garbage collection, drops this holder. The captures' pins go with the last holder of that state; pins that other
    code has put on it stay.
    """

    _pinned: _Pinned | None = None

    def __init__(self, fp8_state: Any) -> None:
        if hasattr(fp8_state, "pinned_by"):
            pinned = _PINNED.get(id(fp8_state)) or _Pinned(fp8_state)
            self._before: set[str] | None = pinned.now()
            self._pinned = _PINNED[id(fp8_state)] = pinned
            pinned.holders += 1

    def __del__(self) -> None:
        self.remove()

    def add(self) -> None:
        if self._pinned is not None:
            self._pinned.state.pin(PINNED_BY)
            self._take_charge(self._pinned)

    def _take_charge(self, pinned: _Pinned) -> None:
        """Count what was pinned since this was made as the captures' pins; the second call does nothing."""
        if self._before is not None:
            pinned.by |= pinned.now() - self._before
            self._before = None

    def remove(self) -> None:
        """Stop holding the state; the second call does nothing."""
        pinned, self._pinned = self._pinned, None
        if pinned is None:
            return
        self._take_charge(pinned)  # `add` was not called: the capture failed
        pinned.holders -= 1
        if not pinned.holders:
            for pin in pinned.by & pinned.now():
                pinned.state.unpin(pin)
            pinned.by.clear()


@contextmanager
def no_device_rng_in_checkpoints() -> Iterator[None]:
    """Inside, torch.utils.checkpoint does not save CUDA's generator, which cannot be read while a stream is captured.

    Nothing can draw from it in a capture, so there is nothing to restore. The CPU's generator is saved as ever.
    """
    original = torch_checkpoint.get_device_states
    torch_checkpoint.get_device_states = lambda *args: ([], [])
    try:
        yield
    finally:
        torch_checkpoint.get_device_states = original


@contextmanager
def repeats_nothing(name: str, states: Iterable[Any]) -> Iterator[None]:
    """Around a capture: CaptureError if every replay would draw the same random numbers.

    Device states take a nonce from the CPU generator when a layer draws. A capture that moves that generator therefore
    draws, and then one of `states` must be able to advance between replays.
    """
    before = torch.get_rng_state()
    yield
    moves = any(hasattr(state, "advance") for state in states)
    if not moves and not torch.equal(before, torch.get_rng_state()):
        reason = "it draws random numbers, and none of rng_states advances between replays"
        raise CaptureError(name, "capture", reason, "Pass rng_states=[the layers' PhiloxState]")


def place(layer: str, start: Tensor, states: Iterable[Any]) -> None:
    """Let each state that says where `layer` draws say it. `start`: the CPU generator as the capture began."""
    for state in states:
        if hasattr(state, "place"):
            torch.set_rng_state(start)
            state.place(layer)


def advance_all(states: Iterable[Any]) -> Callable[[], None]:
    """A function that moves every random state one step on, on the device."""
    movable = [state for state in states if hasattr(state, "advance")]

    def advance() -> None:
        for state in movable:
            state.advance()

    return advance
