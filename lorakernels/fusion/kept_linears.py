# SPDX-License-Identifier: Apache-2.0
"""The nn.Linears that `fuse(keep_linears=True)` keeps, and the check that their weights are still the model's."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lorakernels.fusion.families import spec_of
from lorakernels.modules.linear.frozen import FrozenFP8Linear, quantize_weight
from lorakernels.modules.model.trained_parts import hand_over_originals


@dataclass(eq=False)
class KeptLinear:
    """`linear`, which was `parent.name` in the layer `layer`. `path` is for messages.

    While it is outside of the model, neither `.to` nor `load_state_dict` reaches it. The layer's norm shows what `.to`
    has done since; `dtype` is the norm's dtype when `fuse` ran. The FP8 bytes show whether the weight is the same.
    """

    path: str
    layer: nn.Module
    parent: nn.Module
    name: str
    linear: nn.Linear
    dtype: torch.dtype

    @classmethod
    def of(
        cls, path: str, layer: nn.Module, parent: nn.Module, name: str, linear: nn.Linear
    ) -> KeptLinear:
        return cls(path, layer, parent, name, linear, _norm(layer).dtype)

    @torch.no_grad()
    def weight(self) -> nn.Parameter | None:
        """The weight [N, K] for `put_back`, on the layer's device. It has the norm's dtype if `.to` changed that.

        Returns None if the layer computes with another weight now.
        """
        now = self.parent._modules.get(self.name)
        own: nn.Parameter = self.linear._parameters["weight"]  # type: ignore[assignment]
        if type(now) is not FrozenFP8Linear or not _holds(now, own):
            return None
        norm = _norm(self.layer)
        dtype = own.dtype if norm.dtype == self.dtype else norm.dtype
        if (own.device, own.dtype) == (norm.device, dtype):
            return own
        return nn.Parameter(own.detach().to(norm.device, dtype), own.requires_grad)

    def put_back(self, weight: nn.Parameter) -> None:
        now = self.parent._modules[self.name]
        assert now is not None
        self.linear._parameters["weight"] = weight
        self.linear._parameters["bias"] = now._parameters["bias"]
        hand_over_originals(now, self.linear)
        self.linear.train(now.training)
        self.parent._modules[self.name] = self.linear


def _norm(layer: nn.Module) -> Tensor:
    return layer.get_parameter(f"{spec_of(layer).all_norms[0]}.weight")


def _holds(layer: FrozenFP8Linear, weight: Tensor) -> bool:
    """Whether `layer` holds exactly what it would make of `weight`: FP8 bytes and scale, or plain values."""
    stored, scale_inv = layer.stored, layer.weight_scale_inv
    if stored.shape != weight.shape:
        return False
    if scale_inv is None:
        return torch.equal(stored, weight.to(stored.device, stored.dtype))
    raw, expected = quantize_weight(weight, layer.block_scaling)
    same = torch.equal(stored, raw.to(stored.device))
    return same and torch.equal(scale_inv, expected.to(scale_inv.device))
