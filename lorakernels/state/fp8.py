# SPDX-License-Identifier: Apache-2.0
"""Delayed-scaling state of a whole model: scales and amax histories in one contiguous tensor per direction.

`forward` (x of every layer) and `backward` (dy of every layer) are fp32 [amax_history_len + 1, n]: row 0 collects the
current iteration's amax, rows 1… are the history, the last row holds the scales. Quantizing ops read their scale and
write their amax there; `reduce_and_update` turns amaxes into scales. Nothing here reads a device value on the host,
except where `check_nan` asks for it.

Departures from Transformer Engine's DelayedScaling, on purpose:

* A scale of 0 means "no amax seen yet": the tensor is scaled by its own amax instead of by 1.0, so that small first
  gradients do not underflow (in a deep model they would take one step per layer to get through).
* One inf or NaN amax keeps the scale for that iteration, not for a whole history.
* One roll per iteration over all microbatches, never one per module call.
* In eval mode a tensor is scaled by its own amax, and the state is neither read nor written: a base that is left in
  eval while the rest trains has no stale scale.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._compile import _disable_dynamo

from lorakernels import ops
from lorakernels.config import GEMM_FIELDS, DelayedScaling

_CAPTURE = "a CUDA graph"
_ENTRIES = {"names", "recipe", "in_charge", "forward", "backward"}


@dataclass(frozen=True)
class FP8Snapshot:
    """What `FP8State.save` took: copies of both tensors and who was in charge."""

    names: tuple[str, ...]
    forward: Tensor
    backward: Tensor
    in_charge: str
    leader: int | None
    seen: frozenset[int]


class FP8State:
    """Scales and amax history of the tensors `names`, one x and one dy each.

    Args:
        names: one name per layer; column i of both directions belongs to `names[i]`.
        recipe: the `DelayedScaling` recipe all of them follow.
        device: where the two tensors live. Their addresses stay until the device changes or a tensor is registered.
        check_nan: every update first reads the amaxes on the host, a synchronization with the device, and warns once
            per tensor of a NaN. It may be switched at any time, by `state.check_nan = True`.

    Raises:
        ValueError: two of `names` are equal.
    """

    def __init__(
        self,
        names: Sequence[str],
        recipe: DelayedScaling,
        device: torch.device | str | None = None,
        *,
        check_nan: bool = False,
    ) -> None:
        if len(set(names)) != len(names):
            raise ValueError(f"names must be unique, found {list(names)}")
        self.names = tuple(names)
        self.recipe = recipe
        shape = (recipe.amax_history_len + 1, len(self.names))
        self.forward = torch.zeros(shape, dtype=torch.float32, device=device)
        self.backward = torch.zeros(shape, dtype=torch.float32, device=device)
        self.in_charge = "auto"
        self.check_nan = check_nan
        self._leader: int | None = None
        self._seen: set[int] = set()
        self._pins: list[str] = []
        self._warned: set[tuple[str, str]] = set()
        self.joint: set[int] = set()  # columns whose dy is that of several fused projections

    @property
    def device(self) -> torch.device:
        return self.forward.device

    def column(self, name: str) -> int:
        """Index of `name`; KeyError with the known names otherwise."""
        if name not in self.names:
            raise KeyError(f"no tensor named {name!r} in this FP8State; it has {list(self.names)}")
        return self.names.index(name)

    def values(self, column: int) -> Tensor:
        """fp32 [amax_history_len + 1, 2]: a copy of a column's amax history and scale, of x and of dy."""
        return torch.stack((self.forward[:, column], self.backward[:, column]), 1)

    def set_values(self, column: int, values: Tensor) -> None:
        """The reverse, in place; a state that is still on "meta" takes the device of `values`."""
        if self.forward.is_meta and not values.is_meta:
            self.to(values.device)
        self.forward[:, column] = values[:, 0]
        self.backward[:, column] = values[:, 1]

    def register(self, name: str) -> int:
        """Add a tensor; returns its column. The others keep theirs.

        Both directions get new memory, so register between iterations, not between a forward and its backward.

        Raises:
            ValueError: the name is taken.
            RuntimeError: the addresses are pinned.
        """
        if name in self.names:
            raise ValueError(f"{name!r} is registered already, as column {self.column(name)}")
        self._refuse_when_pinned(f"register {name!r}: that would move the state's memory")
        grown = [torch.cat((t, t.new_zeros(len(t), 1)), 1) for t in (self.forward, self.backward)]
        self.forward, self.backward = grown
        self.names += (name,)
        return len(self.names) - 1

    @property
    def pinned_by(self) -> str | None:
        """Who relies on the addresses staying as they are; None if nobody does."""
        return ", ".join(self._pins) or None

    def pin(self, by: str) -> None:
        """From now on, what would change an address raises and names `by`.

        A training forward or an update that runs under stream capture pins by itself, as "a CUDA graph".
        """
        if by not in self._pins:
            self._pins.append(by)

    def unpin(self, by: str | None = None) -> None:
        """The graphs of `by`, or all of them, are gone: where nobody is left, addresses may change again."""
        self._pins = [] if by is None else [pin for pin in self._pins if pin != by]

    @_disable_dynamo
    def reduce_and_update(self, group: dist.ProcessGroup | None = None) -> None:
        """Take charge: reduce row 0 over `group`, roll the histories, compute the new scales. Once per iteration.

        One all-reduce(MAX) of one row when torch.distributed has more than one rank in `group` (None is the world) and
        the recipe has `reduce_amax` (without it `group` is not used), then one update of both directions. All ranks of
        `group` must call it, on states of the same names; a rank without new amaxes gets the others' scales. From the
        first call on, the automatic update is off. A second call without new amaxes in between changes nothing. A CUDA
        graph may capture it. In a compiled function it is a graph break: call it beside what is compiled.

        Raises:
            ValueError: this rank is not in `group`.
            RuntimeError: `check_nan` is on under stream capture.
        """
        size = self._ranks(group)
        self._before_update()
        if self.in_charge == "auto":
            self.in_charge = "explicit"
        current = None
        if size > 1:
            current = torch.cat((self.forward[0], self.backward[0]))
            # As int32, which orders non-negative floats alike with NaN on top: a backend's float MAX may lose NaN.
            dist.all_reduce(current.view(torch.int32), op=dist.ReduceOp.MAX, group=group)
        self._update(current, gated=False)

    def begin(self, device: torch.device, column: int, training: bool) -> None:
        """What precedes a layer's forward on `device`; in training `on_training_forward`.

        Raises:
            ValueError: this state is in use on another device.
        """
        if device != self.device:
            self._follow(device)
        if training:
            self.on_training_forward(column)

    def on_training_forward(self, column: int) -> None:
        """Automatic update, called by a layer as its training forward begins; does nothing once someone is in charge.

        The first layer that runs leads: each of its forwards begins an outermost training forward. A layer that comes
        round twice without the leader having run takes the lead. The update then waits, on the device, for a
        backward to have run since the last one, so that microbatches whose forwards precede the first
        backward keep one scale. A recomputation updates nothing (ops.py). No communication between ranks.
        """
        if self._capturing():
            self.pin(_CAPTURE)
        if self.in_charge != "auto":
            return
        if torch._C._current_graph_task_id() != -1:  # a recomputation, inside a backward
            return
        if self._leader is None or column in self._seen:
            self._leader = column
        self._seen.add(column)
        if self._leader == column:
            self._seen.clear()
            self._before_update()
            self._update(None, gated=True)

    def reset(self) -> None:
        """Back to "no amax seen", in place; who is in charge does not change."""
        self.forward.zero_()
        self.backward.zero_()

    def save(self) -> FP8Snapshot:
        """Copies on this device of everything that iterations change: take one before warming up a graph."""
        return FP8Snapshot(
            self.names,
            self.forward.clone(),
            self.backward.clone(),
            self.in_charge,
            self._leader,
            frozenset(self._seen),
        )

    def restore(self, snapshot: FP8Snapshot) -> None:
        """Back to `snapshot`, in place: no address changes, and what is pinned stays so.

        Raises:
            ValueError: it was taken of other tensors or of another history length; nothing is changed then.
        """
        self._refuse_others("snapshot", snapshot.names, snapshot.forward, snapshot.backward)
        self.forward.copy_(snapshot.forward)
        self.backward.copy_(snapshot.backward)
        self.in_charge = snapshot.in_charge
        self._leader, self._seen = snapshot.leader, set(snapshot.seen)

    def to(self, device: torch.device | str) -> FP8State:
        """Move in place. From "meta" there is nothing to copy: the state starts anew.

        Raises:
            RuntimeError: the addresses are pinned and `device` is another one.
        """
        target = torch.empty(0, device=device).device
        if target != self.device:
            self.check_move(target)
            moved = [
                torch.zeros_like(t, device=target) if t.is_meta else t.to(target)
                for t in (self.forward, self.backward)
            ]
            self.forward, self.backward = moved
        return self

    def check_move(self, device: torch.device) -> None:
        """RuntimeError if moving to `device` would change pinned addresses."""
        if device != self.device:
            self._refuse_when_pinned(f"move this FP8State from {self.device} to {device}")

    def state_dict(self) -> dict[str, Any]:
        """Tensors (cloned) and the names and recipe they belong to; "joint" where `fuse` has joined some."""
        joint = {"joint": [self.names[column] for column in sorted(self.joint)]}
        return {
            **(joint if self.joint else {}),
            "names": list(self.names),
            "recipe": asdict(self.recipe),
            "in_charge": self.in_charge,
            "forward": self.forward.clone(),
            "backward": self.backward.clone(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore in place: no address changes. The state may come from another device.

        Of layers that are fused on one side only, the history of dy is not taken: it is of another tensor.

        Raises:
            ValueError: an entry is missing, or names, recipe, shapes or dtypes differ; nothing is changed then.
        """
        if state.keys() - {"joint"} != _ENTRIES:
            raise ValueError(
                f"state must have the entries {sorted(_ENTRIES)}, found {sorted(state)}"
            )
        own = asdict(self.recipe)
        # states saved before these fields were there: both GEMMs added up as they do by default
        found = {k: v for k, v in asdict(DelayedScaling()).items() if k in GEMM_FIELDS}
        found |= state["recipe"]
        differing = sorted(k for k in found.keys() | own.keys() if found.get(k) != own.get(k))
        if differing:
            theirs, ours = ({k: recipe.get(k) for k in differing} for recipe in (found, own))
            raise ValueError(f"state follows a recipe with {theirs}, this FP8State has {ours}")
        if not isinstance(state["in_charge"], str):
            raise ValueError(f"in_charge of the state must be a name, found {state['in_charge']!r}")
        self._refuse_others("state", tuple(state["names"]), state["forward"], state["backward"])
        self.forward.copy_(state["forward"])
        self.backward.copy_(state["backward"])
        joint = {self.column(name) for name in state.get("joint", ()) if name in self.names}
        for column in self.joint ^ joint:
            self.backward[:, column] = 0.0
        self.in_charge = state["in_charge"]

    def __getstate__(self) -> dict[str, Any]:
        """What pickle and deepcopy take: the copy has other addresses, which nobody relies on."""
        return {**self.__dict__, "_pins": []}

    def __repr__(self) -> str:
        return (
            f"FP8State({len(self.names)} tensors, {self.recipe}, device={self.device}, "
            f"in_charge={self.in_charge!r})"
        )

    def _ranks(self, group: dist.ProcessGroup | None) -> int:
        """How many ranks reduce together: 1 without torch.distributed or without `reduce_amax`."""
        if not (self.recipe.reduce_amax and dist.is_available() and dist.is_initialized()):
            return 1
        size = dist.get_world_size(group)
        if size < 1:
            raise ValueError(f"rank {dist.get_rank()} is not in `group`: give it one that it is in")
        return size

    def _follow(self, device: torch.device) -> None:
        """FSDP2 moves a CPU model's parameters to its devices, and knows of no state."""
        from_cpu = self.device.type == "cpu" and device.type != "meta"
        if not (from_cpu or self.forward.is_meta):
            raise ValueError(
                f"the FP8State is on {self.device}, x on {device}: the layers that share a state must be on one "
                "device; give those of each device an FP8State of their own"
            )
        self.to(device)

    def _capturing(self) -> bool:
        """Whether what runs now on this state's device is being recorded."""
        return self.forward.is_cuda and torch.cuda.is_current_stream_capturing()

    def _before_update(self) -> None:
        capturing = self._capturing()
        if self.check_nan:
            if capturing:
                raise RuntimeError(
                    "check_nan=True reads the amaxes on the host, which a stream under capture cannot do: "
                    "set `check_nan = False` on the FP8State before capturing"
                )
            self._warn_of_nan()
        if capturing:
            self.pin(_CAPTURE)

    def _warn_of_nan(self) -> None:
        rows = torch.stack((self.forward[0], self.backward[0])).isnan().tolist()
        for what, row in zip(("x", "dy"), rows, strict=True):
            for name, is_nan in zip(self.names, row, strict=True):
                if is_nan and (what, name) not in self._warned:
                    self._warned.add((what, name))
                    warnings.warn(
                        f"amax of {what} of {name!r} is NaN", RuntimeWarning, stacklevel=4
                    )

    def _update(self, current: Tensor | None, gated: bool) -> None:
        recipe = self.recipe
        ops.amax_and_scale_update(
            self.forward,
            self.backward,
            current,
            gated,
            recipe.fp8_max_forward,
            recipe.fp8_max_backward,
            recipe.margin,
            recipe.amax_compute_algo == "most_recent",
        )

    def _refuse_when_pinned(self, what: str) -> None:
        if self._pins:
            raise RuntimeError(
                f"cannot {what}. Its addresses are pinned by {self.pinned_by}; "
                "drop what was captured and call unpin() first"
            )

    def _refuse_others(
        self, what: str, names: tuple[str, ...], forward: Tensor, backward: Tensor
    ) -> None:
        odd = sorted(set(names) ^ set(self.names))
        if odd:
            raise ValueError(
                f"the {what} is of {len(names)} tensors, this FP8State of {len(self.names)}; "
                f"only one of them has {odd[:8]}"
            )
        if names != self.names:
            at = [a == b for a, b in zip(names, self.names, strict=True)].index(False)
            raise ValueError(
                f"column {at} of the {what} is {names[at]!r}, of this FP8State {self.names[at]!r}"
            )
        pairs = (("forward", forward, self.forward), ("backward", backward, self.backward))
        for key, found, own in pairs:
            if not isinstance(found, Tensor) or (found.is_meta and not own.is_meta):
                raise ValueError(
                    f"{key} of the {what} must be a tensor with values, found {found!r}"
                )
            if found.shape != own.shape or found.dtype != own.dtype:
                raise ValueError(
                    f"{key} of the {what} is {found.dtype} {tuple(found.shape)}, of this FP8State {own.dtype} "
                    f"{tuple(own.shape)} (history length + 1, tensors)"
                )
