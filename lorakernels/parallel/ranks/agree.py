# SPDX-License-Identifier: Apache-2.0
"""Checks that all ranks have the same model. A fingerprint is {name for error messages: value to compare}."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from lorakernels.modules.linear.lora import LoRALinear


def checksum(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Shape, dtype and the sum of the bytes."""
    raw = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return tuple(tensor.shape), str(tensor.dtype), int(raw.sum(dtype=torch.int64))


def trained(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, parameter) of the parameters that train."""
    return ((name, p) for name, p in model.named_parameters() if p.requires_grad)


def values(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, Any]:
    """{name for error messages: checksum} of named tensors."""
    return {f"the values of {name}": checksum(tensor) for name, tensor in tensors}


def fingerprint(model: nn.Module, tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, Any]:
    """That of the named `tensors`, the FP8 scales and the generators of `model`."""
    device = next(model.parameters()).device
    return values(tensors) | scales(model) | generators(model, device)


def generators(model: nn.Module, device: torch.device) -> dict[str, Any]:
    """{name for error messages: state} of the generators that draw dropout masks; empty without dropout."""
    layers = [m for m in model.modules() if isinstance(m, LoRALinear) and m.lora_dropout > 0]
    if not layers:
        return {}
    states = {"torch's CPU generator, from which masks draw,": torch.get_rng_state().tolist()}
    if device.type == "cuda" and any(layer.rng_state is None for layer in layers):
        state = torch.cuda.get_rng_state(device).tolist()
        states["torch's CUDA generator, from which masks draw,"] = state
    return states


def scales(model: nn.Module) -> dict[str, Any]:
    """{name for error messages: digest} of the scales and amax histories of each FP8State.

    Amaxes of the current iteration are left out: they may differ between ranks until the next update.
    """
    states = {id(s): s for m in model.modules() if (s := getattr(m, "fp8_state", None))}
    digests = {}
    for number, state in enumerate(states.values()):
        digest = 0  # of a state on "meta", which has seen no amax
        if not state.forward.is_meta:
            bits = torch.stack((state.forward[1:], state.backward[1:])).view(torch.int32).flatten()
            # the weights make the sum depend on the order
            weights = torch.arange(1, len(bits) + 1, device=bits.device)
            digest = int((bits * weights).sum())
        name = f"scales and amax histories of FP8State {number}, as its state_dict has them,"
        digests[name] = state.names, state.recipe, digest
    return digests


def check_equal(fingerprints: list[dict[str, Any]]) -> None:
    """Raise ValueError, which names the first difference, unless the fingerprints of all ranks are equal."""
    first = fingerprints[0]
    for rank, other in enumerate(fingerprints):
        for name in (*first, *other):
            if first.get(name) != other.get(name):
                raise ValueError(
                    f"all ranks of the group must have the same model, but {name} differ between rank 0 and rank "
                    f"{rank}: make it after torch.manual_seed with one value, and draw random numbers on all alike"
                )
