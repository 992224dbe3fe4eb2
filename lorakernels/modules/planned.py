# SPDX-License-Identifier: Apache-2.0
"""A layer's eager call whose plan is known: the way past all that was asked at an equal call before."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lorakernels.autograd import Adapter, AdapterNumbers, Call, lora_linear
from lorakernels.autograd.linear_plan import LinearRun, found_linear
from lorakernels.values import Weight


def found_call(
    layer: Any, x: Tensor, adapter: Adapter, numbers: AdapterNumbers, draws: bool
) -> LinearRun | None:
    """`layer.with_adapter`'s plan for x, if it took such tensors before. x need not have been checked.

    `layer` is a FrozenFP8Linear. `draws` says whether there will be a slot. Nothing is changed yet.
    """
    own = layer.__dict__  # an attribute of a module takes several times as long
    spec = own["_specs"].get((numbers, own["training"]))
    if spec is None or torch.is_autocast_enabled("cuda"):
        return None
    lora_A, lora_B, _ = adapter
    parameters, buffers, state = own["_parameters"], own["_buffers"], own["fp8_state"]
    states = (None, None) if state is None else (state.forward, state.backward)
    weight = (parameters["weight"], buffers["weight_scale_inv"], buffers["weight_t"])
    tensors = (parameters.get("bias"), lora_A, lora_B, *weight, *states)
    return found_linear(x, tensors, spec, draws)


def run_call(layer: Any, found: LinearRun, x: Tensor, slot: Tensor | None) -> Tensor:
    """`layer.with_adapter(x, …)` by the plan that `found_call` has found."""
    own = layer.__dict__
    state = own["fp8_state"]
    if own["training"] and state is not None:
        state.on_training_forward(own["_column"])
    y = found.run(slot)
    if y is not None:
        return y
    bias, lora_A, lora_B, *weight, state_x, state_dy = found.tensors
    call = Call(found.spec, slot, state_x, state_dy)
    return lora_linear(x, Weight(*weight), bias, Adapter(lora_A, lora_B), call)
