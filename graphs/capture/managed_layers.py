# SPDX-License-Identifier: Apache-2.0
"""The layers that a manager captures, and the checks that refuse what cannot be captured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..device.backend import Backend
from ..errors import CaptureError
from ..replay.grads import NamedParameters
from ..replay.watch import MODULE_HOOKS, PARAMETER_HOOKS
from .layer import Layer


@dataclass(eq=False)
class ManagedLayers:
    """What is captured: a training loop's layers, and what else a capture has to know of the loop."""

    names: Sequence[str]
    modules: Sequence[nn.Module]
    fp8_state: Any
    rng_states: Sequence[Any]
    grads: str
    make_backend: Callable[[], Backend]
    ddp: bool = False  # seen to run inside DistributedDataParallel

    def look_for_ddp(self, *_: Any) -> None:
        self.ddp = self.ddp or DistributedDataParallel._active_ddp_module is not None

    def check(self, layers: Sequence[Layer], reentrant: set[int], grads: str) -> bool:
        """Whether gradients are added inside the graphs. CaptureError for what cannot be captured."""
        for index in reentrant:
            reason = (
                "a reentrant checkpoint around it runs its forward twice, without and with grad"
            )
            raise CaptureError(self.names[index], "check", reason, "Use use_reentrant=False")
        hooked = None
        for layer in layers:
            check_module_hooks(layer.name, layer.module)
            try:
                check_parameter_hooks(layer.name, layer.trained)
            except CaptureError as error:
                hooked = hooked or error
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


def check_module_hooks(layer: str, module: nn.Module) -> None:
    """CaptureError for a hook inside of `module`: it would run at capture and never again."""
    for path, inner in module.named_modules():
        for kind in MODULE_HOOKS:
            if inner is not module and (hooks := getattr(inner, kind)):
                hook = next(iter(hooks.values()))
                found = getattr(hook, "__qualname__", type(hook).__qualname__)
                reason = (
                    f"submodule {path!r} has a hook ({kind}: {found}) that would not fire at replay"
                )
                hint = "Remove it, or hook the layer itself: those hooks run outside of its graphs"
                raise CaptureError(layer, "check", reason, hint)


def check_parameter_hooks(layer: str, parameters: NamedParameters) -> None:
    """CaptureError for hooks on parameters, which do not fire when gradients are added inside the graph."""
    for name, parameter in parameters:
        for attribute in PARAMETER_HOOKS:
            if getattr(parameter, attribute, None):
                reason = f"parameter {name!r} has a hook ({attribute}) that would not fire"
                raise CaptureError(
                    layer, "check", reason, "Use grads='autograd', or remove the hook"
                )
