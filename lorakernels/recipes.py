# SPDX-License-Identifier: Apache-2.0
"""FP8 recipes, in Transformer Engine's terms: DelayedScaling and BlockScaling.

A recipe says how x, dy and a frozen weight are scaled. Both validate themselves when they are made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypedDict

import torch

from lorakernels.field_checks import check_bool, check_choice, check_int, unexpected

# Fields of Transformer Engine's DelayedScaling that ours lacks, each with the only value that ours can follow.
_TE_ONLY: Mapping[str, object] = {
    "scaling_factor_compute_algo": None,
    "fp8_dpa": False,
    "fp8_mha": False,
    "override_linear_precision": (False, False, False),
}
# Fields of Transformer Engine's Float8BlockScaling: its blocks, of which there is one kind here, and its scales.
_TE_BLOCKS: Mapping[str, object] = {
    "x_block_scaling_dim": 1,
    "w_block_scaling_dim": 2,
    "grad_block_scaling_dim": 1,
    "fp8_dpa": False,
    "fp8_mha": False,
}
_TE_QUANT = ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad")
GEMM_FIELDS = ("fp8_gemm_fprop", "fp8_gemm_dgrad")


@dataclass(frozen=True)
class MMParams:
    """How an FP8 GEMM adds up. The name is Transformer Engine's.

    Hopper's FP8 tensor cores by themselves keep about 14 bits of an fp32 sum. With `use_split_accumulator`, sums of 512
    products are added in fp32. The error of dx is then 1.67e-3, nearly all of it bf16's rounding. Without it the error
    is 2.1e-3 at a depth of 8192 and 3.2e-3 at 28672. An H200 takes 1 to 12 % less time for such a dgrad.
    """

    use_split_accumulator: bool = True

    def __post_init__(self) -> None:
        split = self.use_split_accumulator
        if not isinstance(split, bool):
            raise TypeError(f"MMParams.use_split_accumulator must be True or False, got {split!r}")


class CallScaling(TypedDict, total=False):
    """What a recipe says of one call of a linear layer, as ops are told. `of_call` of a recipe returns it.

    All code that scales x or dy reads these alone, so that a recipe with other numbers is one class.

    Attributes:
        column: of x and dy in the FP8State.
        delayed: whether scales come from the FP8State. If not, each tensor is scaled by its own amax.
        backward_dtype: FP8 dtype of dy.
        split_fprop, split_dgrad: whether the FP8 GEMM for y, or for dx, adds partial sums in fp32.
        power_of_two: whether the scales of blocks are powers of two; left out where x and dy have one scale each.
    """

    column: int
    delayed: bool
    backward_dtype: torch.dtype
    split_fprop: bool
    split_dgrad: bool
    power_of_two: bool


@dataclass(frozen=True)
class DelayedScaling:
    """FP8 recipe: a tensor's scale comes from the amax history of the iterations before.

    `scale = fp8_max / (amax · 2**margin)` with `amax` the largest ("max") or the newest
    ("most_recent") entry of the history. HYBRID holds activations and weights in e4m3 and gradients in e5m2. E4M3
    holds everything in e4m3. The GEMM fields are named as in Transformer Engine's Float8CurrentScaling. Their defaults
    are what Transformer Engine does under this recipe.

    Raises:
        TypeError, ValueError: a field has a wrong type or value.
    """

    margin: int = 0
    fp8_format: Literal["HYBRID", "E4M3"] = "HYBRID"
    amax_history_len: int = 1024
    amax_compute_algo: Literal["max", "most_recent"] = "max"
    reduce_amax: bool = True
    fp8_gemm_fprop: MMParams = MMParams(use_split_accumulator=False)
    fp8_gemm_dgrad: MMParams = MMParams(use_split_accumulator=True)

    def __post_init__(self) -> None:
        where = "DelayedScaling"
        for name in GEMM_FIELDS:
            if not isinstance(getattr(self, name), MMParams):
                raise unexpected(where, name, getattr(self, name), "an MMParams")
        check_int(where, "margin", self.margin)
        check_choice(where, "fp8_format", self.fp8_format, ("HYBRID", "E4M3"))
        check_int(where, "amax_history_len", self.amax_history_len, at_least=1)
        check_choice(where, "amax_compute_algo", self.amax_compute_algo, ("max", "most_recent"))
        check_bool(where, "reduce_amax", self.reduce_amax)

    @classmethod
    def from_te(cls, recipe: Any) -> DelayedScaling:
        """The same recipe from Transformer Engine's `DelayedScaling`, read by its attributes: TE is not imported.

        Raises:
            TypeError: `recipe` is of another kind (current scaling, MXFP8, blockwise, …).
            ValueError: a field asks for what this library lacks: a function as an algorithm, pure E5M2, FP8 attention,
                a GEMM in higher precision. The message names the field, what was found and what is possible.
        """
        kind = type(recipe).__name__
        fields = ("margin", "fp8_format", "amax_history_len", "amax_compute_algo", "reduce_amax")
        missing = [name for name in fields if not hasattr(recipe, name)]
        if missing or isinstance(recipe, type):
            raise TypeError(
                "recipe must be a transformer_engine.common.recipe.DelayedScaling object, got "
                f"{getattr(recipe, '__name__', kind)}: no other kind of scaling keeps an amax history"
            )
        for name, possible in _TE_ONLY.items():
            setting = getattr(recipe, name, possible)
            if setting != possible:
                raise unexpected(cls.__name__, name, setting, repr(possible))
        values = {name: getattr(recipe, name) for name in fields}
        values["fp8_format"] = getattr(values["fp8_format"], "name", values["fp8_format"])
        for name in GEMM_FIELDS:  # TE's class lacks them, but its GEMMs follow a subclass's
            if hasattr(recipe, name):
                values[name] = MMParams(getattr(recipe, name).use_split_accumulator)
        return cls(**values)

    def to_te(self) -> Any:
        """The same recipe as a `transformer_engine.common.recipe.DelayedScaling`. Imports Transformer Engine.

        Raises:
            ValueError: a GEMM field differs from what TE always does under this recipe.
        """
        values = asdict(self)
        for name in GEMM_FIELDS:
            default = getattr(type(self), name)
            if getattr(self, name) != default:
                raise unexpected("DelayedScaling", name, getattr(self, name), f"{default}, TE's")
            del values[name]
        from transformer_engine.common import recipe

        return recipe.DelayedScaling(**{**values, "fp8_format": recipe.Format[self.fp8_format]})

    @property
    def forward_dtype(self) -> torch.dtype:
        return torch.float8_e4m3fn

    @property
    def backward_dtype(self) -> torch.dtype:
        return torch.float8_e5m2 if self.fp8_format == "HYBRID" else torch.float8_e4m3fn

    def of_call(self, column: int, training: bool) -> CallScaling:
        """How one call scales x and dy. `column`: of the layer in its FP8State."""
        return {
            "column": column,
            "delayed": training,
            "backward_dtype": self.backward_dtype,
            "split_fprop": self.fp8_gemm_fprop.use_split_accumulator,
            "split_dgrad": self.fp8_gemm_dgrad.use_split_accumulator,
        }

    @property
    def fp8_max_forward(self) -> float:
        return torch.finfo(self.forward_dtype).max

    @property
    def fp8_max_backward(self) -> float:
        return torch.finfo(self.backward_dtype).max


@dataclass(frozen=True)
class BlockScaling:
    """FP8 recipe: every block has a scale of its own, from the largest magnitude in it. There is no state.

    Blocks are 128 × 128 of a weight, and 1 × 128 of x and dy along the dimension that is summed over, as in
    Transformer Engine's Float8BlockScaling and in block-FP8 checkpoints. x and the weight are e4m3. dy is e4m3 with
    "E4M3" and e5m2 with "HYBRID". A weight that comes in blocks of 128 × 128 keeps its bytes and scales.

    `power_2_scale` rounds scales to powers of two, so that a scale never changes a mantissa. Transformer Engine has
    this on by default; its `QParams` have the same field.

    Raises:
        TypeError, ValueError: a field has a wrong type or value.
    """

    fp8_format: Literal["E4M3", "HYBRID"] = "E4M3"
    power_2_scale: bool = False

    def __post_init__(self) -> None:
        check_choice("BlockScaling", "fp8_format", self.fp8_format, ("E4M3", "HYBRID"))
        check_bool("BlockScaling", "power_2_scale", self.power_2_scale)

    @classmethod
    def from_te(cls, recipe: Any) -> BlockScaling:
        """The same recipe from Transformer Engine's `Float8BlockScaling`, read by its attributes: TE is not imported.

        Raises:
            TypeError: `recipe` is of another kind.
            ValueError: a field asks for other blocks, an amax_epsilon, FP8 attention, pure E5M2, or for powers of two
                in some tensors only. The message names the field, what was found and what is possible.
        """
        names = [*_TE_QUANT, "fp8_format", "x_block_scaling_dim"]
        if isinstance(recipe, type) or not all(hasattr(recipe, name) for name in names):
            raise TypeError(
                "recipe must be a transformer_engine.common.recipe.Float8BlockScaling object, got "
                f"{getattr(recipe, '__name__', type(recipe).__name__)}"
            )
        for name, possible in _TE_BLOCKS.items():
            if (setting := getattr(recipe, name, possible)) != possible:
                raise unexpected(cls.__name__, name, setting, repr(possible))
        power = getattr(recipe, _TE_QUANT[0]).power_2_scale
        for name in _TE_QUANT:
            params = getattr(recipe, name)
            if params.amax_epsilon != 0.0:
                raise unexpected(cls.__name__, f"{name}.amax_epsilon", params.amax_epsilon, "0.0")
            if params.power_2_scale != power:
                setting, expected = params.power_2_scale, f"{power!r}, as {_TE_QUANT[0]}'s"
                raise unexpected(cls.__name__, f"{name}.power_2_scale", setting, expected)
        return cls(getattr(recipe.fp8_format, "name", recipe.fp8_format), power)

    def to_te(self) -> Any:
        """The same recipe as a `transformer_engine.common.recipe.Float8BlockScaling`. Imports Transformer Engine."""
        from transformer_engine.common import recipe

        made = recipe.Float8BlockScaling(fp8_format=recipe.Format[self.fp8_format])
        for name in _TE_QUANT:  # no fields of TE's dataclass: its constructor does not take them
            quant = recipe.QParams(power_2_scale=self.power_2_scale, amax_epsilon=0.0)
            setattr(made, name, quant)
        return made

    @property
    def backward_dtype(self) -> torch.dtype:
        return torch.float8_e5m2 if self.fp8_format == "HYBRID" else torch.float8_e4m3fn

    def of_call(self, column: int, training: bool) -> CallScaling:
        """How one call scales x and dy. There is no state, so that `column` and `training` change nothing."""
        return {"backward_dtype": self.backward_dtype, "power_of_two": self.power_2_scale}


Recipe = DelayedScaling | BlockScaling
