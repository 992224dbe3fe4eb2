# SPDX-License-Identifier: Apache-2.0
"""Random state in device memory, which kernels read and the host never does.

A dropout site draws its mask from a slot, int64 [2] = (key, offset). Backward keeps these 16 bytes instead of a mask.
reference.dropout_keep has the formula. There are two sources of slots:

* Without a `PhiloxState`, torch's generator of the device. `torch.manual_seed` then reproduces the run.
  `torch.utils.checkpoint` restores that generator and so recomputes the same mask.
* With a `PhiloxState`, slot = (seed + nonce, offset). The nonce is one draw from torch's CPU generator. Calls
  therefore differ, and a recomputation still repeats its forward's mask. `advance()` moves the offset on the device,
  once per iteration or graph replay, because the nonce is frozen in a graph.

Ranks that must draw equal masks need equal states and CPU generators in step. That takes the same `torch.manual_seed`
and the same number of draws since. Megatron-LM's ranks need equal CUDA generators for the same reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from lorakernels.device import extension
from lorakernels.state.ahead import slot_ahead

_INT63 = (1 << 63) - 1
_MASK32 = (1 << 32) - 1
_is_compiling = torch.compiler.is_compiling
_dispatches = torch._C._len_torch_dispatch_stack
_transforms = torch._C._are_functorch_transforms_active
_traces = torch._C._get_tracing_state


def _is_watched() -> bool:
    """Whether the draw has to be an op of torch: it is captured, traced, or seen by a mode or a transform."""
    return bool(
        _is_compiling()
        or _dispatches()
        or _transforms()
        or _traces() is not None
        or torch.cuda.is_current_stream_capturing()
    )


def default_slot(device: torch.device) -> Tensor:
    """int64 [2], drawn from torch's generator of `device`. The tensor is not to be written to."""
    if device.type == "cuda" and not _is_watched():
        return slot_ahead(torch.cuda.current_device() if device.index is None else device.index)
    return random_slot(device)


def random_slot(device: torch.device) -> Tensor:
    """`default_slot` by an op of torch, in new memory."""
    return torch.randint(-_INT63, _INT63, (2,), dtype=torch.int64, device=device)


def _integer(name: str, value: Any, bits: int) -> int:
    integral = isinstance(value, Integral) and not isinstance(value, bool)
    if not integral or not 0 <= int(value) < 1 << bits:
        raise ValueError(f"{name} must be an integer in [0, 2**{bits}), found {value!r}")
    return int(value)


def _check_saved(name: str, saved: Any, state: PhiloxState) -> None:
    """Raise ValueError, which names both sides, unless `saved` can be copied into `state`."""
    if not isinstance(saved, Tensor):
        raise ValueError(f"{name} must be a tensor int64 [2], found {type(saved).__name__}")
    if saved.shape != (2,) or saved.dtype != torch.int64 or saved.is_meta:
        raise ValueError(
            f"{name} must be int64 [2], to be copied to {state.device}; "
            f"found {str(saved.dtype).removeprefix('torch.')} {list(saved.shape)} on {saved.device}"
        )
    if int(saved[0]) < 0:
        raise ValueError(f"{name} holds seed {int(saved[0])}, which must be in [0, 2**63)")


