# SPDX-License-Identifier: Apache-2.0
"""What to adapt and how: LoRAConfig, with PEFT's field names. It validates itself when it is made."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

from lorakernels.field_checks import check_bool, check_choice, check_int, check_number, unexpected
from lorakernels.peft_config import NotPeft, checked_task_type, lora_fields
from lorakernels.recipes import DelayedScaling, Recipe

ALL_LINEAR = "all-linear"
Names = str | tuple[str, ...] | None
_PISSA_NITER = re.compile(r"pissa_niter_\d+")
_WRAPPERS = re.compile(
    r"(?<![^.])(_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)(\.|$)"
)


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
        check_int(where, "r", self.r, at_least=1)
        check_number(where, "lora_alpha", self.lora_alpha, above=0.0)
        check_number(where, "lora_dropout", self.lora_dropout)
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
        check_bool(where, "use_rslora", self.use_rslora)
        check_bool(where, "use_dora", self.use_dora)
        if self.use_dora and (self.target_parameters or self.changes_base):
            other = "target_parameters" if self.target_parameters else "init_lora_weights"
            raise ValueError(
                f"LoRAConfig.use_dora=True does not go with {other}={getattr(self, other)!r}"
            )
        check_choice(where, "bias", self.bias, ("none", "all", "lora_only"))
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


def _initialization(where: str, value: object) -> None:
    named = isinstance(value, str) and (
        value in ("gaussian", "olora", "pissa") or _PISSA_NITER.fullmatch(value)
    )
    if not (isinstance(value, bool) or named):
        expected = "True, False, 'gaussian', 'olora', 'pissa' or 'pissa_niter_N' with a number N"
        raise unexpected(where, "init_lora_weights", value, expected)


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
        check_int("LoRAConfig", "layers_to_transform", item, at_least=0)
    return value if isinstance(value, int) else tuple(items)


def _pattern(name: str, value: object) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise TypeError(f"LoRAConfig.{name} must be a dict of pattern to number, got {value!r}")
    for key, number in value.items():
        if not isinstance(key, str):
            raise TypeError(f"LoRAConfig.{name} must have string keys, got {key!r}")
        _regex(name, key, rf"(.*\.)?({key})$")
        if name == "rank_pattern":
            check_int("LoRAConfig", f"{name}[{key!r}]", number, at_least=1)
        else:
            check_number("LoRAConfig", f"{name}[{key!r}]", number, above=0.0)
    return dict(value)
