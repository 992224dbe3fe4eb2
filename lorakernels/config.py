# SPDX-License-Identifier: Apache-2.0
"""What to adapt and how: LoRAConfig (PEFT's field names), DelayedScaling and BlockScaling (Transformer Engine's).

Both validate themselves when made: an error names the field, the value and what is expected.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any, Literal, TypedDict

import torch

from lorakernels.peft_config import NotPeft, checked_task_type, lora_fields

ALL_LINEAR = "all-linear"
Names = str | tuple[str, ...] | None
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
_PISSA_NITER = re.compile(r"pissa_niter_\d+")
_WRAPPERS = re.compile(
    r"(?<![^.])(_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)(\.|$)"
)


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
                raise _unexpected(where, name, getattr(self, name), "an MMParams")
        _int(where, "margin", self.margin)
        _choice(where, "fp8_format", self.fp8_format, ("HYBRID", "E4M3"))
        _int(where, "amax_history_len", self.amax_history_len, at_least=1)
        _choice(where, "amax_compute_algo", self.amax_compute_algo, ("max", "most_recent"))
        _bool(where, "reduce_amax", self.reduce_amax)

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
                raise _unexpected(cls.__name__, name, setting, repr(possible))
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
                raise _unexpected("DelayedScaling", name, getattr(self, name), f"{default}, TE's")
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
        _choice("BlockScaling", "fp8_format", self.fp8_format, ("E4M3", "HYBRID"))
        _bool("BlockScaling", "power_2_scale", self.power_2_scale)

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
                raise _unexpected(cls.__name__, name, setting, repr(possible))
        power = getattr(recipe, _TE_QUANT[0]).power_2_scale
        for name in _TE_QUANT:
            params = getattr(recipe, name)
            if params.amax_epsilon != 0.0:
                raise _unexpected(cls.__name__, f"{name}.amax_epsilon", params.amax_epsilon, "0.0")
            if params.power_2_scale != power:
                setting, expected = params.power_2_scale, f"{power!r}, as {_TE_QUANT[0]}'s"
                raise _unexpected(cls.__name__, f"{name}.power_2_scale", setting, expected)
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


@dataclass(frozen=True)
class LoRAConfig(NotPeft):
    """One adapter over a frozen base: PEFT's fields with PEFT's meaning, plus one of our own.

    `target_parameters` names the stacked weights of experts, "experts.gate_up_proj", as in PEFT, and takes no dropout.
    `fp8=None` keeps the base weight in its own dtype. "olora", "pissa" and "pissa_niter_N" start from the base weight
    and change it, as in PEFT: `lorakernels.modules.linear.initial` has the formulas. `task_type` goes into the
    adapter's file.

    Raises:
        TypeError, ValueError: a field has a wrong type or value, or two fields do not fit together.
    """

    r: int = 8
    lora_alpha: int | float = 8
    lora_dropout: float = 0.0
    target_modules: str | Collection[str] | None = None
    exclude_modules: str | Collection[str] | None = None
    target_parameters: Collection[str] | None = None
    layers_to_transform: int | Collection[int] | None = None
    layers_pattern: str | Collection[str] | None = None
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, int | float] = field(default_factory=dict)
    modules_to_save: Collection[str] | None = None
    use_rslora: bool = False
    use_dora: bool = False
    bias: Literal["none", "all", "lora_only"] = "none"
    init_lora_weights: bool | str = True
    fp8: Recipe | None = field(default_factory=DelayedScaling)
    task_type: str | None = None

    def __post_init__(self) -> None:
        where = "LoRAConfig"
        _int(where, "r", self.r, at_least=1)
        _number(where, "lora_alpha", self.lora_alpha, above=0.0)
        _number(where, "lora_dropout", self.lora_dropout)
        if not 0.0 <= self.lora_dropout < 1.0:
            raise ValueError(
                f"LoRAConfig.lora_dropout must be in [0, 1), got {self.lora_dropout!r}"
            )
        self._set("target_modules", _targets(self.target_modules))
        self._set("exclude_modules", _names("exclude_modules", self.exclude_modules))
        self._set("target_parameters", _parameters(self.target_parameters))
        if self.target_parameters and self.lora_dropout:
            raise ValueError(
                "LoRAConfig.lora_dropout must be 0 with target_parameters, as in PEFT, "
                f"got {self.lora_dropout!r}"
            )
        self._set("layers_to_transform", _indices(self.layers_to_transform))
        self._set("layers_pattern", _names("layers_pattern", self.layers_pattern))
        self._set("rank_pattern", _pattern("rank_pattern", self.rank_pattern))
        self._set("alpha_pattern", _pattern("alpha_pattern", self.alpha_pattern))
        self._set("modules_to_save", _saved(self.modules_to_save))
        self._check_layers()
        _bool(where, "use_rslora", self.use_rslora)
        _bool(where, "use_dora", self.use_dora)
        if self.use_dora and (self.target_parameters or self.changes_base):
            other = "target_parameters" if self.target_parameters else "init_lora_weights"
            raise ValueError(
                f"LoRAConfig.use_dora=True does not go with {other}={getattr(self, other)!r}"
            )
        _choice(where, "bias", self.bias, ("none", "all", "lora_only"))
        _initialization(where, self.init_lora_weights)
        if self.target_parameters and self.changes_base:
            raise ValueError(
                f"LoRAConfig.init_lora_weights={self.init_lora_weights!r} changes the base weight, which the stacked "
                "weights of target_parameters do not take: expected True, False or 'gaussian'"
            )
        if not (self.fp8 is None or isinstance(self.fp8, Recipe)):
            raise TypeError(
                "LoRAConfig.fp8 must be a DelayedScaling, a BlockScaling or None (the base stays as it is), "
                f"got {self.fp8!r}"
            )
        self._set("task_type", checked_task_type(self.task_type))

    @classmethod
    def from_peft(cls, config: Any, **more: Any) -> LoRAConfig:
        """The same adapter from a `peft.LoraConfig`, read by its attributes. `more` is `fp8`, which PEFT's lacks.

        Raises:
            TypeError: `config` is of another kind.
            ValueError: a field that ours lacks, such as lora_bias, is not at its default.
        """
        return cls(**lora_fields(config), **more)

    @property
    def changes_base(self) -> bool:
        """Whether `init_lora_weights` subtracts the initial adapter from the base weight: OLoRA and PiSSA."""
        return isinstance(self.init_lora_weights, str) and self.init_lora_weights != "gaussian"

    def rank_for(self, path: str) -> int:
        """The rank at `path`: the value of the first key in rank_pattern that matches, else `r`."""
        return next(matching(self.rank_pattern, self.parameter_of(path)), self.r)

    def alpha_for(self, path: str) -> float:
        """The alpha at `path`: the value of the first key in alpha_pattern that matches, else `lora_alpha`."""
        return next(matching(self.alpha_pattern, self.parameter_of(path)), self.lora_alpha)

    def scaling_for(self, path: str) -> float:
        """The scaling at `path`: alpha / r, or alpha / √r with `use_rslora`."""
        r = self.rank_for(path)
        return self.alpha_for(path) / (math.sqrt(r) if self.use_rslora else r)

    def names_parameter(self, path: str) -> bool:
        """Whether `target_parameters` names the parameter at the clean `path`, by PEFT's rule: whole or by a tail."""
        names = self.target_parameters or ()
        return any(path == name or path.endswith(f".{name}") for name in names)

    def parameter_of(self, path: str) -> str:
        """The stacked parameter's path for a layer of one expert, "….gate_up_proj.3"; any other path as it is."""
        owner, _, number = clean_path(path).rpartition(".")
        return owner if number.isdecimal() and self.names_parameter(owner) else path

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _check_layers(self) -> None:
        for name in ("layers_to_transform", "layers_pattern"):
            value = getattr(self, name)
            if isinstance(self.target_modules, str) and value is not None:
                raise ValueError(
                    f"LoRAConfig.{name}={value!r} needs target_modules to be a list of names, "
                    f"got the string {self.target_modules!r}"
                )
        if self.layers_pattern and self.layers_to_transform is None:
            raise ValueError(
                f"LoRAConfig.layers_pattern={self.layers_pattern!r} needs layers_to_transform, "
                "got None"
            )


