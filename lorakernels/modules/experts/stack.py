# SPDX-License-Identifier: Apache-2.0
"""Experts' layers as one stack, which autograd/experts.py multiplies with one launch for all of them.

The layers stay as they are, with parameters and scales of their own. Their weights move once into one piece of memory.
Each layer's parameter is then a part of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lorakernels.autograd.experts import ExpertStack
from lorakernels.device import capability_of
from lorakernels.modules.linear.frozen import FrozenFP8Linear, is_sharded
from lorakernels.modules.linear.lora import LoRALinear
from lorakernels.modules.linear.mergeable import MergeableLinear
from lorakernels.ops.grouped_linear_lora import why_not_sizes
from lorakernels.ops.grouped_quantize_lora_down import MAX_RANK
from lorakernels.state.fp8 import FP8State
from lorakernels.values import Scaling, Weight

_KINDS = (LoRALinear, FrozenFP8Linear, MergeableLinear)


def why_not_stacked(layers: Sequence[nn.Module]) -> str | None:
    """None if these layers run as one stack where they are; otherwise the reason why not."""
    first = layers[0]
    if not isinstance(first, FrozenFP8Linear) or any(type(m) is not type(first) for m in layers):
        return "the experts are not FP8 layers of one kind"
    return why_not_place(first) or _why_not_alike(layers, first)


def why_not_place(layer: FrozenFP8Linear) -> str | None:
    """None if the kernels of stacks take a layer of its size and device; otherwise the reason why not."""
    stored = layer._parameters["weight"]
    assert stored is not None
    if is_sharded(stored):
        return "the weights are sharded"
    if not stored.is_cuda:
        return f"the weights are on {stored.device}"
    return why_not_sizes(capability_of(stored.device), *stored.shape)


def _why_not_alike(layers: Sequence[nn.Module], first: FrozenFP8Linear) -> str | None:
    numbers = [_numbers(layer) for layer in layers]
    state, column, *rest = numbers[0]
    if type(first) not in _KINDS or state is None:
        return "the experts are not held in FP8 with one scale each (DelayedScaling)"
    in_order = all(n[0] is state and n[1] == column + i for i, n in enumerate(numbers))
    if not in_order or any([*n[2:]] != rest for n in numbers):
        return "the experts differ in their adapters or FP8 states"
    if state.recipe.fp8_gemm_fprop.use_split_accumulator:
        return "fp8_gemm_fprop.use_split_accumulator is set"
    if first.bias is not None:
        return "the experts have biases"
    if isinstance(first, LoRALinear) and first.r > MAX_RANK:
        return f"a rank of {first.r} is above {MAX_RANK}"
    if _adapted(first) and first.training and first.lora_dropout:
        return f"the experts' adapters have lora_dropout={first.lora_dropout}"
    return None


def _numbers(layer: Any) -> tuple[Any, ...]:
    """(FP8 state, column, and the numbers that all layers must share)."""
    attributes = layer.__dict__  # a property takes several times as long
    get = attributes.get
    return (
        attributes["fp8_state"],
        attributes["_column"],
        get("r"),
        get("scaling"),
        get("lora_dropout"),
        get("merged"),
        get("disable_adapters"),
        attributes["training"],
    )


def _adapted(layer: Any) -> bool:
    return isinstance(layer, LoRALinear) and not layer.merged and not layer.disable_adapters


def stacked(experts: Iterable[nn.Module]) -> ExpertStack:
    """The stack of layers without an objection of `why_not_stacked`.

    Raises:
        RuntimeError: the stream is being captured, and the weights are not in one piece of memory yet.
    """
    layers: list[Any] = list(experts)
    first = layers[0]
    state: FP8State = first.fp8_state
    state.begin(first.stored.device, first.column, first.training)
    weights = [layer._parameters["weight"] for layer in layers]
    scales = [layer._buffers["weight_scale_inv"] for layer in layers]
    data, scale_inv = _together(weights), _together(scales)
    delayed, recipe = first.training, state.recipe
    adapted = _adapted(first)
    return ExpertStack(
        Weight(data.view(torch.uint8), scale_inv.view(-1)),
        [layer._parameters["lora_A"] for layer in layers] if adapted else [],
        [layer._parameters["lora_B"] for layer in layers] if adapted else [],
        first.scaling if adapted else 1.0,
        Scaling(state.forward, first.column, delayed),
        Scaling(state.backward, first.column, delayed),
        recipe.backward_dtype,
        recipe.fp8_gemm_dgrad.use_split_accumulator,
    )


@torch.no_grad()
def _together(tensors: Sequence[Tensor]) -> Tensor:
    """[G, …] of equal tensors that follow each other in memory. They move there first if they do not yet."""
    first = tensors[0].detach()
    size = first.numel() * first.element_size()
    start, memory = first.data_ptr(), first.untyped_storage().data_ptr()
    last = tensors[-1].untyped_storage().data_ptr()
    if last != memory or not _follow(tensors, start, size):
        if first.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "the experts' weights move together on their first forward: run one before a capture"
            )
        whole = torch.empty((len(tensors), *first.shape), dtype=first.dtype, device=first.device)
        for part, tensor in zip(whole, tensors, strict=True):
            part.copy_(tensor)
            tensor.data = part
        return whole
    strides = (first.numel(), *first.stride())
    return first.as_strided((len(tensors), *first.shape), strides)


def _follow(tensors: Iterable[Tensor], start: int, size: int) -> bool:
    return all(t.data_ptr() == start + i * size for i, t in enumerate(tensors))
