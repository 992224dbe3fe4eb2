# SPDX-License-Identifier: Apache-2.0
"""A PEFT layer in the form that fused decoder layers need: a LoRALinear that owns no tensors.

At each call it reads the layer's base, its active adapter, and whether that is merged or switched off.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from lorakernels import BlockScaling, FP8State, LoRALinear

_FACTORS = ("lora_A", "lora_B")


class PeftProjection(LoRALinear):
    """Shows `layer`'s base weight and its one active adapter under LoRALinear's names.

    It is not a part of the model.
    """

    layer: Any
    row0, site, chunks = 0, 0, ()

    def __init__(self, layer: Any) -> None:
        self.__dict__["layer"] = layer

    def __reduce_ex__(self, _: Any) -> tuple[Any, ...]:
        return PeftProjection, (self.layer,)

    def __hash__(self) -> int:
        return id(self)

    @property
    def base(self) -> Any:
        return self.layer.base_layer

    def _active(self) -> list[str]:
        return [name for name in self.layer.active_adapters if name in self.layer.lora_A]

    @property
    def _adapter(self) -> str:
        """The active adapter, or any adapter if none is active.

        Raises:
            AttributeError: PEFT has deleted all.
        """
        for name in self._active() or self.layer.lora_A:
            return str(name)
        raise AttributeError(f"{self.name or 'this layer'} has no adapter")

    @property
    def disable_adapters(self) -> bool:  # type: ignore[override]
        """True if no adapter takes part.

        Raises:
            ValueError: PEFT would compute something other than one plain adapter.
        """
        layer = self.layer
        if layer.disable_adapters or layer.merged or not self._active():
            return True
        reason = layer.reason_for_peft()
        if reason is not None:
            raise ValueError(
                f"{self.name or 'a layer'} is in a fused layer, which runs one plain adapter, and {reason}: activate "
                "one, or unfuse(model) first"
            )
        return False

    # attributes of a LoRALinear

    @property
    def merged(self) -> bool:  # type: ignore[override]
        return bool(self.layer.merged)

    @property
    def training(self) -> bool:  # type: ignore[override]
        return bool(self.layer.training)

    @property
    def r(self) -> int:  # type: ignore[override]
        return int(self.layer.r[self._adapter])

    @property
    def scaling(self) -> float:
        return float(self.layer.scaling[self._adapter])

    @property
    def lora_dropout(self) -> float:
        return float(self.layer.dropout_of(self._adapter))

    @property
    def rng_state(self) -> Any:  # type: ignore[override]
        return self.layer.rng_state

    @property
    def lora_A(self) -> nn.Parameter:  # type: ignore[override]
        return self.layer.lora_A[self._adapter].weight

    @property
    def lora_B(self) -> nn.Parameter:  # type: ignore[override]
        return self.layer.lora_B[self._adapter].weight

    @property
    def bias(self) -> Tensor | None:  # type: ignore[override]
        return self.base.bias

    @property
    def _parameters(self) -> dict[str, Any]:  # type: ignore[override]
        if self.layer.disable_adapters and self.layer.merged:
            self.layer.unmerge()  # PEFT's forward does the same
        base, modules = self.base._parameters, self.layer._modules
        factors: dict[str, Any] = {}
        if modules["lora_A"]._modules:  # PEFT may have deleted all
            adapter = self._adapter
            factors = {f: modules[f]._modules[adapter]._parameters["weight"] for f in _FACTORS}
        return {"weight": base["weight"], "bias": base["bias"], **factors}

    @property
    def _buffers(self) -> dict[str, Any]:  # type: ignore[override]
        return {"weight_scale_inv": self.weight_scale_inv}

    # attributes of its base, an nn.Linear or a FrozenFP8Linear

    @property
    def in_features(self) -> int:  # type: ignore[override]
        return int(self.base.in_features)

    @property
    def out_features(self) -> int:  # type: ignore[override]
        return int(self.base.out_features)

    @property
    def weight_scale_inv(self) -> Tensor | None:  # type: ignore[override]
        return getattr(self.base, "weight_scale_inv", None)

    @property
    def fp8_state(self) -> FP8State | None:
        return getattr(self.base, "fp8_state", None)

    @property
    def block_scaling(self) -> BlockScaling | None:  # type: ignore[override]
        return getattr(self.base, "block_scaling", None)

    @property
    def column(self) -> int:
        return getattr(self.base, "column", 0)

    @property
    def name(self) -> str:  # type: ignore[override]
        return getattr(self.base, "name", "")

    def move_state(self, state: FP8State, name: str) -> None:
        self.base.move_state(state, name)
