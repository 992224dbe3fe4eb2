# SPDX-License-Identifier: Apache-2.0
"""The layers that a manager captures, and the checks that refuse what cannot be captured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..device.backend import Backend
from ..interface.errors import CaptureError
from .checks import check_module_hooks, check_parameter_hooks
from .layer import Layer


@dataclass(eq=False)
class ManagedLayers:
    """The layers of a training loop, and what a capture has to know of the loop besides.

    `grads` is GraphManager's argument. `ddp`: the layers were seen to run inside DistributedDataParallel.
    """

    names: Sequence[str]
    modules: Sequence[nn.Module]
    fp8_state: Any
    rng_states: Sequence[Any]
    grads: str
    make_backend: Callable[[], Backend]
    ddp: bool = False

    def look_for_ddp(self, *_: Any) -> None:
        """Note whether a DistributedDataParallel forward is running now."""
        self.ddp = self.ddp or DistributedDataParallel._active_ddp_module is not None

    def check(self, layers: Sequence[Layer], reentrant: set[int], grads: str) -> bool:
        """Whether gradients of parameters are added inside the graphs.

        Args:
            layers: as they would be captured.
            reentrant: indices of layers that a reentrant checkpoint recomputes.
            grads: "auto", "add" or "autograd".

        Raises:
            CaptureError: something that a graph could not do at replay, by the layer's name.
        """
        for index in reentrant:
            reason = (
                "a reentrant checkpoint around it runs its forward twice, without and with grad"
            )
            raise CaptureError(self.names[index], "check", reason, "Use use_reentrant=False")
        hooked = _hooked(layers)
        if grads == "add" and hooked is not None:
            raise hooked
        if grads == "add" and self.ddp:
            reason = (
                "the layers run inside DistributedDataParallel, whose hooks on parameters would not "
                "fire"
            )
            raise CaptureError(self.names[0], "check", reason, "Use grads='autograd'")
        if getattr(self.fp8_state, "in_charge", None) == "auto":
            reason = "fp8_state updates itself inside the layers (in_charge='auto')"
            hint = "Call fp8_state.reduce_and_update() once per iteration, from the first one on"
            raise CaptureError(self.names[0], "check", reason, hint)
        return grads == "add" or (grads == "auto" and hooked is None and not self.ddp)


def _hooked(layers: Sequence[Layer]) -> CaptureError | None:
    """Why gradients cannot be added inside the graphs; hooks on submodules are refused in any case."""
    hooked = None
    for layer in layers:
        check_module_hooks(layer.name, layer.module)
        try:
            check_parameter_hooks(layer.name, layer.trained)
        except CaptureError as error:
            hooked = hooked or error
    return hooked
