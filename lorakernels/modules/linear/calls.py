# SPDX-License-Identifier: Apache-2.0
"""A linear layer's call: recorded → check → draw → with its adapter.

This is the file that reads a module's `__dict__`: an attribute, and above all a property, takes several times as long.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lorakernels.autograd import Adapter, Call, check_input, is_compiling, lora_linear, traced_slot
from lorakernels.autograd.linear.adapter_rows import AdapterRows
from lorakernels.autograd.linear.recorded import find_linear, run_linear
from lorakernels.autograd.linear.values import LoRASpec
from lorakernels.numerics.segments import adapters_of, check_sequences
from lorakernels.state.philox import PhiloxState, PhiloxStates, draw_slot
from lorakernels.values import Weight

_REQUIRED = object()


def number(name: str, absent: Any = _REQUIRED) -> Any:
    """A property for a value that compiled ops look up by the layer's handle: setting it makes a new handle.

    A layer that was never given one has `absent`, such as a layer from a pickle that is older than the number.

    Each such value has a property because FSDP2 cannot put FP8 parameters into modules if their class has its own
    `__setattr__`.
    """

    def get(layer: Any) -> Any:
        value = layer.__dict__.get(name, absent)
        if value is _REQUIRED:
            raise AttributeError(name)
        return value

    def put(layer: Any, value: Any) -> None:
        layer.__dict__[name] = value
        if "_handle" in layer.__dict__:
            layer.renew_handle()

    return property(get, put)


def call(
    layer: Any,
    x: Tensor,
    adapter: Adapter,
    draws: bool = False,
    rng_state: PhiloxState | PhiloxStates | None = None,
    scaling: float | None = None,
    p: float | None = None,
) -> Tensor:
    """y [..., N] of a FrozenFP8Linear `layer` with `adapter`. Its A and B may be None.

    Args:
        x: [..., K], not checked yet.
        draws: whether a mask is drawn, from `rng_state`.
        scaling, p: the adapter's, where they differ from the layer's.

    Raises:
        TypeError, ValueError, RuntimeError: `check_input` does not take x, or the weight.
    """
    attributes = layer.__dict__
    if torch.compiler.is_compiling():
        check_input(x, layer.held)
        if is_compiling():
            slot = traced_slot(rng_state, layer.handle.tensor) if draws else None
            return layer.traced(x, adapter, slot, scaling, p)
        training = layer.training
        spec = attributes["_numbers"].spec(training, scaling, p)
    else:
        training = attributes["training"]
        spec = attributes["_numbers"].spec(training, scaling, p)
        y = _recorded(layer, x, adapter, spec, draws, rng_state)
        if y is not None:
            return y
        check_input(x, layer.held)
    slot = draw_slot(rng_state, x.device) if draws else None
    if layer.fp8_state is not None:
        layer.fp8_state.begin(x.device, spec.column, training)
    bias = None if layer.skip_bias_add else layer._parameters.get("bias")
    weight, numbers = weight_and_call(layer, spec, slot)
    return lora_linear(x, weight, bias, adapter, numbers)


def weight_and_call(layer: Any, spec: LoRASpec, slot: Tensor | None) -> tuple[Weight, Call]:
    """The weight and the values that `lora_linear` takes of a layer for one call."""
    state = layer.fp8_state
    state_x, state_dy = (None, None) if state is None else (state.forward, state.backward)
    weight = Weight(layer.held, layer._buffers["weight_scale_inv"])
    return weight, Call(spec, slot, state_x, state_dy, layer.over)


def call_own(layer: Any, x: Tensor) -> Tensor:
    """`call` of a LoRALinear with its own adapter, outside of traces."""
    attributes = layer.__dict__
    parameters, spec = attributes["_parameters"], attributes["_numbers"].default
    lora_A, lora_B = parameters["lora_A"], parameters["lora_B"]
    if "adapter_rows" in attributes:
        if (rows := rows_of_call(layer)) is not None:
            lora_A, lora_B = rows.factors(lora_A, lora_B)
        check_sequences(x, adapters_of(lora_A))
    draws = attributes["training"] and spec.p > 0
    return call(layer, x, Adapter(lora_A, lora_B), draws, attributes["rng_state"])


def rows_of_call(layer: Any) -> AdapterRows | None:
    """Which adapters the rows of the call that begins have; None outside of `AdapterBatch.rows`."""
    calls = layer.adapter_rows
    if calls is None or not calls.needs_lookup:
        return None
    rows: AdapterRows = calls.of(layer.lora_A.device, layer.training)
    return rows


def _recorded(
    layer: Any,
    x: Tensor,
    adapter: Adapter,
    spec: LoRASpec,
    draws: bool,
    rng_state: PhiloxState | PhiloxStates | None,
) -> Tensor | None:
    """The call by its recording, if one like it came before; else None, and nothing is changed.

    It checks nothing again that was checked at the earlier call.
    """
    if layer.over is not None or torch.is_autocast_enabled():
        return None
    attributes = layer.__dict__
    parameters, state = attributes["_parameters"], attributes["fp8_state"]
    tensors = (
        parameters.get("bias"),
        adapter[0],
        adapter[1],
        parameters["weight"],
        attributes["_buffers"]["weight_scale_inv"],
        None if state is None else state.forward,
        None if state is None else state.backward,
    )
    match = find_linear(x, tensors, spec, draws)
    if match is None:
        return None
    slot = draw_slot(rng_state, x.device) if draws else None
    if state is not None and attributes["training"]:
        state.on_training_forward(spec.column)
    y = run_linear(match, tensors, spec, slot)
    if y is not None:
        return y
    bias, _, _, *weight, state_x, state_dy = tensors
    return lora_linear(x, Weight(*weight), bias, adapter, Call(spec, slot, state_x, state_dy))
