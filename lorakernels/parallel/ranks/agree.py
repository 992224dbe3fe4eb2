# SPDX-License-Identifier: Apache-2.0
"""Whether ranks have the same model: what of it they compare, and the error that names what differs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lorakernels.modules.linear.lora import LoRALinear


def checksum(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Shape, dtype and the sum of the bytes."""
    raw = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return tuple(tensor.shape), str(tensor.dtype), int(raw.sum(dtype=torch.int64))


def generators(model: nn.Module, device: torch.device) -> dict[str, Any]:
    """The random states from which masks draw, by what they are called in a message; none without dropout."""
    layers = [m for m in model.modules() if isinstance(m, LoRALinear) and m.lora_dropout > 0]
    if not layers:
        return {}
    found = {"torch's CPU generator, from which masks draw,": torch.get_rng_state().tolist()}
    if device.type == "cuda" and any(layer.rng_state is None for layer in layers):
        state = torch.cuda.get_rng_state(device).tolist()
        found["torch's CUDA generator, from which masks draw,"] = state
    return found


def scales(model: nn.Module) -> dict[str, Any]:
    """A digest of the scales and amax histories of each FP8State, by what they are called in a message.

    Amaxes of the current iteration are left out: they are each rank's own until the next update.
    """
    states = {id(s): s for m in model.modules() if (s := getattr(m, "fp8_state", None))}
    found = {}
    for number, state in enumerate(states.values()):
        digest = 0  # of "meta", where no amax was seen
        if not state.forward.is_meta:
            bits = torch.stack((state.forward[1:], state.backward[1:])).view(torch.int32).flatten()
            # weights, so that values in other places have another sum
            weights = torch.arange(1, len(bits) + 1, device=bits.device)
            digest = int((bits * weights).sum())
        what = f"scales and amax histories of FP8State {number}, as its state_dict has them,"
        found[what] = state.names, state.recipe, digest
    return found


def check_equal(found: list[dict[str, Any]]) -> None:
    """ValueError, which names the first difference, unless all ranks' fingerprints are equal."""
    first = found[0]
    for rank, other in enumerate(found):
        for name in (*first, *other):
            if first.get(name) != other.get(name):
                raise ValueError(
                    f"all ranks of the group must have the same model, but {name} differ between rank 0 and rank "
                    f"{rank}: make it after torch.manual_seed with one value, and draw random numbers on all alike"
                )