def matching(patterns: Mapping[str, Any], path: str) -> Iterator[Any]:
    """The values of the keys that match `path` or its tail after a dot, in their order. PEFT takes the first.

    The value of a key that equals `path` comes last: read as an expression, the key may not match.
    """
    path = clean_path(path)
    for key, value in patterns.items():
        if _expression(key).match(path):
            yield value
    if path in patterns:
        yield patterns[path]


# re caches only 512 expressions; a file with a key for every layer may have more
@lru_cache(maxsize=1 << 16)
def _expression(key: str) -> re.Pattern[str]:
    return re.compile(rf"(.*\.)?({key})$")


def clean_path(path: str) -> str:
    """`path` without the names that torch.compile, FSDP1 and checkpoint wrappers put into it."""
    return _WRAPPERS.sub("", path).rstrip(".")


def _unexpected(where: str, name: str, value: object, expected: str) -> ValueError:
    return ValueError(f"{where}.{name} must be {expected}, got {value!r}")


def _bool(where: str, name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{where}.{name} must be True or False, got {value!r}")


def _int(where: str, name: str, value: object, at_least: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{where}.{name} must be an int, got {value!r}")
    if at_least is not None and value < at_least:
        raise _unexpected(where, name, value, f"at least {at_least}")


def _number(where: str, name: str, value: object, above: float | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{where}.{name} must be a number, got {value!r}")
    if not math.isfinite(value):
        raise _unexpected(where, name, value, "finite")
    if above is not None and value <= above:
        raise _unexpected(where, name, value, f"greater than {above:g}")


def _choice(where: str, name: str, value: object, choices: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in choices:
        raise _unexpected(where, name, value, " or ".join(map(repr, choices)))


def _initialization(where: str, value: object) -> None:
    named = isinstance(value, str) and (
        value in ("gaussian", "olora", "pissa") or _PISSA_NITER.fullmatch(value)
    )
    if not (isinstance(value, bool) or named):
        expected = "True, False, 'gaussian', 'olora', 'pissa' or 'pissa_niter_N' with a number N"
        raise _unexpected(where, "init_lora_weights", value, expected)


def _regex(name: str, pattern: str, expression: str) -> None:
    try:
        re.compile(expression)
    except re.error as error:
        raise ValueError(
            f"LoRAConfig.{name}: {pattern!r} is not a valid regular expression: {error}"
        ) from error


def _names(name: str, value: object) -> Names:
    """A str stays one; a collection of str becomes a tuple without duplicates (a set: sorted)."""
    if value is None or isinstance(value, str):
        if isinstance(value, str) and name != "layers_pattern":
            _regex(name, value, value)
        return value
    if not isinstance(value, list | tuple | set | frozenset):
        raise TypeError(f"LoRAConfig.{name} must be a string or a list of strings, got {value!r}")
    bad = [item for item in value if not isinstance(item, str)]
    if bad:
        raise TypeError(f"LoRAConfig.{name} must hold strings only, got {bad[0]!r}")
    ordered = sorted(value) if isinstance(value, set | frozenset) else value
    return tuple(dict.fromkeys(ordered))


def _targets(value: object) -> Names:
    names = _names("target_modules", value)
    if isinstance(names, tuple) and any(name.lower() == ALL_LINEAR for name in names):
        raise ValueError(
            f"LoRAConfig.target_modules must be the string {ALL_LINEAR!r} or a list of module "
            f"names, got {ALL_LINEAR!r} inside the list {list(names)!r}"
        )
    return names


def _parameters(value: object) -> tuple[str, ...] | None:
    if isinstance(value, str):
        raise TypeError(
            f"LoRAConfig.target_parameters must be a list of names, got the string {value!r}"
        )
    names = _names("target_parameters", value)
    if names is not None and "" in names:
        raise ValueError("LoRAConfig.target_parameters: '' would match every parameter")
    return names if names is None else tuple(names)


def _saved(value: object) -> tuple[str, ...] | None:
    if isinstance(value, str):
        raise TypeError(
            f"LoRAConfig.modules_to_save must be a list of names, got the string {value!r}"
        )
    names = _names("modules_to_save", value)
    for name in names or ():
        if not name:
            raise ValueError("LoRAConfig.modules_to_save: '' would match every module")
        _regex("modules_to_save", name, name)
    return names if names is None else tuple(names)


def _indices(value: object) -> int | tuple[int, ...] | None:
    if value is None:
        return None
    items = (value,) if isinstance(value, int) else value
    if not isinstance(items, list | tuple | set | frozenset | range):
        raise TypeError(
            f"LoRAConfig.layers_to_transform must be an int or a list of ints, got {value!r}"
        )
    for item in items:
        _int("LoRAConfig", "layers_to_transform", item, at_least=0)
    return value if isinstance(value, int) else tuple(items)


def _pattern(name: str, value: object) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise TypeError(f"LoRAConfig.{name} must be a dict of pattern to number, got {value!r}")
    for key, number in value.items():
        if not isinstance(key, str):
            raise TypeError(f"LoRAConfig.{name} must have string keys, got {key!r}")
        _regex(name, key, rf"(.*\.)?({key})$")
        if name == "rank_pattern":
            _int("LoRAConfig", f"{name}[{key!r}]", number, at_least=1)
        else:
            _number("LoRAConfig", f"{name}[{key!r}]", number, above=0.0)
    return dict(value)
