# SPDX-License-Identifier: Apache-2.0
"""DoRALinear: y = m ⊙ (W + s · B A) x / ‖W + s · B A‖ + bias, a weight in magnitude and direction (arXiv 2402.09353).

The norm is of each row, [N], in fp32, and counts as a constant in backward (section 4.3 there). W is the weight as it
is held. It is made from the ops of LoRALinear and plain PyTorch, so it runs eager only. Over an FP8 base with one scale
m / ‖W + s · B A‖ is a part of each column's scale in the product, and of B.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lorakernels.autograd import check_input, is_compiling
from lorakernels.autograd.compiled.magnitude import MagnitudeNode, ways_of
from lorakernels.autograd.linear.lora_linear import lora_linear
from lorakernels.autograd.linear.node import in_bytes
from lorakernels.autograd.linear.recorded import way_of
from lorakernels.autograd.linear.values import Adapter
from lorakernels.config import LoRAConfig
from lorakernels.modules.linear.calls import weight_and_call
from lorakernels.modules.linear.initial import Initial
from lorakernels.modules.linear.lora import LoRALinear
from lorakernels.modules.marks import refuse_held
from lorakernels.numerics.autocast import autocast_dtype
from lorakernels.numerics.dropout import masked
from lorakernels.recorded.routing import WATCHED
from lorakernels.values import Dropout


class DoRALinear(LoRALinear):
    """A LoRALinear with a trained magnitude for each row. `LoRAConfig.use_dora` selects it.

    A forward makes W + s · B A in fp32 to take its norms: memory of [N, K] for as long as that lasts. With dropout it
    multiplies W twice, by x − D(x) and by D(x), because in PEFT dropout acts in front of W as well. Over an FP8 base
    with one scale, one product computes all of D(x)'s terms but the bias, unless x is float16. Without dropout, D(x) is
    x. Backward reads that product. Without dropout and bias it is also the result, and torch refuses a backward after
    the result was changed in place.

    Attributes:
        lora_magnitude_vector: m [N], a Parameter in the adapter's dtype. It starts as ‖W + s · B A‖.

    Raises:
        TypeError, ValueError, KeyError: as for LoRALinear.
    """

    has_magnitude = True

    def _add_adapter(
        self,
        config: LoRAConfig,
        device: Any = None,
        dtype: torch.dtype | None = None,
        initial: Initial | None = None,
    ) -> None:
        super()._add_adapter(config, device, dtype, initial)
        self.lora_magnitude_vector = nn.Parameter(self.lora_A.new_empty(self.out_features))
        self.reset_magnitude()

    def reset_adapter(self) -> None:
        """As LoRALinear's; m becomes ‖W + s · B A‖ again."""
        super().reset_adapter()
        if "lora_magnitude_vector" in self._parameters:
            self.reset_magnitude()

    @torch.no_grad()
    def reset_magnitude(self) -> None:
        """Set m to ‖W + s · B A‖, so that the layer equals a LoRALinear."""
        if not self.lora_A.is_meta:
            self.lora_magnitude_vector.copy_(self.norms())

    @torch.no_grad()
    def norms(self) -> Tensor:
        """fp32 [N]: ‖W + s · B A‖ of each row."""
        return self._direction().norm(dim=1)

    def _direction(self) -> Tensor:
        """fp32 [N, K]: W + s · B A."""
        a, b = self.lora_A.detach().float(), self.lora_B.detach().float()
        return self.base_weight().addmm_(b, a, alpha=self.scaling)

    def _factor(self) -> Tensor:
        """fp32 [N]: m / ‖W + s · B A‖, differentiable in m; 0 for a row of zeros, which has no direction."""
        norms = self.norms()
        return self.lora_magnitude_vector.float() / norms.clamp_min(torch.finfo(norms.dtype).tiny)

    def forward(self, x: Tensor) -> Tensor:
        """As LoRALinear's.

        Raises:
            TypeError, ValueError: as LoRALinear's.
            RuntimeError: it is compiled or captured by a CUDA graph, or the weight is in a sharded base.
        """
        if self.merged or self.disable_adapters:
            return super().forward(x)
        self._check_eager(x)
        check_input(x, self.held)
        x = x.to(_dtype_of(x))
        if self.fp8_state is not None:
            self.fp8_state.begin(x.device, self.column, self.training)
        if self.training and self.lora_dropout > 0:
            return self._with_dropout(x)
        y = self._turned(x)
        return y if self.bias is None else (y.float() + self.bias.float()).to(y.dtype)

    def _with_dropout(self, x: Tensor) -> Tensor:
        """PEFT's x Wᵀ + bias + (g − 1) ⊙ D(x) Wᵀ + g ⊙ s · D(x) Aᵀ Bᵀ, g = m / ‖W + s · B A‖, by two products:

        (x − D(x)) Wᵀ + bias, and g ⊙ (D(x) Wᵀ + s · D(x) Aᵀ Bᵀ).
        """
        rows = x.reshape(-1, x.shape[-1])
        slot = self.draw_slot(x.device)
        kept, factor = masked(rows, Dropout(slot, self.lora_dropout, self.site))
        kept = (kept * factor).view(x.shape)
        weight, call = weight_and_call(self, self._numbers.spec(self.training, 1.0, 0.0), None)
        y = lora_linear(x - kept, weight, self.bias, Adapter(), call)
        return y + self._turned(kept)

    def _turned(self, x: Tensor) -> Tensor:
        """g ⊙ (x Wᵀ + s · x Aᵀ Bᵀ), g = m / ‖W + s · B A‖.

        Over FP8 with one scale, g is in the scale of each of the product's columns. Else, and in float16, which has too
        few exponents for g ⊙ B, g multiplies the written product.
        """
        weight, call = weight_and_call(self, self._numbers.spec(self.training, p=0.0), None)
        if self.fp8_state is None or x.dtype == torch.float16:
            y = lora_linear(x, weight, None, Adapter(self.lora_A, self.lora_B), call)
            return (y.float() * self._factor()).to(y.dtype)
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        y = MagnitudeNode.apply(
            rows, self._factor(), self.lora_A, self.lora_B, in_bytes(weight), call
        )
        return y.view(*x.shape[:-1], y.shape[1])

    def eager_ways(self, kinds: Mapping[Any, str]) -> list[str]:
        specs = self._numbers.specs.values()
        ways = {way_of(spec, kinds) for spec in specs if "linear" in spec.memo}
        all_ways = {way for way in ways if way is not None} | ways_of(specs)
        return sorted(all_ways or ({WATCHED} if specs else ()))

    def _check_eager(self, x: Tensor) -> None:
        what = "torch.compile" if is_compiling() else ""
        if not what and x.is_cuda and torch.cuda.is_current_stream_capturing():
            what = "a CUDA graph"
        if what:
            raise RuntimeError(
                f"{self.name or 'DoRALinear'}: use_dora=True runs eager only, found {what}"
            )
        refuse_held(self, "take the norms of")

    def delta_weight(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """What merging adds, [N, K]: m ⊙ (W + s · B A) / ‖W + s · B A‖ − W."""
        return (self.merged_weight() - self.base_weight()).to(dtype)

    @torch.no_grad()
    def merged_weight(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """m ⊙ (W + s · B A) / ‖W + s · B A‖, [N, K], in fp32 and rounded once to `dtype`."""
        return (self._factor()[:, None] * self._direction()).to(dtype)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if prefix + "lora_A" not in destination:
            destination.pop(prefix + "lora_magnitude_vector", None)


def _dtype_of(x: Tensor) -> torch.dtype:
    """x's, or autocast's."""
    return autocast_dtype(x.device.type) or x.dtype


def kind_for(config: LoRAConfig) -> type[LoRALinear]:
    """The class of layer for `config`."""
    return DoRALinear if config.use_dora else LoRALinear
