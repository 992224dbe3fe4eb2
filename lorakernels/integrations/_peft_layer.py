# SPDX-License-Identifier: Apache-2.0
"""PEFT's LoRA layer, computed by lorakernels' op.

    y = x Wᵀ + bias + scaling · D(x) Aᵀ Bᵀ        one op when one plain adapter is active

All other features of PEFT (several active adapters, mixed batches, variants) run through PEFT's own forward over the
same base. `lorakernels_path` then says why.
"""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners.lora.layer import Linear as PeftLinear
from peft.tuners.lora.layer import LoraLayer
from peft.tuners.tuners_utils import check_adapters_to_merge
from torch import Tensor, nn

from lorakernels import FrozenFP8Linear, PhiloxState, PhiloxStates
from lorakernels.autograd import (
    Adapter,
    Call,
    LoRASpec,
    check_input,
    lora_linear,
)
from lorakernels.integrations._peft_calls import mend_hooks_of_calls
from lorakernels.integrations._peft_projection import PeftProjection
from lorakernels.modules.linear.calls import call
from lorakernels.modules.linear.lora import delta_of
from lorakernels.modules.linear.mergeable import MergeableLinear, mergeable
from lorakernels.modules.linear.spec import FrozenSpec
from lorakernels.modules.marks import became
from lorakernels.modules.model.convert import to_frozen
from lorakernels.modules.model.frozen_targets import HOOKS
from lorakernels.modules.model.targets import has_forward_of_its_own
from lorakernels.modules.order import refuse
from lorakernels.recipes import Recipe
from lorakernels.state.philox import draw_slot
from lorakernels.values import Weight

FUSED = "lorakernels"
_DROPOUTS = (nn.Dropout, nn.Identity)  # a tuple, because torch 2.8 can trace it
_READS_BASE = (
    "use_dora",
    "kasa_config",
    "velora_config",
    "monteclora_config",
    "use_bdlora",
    "arrow_config",
)
_INIT_WITHOUT_BASE = (True, False, "gaussian", "eva", "orthogonal")
mend_hooks_of_calls()


