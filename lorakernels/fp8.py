# SPDX-License-Identifier: Apache-2.0
"""Delayed-scaling state of a whole model: scales and amax histories in one contiguous tensor per direction.

`forward` (x of every layer) and `backward` (dy of every layer) are fp32 [amax_history_len + 1, n]: row 0 collects the
current iteration's amax, rows 1… are the history, the last row holds the scales. Quantizing ops read their scale and
write their amax there; `reduce_and_update` turns amaxes into scales. Nothing here reads a device value on the host.

Departures from Transformer Engine's DelayedScaling, on purpose:

* A scale of 0 means "no amax seen yet": the tensor is scaled by its own amax instead of by 1.0, so that small first
  gradients do not underflow (in a deep model they would take one step per layer to get through).
* One inf amax keeps the scale for that iteration, not for a whole history.
* One roll per iteration over all microbatches, never one per module call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from lorakernels import ops
from lorakernels.config import DelayedScaling


class FP8State:
    """Scales and amax history of the tensors `names`, one x and one dy each.

    Args:
        names: one name per layer; column i of both directions belongs to `names[i]`.
        recipe: the `DelayedScaling` recipe all of them follow.
        device: where the two tensors live. Their addresses stay until the device changes.
    """

    def __init__(
        self,
        names: Sequence[str],
        recipe: DelayedScaling,
        device: torch.device | str | None = None,
    ) -> None:
        if len(set(names)) != len(names):
            raise ValueError(f"names must be unique, found {list(names)}")
        self.names = tuple(names)
        self.recipe = recipe
        shape = (recipe.amax_history_len + 1, len(self.names))
        self.forward = torch.zeros(shape, dtype=torch.float32, device=device)
        self.backward = torch.zeros(shape, dtype=torch.float32, device=device)
        self.in_charge = "auto"
        self._leader: int | None = None
        self._seen: set[int] = set()

    @property
    def device(self) -> torch.device:
        return self.forward.device

    def column(self, name: str) -> int:
        """Index of `name`; KeyError with the known names otherwise."""
        if name not in self.names:
            raise KeyError(f"no tensor named {name!r} in this FP8State; it has {list(self.names)}")
        return self.names.index(name)

    def reduce_and_update(self, group: dist.ProcessGroup | None = None) -> None:
        """Take charge: reduce row 0 over `group`, roll the histories, compute the new scales. Once per iteration.

        One all-reduce(MAX) per direction when torch.distributed is initialised and the recipe has `reduce_amax`
        (`group=None` is the world), then one update per direction. From the first call on, the automatic update is off.
        A second call without new amaxes in between changes nothing.
        """
        if self.in_charge == "auto":
            self.in_charge = "explicit"
        if self.recipe.reduce_amax and dist.is_available() and dist.is_initialized():
            row = torch.cat((self.forward[0], self.backward[0]))
            dist.all_reduce(row, op=dist.ReduceOp.MAX, group=group)
            self.forward[0].copy_(row[: len(self.names)])
            self.backward[0].copy_(row[len(self.names) :])
        self._update(gated=False)

    def on_training_forward(self, column: int) -> None:
        """Automatic update, called by a layer as its training forward begins; does nothing once someone is in charge.

        The first layer that runs leads: each of its forwards begins an outermost training forward. A layer that comes
        round twice without the leader having run takes the lead. The update then waits, on the device, for a
        backward to have run since the last one, so that microbatches whose forwards precede the first
        backward keep one scale. A recomputation updates nothing (ops.py). No communication between ranks.
        """
        if self.in_charge != "auto":
            return
        if torch.compiler.is_compiling():  # a set would be one more guard per layer
            if self._leader is None:
                self._leader = column
        elif torch._C._current_graph_task_id() != -1:  # a recomputation, inside a backward
            return
        else:
            if self._leader is None or column in self._seen:
                self._leader = column
            self._seen.add(column)
            if self._leader == column:
                self._seen.clear()
        if self._leader == column:
            self._update(gated=True)

    def _update(self, gated: bool) -> None:
        recipe = self.recipe
        most_recent = recipe.amax_compute_algo == "most_recent"
        gate = self.backward[0].clone() if gated else None
        for state, fp8_max in (
            (self.forward, recipe.fp8_max_forward),
            (self.backward, recipe.fp8_max_backward),
        ):
            ops.amax_and_scale_update(state, gate, fp8_max, recipe.margin, most_recent)

    def reset(self) -> None:
        """Back to "no amax seen", in place; who is in charge does not change."""
        self.forward.zero_()
        self.backward.zero_()

    def to(self, device: torch.device | str) -> FP8State:
        """Move in place. From "meta" there is nothing to copy: the state starts anew."""
        target = torch.empty(0, device=device).device
        if target != self.device:
            moved = [
                torch.zeros_like(t, device=target) if t.is_meta else t.to(target)
                for t in (self.forward, self.backward)
            ]
            self.forward, self.backward = moved
        return self

    def state_dict(self) -> dict[str, Any]:
        """Tensors (cloned) and the names and recipe they belong to."""
        return {
            "names": list(self.names),
            "recipe": asdict(self.recipe),
            "in_charge": self.in_charge,
            "forward": self.forward.clone(),
            "backward": self.backward.clone(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore in place: no address changes.

        Raises:
            ValueError: names, recipe, shapes or dtypes differ; nothing is changed then.
        """
        if list(state["names"]) != list(self.names):
            odd = sorted(set(state["names"]) ^ set(self.names))
            raise ValueError(
                f"state is for other tensors: {len(state['names'])} names, differing {odd[:8]}"
            )
        if state["recipe"] != asdict(self.recipe):
            raise ValueError(
                f"state follows {state['recipe']}, this FP8State {asdict(self.recipe)}"
            )
        for key, own in (("forward", self.forward), ("backward", self.backward)):
            found = state[key]
            if found.shape != own.shape or found.dtype != own.dtype:
                raise ValueError(
                    f"state[{key!r}] must be {own.dtype} {tuple(own.shape)} (history length + 1, tensors), "
                    f"found {found.dtype} {tuple(found.shape)}"
                )
        self.forward.copy_(state["forward"])
        self.backward.copy_(state["backward"])
        self.in_charge = state["in_charge"]

    def __repr__(self) -> str:
        return (
            f"FP8State({len(self.names)} tensors, {self.recipe}, device={self.device}, "
            f"in_charge={self.in_charge!r})"
        )
