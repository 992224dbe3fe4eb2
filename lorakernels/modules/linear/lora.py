# SPDX-License-Identifier: Apache-2.0
"""LoRALinear: y = x Wᵀ + bias + scaling · D(x) Aᵀ Bᵀ over a frozen base in FP8 (or in its own dtype)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lorakernels.autograd import Adapter, LoRASpec
from lorakernels.autograd.linear.adapter_rows import CallRows
from lorakernels.autograd.linear.recorded import way_of
from lorakernels.config import LoRAConfig
from lorakernels.modules.linear.calls import call, number
from lorakernels.modules.linear.frozen import is_sharded
from lorakernels.modules.linear.initial import NAMES, Initial, initial_adapter, initial_of
from lorakernels.modules.linear.mergeable import MergeableLinear
from lorakernels.modules.linear.spec import FrozenSpec
from lorakernels.modules.linear.state_entries import is_apart
from lorakernels.ops.hardware import FLOATS
from lorakernels.state.fp8 import FP8State
from lorakernels.state.philox import PhiloxState, PhiloxStates, draw_slot
from lorakernels.values import Weight


def delta_of(lora_A: Tensor, lora_B: Tensor, scaling: float) -> Tensor:
    """fp32 [N, K]: scaling · B A."""
    if lora_A.dim() != 2:
        raise ValueError(
            f"lora_A must be [R, K], found {list(lora_A.shape)}: choose one adapter by AdapterBatch.only(name)"
        )
    return scaling * (lora_B.float() @ lora_A.float())


def refuse_merged_batch(layer: LoRALinear) -> None:
    """Raise RuntimeError if `layer` has several adapters, one of which was merged inside `AdapterBatch.only`."""
    lora_A = layer._parameters.get("lora_A")  # a projection of another library has none
    if lora_A is not None and lora_A.dim() != 2:
        raise RuntimeError(
            f"{layer.name or 'this layer'} has several adapters, and one is merged: call unmerge_lora. Merge it "
            "inside AdapterBatch.only(name), for as long as it is alone"
        )


def first_plain_dtype(tensors: Iterable[Any]) -> torch.dtype | None:
    """The dtype of the first floating-point tensor with more than one byte per value. FP8 has one byte."""
    floats = (t for t in tensors if isinstance(t, Tensor) and t.is_floating_point())
    return next((t.dtype for t in floats if t.element_size() > 1), None)


class LoRALinear(MergeableLinear):
    """Drop-in for `nn.Linear` with a frozen base and a trainable rank-R adapter.

    Args:
        in_features, out_features: K and N.
        bias: whether the base has a bias [N] (frozen unless the config says otherwise).
        config: rank, scaling, dropout, FP8 recipe; `LoRAConfig()` when None. Its patterns apply to `name`.
        device, dtype: of bias and adapters, and of the weight when `config.fp8` is None.
        adapter_dtype: dtype of lora_A and lora_B, if not `dtype`: float32, bfloat16 or float16.
        fp8_state, name: the model's FP8State and this layer's entry in it. None makes a state for this layer alone.

    Attributes:
        lora_A [R, K], lora_B [N, R]: Parameters; [J, R, K] and [J, N, R] after `batch_adapters`. B starts at zero, so
            the output equals the base's at first, unless `config.init_lora_weights` is False.
        scaling: alpha / r, or alpha / √r with rslora.
        row0: the row of the whole tensor at which x begins, where ranks hold rows of one tensor: masks are drawn there.
            DoRA does not read it.
        chunks: (rank, ranks, size), the `values.RowChunks` of a rank that has chunks of each row of tokens. row0 is one
            of its rows then. () where x's rows are consecutive. `context_parallel` sets it.
        rng_state: a `PhiloxState` or `PhiloxStates` to draw dropout from. None draws from torch's generator.
        merged: while True, the weight contains the adapter, and `forward` computes no adapter.
        disable_adapters: while True, `forward` computes no adapter.
        lora_A_init, lora_B_init: buffers, there only after "olora" and "pissa" (modules/linear/initial.py). `forward`
            computes with them while `disable_adapters` is True, because the weight lacks their product.

    Raises:
        TypeError: the adapter's dtype is not float32, bfloat16 or float16.
        ValueError, KeyError: as for FrozenFP8Linear; ValueError also for an initialisation from the weight, which
            `from_linear` has.
    """

    has_magnitude = False  # DoRALinear has one
    adapter_rows: CallRows | None = None  # an AdapterBatch's
    site = number("site")
    row0 = number("row0")
    chunks = number("chunks", ())
    scaling = number("scaling")
    lora_dropout = number("lora_dropout")

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        config: LoRAConfig | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        adapter_dtype: torch.dtype | None = None,
        fp8_state: FP8State | None = None,
        name: str = "",
    ) -> None:
        config = config or LoRAConfig()
        if config.changes_base:
            raise ValueError(
                f"config.init_lora_weights={config.init_lora_weights!r} starts from a weight: use from_linear"
            )
        super().__init__(
            in_features,
            out_features,
            bias,
            config.fp8,
            device,
            dtype,
            fp8_state=fp8_state,
            name=name,
        )
        self._add_adapter(config, device, adapter_dtype or dtype)

    @classmethod
    def from_linear(  # type: ignore[override]
        cls,
        linear: nn.Linear,
        config: LoRAConfig,
        *,
        adapter_dtype: torch.dtype | None = torch.float32,
        fp8_state: FP8State | None = None,
        name: str = "",
    ) -> LoRALinear:
        """A LoRALinear with the weight and bias of an `nn.Linear`.

        Adapters are float32 by default, as in PEFT. `adapter_dtype=None` gives them the weight's dtype.

        Raises:
            TypeError, ValueError, KeyError: as for the class; ValueError also if the weight is not finite.
        """
        return cls.from_weight(
            Weight(linear.weight.detach()),
            linear.bias,
            config,
            adapter_dtype=adapter_dtype,
            fp8_state=fp8_state,
            name=name,
        ).train(linear.training)

    @classmethod
    def from_weight(  # type: ignore[override]
        cls,
        weight: Weight,
        bias: Tensor | None,
        config: LoRAConfig,
        *,
        adapter_dtype: torch.dtype | None = torch.float32,
        fp8_state: FP8State | None = None,
        name: str = "",
    ) -> LoRALinear:
        """A LoRALinear over these very tensors: `FrozenFP8Linear.from_weight` with a new adapter.

        `adapter_dtype=None` gives the adapters the dtype of a plain weight, else the bias's, or torch's default dtype.
        Under "olora" and "pissa" the layer holds the weight less the initial adapter, in new memory.

        Raises:
            TypeError, ValueError, KeyError: as `FrozenFP8Linear.from_weight`; TypeError also for the adapter's dtype.
                TypeError, ValueError: "olora" and "pissa" do not take the weight (`check_initial`).
        """
        spec = FrozenSpec(config.fp8, fp8_state, name)
        dtype = adapter_dtype or first_plain_dtype((weight.data, bias))
        initial = None
        if config.changes_base:
            initial = initial_adapter(name, weight.data, config, dtype)
            kept = initial.rest if config.fp8 else initial.rest.to(weight.data.dtype)
            weight = Weight(kept)
        new = super().from_weight(weight, bias, spec)
        new._add_adapter(config, weight.data.device, dtype, initial)
        return new

    def _add_adapter(
        self,
        config: LoRAConfig,
        device: Any = None,
        dtype: torch.dtype | None = None,
        initial: Initial | None = None,
    ) -> None:
        dtype = dtype or torch.get_default_dtype()
        if dtype not in FLOATS:
            raise TypeError(f"adapter dtype must be float32, bfloat16 or float16, found {dtype}")
        if config.use_dora != self.has_magnitude:
            kind = "a DoRALinear" if config.use_dora else "a LoRALinear"
            raise ValueError(
                f"config.use_dora={config.use_dora} needs {kind}, found {type(self).__name__}"
            )
        self.config = config
        self.r = config.rank_for(self.name)
        self.lora_alpha = config.alpha_for(self.name)
        self.scaling = config.scaling_for(self.name)
        self.lora_dropout = config.lora_dropout
        self.site = self.row0 = 0
        self.rng_state: PhiloxState | PhiloxStates | None = None
        self.disable_adapters = False
        self.lora_A = nn.Parameter(
            torch.empty(self.r, self.in_features, device=device, dtype=dtype)
        )
        self.lora_B = nn.Parameter(
            torch.empty(self.out_features, self.r, device=device, dtype=dtype)
        )
        if initial is not None:
            for name, value in zip(NAMES, (initial.A, initial.B), strict=True):
                self.register_buffer(name, value)
            self.init_scaling = initial.scaling
        self.reset_adapter()
        if config.bias != "none" and self.bias is not None:
            self.bias.requires_grad_(True)

    def reset_adapter(self) -> None:
        """Initialise A and B as PEFT does for `config.init_lora_weights`. "olora" and "pissa" give A0 and B0 again."""
        if self.lora_A.is_meta:
            return
        if (initial := initial_of(self)) is not None:
            with torch.no_grad():
                self.lora_A.copy_(initial[0])
                self.lora_B.copy_(initial[1])
            return
        if self.config.init_lora_weights == "gaussian":
            nn.init.normal_(self.lora_A, std=1 / self.r)
        else:
            nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))
        if self.config.init_lora_weights is False:
            nn.init.kaiming_uniform_(self.lora_B, a=math.sqrt(5))
        else:
            nn.init.zeros_(self.lora_B)

    def _own_spec(self) -> LoRASpec:
        values = vars(self)  # while the layer is constructed, some are missing
        numbers = {"scaling": "scaling", "p": "lora_dropout", "site": "site", "row0": "row0"}
        present = {field: values[name] for field, name in numbers.items() if name in values}
        return LoRASpec(**present, chunks=self.chunks)

    def forward(self, x: Tensor) -> Tensor:
        """[..., K] → [..., N] in x's dtype (under autocast, the autocast dtype). x may be empty.

        Raises:
            TypeError: x is not float32, bfloat16 or float16.
            ValueError: x's last dimension is not K, or x is on another device. Or several adapters do not divide the
                first dimension of an x of three or more.
            RuntimeError: it has several adapters, and one of them is merged. Or gradients are computed, and
                `weight.requires_grad` is True, though the weight is frozen.
        """
        if self.merged or self.disable_adapters:
            if self.merged:
                refuse_merged_batch(self)
                return super().forward(x)
            return self._without_adapter(x)
        return call(self, x)

    def draw_slot(self, device: torch.device) -> Tensor:
        """The slot int64 [2] on `device` of one call's mask, of this layer's random state."""
        return draw_slot(self.rng_state, device)

    def _without_adapter(self, x: Tensor) -> Tensor:
        """x Wᵀ + bias. A weight that lacks an initial adapter computes with that one, without dropout."""
        if (initial := initial_of(self)) is None:
            return super().forward(x)
        return call(self, x, Adapter(*initial), scaling=self.init_scaling, p=0.0)

    def eager_ways(self, kinds: Mapping[Any, str]) -> list[str]:
        """How its own eager forwards ran since a number of it changed: "" if recorded, or else why by the ops.

        `kinds`: of `ways_of_kinds` in autograd. Each answer is there once.
        """
        ways = {way_of(spec, kinds) for spec in self._numbers.specs.values()}
        return sorted(way for way in ways if way is not None)

    def delta_weight(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """scaling · B A, [N, K]."""
        return delta_of(self.lora_A.detach(), self.lora_B.detach(), self.scaling).to(dtype)

    def merged_weight(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """W + scaling · B A, [N, K], added in fp32 and rounded once to `dtype`. The layer may be merged or not.

        Over an FP8 base this is more precise than the weight of a merged layer, which is rounded to e4m3.
        """
        return (self.base_weight() + self.delta_weight()).to(dtype)

    def original_weight(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight before there was an adapter, [N, K]: `base_weight`, with the initial adapter if it lacks one.

        The product that "olora" and "pissa" took away is added in fp32, and the sum is rounded once to `dtype`. It
        equals the first weight up to the rounding of the layer's weight.
        """
        initial = initial_of(self)
        if initial is None:
            return self.base_weight(dtype)
        return (self.base_weight() + delta_of(*initial, self.init_scaling)).to(dtype)

    @torch.no_grad()
    def merge(self) -> None:
        """Add the adapter to the weight, in place. An FP8 sum is requantized from its exact amax.

        A copy of the base is kept for `unmerge`. The state_dict then has the merged weight and no adapter;
        `training_state_dict` still has base and adapter apart.

        Raises:
            ValueError: the merged weight is not finite in the weight's dtype; nothing is changed then.
            RuntimeError: the parameters are sharded (FSDP2). Gather them first.
        """
        if self.merged:
            return
        if any(is_sharded(p) for p in self.parameters(recurse=False)):
            raise RuntimeError(f"{self.name or 'LoRALinear'}: cannot merge sharded parameters")
        self.put_merged(self.merged_weight())

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.merged and not is_apart():
            for name in ("lora_A", "lora_B"):
                destination.pop(prefix + name, None)

    def extra_repr(self) -> str:
        return (
            f"{super().extra_repr()}, r={self.r}, scaling={self.scaling:g}, "
            f"lora_dropout={self.lora_dropout}"
        )
