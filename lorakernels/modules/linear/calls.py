# SPDX-License-Identifier: Apache-2.0
"""A linear layer's call: recorded → check → draw → with its adapter.

This is the file that reads a module's `__dict__`: an attribute, and above all a property, takes several times as long.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from lorakernels.autograd import Adapter, Call, check_input, is_compiling, lora_linear, traced_slot
from lorakernels.autograd.linear.adapter_rows import AdapterRows
from lorakernels.autograd.linear.recorded import find_linear, run_linear
from lorakernels.autograd.linear.values import LoRASpec
from lorakernels.numerics.segments import adapters_of, check_sequences
from lorakernels.state.philox import PhiloxState, PhiloxStates, draw_slot
from lorakernels.values import Weight

RandomState = PhiloxState | PhiloxStates | None
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
    adapter: Adapter | None = None,
    draws: bool = False,
    rng_state: RandomState = None,
    scaling: float | None = None,
    p: float | None = None,
) -> Tensor:
    """y [..., N] of a FrozenFP8Linear `layer`: recorded → check → draw → with its adapter.

    A recorded call asks nothing again that was asked at an equal call before.

    Args:
        x: [..., K], not checked yet.
        adapter: A and B, or None twice for the base alone. None is a LoRALinear's own, with its dropout.
        draws: whether a mask is drawn, from `rng_state`.
        scaling, p: the adapter's, where they differ from the layer's.

    Raises:
        TypeError, ValueError, RuntimeError: `check_input` does not take x, or the weight.
    """
    if torch.compiler.is_compiling():
        return _traced(layer, x, adapter, draws, rng_state, scaling, p)
    attributes = layer.__dict__
    training, parameters = attributes["training"], attributes["_parameters"]
    numbers, state = attributes["_numbers"], attributes["fp8_state"]
    spec = numbers.specs.get((training, scaling, p)) or numbers.spec(training, scaling, p)
    if adapter is None:
        lora_A, lora_B = parameters["lora_A"], parameters["lora_B"]
        if "adapter_rows" in attributes:
            lora_A, lora_B = _factors_by_rows(layer, x)
        draws, rng_state = training and spec.p > 0, attributes["rng_state"]
    else:
        lora_A, lora_B, _ = adapter
    if layer.over is None and not torch.is_autocast_enabled():
        tensors = (
            parameters.get("bias"),
            lora_A,
            lora_B,
            parameters["weight"],
            attributes["_buffers"]["weight_scale_inv"],
            None if state is None else state.forward,
            None if state is None else state.backward,
        )
        match = find_linear(x, tensors, spec, draws)
        if match is not None:
            slot = draw_slot(rng_state, x.device) if draws else None
            if training and state is not None:
                state.on_training_forward(spec.column)
            y = run_linear(match, tensors, spec, slot)
            return _by_ops(layer, x, Adapter(lora_A, lora_B), spec, slot) if y is None else y
    check_input(x, layer.held)
    slot = draw_slot(rng_state, x.device) if draws else None
    if state is not None:
        state.begin(x.device, spec.column, training)
    return _by_ops(layer, x, Adapter(lora_A, lora_B), spec, slot)


def _by_ops(layer: Any, x: Tensor, adapter: Adapter, spec: LoRASpec, slot: Tensor | None) -> Tensor:
    weight, numbers = weight_and_call(layer, spec, slot)
    bias = None if layer.skip_bias_add else layer._parameters.get("bias")
    return lora_linear(x, weight, bias, adapter, numbers)


def _traced(
    layer: Any,
    x: Tensor,
    adapter: Adapter | None,
    draws: bool,
    rng_state: RandomState,
    scaling: float | None,
    p: float | None,
) -> Tensor:
    """`call` while torch.compile or torch.export traces it."""
    if adapter is None:
        lora_A, lora_B = layer.lora_A, layer.lora_B
        if layer.adapter_rows is not None and layer.adapter_rows.needs_lookup:
            lora_A, lora_B = _untraced_factors(layer)
        check_sequences(x, adapters_of(lora_A))
        adapter = Adapter(lora_A, lora_B)
        draws, rng_state = layer.training and layer.handle.drops, layer.rng_state
    check_input(x, layer.held)
    if is_compiling():
        slot = traced_slot(rng_state, layer.handle.tensor) if draws else None
        y: Tensor = layer.traced(x, adapter, slot, scaling, p)
        return y
    spec = layer.__dict__["_numbers"].spec(layer.training, scaling, p)
    slot = draw_slot(rng_state, x.device) if draws else None
    if layer.fp8_state is not None:
        layer.fp8_state.begin(x.device, spec.column, layer.training)
    return _by_ops(layer, x, adapter, spec, slot)


def weight_and_call(layer: Any, spec: LoRASpec, slot: Tensor | None) -> tuple[Weight, Call]:
    """The weight and the values that `lora_linear` takes of a layer for one call."""
    weight = Weight(layer.held, layer._buffers["weight_scale_inv"])
    return weight, layer.__dict__["_numbers"].call(spec, slot, layer.over)


def _factors_by_rows(layer: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """A and B of a layer of an AdapterBatch, of those adapters that the rows of the call have."""
    lora_A, lora_B = layer.lora_A, layer.lora_B
    if (rows := rows_of_call(layer)) is not None:
        lora_A, lora_B = rows.factors(lora_A, lora_B)
    check_sequences(x, adapters_of(lora_A))
    return lora_A, lora_B


@_disable_dynamo
def _untraced_factors(layer: Any) -> tuple[Tensor, Tensor]:
    """A and B of a call that is compiled. What backward runs is no part of the trace."""
    rows = rows_of_call(layer)
    factors: tuple[Tensor, Tensor] = layer.lora_A, layer.lora_B
    return factors if rows is None else rows.factors(*factors)


def rows_of_call(layer: Any) -> AdapterRows | None:
    """Which adapters the rows of the call that begins have; None outside of `AdapterBatch.rows`."""
    calls = layer.adapter_rows
    if calls is None or not calls.needs_lookup:
        return None
    rows: AdapterRows = calls.of(layer.lora_A.device, layer.training)
    return rows
