# SPDX-License-Identifier: Apache-2.0
"""MergeableLinear: a frozen layer that adapters can be merged into. It keeps its own weight meanwhile.

A LoRALinear is one, and so is the FP8 base of a PEFT layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lorakernels.modules.linear.frozen import FrozenFP8Linear
from lorakernels.modules.linear.spec import FrozenSpec
from lorakernels.modules.linear.state_entries import is_apart
from lorakernels.modules.linear.weights import dequantize_weight, quantize_weight
from lorakernels.modules.marks import refuse_held
from lorakernels.numerics.fp8 import E4M3
from lorakernels.values import Weight


class MergeableLinear(FrozenFP8Linear):
    """A FrozenFP8Linear with a second weight, which is used while adapters are merged.

    Attributes:
        merged: whether the weight contains adapters. Then `load_state_dict` refuses the layer's entries.
    """

    merged: bool
    _base: tuple[Tensor, Tensor | None] | None  # as it is stored, with its scale_inv; while merged

    def _hold(self, weight: Weight, bias: Tensor | None, spec: FrozenSpec) -> None:
        super()._hold(weight, bias, spec)
        self.merged, self._base = False, None

    def base_weight(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight without adapters, a new tensor [N, K] in `dtype`. A merged layer has kept it."""
        if self._base is None:
            return self.dequantized_weight(dtype)
        weight, scale_inv = self._base
        held = weight if scale_inv is None else weight.view(E4M3)
        return dequantize_weight(held, scale_inv, dtype)

    @torch.no_grad()
    def put_merged(self, total: Tensor) -> None:
        """Compute with `total` (fp32 [N, K], base and adapters) from now on. An FP8 weight is requantized from it.

        If the layer is not merged yet, its weight is kept for `unmerge`.

        Raises:
            ValueError: `total` is not finite in the weight's dtype; nothing is changed then.
            RuntimeError: the weight is in a sharded base.
        """
        refuse_held(self, "merge into")
        merged, new_scale_inv = self._as_held(total)
        scale_inv = self.weight_scale_inv
        before = (self.stored.detach().clone(), None if scale_inv is None else scale_inv.clone())
        was_merged, kept = self.merged, self._base
        self.merged, self._base = True, before if kept is None else kept
        try:
            self._write_weight(merged, new_scale_inv)
        except BaseException:
            self._write_weight(*before)
            self.merged, self._base = was_merged, kept
            raise

    def _as_held(self, total: Tensor) -> tuple[Tensor, Tensor | None]:
        if self.holds_fp8:
            return quantize_weight(total, self.block_scaling)
        merged = total.to(self.stored.dtype)
        if not bool(merged.isfinite().all()):
            name = self.name or type(self).__name__
            raise ValueError(f"{name}: the merged weight is not finite")
        return merged, None

    @torch.no_grad()
    def unmerge(self) -> None:
        """Put the base weight back, byte for byte."""
        if not self.merged or self._base is None:
            return
        self._write_weight(*self._base)
        self.merged, self._base = False, None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> MergeableLinear:
        super()._apply(fn, recurse)
        if self._base is not None:
            weight, scale_inv = self._base
            weight = fn(weight)
            self._base = (weight, None if scale_inv is None else scale_inv.to(weight.device))
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self._base is None or not is_apart():
            return
        weight, scale_inv = self._base
        destination[prefix + "weight"] = weight
        if scale_inv is not None:
            destination[prefix + "weight"] = weight.view(E4M3)
            destination[prefix + "weight_scale_inv"] = scale_inv

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        if self.merged:
            error_msgs: list[str] = args[-1]
            error_msgs.append(f"{prefix or 'this layer'}: unmerge the adapter before loading")
            return
        super()._load_from_state_dict(state_dict, prefix, *args)


def mergeable(layer: FrozenFP8Linear) -> MergeableLinear:
    """`layer` itself. If it is a FrozenFP8Linear, it becomes a MergeableLinear.

    Raises:
        TypeError: the layer's class is a subclass of FrozenFP8Linear that cannot be merged into.
    """
    if isinstance(layer, MergeableLinear):
        return layer
    if type(layer) is not FrozenFP8Linear:
        raise TypeError(f"cannot merge into a {type(layer).__name__}, expected a FrozenFP8Linear")
    vars(layer).setdefault("merged", False)
    vars(layer).setdefault("_base", None)
    layer.__class__ = MergeableLinear
    return layer  # type: ignore[return-value]
