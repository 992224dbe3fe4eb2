# SPDX-License-Identifier: Apache-2.0
"""A dropout slot in a trace: one op, which draws the slot of an eager layer.

    slot = layer_slot(handle)        int64 [2] on the handle's device

Inductor makes a kernel for each `torch.randint` of a trace, and one for their seeds. Its launch takes
more of the host's time than a linear's forward. `slot_ahead` has the slot without a launch.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from lorakernels.ops.register import define_composed
from lorakernels.recorded.routing import put_ahead
from lorakernels.state.ahead import slot_ahead
from lorakernels.state.philox import PhiloxState, PhiloxStates, default_slot, draw_slot, random_slot


def layer_slot(handle: Tensor) -> Tensor:
    """int64 [2], drawn from torch's generator of the handle's device."""
    device = handle.device
    return default_slot(device) if _is_ahead(handle) else random_slot(device)


def _is_ahead(handle: Tensor) -> bool:
    """Whether the slot may lie in a table. On other streams Inductor warms its CUDA graphs up, and captures them: all
    that an op returns there has to lie in their memory."""
    return handle.is_cuda and torch._C._cuda_getCurrentRawStream(handle.get_device()) == 0


_slot_op = define_composed(
    layer_slot, lambda handle: handle.new_empty((2,), dtype=torch.int64), draws=True
)


def _at_once(general: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if len(args) == 1 and type(args[0]) is Tensor and _is_ahead(args[0]):
        return slot_ahead(args[0].get_device())
    return general(*args, **kwargs)


put_ahead(_slot_op, _at_once)


def _draws_are_told_apart() -> bool:
    """Whether AOTAutograd leaves two equal calls of the op two calls, as it does of the ops in a list of its own."""
    listed = getattr(import_module("torch._functorch.compile_utils"), "rand_ops", None)
    if not isinstance(listed, list):
        return False
    if _slot_op.overloadpacket not in listed:
        listed.append(_slot_op.overloadpacket)
    return True


# Dynamo calls it while it traces, as of torch.compiler.assume_constant_result, which imports all of Dynamo.
_draws_are_told_apart._dynamo_marked_constant = True  # type: ignore[attr-defined]


def traced_slot(state: PhiloxState | PhiloxStates | None, handle: Tensor) -> Tensor:
    """`draw_slot` for a trace, on the device of a layer's handle."""
    if state is None and _draws_are_told_apart():
        slot: Tensor = _slot_op(handle)
        return slot
    return draw_slot(state, handle.device)
