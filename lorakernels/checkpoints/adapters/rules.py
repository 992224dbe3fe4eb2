# SPDX-License-Identifier: Apache-2.0
"""The fields of adapter_config.json that select a model's adapted layers and give each its rank and scaling.

The layers may come from several configs or be made by hand, so the fields describe the layers as they are now.

PEFT sorts the keys of rank_pattern and alpha_pattern when it saves a file again, and takes the first key that
matches. Therefore no two keys written here match the same layer with different values.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace
from statistics import mode
from typing import Any

from torch import nn

from lorakernels.checkpoints.adapters.keys import bias_mode
from lorakernels.config import LoRAConfig, clean_path, matching
from lorakernels.modules.experts.layer import expert_layers
from lorakernels.modules.linear.initial import initial_of
from lorakernels.modules.linear.lora import LoRALinear
from lorakernels.modules.model.peft_mixtures import unlike_peft
from lorakernels.modules.model.targets import choose, tails
from lorakernels.modules.model.trained_parts import saved_modules

_TARGET_FIELDS = ("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern")
_READ_WITH_THEM = ("target_parameters", "r", "rank_pattern", "modules_to_save")


def describe(model: nn.Module, layers: Mapping[str, LoRALinear]) -> dict[str, Any]:
    """The fields of an adapter_config.json that recreate `layers` (path → layer) of `model` and its saved modules.

    Raises:
        ValueError: no rules of PEFT's choose exactly these modules, only some layers have `use_dora`, or a scaling is
            not a positive number.
    """
    dora = {layer.config.use_dora: path for path, layer in layers.items()}
    if len(dora) > 1:
        raise ValueError(
            f"use_dora must be the same in all layers of a file, found True in {dora[True]} and False in {dora[False]}"
        )
    saved = _saved_names(model, [layer.config for layer in layers.values()])
    first = next(iter(layers.values())).config
    experts = expert_layers(model)
    plain = {path: layer for path, layer in layers.items() if path not in experts}
    parameters = {experts[path]: layer for path, layer in layers.items() if path in experts}
    targets = replace(first, target_modules=[], modules_to_save=saved)
    if plain:
        targets = _target_rules(model, plain, replace(first, modules_to_save=saved))
    biases = [layer.config.bias for layer in layers.values()]
    dropouts = [layer.lora_dropout for layer in layers.values()]
    tasks = [task for layer in layers.values() if (task := layer.config.task_type) is not None]
    return {
        **{name: getattr(targets, name) for name in _TARGET_FIELDS},
        "target_parameters": list(parameters) or None,
        **_ranks_and_alphas({**plain, **parameters}),
        "modules_to_save": saved,
        "bias": _one_for_all("bias", biases, bias_mode(layers.values())),
        "lora_dropout": _one_for_all("lora_dropout", dropouts, mode(dropouts)),
        "task_type": _one_for_all("task_type", tasks, mode(tasks)) if tasks else None,
        "init_lora_weights": True if first.changes_base else first.init_lora_weights,
    }


def warn_of_peft(
    model: nn.Module, layers: Mapping[str, LoRALinear], rules: Mapping[str, Any]
) -> None:
    """Warn where PEFT reads the file of `layers` otherwise, as it gives mixtures' targets other meanings."""
    config = LoRAConfig(
        **{name: rules[name] for name in (*_TARGET_FIELDS, *_READ_WITH_THEM)}, fp8=None
    )
    unlike = unlike_peft(model, config, {path: _rank(layer) for path, layer in layers.items()})
    if unlike is not None and (unlike.less or unlike.theirs is None):
        warnings.warn(
            f"PEFT does not read this file's adapters as they are trained; lorakernels does. {unlike}. Leave these "
            "layers out of target_modules if PEFT is to read the file",
            stacklevel=4,
        )


def _one_for_all(name: str, values: list[Any], kept: Any) -> Any:
    """`kept`. Warns if the layers differ in `name`, because the file has room for one value only."""
    if len(set(values)) > 1:
        warnings.warn(
            f"the layers differ in {name}: {sorted(set(values))}. An adapter file has one value, {kept!r} is saved. "
            "What a loaded adapter computes is the same; if it is trained on, it is with that value",
            stacklevel=4,
        )
    return kept


def _target_rules(
    model: nn.Module, layers: Mapping[str, LoRALinear], config: LoRAConfig
) -> LoRAConfig:
    """The shortest rules that choose exactly `layers`.

    The candidates are the rules of `config`, ends of paths, whole paths, and one regular expression.
    """
    paths = list(dict.fromkeys(clean_path(name) for name, _ in model.named_modules() if name))
    plain = replace(config, exclude_modules=None, layers_to_transform=None, layers_pattern=None)
    short = _short_names(layers, set(paths) - layers.keys())
    candidates = [config, replace(plain, target_modules=list(short))]
    names = config.target_modules
    if config.layers_to_transform is None and isinstance(names, tuple) and len(short) < len(names):
        candidates.reverse()
    candidates.append(replace(plain, target_modules=list(layers)))
    candidates.append(replace(plain, target_modules="|".join(map(re.escape, layers))))
    for rules in candidates:
        if choose(rules, paths) == list(layers):
            return rules
    raise ValueError(
        f"modules_to_save={list(config.modules_to_save or ())!r} would keep an adapter file from choosing all of "
        f"{list(layers)[:3]!r} …: a layer that is adapted is also inside a module with a saved one's name"
    )


