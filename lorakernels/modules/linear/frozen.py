# SPDX-License-Identifier: Apache-2.0
"""FrozenFP8Linear: y = x Wᵀ + bias. W is stored once, in FP8, and is never trained."""

from __future__ import annotations

import math
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lorakernels.autograd import (
    Adapter,
    LoRASpec,
    compiled_linear,
)
from lorakernels.autograd.linear.numbers import Numbers
from lorakernels.autograd.linear.projections import OverRanks
from lorakernels.modules.linear.calls import call
from lorakernels.modules.linear.spec import FrozenSpec
from lorakernels.modules.linear.stored_weight import StoredWeight, frozen, is_sharded
from lorakernels.modules.linear.weights import quantize_weight
from lorakernels.recipes import DelayedScaling, Recipe
from lorakernels.state.fp8 import FP8State
from lorakernels.state.handles import Handle
from lorakernels.values import Weight

_Layer = TypeVar("_Layer", bound="FrozenFP8Linear")
_NO_ADAPTER = Adapter()
__all__ = ["FrozenFP8Linear", "is_sharded", "quantize_weight"]


class FrozenFP8Linear(StoredWeight):
    """A linear layer with a weight that is frozen and stored in FP8 (e4m3), 1 byte per parameter.

    Args:
        in_features, out_features: K and N.
        bias: whether there is a bias [N].
        fp8: the recipe for x and dy. None keeps the weight in `dtype`.
        device, dtype: of the parameters. `dtype` does not apply to an FP8 weight.
        fp8_state, name: the model's FP8State and this layer's entry in it. None makes a state for this layer alone.

    Attributes:
        weight: [N, K], the e4m3 view of the stored bytes, or the plain parameter when `fp8` is None. While FSDP2 has
            it sharded (outside of forward), it is the parameter as it is stored.
        weight_scale_inv: fp32 [1], [⌈N/128⌉, ⌈K/128⌉] under BlockScaling, by the exact amax; None when `fp8` is None.
        fp8_state: scales and amax history of x and dy; None under BlockScaling.
        block_scaling: the recipe if it is a BlockScaling, else None.
        column: this layer's column of `fp8_state`.

    Raises:
        ValueError: a size is not a positive integer, or `fp8_state` has another recipe or device.
        KeyError: `fp8_state` has no `name`.

    The stored Parameter is uint8 where torch allows it (`STORAGE` in stored_weight.py). `.to(dtype)` never touches its
    bytes.
    """

    over: OverRanks | None = None  # a layer over ranks (lorakernels.parallel.tensor.layers) has one
    skip_bias_add = False  # likewise, in Megatron's terms

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        fp8: Recipe | None = DelayedScaling(),  # noqa: B008  (frozen)
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        fp8_state: FP8State | None = None,
        name: str = "",
    ) -> None:
        super().__init__()
        for field, value in (("in_features", in_features), ("out_features", out_features)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{field} must be a positive integer, found {value!r}")
        weight = torch.empty(out_features, in_features, device=device, dtype=dtype)
        if not weight.is_meta:
            nn.init.kaiming_uniform_(weight, a=math.sqrt(5))
        bias_value = torch.empty(out_features, device=device, dtype=dtype) if bias else None
        if bias_value is not None and not bias_value.is_meta:
            bound = 1 / math.sqrt(in_features)
            nn.init.uniform_(bias_value, -bound, bound)
        spec = FrozenSpec(fp8, fp8_state, name)
        self._hold(Weight(weight), bias_value, spec)

    def _hold(self, weight: Weight, bias: Tensor | None, spec: FrozenSpec) -> None:
        """Make `weight` and `bias` this layer's own. If they do not fit (`FrozenSpec.check`), nothing is changed."""
        spec.check(weight, bias)
        data, scale_inv = weight.data.contiguous(), weight.scale_inv
        if spec.fp8 is not None and scale_inv is None:
            data, scale_inv = quantize_weight(data, spec.blocks)
        self.block_scaling = spec.blocks
        self.out_features, self.in_features = data.shape
        self.name = spec.name
        self._store(data, scale_inv)
        self.bias = None if bias is None else frozen(bias.detach())
        self.fp8_state = spec.state_on(data.device)
        self.column = 0 if self.fp8_state is None else self.fp8_state.column(spec.entry)
        self.renew_handle()

    @classmethod
    def from_weight(
        cls: type[_Layer], weight: Weight, bias: Tensor | None, spec: FrozenSpec
    ) -> _Layer:
        """A layer over these very tensors, in training mode.

        Args:
            weight: `data` [N, K] is a plain weight, or e4m3 bytes (uint8 or e4m3) if there is a `scale_inv`, fp32 [1],
                or [⌈N/128⌉, ⌈K/128⌉] under BlockScaling.
                With `spec.fp8` a plain one is quantized from its exact amax.
            bias: [N] or None; it does not train.
            spec: recipe, FP8 state and name.

        Raises:
            TypeError: there is a `scale_inv`, but `data` is not in bytes of FP8.
            ValueError: a shape does not fit, the weight is not finite, FP8 bytes have no recipe, or `spec.fp8_state`
                has another recipe or device.
            KeyError: `spec.fp8_state` has no `spec.name`. Nothing is changed by an exception.
        """
        new = cls.__new__(cls)
        nn.Module.__init__(new)
        new._hold(weight, bias, spec)
        return new

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        fp8: Recipe | None = DelayedScaling(),  # noqa: B008  (frozen)
        *,
        fp8_state: FP8State | None = None,
        name: str = "",
    ) -> FrozenFP8Linear:
        """A layer with the bias and the weight of an `nn.Linear`; with `fp8`, W is quantized from its exact amax.

        Args:
            linear: weight [N, K] and bias [N] or None.
            fp8: the recipe; None keeps the weight as it is.
            fp8_state, name: as for the class.

        Raises:
            ValueError: the weight is not finite, or `fp8_state` has another recipe or device.
            KeyError: `fp8_state` has no `name`.
        """
        spec = FrozenSpec(fp8, fp8_state, name)
        new = cls.from_weight(Weight(linear.weight.detach()), linear.bias, spec)
        return new.train(linear.training)

    @property
    def recipe(self) -> Recipe | None:
        """What x and dy follow; None over a plain weight."""
        return self.block_scaling if self.fp8_state is None else self.fp8_state.recipe

    def move_state(self, state: FP8State, name: str) -> None:
        """Move this layer's scales and amax histories to the tensor `name` of `state`, and follow that from now on.

        The tensor is registered if `state` does not have it.

        Raises:
            ValueError: this layer has no FP8 state.
            RuntimeError: the tensor is new, and the addresses of `state` are pinned. Nothing is changed then.
        """
        old = self.fp8_state
        if old is None:
            raise ValueError(
                f"{self.name or 'this layer'} holds no FP8, so it has no state to move"
            )
        column = state.column(name) if name in state.names else state.register(name)
        state.set_values(column, old.values(self.column))
        if self.column in old.joint:
            state.joint.add(column)
        self.name, self.fp8_state, self.column = name, state, column

    def forward(self, x: Tensor) -> Tensor:
        """[..., K] → [..., N] in x's dtype; backward gives dx (and dbias if the bias is trained).

        Raises:
            TypeError: x is not float32, bfloat16 or float16.
            ValueError: x's last dimension is not K, or x is on another device.
            RuntimeError: gradients are computed, and `weight.requires_grad` is True, though the weight is frozen.
        """
        return call(self, x, _NO_ADAPTER, scaling=1.0, p=0.0)

    def traced(
        self,
        x: Tensor,
        adapter: Adapter,
        slot: Tensor | None,
        scaling: float | None = None,
        p: float | None = None,
    ) -> Tensor:
        """`call` in a trace. It reads no number that differs between layers, so that they share the trace."""
        base = (self.held, self.weight_scale_inv, self.bias)
        handle, factors = self._handle.tensor, (adapter.A, adapter.B)
        return compiled_linear(x, base, factors, slot, handle, self.training, scaling=scaling, p=p)

    def _own_spec(self) -> LoRASpec:
        """The numbers of the layer's own adapter. Without one there is nothing to scale or to drop."""
        return LoRASpec()

    @property
    def handle(self) -> Handle:
        """The handle of this layer's numbers in a trace. A change of a number makes a new one."""
        return self._handle

    def renew_handle(self) -> None:
        """Make a new handle when a number changes, so that a backward never sees other numbers than its forward."""
        weight = self._parameters["weight"]
        assert weight is not None
        spec = self._own_spec()
        numbers = Numbers(self.name, self.recipe, self.fp8_state, self.column, spec)
        self._numbers, self._handle = numbers, Handle(numbers, numbers.default.p > 0, weight.device)

    def weight_moved(self) -> None:
        """Make a handle on the weight's device. An op that is given a "meta" handle would silently compute nothing."""
        stored = self._parameters["weight"]
        if (
            "_handle" in self.__dict__
            and stored is not None
            and stored.device != self._handle.tensor.device
        ):
            self.renew_handle()

    def __getstate__(self) -> dict[str, Any]:
        """State for pickle and deepcopy, without the handle."""
        state = super().__getstate__()
        return {k: v for k, v in state.items() if k not in ("_handle", "_numbers")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.renew_handle()

    def extra_repr(self) -> str:
        base = "e4m3" if self.weight_scale_inv is not None else str(self.weight.dtype)[6:]
        base += " in blocks" if self.block_scaling is not None else ""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, base={base}"
        )
