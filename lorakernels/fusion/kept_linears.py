# SPDX-License-Identifier: Apache-2.0
"""The nn.Linears that `fuse(keep_linears=True)` keeps, and the check that their weights are still the model's."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lorakernels.fusion.describe import LayerDescription, Projection
from lorakernels.modules.linear.frozen import FrozenFP8Linear, quantize_weight
from lorakernels.modules.model.trained_parts import hand_over_originals


@dataclass(eq=False)
class KeptLinear:
    """`linear`, which was `parent.name` in a decoder layer. `path` is for messages.

    While it is outside of the model, neither `.to` nor `load_state_dict` reaches it. `norm`, the layer's first norm,
    shows what `.to` has done since; `dtype` is the norm's dtype when `fuse` ran. The FP8 bytes show whether the weight
    is the same.
    """

    path: str
    norm: nn.Module
    parent: nn.Module
    name: str
    linear: nn.Linear
    dtype: torch.dtype

    @classmethod
    def of(cls, layer: LayerDescription, p: Projection) -> KeptLinear:
        """`p`: a projection of `layer` that is a plain nn.Linear."""
        norm = layer.norm_weight
        return cls(p.full_path, layer.first_norm, p.parent, p.name, p.linear, norm.dtype)

    @torch.no_grad()
    def weight(self) -> nn.Parameter | None:
        """The weight [N, K] for `put_back`, on the layer's device. It has the norm's dtype if `.to` changed that.

        Returns None if the layer computes with another weight now.
        """
        now = self.parent._modules.get(self.name)
        weight: nn.Parameter = self.linear._parameters["weight"]  # type: ignore[assignment]
        if type(now) is not FrozenFP8Linear or not _holds(now, weight):
            return None
        norm = self.norm.get_parameter("weight")
        dtype = weight.dtype if norm.dtype == self.dtype else norm.dtype
        if (weight.device, weight.dtype) == (norm.device, dtype):
            return weight
        return nn.Parameter(weight.detach().to(norm.device, dtype), weight.requires_grad)

    def put_back(self, weight: nn.Parameter) -> None:
        now = self.parent._modules[self.name]
        assert now is not None
        self.linear._parameters["weight"] = weight
        self.linear._parameters["bias"] = now._parameters["bias"]
        hand_over_originals(now, self.linear)
        self.linear.train(now.training)
        self.parent._modules[self.name] = self.linear


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
