# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core: our column and row layers behind the constructors of its own (read and tested at 0.16.1).

    spec.submodules.linear_proj = ModuleSpec(module=RowParallelLinear, params={"lora": LoRAConfig(r=16)})

The base is frozen, in FP8 if the LoRAConfig has a recipe, and the adapter trains. Attributes of parameters
tell Megatron's clipping to count parts of the adapter on every rank, and whole factors on one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lorakernels import LoRAConfig
from lorakernels.parallel import ColumnParallelLoRALinear, RowParallelLoRALinear

# what Megatron's constructors have and we do not, with the only value that is taken
_FIXED = {
    "stride": 1,
    "keep_master_weight_for_test": False,
    "skip_weight_param_allocation": False,
    "embedding_activation_buffer": None,
    "grad_output_buffer": None,
    "is_expert": False,
    "disable_grad_reduce": False,
}
_TAKEN = ("bias", "gather_output", "input_is_parallel", "skip_bias_add", "fp8_state", "name")
_UNUSED = "tp_comm_buffer_name"  # by Megatron's own layers, too


class _Constructed:
    drawn: Any  # (init_method, dtype) during the construction

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: Callable[[Tensor], Any],
        lora: LoRAConfig | None = None,
        tp_group: Any = None,
        **options: Any,
    ) -> None:
        options.pop(_UNUSED, None)
        for name, value in _FIXED.items():
            if (passed := options.pop(name, value)) != value:
                raise ValueError(
                    f"{name} must be {value}, found {passed!r}: another value is not supported yet"
                )
        if unknown := options.keys() - set(_TAKEN):
            raise TypeError(f"{type(self).__name__} takes no {sorted(unknown)}")
        if config.params_dtype == torch.float16:
            raise TypeError("config.params_dtype must be float32 or bfloat16, found torch.float16")
        if tp_group is None:
            from megatron.core.parallel_state import get_tensor_model_parallel_group

            tp_group = get_tensor_model_parallel_group()
        on_cpu = config.use_cpu_initialization
        layer: Any = super()
        drawn = (init_method, config.params_dtype) if config.perform_initialization else None
        self.__dict__["drawn"] = drawn  # nn.Module is not set up yet
        layer.__init__(
            input_size,
            output_size,
            config=lora,
            tp_group=tp_group,
            sequence_parallel=config.sequence_parallel and tp_group.size() > 1,
            device="cpu" if on_cpu else torch.device("cuda", torch.cuda.current_device()),
            dtype=config.params_dtype,
            **options,
        )
        del self.__dict__["drawn"]
        shard: Any = self
        for name, dim in shard.dimensions.items():
            if (part := getattr(self, name, None)) is not None and name != "weight":
                part.tensor_model_parallel, part.partition_dim, part.partition_stride = True, dim, 1

    def initialize(self) -> None:
        """Draw the whole weight by `init_method`, and set the bias to zero, as Megatron's layers do."""
        if self.drawn is None:
            return
        layer: Any = self
        init_method, dtype = self.drawn
        weight = torch.empty(
            layer.out_features, layer.in_features, device=layer.lora_A.device, dtype=dtype
        )
        init_method(weight)
        values = {"weight": weight}
        if layer.bias is not None:
            values["bias"] = torch.zeros_like(layer.bias)
        layer.load_state_dict(values, strict=False)

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Megatron's default would save one rank's part as if all held it.

        Raises:
            NotImplementedError: always, as this is not supported yet.
        """
        raise NotImplementedError(
            "Megatron's distributed checkpoints of LoRA layers are not supported yet: save state_dict() of each rank"
        )


class ColumnParallelLinear(_Constructed, ColumnParallelLoRALinear):
    """megatron.core.tensor_parallel.ColumnParallelLinear with an adapter over a frozen base.

    Args:
        input_size, output_size: K and N of the whole layer.
        config: Megatron's ModelParallelConfig: `params_dtype`, `sequence_parallel`, `use_cpu_initialization`,
            `perform_initialization`.
        init_method: fills the whole weight [N, K] on each rank, which keeps its part. Draw alike on all ranks.
        lora: rank, scaling, dropout, FP8 recipe, from the ModuleSpec's `params`.
        tp_group: torch's process group; None takes Megatron's tensor-model-parallel group.
        options: Megatron's own, and `fp8_state` and `name` of a LoRALinear. Unsupported options are refused.

    Raises:
        ValueError: an option is not supported yet, or the ranks do not divide N.
        TypeError: an option is unknown, or `params_dtype` is float16.
    """

    def forward(  # type: ignore[override]
        self, x: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """(y [S, B, N/T], bias if `skip_bias_add`) of x [S, B, K], or of its part [S/T, B, K].

        Raises:
            ValueError: `weight` is not None, or `runtime_gather_output` is True.
        """
        if weight is not None:
            raise ValueError("weight must be None: the layer has a frozen weight of its own")
        if runtime_gather_output:
            raise ValueError(
                "runtime_gather_output must be None or False: True is not supported yet"
            )
        output: tuple[Tensor, Tensor | None] = super().forward(x)
        return output


class RowParallelLinear(_Constructed, RowParallelLoRALinear):  # type: ignore[misc]
    """megatron.core.tensor_parallel.RowParallelLinear with an adapter over a frozen base.

    Args:
        input_size, output_size, config, init_method, lora, tp_group, options: as for ColumnParallelLinear.

    Raises:
        ValueError: an option is not supported yet, or the ranks do not divide K.
        TypeError: as for ColumnParallelLinear.
    """