class LoraKernelsLinear(PeftLinear):
    """A `peft.tuners.lora.Linear` whose forward is `lora_linear`, over an `nn.Linear` or an FP8 base.

    `merge` on an FP8 base requantizes base + deltas, and `unmerge` restores the base's bytes. Dropout draws from
    `rng_state`, or from torch's generator if it is None.
    """

    base_layer: Any
    rng_state: PhiloxState | PhiloxStates | None
    is_merged: bool  # copy of `merged`, which PEFT derives from a list; graphs watch this one

    def __init__(
        self,
        base_layer: nn.Module,
        adapter_name: str,
        *,
        fp8: Recipe | None = None,
        **kwargs: Any,
    ) -> None:
        if fp8 is not None:
            _check_keeps_base(kwargs["config"])
        super().__init__(base_layer, adapter_name, **kwargs)
        self.start()
        if fp8 is not None and not isinstance(self.base_layer, FrozenFP8Linear):
            self.use_fp8_base(FrozenSpec(fp8))

    def start(self) -> None:
        """Set the attributes that PEFT's class lacks."""
        self.rng_state, self.is_merged = None, self.merged

    def stop(self) -> None:
        del self.rng_state, self.is_merged

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self.is_fp8 and self.merged:
            mergeable(self.base_layer)  # in older pickles it is a FrozenFP8Linear with a kept base

    def use_fp8_base(self, spec: FrozenSpec) -> None:
        """Quantize the base weight to FP8 and hold it so from now on."""
        linear = self.base_layer
        base = to_frozen(linear, spec)
        # Under PEFT's low_cpu_mem_usage the new layer's bias is on "meta", so the original is put back.
        base._parameters["bias"] = linear.bias
        base.unquantized_dtype = linear.weight.dtype
        self.base_layer = base

    @property
    def lorakernels_path(self) -> str:
        """ "lorakernels", or "peft: <why our op does not take the next forward>"."""
        reason = self.reason_for_peft()
        return FUSED if reason is None else f"peft: {reason}"

    def reason_for_peft(self) -> str | None:
        """Why PEFT's own forward runs next, in words; None if our op does."""
        if self.disable_adapters:
            return "adapters are disabled"
        if self.merged:
            return "the adapter is merged"
        active = [name for name in self.active_adapters if name in self.lora_A]
        if len(active) != 1:
            return f"{len(active)} adapters are active"
        (name,) = active
        if name in self.lora_variant:
            return f"adapter {name!r} is a {type(self.lora_variant[name]).__name__}"
        if self.lora_bias[name]:
            return f"adapter {name!r} has a bias on lora_B"
        if not self.cast_input_dtype_enabled:
            return "input casting is switched off"
        if not (isinstance(self.base_layer, FrozenFP8Linear) or is_plain_linear(self.base_layer)):
            more = " with a forward of its own" if has_forward_of_its_own(self.base_layer) else ""
            return f"the base layer is a {type(self.base_layer).__name__}{more}"
        if self.fan_in_fan_out:
            return "the base weight is stored [K, N] (fan_in_fan_out)"
        if self.base_layer.weight.requires_grad:
            return "the base weight is trained"
        parts = (self.base_layer, self.lora_A[name], self.lora_B[name], self.lora_dropout[name])
        if any(getattr(part, hooks) for part in parts for hooks in HOOKS):
            return "a part of the layer has hooks"
        if not isinstance(parts[3], _DROPOUTS):
            return f"dropout is a {type(parts[3]).__name__}"
        if self.dropout_of(name) >= 1.0:
            return "dropout drops everything"
        return None

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if args or any(value is not None for value in kwargs.values()):
            return super().forward(x, *args, **kwargs)
        if self.reason_for_peft() is not None or not self._takes(x):
            return super().forward(x)
        base = self.base_layer
        (name,) = (name for name in self.active_adapters if name in self.lora_A)
        p = self.dropout_of(name) if self.training else 0.0
        adapter = Adapter(self.lora_A[name].weight, self.lora_B[name].weight)
        if isinstance(base, FrozenFP8Linear):
            return call(base, x, adapter, p > 0, self.rng_state, self.scaling[name], p)
        check_input(x, base.weight)
        slot = draw_slot(self.rng_state, x.device) if p > 0 else None
        numbers = Call(LoRASpec(self.scaling[name], p), slot)
        return lora_linear(x, Weight(base.weight), base.bias, adapter, numbers)

    def _takes(self, x: Tensor) -> bool:
        """True if our op accepts `x`.

        An FP8 base takes every dtype. A plain base computes in its own dtype, so `x` must have it, or autocast must be
        on.
        """
        if isinstance(self.base_layer, FrozenFP8Linear) and self.is_fp8:
            return True
        weight = self.base_layer.weight
        casts = torch.is_autocast_enabled(x.device.type) and weight.element_size() > 1
        return x.dtype == weight.dtype or casts

    def dropout_of(self, adapter: str) -> float:
        dropout = self.lora_dropout[adapter]
        return dropout.p if isinstance(dropout, nn.Dropout) else 0.0

    @property
    def dropout_p(self) -> float:
        """The largest dropout probability of all adapters."""
        return max(map(self.dropout_of, self.lora_dropout), default=0.0)

    def lorakernels_projection(self) -> PeftProjection:
        """The projection that a fused decoder layer runs instead of this layer.

        Raises:
            ValueError: our op does not take this layer.
        """
        reason = self.reason_for_peft()
        if reason is not None:
            raise ValueError(f"a LoRA layer of PEFT's cannot be fused: {reason}")
        return PeftProjection(self)

    @property
    def is_fp8(self) -> bool:
        return isinstance(self.base_layer, FrozenFP8Linear) and self.base_layer.holds_fp8

    @property
    def mergeable_base(self) -> MergeableLinear:
        """The FP8 base, in the class that adapters can be merged into."""
        return mergeable(self.base_layer)

    def update_layer(self, adapter_name: str, *args: Any, config: Any, **kwargs: Any) -> None:
        refuse(self.base_layer, "apply_lora", ())
        if isinstance(self.base_layer, FrozenFP8Linear):
            _check_keeps_base(config)
            if config.init_lora_weights not in _INIT_WITHOUT_BASE:
                raise ValueError(
                    f"init_lora_weights={config.init_lora_weights!r} reads the base weight, which "
                    "is held in FP8: use True, False, 'gaussian', 'eva' or 'orthogonal'"
                )
        super().update_layer(adapter_name, *args, config=config, **kwargs)

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        try:
            self._merge(safe_merge, adapter_names)
        finally:
            self.is_merged = self.merged

    def _merge(self, safe_merge: bool, adapter_names: list[str] | None) -> None:
        if not self.is_fp8:
            super().merge(safe_merge=safe_merge, adapter_names=adapter_names)
            return
        names = [n for n in check_adapters_to_merge(self, adapter_names) if n in self.lora_A]
        if not names:
            return
        weight = self._merged_weight([*self.merged_adapters, *names])
        if not bool(weight.isfinite().all()):
            raise ValueError(
                f"NaNs detected in the merged weights. The adapter {names[-1]} seems to be broken"
            )
        self.mergeable_base.put_merged(weight)
        self.merged_adapters.extend(names)

    def unmerge(self) -> None:
        if self.is_fp8 and self.merged:
            self.mergeable_base.unmerge()
            self.merged_adapters.clear()
        else:
            super().unmerge()
        self.is_merged = self.merged

    @torch.no_grad()
    def _merged_weight(self, names: list[str]) -> Tensor:
        """fp32 [N, K]: the unmerged base plus the deltas of `names`."""
        for name in names:
            if name in self.lora_variant or self.lora_bias[name]:
                raise ValueError(
                    f"adapter {name!r} cannot be merged into an FP8 base: it is more than B A"
                )
        weight = self.mergeable_base.base_weight()
        for name in names:
            weight += delta_of(
                self.lora_A[name].weight, self.lora_B[name].weight, self.scaling[name]
            )
        return weight

    def unload_and_optionally_merge_module(
        self, merge: bool, safe_merge: bool, adapter_names: list[str] | None
    ) -> nn.Module:
        """Called when PEFT removes the layer. An FP8 base becomes an nn.Linear in the dtype that it had originally.

        Raises:
            ValueError: the layer is in a fused one, which cannot run without it. Also if a merged adapter is more than
                B A.
        """
        if became(self).fused_projection is not None:
            raise ValueError(
                "a fused layer's adapters cannot be unloaded: call unfuse(model) first"
            )
        if not self.is_fp8:
            if merge:
                self.merge(safe_merge=safe_merge, adapter_names=adapter_names)
            return self.get_base_layer()
        names = check_adapters_to_merge(self, adapter_names) if merge else []
        names = [*self.merged_adapters, *(name for name in names if name in self.lora_A)]
        return self._plain_linear(self._merged_weight(names))

    def _plain_linear(self, weight: Tensor) -> nn.Linear:
        base = self.base_layer
        linear = nn.Linear(1, 1, bias=False, device="meta")
        linear.out_features, linear.in_features = weight.shape
        dtype = getattr(base, "unquantized_dtype", torch.bfloat16)
        linear.weight = nn.Parameter(weight.to(dtype), requires_grad=False)
        linear.bias = base.bias
        return linear.train(base.training)

    def _get_base_layer_device_and_dtype(self, base_layer: nn.Module) -> tuple[Any, Any]:
        """Adapters get the dtype that the base had before it was quantized to FP8."""
        device, dtype = super()._get_base_layer_device_and_dtype(base_layer)
        return device, getattr(base_layer, "unquantized_dtype", dtype)

    def _get_in_out_features(self, module: nn.Module) -> tuple[int | None, int | None]:
        if isinstance(module, FrozenFP8Linear):
            return module.in_features, module.out_features
        return super()._get_in_out_features(module)

    def __repr__(self) -> str:
        return super().__repr__().replace("lora.", "lorakernels.", 1)


def is_plain_linear(module: nn.Module) -> bool:
    """True for an nn.Linear whose forward is nn.Linear's, also on the instance, and is called by its owner."""
    return (
        isinstance(module, nn.Linear)
        and type(module).forward is nn.Linear.forward
        and type(module).__name__ != "NonDynamicallyQuantizableLinear"
        and not hasattr(module, "parametrizations")
        and not has_forward_of_its_own(module)
    )


def _check_keeps_base(config: Any) -> None:
    if config.init_lora_weights == "mica":
        raise ValueError("init_lora_weights='mica' needs a base weight in full precision")
    for field in _READS_BASE:
        value = getattr(config, field, None)
        if value:
            raise ValueError(
                f"{field}={value!r} needs a base weight in full precision: use fp8=None"
            )


def lora_layers(model: nn.Module) -> dict[str, LoraLayer]:
    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