class PhiloxState:
    """Seed and offset as one int64 [2] tensor on `device`.

    deepcopy and pickle give an independent state. It draws the same masks from the same torch CPU generator.

    Args:
        seed: any integer in [0, 2**63), also of numpy's types.
        device: where the state lives; kernels on that device read it.

    Attributes:
        tensor: int64 [2]. Its address changes only with the device.
        seed: the seed on the host, so that reading it needs no device access.

    Raises:
        ValueError: the seed is not such an integer.
    """

    def __init__(self, seed: int, device: torch.device | str | None = None) -> None:
        self.seed = _integer("seed", seed, 63)
        self.tensor = torch.tensor([self.seed, 0], dtype=torch.int64, device=device)
        # A slot adds nonce · _key to the state, which changes only the first element, the seed.
        self._key = torch.tensor([1, 0], dtype=torch.int64, device=device)

    @property
    def device(self) -> torch.device:
        return self.tensor.device

    def slot(self) -> Tensor:
        """A new int64 [2] slot for one call of one dropout site."""
        nonce = torch.randint(_INT63, (), dtype=torch.int64, device="cpu")
        if torch.compiler.is_compiling():
            return self.tensor + self._key * nonce
        return torch.add(self.tensor, self._key, alpha=int(nonce))  # a single kernel launch

    def advance(self, steps: int = 1) -> None:
        """Add `steps` to the offset on the device, without a host sync. Every site then draws new masks.

        Call it after the iteration's last backward: a recomputation takes its slot again and needs its forward's
        offset. Only the low 32 bits of the offset count, so masks of one nonce repeat after 2**32 steps.
        """
        self.tensor[1].add_(steps)

    def to(self, device: torch.device | str) -> PhiloxState:
        """Move in place. The tensor's address changes if the device does."""
        self.tensor, self._key = self.tensor.to(device), self._key.to(device)
        return self

    def state_dict(self) -> dict[str, Tensor]:
        """A snapshot on the CPU. Save torch's CPU generator too, because the nonces come from it."""
        return {"philox": self.tensor.detach().cpu().clone()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore in place, from a tensor on any device. This state's address and device stay.

        Raises:
            ValueError: `state` is not one int64 [2] tensor named "philox"; nothing is changed then.
        """
        if set(state) != {"philox"}:
            raise ValueError(f"state must have the one name 'philox', found {sorted(state)}")
        _check_saved("state['philox']", state["philox"], self)
        self._load(state["philox"])

    def _load(self, saved: Tensor) -> None:
        self.seed = int(saved[0])
        self.tensor.copy_(saved)

    def __repr__(self) -> str:
        return f"PhiloxState(seed={self.seed}, device={self.device})"


def _check_seeds_differ(seeds: dict[str, int]) -> None:
    """Raise ValueError if two seeds are equal, because their states would draw equal masks."""
    owner: dict[int, str] = {}
    for name, seed in seeds.items():
        if seed in owner:
            raise ValueError(
                f"states {owner[seed]!r} and {name!r} have the same seed {seed}; seeds must differ"
            )
        owner[seed] = name


class PhiloxStates:
    """Named states with the interface of Transformer Engine's `CudaRNGStatesTracker`: one per kind of parallel region.

    A deepcopy or pickle holds copies of the states and is outside of any fork.
    """

    def __init__(self) -> None:
        self._states: dict[str, PhiloxState] = {}
        self._current: list[PhiloxState] = []

    def reset(self) -> None:
        """Forget every state.

        Raises:
            RuntimeError: inside `fork`.
        """
        self._refuse_inside_fork("reset")
        self._states = {}

    def get_states(self) -> dict[str, PhiloxState]:
        """A new dict of the state objects by name. They are not copied; `state_dict` takes a snapshot."""
        return dict(self._states)

    def set_states(self, states: dict[str, PhiloxState]) -> None:
        """Replace all states by the objects in `states`, which layers and graphs may go on sharing.

        Raises:
            RuntimeError: inside `fork`.
            TypeError: a value is not a PhiloxState.
            ValueError: two of them have the same seed.
        """
        self._refuse_inside_fork("set_states")
        for name, state in states.items():
            if not isinstance(state, PhiloxState):
                raise TypeError(
                    f"states[{name!r}] must be a PhiloxState, found {type(state).__name__}"
                )
        _check_seeds_differ({name: state.seed for name, state in states.items()})
        self._states = dict(states)

    def add(self, name: str, seed: int, device: torch.device | str | None = None) -> PhiloxState:
        """Create a state. `name` and `seed` must both be new, because two equal seeds would draw equal masks.

        Raises:
            ValueError: the name or the seed is taken, or the seed is not an integer in [0, 2**63).
        """
        if name in self._states:
            raise ValueError(f"name {name!r} is taken; states: {sorted(self._states)}")
        seed = _integer("seed", seed, 63)
        for other, taken in self._states.items():
            if taken.seed == seed:
                raise ValueError(f"seed {seed} is already used by state {other!r}")
        self._states[name] = PhiloxState(seed, device)
        return self._states[name]

    @contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[PhiloxState]:
        """Inside the context, layers that hold this `PhiloxStates` draw from state `name`.

        Fork inside the function given to `torch.utils.checkpoint`, so that recomputation forks again. A layer that
        draws outside of any fork raises.

        Raises:
            KeyError: there is no such state.
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

    def to(self, device: torch.device | str) -> PhiloxStates:
        """Move every state in place."""
        for state in self._states.values():
            state.to(device)
        return self

    def state_dict(self) -> dict[str, Tensor]:
        """A snapshot on the CPU: int64 [2] by name.

        Save torch's CPU generator too, because the nonces come from it.
        """
        return {name: state.state_dict()["philox"] for name, state in self._states.items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore in place. Every address stays.

        Raises:
            ValueError: the names differ, a value is not int64 [2], or two seeds are equal; nothing is changed then.
        """
        if set(state) != set(self._states):
            raise ValueError(f"state names {sorted(state)} must be {sorted(self._states)}")
        for name, saved in state.items():
            _check_saved(f"state[{name!r}]", saved, self._states[name])
        _check_seeds_differ({name: int(saved[0]) for name, saved in state.items()})
        for name, saved in state.items():
            self._states[name]._load(saved)

    def _refuse_inside_fork(self, what: str) -> None:
        if self._current:
            raise RuntimeError(f"{what}() inside fork(): leave the context first")

    def __getstate__(self) -> dict[str, Any]:
        return {"_states": dict(self._states), "_current": []}

    def __repr__(self) -> str:
        return f"PhiloxStates({self._states})"


def model_parallel_states(
    seed: int,
    *,
    tensor_parallel_rank: int = 0,
    data_parallel_rank: int = 0,
    pipeline_parallel_rank: int = 0,
    device: torch.device | str | None = None,
) -> PhiloxStates:
    """This rank's two states, with the names and roles of Megatron-LM's `model_parallel_cuda_manual_seed`.

    * "data-parallel-rng" is for tensors that every tensor-parallel rank holds whole. It is equal on all
      tensor-parallel ranks and different on every data- and pipeline-parallel rank. With `row0`, `col0` it also serves
      sharded tensors, whose ranks then draw their parts of one mask.
    * "model-parallel-rng" is for sharded tensors that each rank treats as its own. It also differs by tensor-parallel
      rank.

    The seeds are 63 bits of Philox4x32-10(counter = (tensor, data, pipeline rank, kind), key = seed). Kind and tensor
    rank are 0 for the first state; kind is 1 for the second.

    Megatron adds ranks up instead (seed + 100 · pipeline rank, and + 2718 + tensor rank). There, different ranks, and
    runs whose seeds differ by little, can get the same sum. The seeds here collide no more often than random numbers
    do.

    A slot adds a nonce from torch's CPU generator to the seed. Tensor-parallel ranks therefore draw equal
    "data-parallel-rng" masks only while their CPU generators are in step. Call `torch.manual_seed` with the same value
    on all of them.

    Args:
        seed: the run's seed, the same on every rank; an integer in [0, 2**63).
        tensor_parallel_rank, data_parallel_rank, pipeline_parallel_rank: this rank's places, in [0, 2**32).
        device: where the states live.

    Raises:
        ValueError: an argument is out of range; the message names it.
        ImportError: lorakernels._C was not built.
    """
    seed = _integer("seed", seed, 63)
    ranks = {
        "tensor_parallel_rank": tensor_parallel_rank,
        "data_parallel_rank": data_parallel_rank,
        "pipeline_parallel_rank": pipeline_parallel_rank,
    }
    tensor, data, pipeline = (_integer(name, rank, 32) for name, rank in ranks.items())
    states = PhiloxStates()
    for name, counter in (
        ("data-parallel-rng", (0, data, pipeline, 0)),
        ("model-parallel-rng", (tensor, data, pipeline, 1)),
    ):
        low, high, *_ = extension().philox4x32_10(counter, (seed & _MASK32, seed >> 32))
        states.add(name, (high << 32 | low) & _INT63, device)
    return states


def skip_slots(count: int) -> None:
    """Leave torch's CPU generator where `count` slots of `PhiloxState`s would leave it."""
    torch.randint(_INT63, (count,), dtype=torch.int64, device="cpu")


def draw_slot(state: PhiloxState | PhiloxStates | None, device: torch.device) -> Tensor:
    """int64 [2] for one call of one dropout site, from `state`, or from torch's generator of `device` if it is None.

    Raises:
        RuntimeError: `state` is a `PhiloxStates` outside of `fork`. Using another generator would change the mask
            silently.
        ValueError: `state` lives on another device.
    """
    if state is None:
        return default_slot(device)
    current = state.current() if isinstance(state, PhiloxStates) else state
    if current.device != device:
        raise ValueError(f"the PhiloxState is on {current.device}, the tensor on {device}")
    return current.slot()
