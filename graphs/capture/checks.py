# SPDX-License-Identifier: Apache-2.0
"""Checks that a layer can be captured."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from ..compare.signature import Signature
from ..interface.errors import CaptureError
from ..record.tracer import RecordedCall
from ..replay.grads import NamedParameters
from ..replay.watch import MODULE_HOOKS, PARAMETER_HOOKS


def check_module_hooks(layer: str, module: nn.Module) -> None:
    """CaptureError for a hook on a submodule of `module`: it would run at capture and never again."""
    for path, inner in module.named_modules():
        for kind in MODULE_HOOKS:
            if inner is not module and (hooks := getattr(inner, kind)):
                hook = next(iter(hooks.values()))
                hook_name = getattr(hook, "__qualname__", type(hook).__qualname__)
                reason = f"submodule {path!r} has a hook ({kind}: {hook_name}) that would not fire at replay"
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


def check_outputs(name: str, outputs: Signature, recorded: RecordedCall) -> None:
    """CaptureError if a warm-up or a capture returns something else than the recorded call did."""
    if outputs.spec != recorded.outputs.spec:
        raise CaptureError(
            name,
            "check",
            "its forward returns another structure than was recorded: a hook changes the output",
        )
    for path, x, spec in zip(outputs.paths, outputs.tensors, recorded.output_specs, strict=True):
        if x.requires_grad != spec.requires_grad:
            reason = (
                f"output {path} requires grad: recorded {spec.requires_grad}, now {x.requires_grad}"
            )
            raise CaptureError(name, "check", reason)


def check_trained(name: str, outputs: Sequence[Tensor], leaves: Sequence[Tensor]) -> None:
    """CaptureError if a gradient would go to a tensor that is neither the layer's parameter nor its argument."""
    allowed = {id(x) for x in leaves}
    todo = [x.grad_fn for x in outputs if x.grad_fn is not None]
    visited = set(todo)
    while todo:
        node = todo.pop()
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in allowed:
            raise CaptureError(
                name,
                "check",
                f"it trains a tensor {list(leaf.shape)} that is neither its parameter nor its argument",
                "Register it as a parameter of the layer, or pass it to forward",
            )
        following = [n for n, _ in node.next_functions if n is not None and n not in visited]
        visited.update(following)
        todo += following
