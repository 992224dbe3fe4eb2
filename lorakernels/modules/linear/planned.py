# SPDX-License-Identifier: Apache-2.0
"""A layer's eager call by a known plan. It asks nothing again that was asked at an equal call before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lorakernels.autograd import Adapter, AdapterNumbers, Call, lora_linear
from lorakernels.autograd.linear.plan import found_linear, run_linear
from lorakernels.state.philox import PhiloxState, PhiloxStates
from lorakernels.values import Weight


def planned_call(
    layer: Any,
    x: Tensor,
    lora_A: Tensor | None,
    lora_B: Tensor | None,
    numbers: AdapterNumbers,
    draw: Callable[[Any, torch.device], Tensor] | None = None,
    rng_state: PhiloxState | PhiloxStates | None = None,
) -> Tensor | None:
    """`layer.with_adapter` by its plan, if that took such tensors before; else None, and nothing is changed.

    Args:
        layer: a FrozenFP8Linear.
        x: need not have been checked.
        lora_A, lora_B, numbers: of `with_adapter`.
        draw: `draw_slot`, which draws the call's slot from `rng_state`; None if there is none to draw.
    """
    own = layer.__dict__  # an attribute of a module takes several times as long
    training = own["training"]
    spec = own["_specs"].get((numbers, training))
    if spec is None or not layer.repeats_calls or torch.is_autocast_enabled():
        return None
    parameters, buffers, state = own["_parameters"], own["_buffers"], own["fp8_state"]
    tensors = (
        parameters.get("bias"),
        lora_A,
        lora_B,
        parameters["weight"],
        buffers["weight_scale_inv"],
        None if state is None else state.forward,
        None if state is None else state.backward,
    )
    found = found_linear(x, tensors, spec, draw is not None)
    if found is None:
        return None
    slot = None if draw is None else draw(rng_state, x.device)
    if training and state is not None:
        state.on_training_forward(own["_column"])
    y = run_linear(found, tensors, spec, slot)
    if y is not None:
        return y
    bias, _, _, *weight, state_x, state_dy = tensors
    adapter, call = Adapter(lora_A, lora_B), Call(spec, slot, state_x, state_dy)
    return lora_linear(x, Weight(*weight), bias, adapter, call)