def _short_names(wanted: Iterable[str], others: Iterable[str]) -> dict[str, bool]:
    """{end of a path: True} for each path of `wanted`: its shortest end that has no number and fits no path of
    `others`.

    A path without such an end appears whole, as {path: False}.
    """
    taken = {name for path in others for name in (path, *tails(path))}
    names: dict[str, bool] = {}
    for path in wanted:
        free = (tail for tail in tails(path) if not re.search(r"(^|\.)\d+(\.|$)", tail))
        tail = next((tail for tail in free if tail not in taken), None)
        names[tail or path] = tail is not None or names.get(path, False)
    return names


def _saved_names(model: nn.Module, configs: list[LoRAConfig]) -> tuple[str, ...] | None:
    """Names that choose exactly the saved modules: the names in the configs if they do, otherwise whole paths."""
    saved = {clean_path(path): module for path, module in saved_modules(model).items()}
    if not saved:
        return None
    named = tuple(dict.fromkeys(name for c in configs for name in c.modules_to_save or ()))
    everything = {clean_path(p): m for p, m in model.named_modules(remove_duplicate=False) if p}
    for names in (named, tuple(saved)):
        chosen = {id(m) for path, m in everything.items() if names and path.endswith(names)}
        if chosen == {id(module) for module in saved.values()}:
            return names
    raise ValueError(
        f"no modules_to_save chooses exactly {list(saved)!r}: other modules end with these paths"
    )


def _ranks_and_alphas(layers: Mapping[str, LoRALinear]) -> dict[str, Any]:
    first = next(iter(layers.values())).config
    if all(_says(first, path, layer) for path, layer in layers.items()):
        return {
            "r": first.r,
            "lora_alpha": _whole(first.lora_alpha),
            "use_rslora": first.use_rslora,
            "rank_pattern": _used(first.rank_pattern, layers),
            "alpha_pattern": _used(first.alpha_pattern, layers),
        }
    use_rslora = all(layer.config.use_rslora for layer in layers.values())
    ranks: dict[str, int] = {path: _rank(layer) for path, layer in layers.items()}
    alphas = {path: _alpha(path, layer, use_rslora) for path, layer in layers.items()}
    r, alpha = mode(ranks.values()), mode(alphas.values())
    return {
        "r": r,
        "lora_alpha": alpha,
        "use_rslora": use_rslora,
        "rank_pattern": _patterns(ranks, r),
        "alpha_pattern": _patterns(alphas, alpha),
    }


def _says(config: LoRAConfig, path: str, layer: LoRALinear) -> bool:
    """True if `config` gives this layer its rank and scaling, whatever the order in which its patterns are read."""
    ordered = all(
        len(set(matching(pattern, path))) <= 1
        for pattern in (config.rank_pattern, config.alpha_pattern)
    )
    same = config.rank_for(path) == _rank(layer) and config.scaling_for(path) == layer.scaling
    return ordered and same


def _rank(layer: LoRALinear) -> int:
    """The rank in the file, which is twice the layer's if the file has its initial adapter, too."""
    return layer.r if initial_of(layer) is None else 2 * layer.r


def _used(pattern: Mapping[str, Any], layers: Iterable[str]) -> dict[str, Any]:
    """`pattern` without the keys that match no layer, because PEFT warns about such keys."""
    paths = list(layers)
    return {
        key: _whole(value)
        for key, value in pattern.items()
        if any(any(matching({key: value}, path)) for path in paths)
    }


def _alpha(path: str, layer: LoRALinear, use_rslora: bool) -> int | float:
    """The alpha that yields `layer.scaling`, which is alpha / r, or alpha / sqrt(r) with `use_rslora`."""
    if not (math.isfinite(layer.scaling) and layer.scaling > 0):
        raise ValueError(
            f"{path}.scaling must be finite and greater than 0 to be saved, got {layer.scaling!r}"
        )
    divisor = math.sqrt(_rank(layer)) if use_rslora else _rank(layer)
    near = round(layer.scaling * divisor)
    for alpha in (layer.lora_alpha, near):
        if alpha > 0 and alpha / divisor == layer.scaling:
            return _whole(alpha)
    return layer.scaling * divisor


def _whole(alpha: int | float) -> int | float:
    """`alpha` as an int where it is whole, because PEFT and vLLM expect lora_alpha to be an int."""
    return int(alpha) if float(alpha).is_integer() else alpha


def _patterns(values: Mapping[str, Any], default: Any) -> dict[str, Any]:
    """Keys for the paths whose value is not `default`. Two keys that match the same path have the same value."""
    patterns: dict[str, Any] = {}
    for value in dict.fromkeys(values.values()):
        if value == default:
            continue
        mine = [path for path, other in values.items() if other == value]
        for name, is_tail in _short_names(mine, values.keys() - set(mine)).items():
            patterns[re.escape(name) if is_tail else f"^{re.escape(name)}"] = value
    return patterns
