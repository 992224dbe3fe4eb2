# SPDX-License-Identifier: Apache-2.0
"""Delayed-scaling state of a whole model: scales and amax histories in one contiguous tensor per direction.

`forward` (x of every layer) and `backward` (dy of every layer) are fp32 [amax_history_len + 1, n]. Row 0 collects the
current iteration's amax, rows 1… are the history, and the last row holds the scales. Quantizing ops read their scale
and write their amax there. `reduce_and_update` turns amaxes into scales. The host reads no device value here, except
with `check_nan`.

This state departs from Transformer Engine's DelayedScaling on purpose:

* A scale of 0 means "no amax seen yet". The tensor is then scaled by its own amax instead of by 1.0, so that small
  first gradients do not underflow. In a deep model they would take one step per layer to get through.
* One inf or NaN amax keeps the scale for that iteration, not for a whole history.
* The history is rolled once per iteration over all microbatches, never once per module call.
* In eval mode a tensor is scaled by its own amax, and the state is neither read nor written. A base that stays in eval
  while the rest trains therefore has no stale scale.
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
from lorakernels.device import in_backward
from lorakernels.recipes import GEMM_FIELDS, DelayedScaling

_CAPTURE = "a CUDA graph"
_ENTRIES = {"names", "recipe", "in_charge", "forward", "backward"}


def reduce_amax(amax: Tensor, group: Any) -> None:
    """Collective: `amax` fp32, not negative, becomes its largest over the ranks of `group`. NaN is the largest."""
    # int32 orders such numbers the same way. A backend's float MAX may lose NaN.
    dist.all_reduce(amax.view(torch.int32), op=dist.ReduceOp.MAX, group=group)


@dataclass(frozen=True)
class FP8Snapshot:
    """The result of `FP8State.save`: copies of both tensors and of the record of who runs the updates."""

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
        recipe: the `DelayedScaling` recipe that all of them follow.
        device: where the two tensors live. Their addresses stay until the device changes or a tensor is registered.
        check_nan: every update first reads the amaxes on the host, which synchronizes with the device. It warns once
            per tensor with a NaN. `state.check_nan` may be changed at any time.

    Attributes:
        forward, backward: fp32 [amax_history_len + 1, n], for x and for dy.
        in_charge: "auto" while layers start the updates, "explicit" after a call of `reduce_and_update`.
        shared_over: groups whose ranks hold parts of the same tensors (tensor and context parallelism). Every update
            first takes the largest amaxes of their ranks, the automatic one too. A copy has none.
        updates, rewrites: how often scales were updated, and how often values were put in place from elsewhere.

    Raises:
        ValueError: two of `names` are equal.
    """

    shared_over: tuple[Any, ...] = ()
    updates = rewrites = 0

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
        self.joint: set[int] = set()  # columns that hold a joint dy of several fused projections

    @property
    def device(self) -> torch.device:
        return self.forward.device

    def column(self, name: str) -> int:
        """Index of `name`.

        Raises:
            KeyError: there is no such tensor; the message lists the known names.
        """
        if name not in self.names:
            raise KeyError(f"no tensor named {name!r} in this FP8State; it has {list(self.names)}")
        return self.names.index(name)

    def values(self, column: int) -> Tensor:
        """fp32 [amax_history_len + 1, 2]: a copy of a column's amax history and scale, for x and for dy."""
        return torch.stack((self.forward[:, column], self.backward[:, column]), 1)

    def set_values(self, column: int, values: Tensor) -> None:
        """Copy `values`, as returned by `values`, into a column, in place.

        A state that is still on "meta" first moves to the device of `values`.
        """
        if self.forward.is_meta and not values.is_meta:
            self.to(values.device)
        self.rewrites += 1
        self.forward[:, column] = values[:, 0]
        self.backward[:, column] = values[:, 1]

    def register(self, name: str) -> int:
        """Add a tensor and return its column. The other columns stay.

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
        """The holders that rely on constant addresses, joined by ", "; None if there are none."""
        return ", ".join(self._pins) or None

    def pin(self, by: str) -> None:
        """Keep the addresses constant: any call that would change one now raises and names `by`.

        A training forward or an update under stream capture pins by itself, as "a CUDA graph".
        """
        if by not in self._pins:
            self._pins.append(by)

    def unpin(self, by: str | None = None) -> None:
        """Drop the pin of `by`, or all pins. Addresses may change again once no pin is left."""
        self._pins = [] if by is None else [pin for pin in self._pins if pin != by]

    @_disable_dynamo
    def reduce_and_update(self, group: dist.ProcessGroup | None = None) -> None:
        """Take over the updates: reduce row 0 over `group`, roll the histories, compute the new scales. Call once per
        iteration.

        With more than one rank in `group` (None is the world) and `reduce_amax` in the recipe, one all-reduce(MAX) of
        one row comes first. Without `reduce_amax`, `group` is not used. One update of both directions follows. All
        ranks of `group` must call this, on states of the same names. A rank without new amaxes gets the scales of
        the other ranks.

        From the first call on, the automatic update is off. A second call without new amaxes in between changes
        nothing. A CUDA graph may capture this call. In a compiled function it is a graph break, so call it outside.

        Raises:
            ValueError: this rank is not in `group`.
            RuntimeError: `check_nan` is on under stream capture.
        """
        size = self._ranks(group)
        self._before_update()
        if self.in_charge == "auto":
            self.in_charge = "explicit"
        groups = [*self.shared_over, *[group] * (size > 1)]
        self._update(self._reduced(groups), gated=False)

    def begin(self, device: torch.device, column: int, training: bool) -> None:
        """Called before a layer's forward on `device`. In training it calls `on_training_forward`.

        Raises:
            ValueError: this state is in use on another device.
        """
        if device != self.device:
            self._follow(device)
        if training:
            self.on_training_forward(column)

    def on_training_forward(self, column: int) -> None:
        """Automatic update, called by a layer as its training forward begins. It does nothing unless `in_charge` is
        "auto".

        The first layer that runs leads: each of its forwards begins an outermost training forward. A layer that runs
        twice without the leader in between becomes the leader.

        The update waits, on the device, for a backward to have run since the last update. Microbatches whose forwards
        precede the first backward therefore keep one scale. A recomputation updates nothing. Only the ranks of
        `shared_over` communicate.
        """
        if self._capturing():
            self.pin(_CAPTURE)
        if self.in_charge != "auto":
            return
        if in_backward():  # a recomputation
            return
        if self._leader is None or column in self._seen:
            self._leader = column
        self._seen.add(column)
        if self._leader == column:
            self._seen.clear()
            self._before_update()
            self._update(self._reduced([*self.shared_over]), gated=True)

    def reset(self) -> None:
        """Back to "no amax seen", in place. `in_charge` does not change."""
        self.rewrites += 1
        self.forward.zero_()
        self.backward.zero_()

    def save(self) -> FP8Snapshot:
        """Copies, on this device, of everything that iterations change. Save before the warm-up of a graph."""
        return FP8Snapshot(
            self.names,
            self.forward.clone(),
            self.backward.clone(),
            self.in_charge,
            self._leader,
            frozenset(self._seen),
        )

    def restore(self, snapshot: FP8Snapshot) -> None:
        """Restore `snapshot` in place: no address changes, and pins stay.

        Raises:
            ValueError: the snapshot has other tensors or another history length; nothing is changed then.
        """
        self._refuse_others("snapshot", snapshot.names, snapshot.forward, snapshot.backward)
        self.rewrites += 1
        self.forward.copy_(snapshot.forward)
        self.backward.copy_(snapshot.backward)
        self.in_charge = snapshot.in_charge
        self._leader, self._seen = snapshot.leader, set(snapshot.seen)

    def to(self, device: torch.device | str) -> FP8State:
        """Move in place. A state on "meta" has no values to copy, so it starts from new values.

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
        """Raise RuntimeError if moving to `device` would change pinned addresses."""
        if device != self.device:
            self._refuse_when_pinned(f"move this FP8State from {self.device} to {device}")

    def state_dict(self) -> dict[str, Any]:
        """Cloned tensors, the names and recipe that they belong to, and `in_charge`.

        After `fuse` has joined projections, the entry "joint" names the columns that hold a joint dy.
        """
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

        If a layer is fused on one side only, its dy history is not taken, because it describes another tensor.

        Raises:
            ValueError: an entry is missing, or names, recipe, shapes or dtypes differ; nothing is changed then.
        """
        if state.keys() - {"joint"} != _ENTRIES:
            raise ValueError(
                f"state must have the entries {sorted(_ENTRIES)}, found {sorted(state)}"
            )
        current = asdict(self.recipe)
        # Older states lack these fields. Both GEMMs then accumulated in the way that is still the default.
        saved = {k: v for k, v in asdict(DelayedScaling()).items() if k in GEMM_FIELDS}
        saved |= state["recipe"]
        differing = sorted(
            k for k in saved.keys() | current.keys() if saved.get(k) != current.get(k)
        )
        if differing:
            theirs, ours = ({k: recipe.get(k) for k in differing} for recipe in (saved, current))
            raise ValueError(f"state follows a recipe with {theirs}, this FP8State has {ours}")
        if not isinstance(state["in_charge"], str):
            raise ValueError(f"in_charge of the state must be a name, found {state['in_charge']!r}")
        self._refuse_others("state", tuple(state["names"]), state["forward"], state["backward"])
        self.rewrites += 1
        self.forward.copy_(state["forward"])
        self.backward.copy_(state["backward"])
        joint = {self.column(name) for name in state.get("joint", ()) if name in self.names}
        for column in self.joint ^ joint:
            self.backward[:, column] = 0.0
        self.in_charge = state["in_charge"]

    def __getstate__(self) -> dict[str, Any]:
        """The state for pickle and deepcopy. A copy has its own addresses, so it starts without pins and group."""
        return {**self.__dict__, "_pins": [], "shared_over": ()}

    def __repr__(self) -> str:
        return (
            f"FP8State({len(self.names)} tensors, {self.recipe}, device={self.device}, "
            f"in_charge={self.in_charge!r})"
        )

    def _ranks(self, group: dist.ProcessGroup | None) -> int:
        """Number of ranks that reduce together: 1 without torch.distributed or without `reduce_amax`."""
        if not (self.recipe.reduce_amax and dist.is_available() and dist.is_initialized()):
            return 1
        size = dist.get_world_size(group)
        if size < 1:
            raise ValueError(f"rank {dist.get_rank()} is not in `group`: give it one that it is in")
        return size

    def _follow(self, device: torch.device) -> None:
        """Move to `device` from the CPU or "meta". FSDP2 moves a CPU model's parameters, but does not know
        this state.
        """
        from_cpu = self.device.type == "cpu" and device.type != "meta"
        if not (from_cpu or self.forward.is_meta):
            raise ValueError(
                f"the FP8State is on {self.device}, x on {device}: the layers that share a state must be on one "
                "device; give those of each device an FP8State of their own"
            )
        self.to(device)

    def _capturing(self) -> bool:
        """True if a CUDA graph records the current stream on this state's device."""
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

    def _reduced(self, groups: Sequence[Any]) -> Tensor | None:
        """fp32 [2n]: row 0 of both directions, at its largest over the ranks of all `groups`; None without groups."""
        if not groups:
            return None
        current = torch.cat((self.forward[0], self.backward[0]))
        for group in groups:
            reduce_amax(current, group)
        return current

    def _update(self, current: Tensor | None, gated: bool) -> None:
        self.updates += 1
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
            column = [a == b for a, b in zip(names, self.names, strict=True)].index(False)
            raise ValueError(
                f"column {column} of the {what} is {names[column]!r}, of this FP8State {self.names[column]!r}"
            )
        pairs = (("forward", forward, self.forward), ("backward", backward, self.backward))
        for key, saved, current in pairs:
            if not isinstance(saved, Tensor) or (saved.is_meta and not current.is_meta):
                raise ValueError(
                    f"{key} of the {what} must be a tensor with values, found {saved!r}"
                )
            if saved.shape != current.shape or saved.dtype != current.dtype:
                raise ValueError(
                    f"{key} of the {what} is {saved.dtype} {tuple(saved.shape)}, of this FP8State {current.dtype} "
                    f"{tuple(current.shape)} (history length + 1, tensors)"
                )
