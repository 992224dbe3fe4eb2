# SPDX-License-Identifier: Apache-2.0
"""Random state that lives in device memory: kernels read it, the host never does.

A dropout site draws its mask from a slot, int64 [2] = (key, offset), 16 bytes that backward keeps instead of a mask
(reference.dropout_keep has the formula). A slot comes from

* torch's generator of the device, when nobody is in charge: `torch.manual_seed` reproduces the run, and
  `torch.utils.checkpoint`, which restores that generator, recomputes the same mask;
* a `PhiloxState`, when one is attached: slot = (seed + nonce, offset). The nonce is one draw from torch's CPU
  generator, so that calls differ and recomputation still repeats its forward's mask; `advance()` moves the
  offset on the device, once per iteration or graph replay, where the nonce is frozen in the graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_INT63 = (1 << 63) - 1


def default_slot(device: torch.device) -> Tensor:
    """int64 [2] drawn from torch's generator of `device`."""
    return torch.randint(-_INT63, _INT63, (2,), dtype=torch.int64, device=device)


class PhiloxState:
    """Seed and offset as one int64 [2] tensor on `device`.

    Args:
        seed: any integer in [0, 2**63).
        device: where the state lives; kernels on that device read it.
    """

    def __init__(self, seed: int, device: torch.device | str | None = None) -> None:
        if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed <= _INT63:
            raise ValueError(f"seed must be an integer in [0, 2**63), found {seed!r}")
        self.tensor = torch.tensor([seed, 0], dtype=torch.int64, device=device)

    @property
    def device(self) -> torch.device:
        return self.tensor.device

    def slot(self) -> Tensor:
        """A new int64 [2] slot for one call of one dropout site."""
        nonce = torch.randint(_INT63, (), dtype=torch.int64)
        slot = self.tensor.clone()
        slot[0] += nonce if torch.compiler.is_compiling() else int(nonce)
        return slot

    def advance(self, steps: int = 1) -> None:
        """Move the offset on the device, without a host sync; every site draws new masks from here on."""
        self.tensor[1] += steps

    def to(self, device: torch.device | str) -> PhiloxState:
        """Move in place; the tensor's address changes when the device does."""
        self.tensor = self.tensor.to(device)
        return self

    def state_dict(self) -> dict[str, Tensor]:
        return {"philox": self.tensor.detach().cpu().clone()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore in place: the tensor's address stays.

        Raises:
            ValueError: `state` is not one int64 [2] tensor named "philox".
        """
        found = state.get("philox")
        if found is None or found.shape != (2,) or found.dtype != torch.int64 or len(state) != 1:
            got = {k: (tuple(v.shape), v.dtype) for k, v in state.items()}
            raise ValueError(f'state must be {{"philox": int64 [2]}}, found {got}')
        self.tensor.copy_(found)

    def __repr__(self) -> str:
        return f"PhiloxState(device={self.device})"


class PhiloxStates:
    """Named states with Transformer Engine's `CudaRNGStatesTracker` interface: one per kind of parallel region."""

    def __init__(self) -> None:
        self._states: dict[str, PhiloxState] = {}
        self._current: list[PhiloxState] = []

    def reset(self) -> None:
        """Forget every state.

        Raises:
            RuntimeError: inside `fork`.
        """
        if self._current:
            raise RuntimeError("reset() inside fork(): leave the context first")
        self._states = {}

    def get_states(self) -> dict[str, PhiloxState]:
        """A new dict of the states themselves, by name; they go on living. `state_dict` takes a snapshot."""
        return dict(self._states)

    def set_states(self, states: dict[str, PhiloxState]) -> None:
        """Replace all states by `states`."""
        for name, state in states.items():
            if not isinstance(state, PhiloxState):
                raise TypeError(
                    f"states[{name!r}] must be a PhiloxState, found {type(state).__name__}"
                )
        self._states = dict(states)

    def add(self, name: str, seed: int, device: torch.device | str | None = None) -> PhiloxState:
        """Create a state; `name` and `seed` must both be new, as two equal seeds would draw equal masks.

        Raises:
            ValueError: the name or the seed is taken.
        """
        if name in self._states:
            raise ValueError(f"name {name!r} is taken; states: {sorted(self._states)}")
        state = PhiloxState(seed, device)
        for other, taken in self._states.items():
            if int(taken.tensor[0]) == seed:
                raise ValueError(f"seed {seed} is already used by state {other!r}")
        self._states[name] = state
        return state

    @contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[PhiloxState]:
        """Inside the context, layers that hold this `PhiloxStates` draw from state `name`.

        Fork inside the function given to `torch.utils.checkpoint`, so that recomputation forks again; a layer that
        would have to draw outside of any fork raises.

        Raises:
            KeyError: no such state.
        """
        if name not in self._states:
            raise KeyError(f"no state named {name!r}; states: {sorted(self._states)}")
        self._current.append(self._states[name])
        try:
            yield self._states[name]
        finally:
            self._current.pop()

    def current(self) -> PhiloxState:
        """The innermost forked state.

        Raises:
            RuntimeError: outside of `fork`.
        """
        if not self._current:
            raise RuntimeError(
                f"dropout drew outside of PhiloxStates.fork(name); states: {sorted(self._states)}. Under "
                "torch.utils.checkpoint, fork inside the checkpointed function"
            )
        return self._current[-1]

    def state_dict(self) -> dict[str, Tensor]:
        """A snapshot: int64 [2] by name, on the CPU."""
        return {name: state.state_dict()["philox"] for name, state in self._states.items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore in place; ValueError if the names differ."""
        if set(state) != set(self._states):
            raise ValueError(f"state names {sorted(state)} must be {sorted(self._states)}")
        for name, value in state.items():
            self._states[name].load_state_dict({"philox": value})
