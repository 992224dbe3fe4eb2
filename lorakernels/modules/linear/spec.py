# SPDX-License-Identifier: Apache-2.0
"""FrozenSpec: how a frozen linear layer holds its weight, and in which FP8 state its scales are."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lorakernels.modules.linear.weights import BYTES, check_plain, scales_shape
from lorakernels.recipes import BlockScaling, DelayedScaling, Recipe
from lorakernels.state.fp8 import FP8State
from lorakernels.values import Weight


@dataclass(frozen=True)
class FrozenSpec:
    """The arguments of `FrozenFP8Linear.from_weight` besides the tensors.

    Attributes:
        fp8: the recipe for x and dy, and then the weight is held in FP8. None keeps the weight as it is.
        fp8_state: the model's FP8State; None makes a state for the layer alone. BlockScaling has none.
        name: the layer's name, and its entry in `fp8_state`.
    """

    fp8: Recipe | None
    fp8_state: FP8State | None = None
    name: str = ""

    @property
    def entry(self) -> str:
        """The layer's entry in its FP8 state. A layer without a name has one, too."""
        return self.name or "linear"

    @property
    def blocks(self) -> BlockScaling | None:
        """The recipe if it has a scale for each block."""
        return self.fp8 if isinstance(self.fp8, BlockScaling) else None

    def check(self, weight: Weight, bias: Tensor | None) -> None:
        """Refuse parts that do not make a layer.

        Raises:
            TypeError: there is a `scale_inv`, but `data` is not in bytes of FP8.
            ValueError: a shape does not fit, FP8 bytes have no recipe, or the state has another recipe or device.
            KeyError: the state has no such entry.
        """
        data, scale_inv = weight.data, weight.scale_inv
        if data.dim() != 2:
            raise ValueError(f"{self.entry}: weight must be [N, K], found {tuple(data.shape)}")
        if bias is not None and bias.shape != data.shape[:1]:
            shapes = f"{tuple(bias.shape)} for a weight {tuple(data.shape)}"
            raise ValueError(f"{self.entry}: bias must be [N], found {shapes}")
        if scale_inv is not None:
            self._check_bytes(data, scale_inv)
        else:
            check_plain(f"{self.entry}: weight", data)
        if self.fp8_state is not None:
            self._check_state(self.fp8_state, data.device)

    def _check_bytes(self, data: Tensor, scale_inv: Tensor) -> None:
        if data.dtype not in BYTES:
            raise TypeError(
                f"{self.entry}: a weight with a scale_inv must be uint8 or e4m3, found {data.dtype}"
            )
        expected = (1,) if self.blocks is None else scales_shape(data)
        if tuple(scale_inv.shape) != expected:
            shape = tuple(scale_inv.shape)
            raise ValueError(f"{self.entry}: scale_inv must be {list(expected)}, found {shape}")
        if self.fp8 is None:
            raise ValueError(
                f"{self.entry}: fp8 must be a DelayedScaling or a BlockScaling for an FP8 weight, found None"
            )

    def _check_state(self, state: FP8State, device: torch.device) -> None:
        if state.recipe != self.fp8:
            raise ValueError(
                f"{self.entry}: fp8_state follows {state.recipe}, the layer {self.fp8}"
            )
        if state.device != device:
            raise ValueError(
                f"{self.entry}: fp8_state is on {state.device}, the weight on {device}"
            )
        state.column(self.entry)

    def state_on(self, device: torch.device) -> FP8State | None:
        """The state that the layer follows, made here if none is given; None without a DelayedScaling."""
        if not isinstance(self.fp8, DelayedScaling):
            return None
        return self.fp8_state or FP8State([self.entry], self.fp8, device)
