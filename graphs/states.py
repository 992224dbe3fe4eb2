# SPDX-License-Identifier: Apache-2.0
"""What warm-up and capture must leave as it was: module buffers, FP8 state, random states, torch's generators.

FP8 and random states are known by what they offer: tensors as attributes; `save`, `restore`, `pin`, `unpin` and
`in_charge` (FP8); `advance` (random); `get_states` (several random states by name).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import Tensor, nn

from .errors import CaptureError

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
    """Takes the state when made; `restore` puts it back in place: no address changes."""

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


class Pins:
    """The pins on an FP8 state's addresses that a capture adds, its own and the state's, to be taken off together: by
    `remove`, or when this goes."""

    def __init__(self, fp8_state: Any) -> None:
        self._state = fp8_state
        self._before = self._now()

    def __del__(self) -> None:
        self.remove()

    def _now(self) -> set[str]:
        found = getattr(self._state, "pinned_by", None)
        return set(found.split(", ")) if found else set()

    def add(self) -> None:
        if self._state is not None:
            self._state.pin(PINNED_BY)

    def remove(self) -> None:
        """Once: what is pinned later is others' pin."""
        for pin in self._now() - self._before:
            self._state.unpin(pin)
        self._state = None


@contextmanager
def no_device_rng_in_checkpoints() -> Iterator[None]:
    """torch.utils.checkpoint saves the CUDA generator, which a stream under capture cannot read. Nor can anything draw
    from it there, so that there is nothing to restore; the CPU generator is saved and restored as ever."""
    original = torch_checkpoint.get_device_states
    torch_checkpoint.get_device_states = lambda *args: ([], [])
    try:
        yield
    finally:
        torch_checkpoint.get_device_states = original


@contextmanager
def repeats_nothing(name: str, states: Iterable[Any]) -> Iterator[None]:
    """Around a capture: CaptureError if it draws from the CPU generator, as device states do for their nonces, and no
    random state moves between replays, which would all draw the same numbers."""
    before = torch.get_rng_state()
    yield
    moves = any(hasattr(state, "advance") for state in states)
    if not moves and not torch.equal(before, torch.get_rng_state()):
        reason = "it draws random numbers, and none of rng_states advances between replays"
        raise CaptureError(name, "capture", reason, "Pass rng_states=[the layers' PhiloxState]")


def advance_all(states: Iterable[Any]) -> Callable[[], None]:
    """A function that moves every random state one step on, on the device."""
    movable = [state for state in states if hasattr(state, "advance")]

    def advance() -> None:
        for state in movable:
            state.advance()

    return advance
