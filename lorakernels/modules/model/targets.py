# SPDX-License-Identifier: Apache-2.0
"""Choose the modules that get an adapter, by PEFT's rules and with its quirks. The code is our own.

target_modules   A str must match the whole dotted path (`re.fullmatch`).
                 A name in a list must equal the path, or its tail after a dot.
                 "all-linear" takes every Linear except a transformers model's output embedding.
exclude_modules  The rules for str and list are the same. An excluded module is never a target.
                 A warning names unmatched names here, and keys of rank_pattern and alpha_pattern without a target.
target_parameters
                 A name must equal the path of a stacked parameter of experts, or its tail after a dot. The layers of
                 LoRAExperts follow it alone: exclude_modules leaves none of them out.
modules_to_save  Such a module is never a target, nor is a module inside it.
layers_to_transform, layers_pattern
                 These restrict only names in a list that match a tail. A name that equals the path always matches.
                 The layer index is the first number in the path, or the first after layers_pattern.

Paths are matched without the names that torch.compile's, FSDP1's and checkpoint wrappers add. A target is refused if
its owner does not call it, or if it would lose hooks or its own forward.
"""

from __future__ import annotations

import difflib
import re
import warnings
from collections.abc import Collection, Iterable, Iterator

from torch import nn

from lorakernels.config import ALL_LINEAR, LoRAConfig, clean_path, matching
from lorakernels.modules.experts.layer import expert_layers, match_experts
from lorakernels.modules.model.owners import check_owner
from lorakernels.modules.order import refuse_module

_Wanted = str | frozenset[str]  # a regular expression, or whole paths and tails
_SHOWN = 8
_PEFT_HEADS = {"classifier", "score"}  # PEFT adds both for SEQ_CLS; a model has one of them
# Parameters and buffers of a linear layer that say how its weight is quantized
_QUANTIZED = re.compile(r"scale|zero_point|absmax|qweight|qzeros|g_idx|packed|quant_")
_HOOKS = {
    "_forward_pre_hooks": "forward pre-hook",
    "_forward_hooks": "forward hook",
    "_backward_pre_hooks": "backward pre-hook",
    "_backward_hooks": "backward hook",
}


def match_targets(model: nn.Module, config: LoRAConfig) -> list[str]:
    """The paths of the modules that get an adapter, in the order of `model.named_modules()`.

    Raises:
        ValueError: `target_modules` is None or matches nothing, or an owner reads a target's weight instead of calling
            the target. Or, with FP8, an owner works in the dtype of a target's weight.
        TypeError: a target is not a linear layer that we can adapt, or has hooks or its own forward.
    """
    wanted = _wanted(model, config)
    experts = expert_layers(model)
    named = set(match_experts(model, config))
    if wanted is None and not named:
        raise ValueError(
            "LoRAConfig.target_modules is None: name the modules to adapt, or use 'all-linear'. "
            f"Linear modules here end in {_linear_suffixes(model)}"
        )
    paths = [path for path, _ in model.named_modules() if path]
    chosen = [
        path
        for path in paths
        if path in named
        or (path not in experts and wanted and _is_wanted(config, wanted, clean_path(path)))
    ]
    targets = [
        path
        for path in chosen
        if not (
            _is_inside_saved(config, experts[path])
            if path in experts
            else _is_excluded(config, clean_path(path))
        )
    ]
    _warn_of_whole_stacks(config, [path for path in targets if path in experts])
    if not targets:
        raise ValueError(_no_match(model, config, chosen))
    for path in targets:
        module = model.get_submodule(path)
        refuse_module(path, module, "apply_lora")
        check_class(path, module)
        _check_kept(path, module)
        check_owner(model, path, config.fp8 is not None)
    return targets


def warn_of_unused(model: nn.Module, config: LoRAConfig, targets: Iterable[str]) -> None:
    """Warn of names in exclude_modules without a module, and of keys of rank_ and alpha_pattern without a target.

    Args:
        targets: as `match_targets` returns them.
    """
    exclude = config.exclude_modules or ()
    unused = {"exclude_modules": [exclude] if isinstance(exclude, str) else list(exclude)}
    for path, _ in model.named_modules() if exclude else ():
        clean = clean_path(path)
        unused["exclude_modules"] = [
            name
            for name in unused["exclude_modules"]
            if not _matches_excluded(exclude, name, clean)
        ]
    paths = [config.parameter_of(path) for path in targets]
    for field in ("rank_pattern", "alpha_pattern"):
        keys = getattr(config, field)
        unused[field] = [
            key for key in keys if not any(any(matching({key: True}, path)) for path in paths)
        ]
    for field, names in unused.items():
        if names:
            what = "module" if field == "exclude_modules" else "target"
            unmatched = ", ".join(map(repr, names))
            warnings.warn(
                f"LoRAConfig.{field}: {unmatched} matches no {what} and has no effect", stacklevel=4
            )


def match_saved(model: nn.Module, config: LoRAConfig) -> list[str]:
    """The paths that end with a name of `config.modules_to_save`. As in PEFT, the name need not follow a dot.

    Raises:
        ValueError: a name matches nothing, or a module would be both adapted and trained whole.
        TypeError: a name matches a ModuleList or a ModuleDict.
    """
    names = tuple(config.modules_to_save or ())
    modules = model.named_modules(remove_duplicate=False)
    # where a wrapper and its inside have one clean path, the inside counts
    paths = {clean_path(path): path for path, _ in modules if path}
    saved = [path for clean, path in paths.items() if names and clean.endswith(names)]
    for name in names:
        other_head = saved and name in _PEFT_HEADS and _PEFT_HEADS.issubset(names)
        if not (other_head or any(clean.endswith(name) for clean in paths)):
            near = _near_names([name], paths)
            raise ValueError(f"LoRAConfig.modules_to_save: no module ends with {name!r}{near}")
    wanted = _wanted(model, config) if saved else None
    for path in saved:
        _check_saved(model, config, path, wanted)
    return saved


def _check_saved(model: nn.Module, config: LoRAConfig, path: str, wanted: _Wanted | None) -> None:
    module = model.get_submodule(path)
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        raise TypeError(
            f"modules_to_save: {path!r} is a {type(module).__name__}, "
            "which has no forward of its own: name the modules in it"
        )
    for name, _ in module.named_modules(prefix=path):
        clean = clean_path(name)
        if wanted and _is_wanted(config, wanted, clean) and not _is_excluded(config, clean):
            raise ValueError(
                f"{name!r} would be both adapted and trained whole: {path!r} ends with a name of "
                f"modules_to_save={config.modules_to_save!r}, which PEFT takes without a dot too"
            )


def _wanted(model: nn.Module, config: LoRAConfig) -> _Wanted | None:
    if isinstance(config.target_modules, str) and config.target_modules.lower() == ALL_LINEAR:
        return frozenset(map(clean_path, all_linear(model)))
    return _names(config)


def _names(config: LoRAConfig) -> _Wanted | None:
    wanted = config.target_modules
    return wanted if wanted is None or isinstance(wanted, str) else frozenset(wanted)


def choose(config: LoRAConfig, paths: Iterable[str]) -> list[str]:
    """The paths among `paths` that the rules choose. "all-linear" needs a model: use match_targets."""
    wanted = _names(config)
    if wanted is None:
        return []
    return [p for p in paths if _is_wanted(config, wanted, p) and not _is_excluded(config, p)]


def tails(path: str) -> Iterator[str]:
    """The tail of `path` after each dot, the shortest first. The whole path is not among them."""
    parts = path.split(".")
    return (".".join(parts[start:]) for start in range(len(parts) - 1, 0, -1))


def _is_wanted(config: LoRAConfig, wanted: _Wanted, path: str) -> bool:
    if isinstance(wanted, str):
        return re.fullmatch(wanted, path) is not None
    if path in wanted:
        return True
    return any(tail in wanted for tail in tails(path)) and _in_layers(config, path)


def _is_excluded(config: LoRAConfig, path: str) -> bool:
    return _is_named_excluded(config, path) or _is_inside_saved(config, path)


def _is_named_excluded(config: LoRAConfig, path: str) -> bool:
    exclude = config.exclude_modules or ()
    names = [exclude] if isinstance(exclude, str) else exclude
    return any(_matches_excluded(exclude, name, path) for name in names)


def _matches_excluded(exclude: str | Collection[str], name: str, path: str) -> bool:
    """Whether `name` of `exclude`, or the expression that this is, matches `path`."""
    if isinstance(exclude, str):
        return re.fullmatch(name, path) is not None
    return path == name or path.endswith(f".{name}")


def _is_inside_saved(config: LoRAConfig, path: str) -> bool:
    return any(re.match(rf"(^|.*\.){name}($|\..*)", path) for name in config.modules_to_save or ())


def _warn_of_whole_stacks(config: LoRAConfig, experts: Iterable[str]) -> None:
    """Warn that `exclude_modules` leaves out no expert: PEFT's files have all of a stacked parameter, or none."""
    named = [path for path in experts if _is_named_excluded(config, clean_path(path))]
    if named:
        warnings.warn(
            f"exclude_modules={config.exclude_modules!r} matches {named[0]!r}, which target_parameters adapts all the "
            "same: it takes a stacked parameter with all experts, as in PEFT. Leave the parameter out of it instead",
            stacklevel=4,
        )


def _in_layers(config: LoRAConfig, path: str) -> bool:
    layers = config.layers_to_transform
    if layers is None or layers == ():
        return True
    index = _layer_index(config.layers_pattern, path)
    return index is not None and (index == layers if isinstance(layers, int) else index in layers)


def _layer_index(layers_pattern: str | Collection[str] | None, path: str) -> int | None:
    if layers_pattern:
        names = [layers_pattern] if isinstance(layers_pattern, str) else layers_pattern
        expressions = [rf"(?:^|.*?\.){name}\.(?P<index>\d+)\." for name in names]
    else:
        expressions = [r".*?\.[^.]*\.(?P<index>\d+)\."]
    matches = (re.match(expression, path) for expression in expressions)
    match = next((match for match in matches if match), None)
    return int(match["index"]) if match else None


def all_linear(model: nn.Module) -> set[str]:
    output_embedding = getattr(model, "get_output_embeddings", lambda: None)()
    return {
        path
        for path, module in model.named_modules()
        if path and module is not output_embedding and counts_as_linear(module)
    }


def counts_as_linear(module: nn.Module) -> bool:
    """Whether `target_modules="all-linear"` means this module, by PEFT's rules; a FrozenFP8Linear is one too."""
    names = {base.__name__ for base in type(module).__mro__}
    return isinstance(module, nn.Linear) or bool(names & {"Conv1D", "FrozenFP8Linear"})


def check_class(path: str, module: nn.Module) -> None:
    """Refuse a target that cannot become a LoRALinear.

    Raises:
        TypeError: the module at `path` is no linear layer, or computes more than one.
    """
    kind = type(module)
    if is_fp8_linear(module) or kind.__name__ in ("FrozenFP8Linear", "MergeableLinear"):
        return
    if not isinstance(module, nn.Linear):
        raise TypeError(f"target {path!r} is a {kind.__name__}, expected an nn.Linear")
    own_forward = kind.forward is not nn.Linear.forward
    if own_forward or kind.__name__ == "NonDynamicallyQuantizableLinear":
        raise TypeError(
            f"target {path!r} is a {kind.__module__}.{kind.__name__}, which does more than "
            "nn.Linear or is not called by its owner: leave it out with exclude_modules"
        )
    if hasattr(module, "parametrizations"):
        raise TypeError(f"target {path!r} is parametrized, expected a plain nn.Linear")


def _check_kept(path: str, module: nn.Module) -> None:
    """Refuse a module with hooks, its own forward or scales. LoRALinear replaces it, so they would be lost."""
    if scales := quantized_with(module):
        raise TypeError(
            f"target {path!r} is quantized, with {', '.join(scales)}, and LoRALinear would take its weight "
            "without them: dequantize the model with the tool that quantized it and save it in bf16, or load the bf16 "
            "checkpoint"
        )
    for attribute, what in _HOOKS.items():
        hooks = list(getattr(module, attribute, {}).values())
        if hooks:
            name = getattr(hooks[0], "__qualname__", type(hooks[0]).__qualname__)
            raise TypeError(
                f"target {path!r} has a {what}, {name}, which would never run again: LoRALinear takes the module's "
                "place. Remove it and register it after apply_lora, or leave the module out with exclude_modules"
            )
    if has_forward_of_its_own(module):
        hook = getattr(module, "_hf_hook", None)
        owner = f" by accelerate's {type(hook).__name__}" if hook is not None else ""
        cure = (
            "Remove it first (accelerate.hooks.remove_hook_from_submodules(model))"
            if owner
            else "Get the plain layer from the tool that set it, as it may dequantize the weight or offload it"
        )
        raise TypeError(
            f"target {path!r} has a forward set on the instance{owner}, which would never run again: LoRALinear "
            f"takes the module's place. {cure}, or leave the module out with exclude_modules"
        )


def has_forward_of_its_own(module: nn.Module) -> bool:
    """Whether `forward` was set on the instance.

    accelerate's remove_hook_from_module leaves the class's forward there, bound to the instance, which does not count.
    """
    forward = vars(module).get("forward")
    return forward is not None and getattr(forward, "__func__", None) is not type(module).forward


def quantized_with(module: nn.Module) -> list[str]:
    """The scales and the like that an `nn.Linear` has besides its weight; none of transformers' FP8Linear."""
    if not isinstance(module, nn.Linear) or is_fp8_linear(module):
        return []
    named = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    return [name for name, _ in named if _QUANTIZED.search(name)]


def is_fp8_linear(module: nn.Module) -> bool:
    """Whether `module` is transformers' FP8Linear, by its name: transformers is not imported."""
    kind = type(module)
    return kind.__name__ == "FP8Linear" and kind.__module__.startswith("transformers.")


def _no_match(model: nn.Module, config: LoRAConfig, chosen: list[str]) -> str:
    if chosen:
        return (
            f"LoRAConfig.target_modules={config.target_modules!r} matches {len(chosen)} modules, "
            f"all excluded by exclude_modules={config.exclude_modules!r} or "
            f"modules_to_save={config.modules_to_save!r}; the first is {chosen[0]!r}"
        )
    wanted = config.target_modules
    names = [wanted] if isinstance(wanted, str) else list(wanted or ())
    near = _near_names(names, [path for path, _ in model.named_modules() if path])
    layers = ""
    if config.layers_to_transform is not None:
        layers = (
            f" with layers_to_transform={config.layers_to_transform!r} and "
            f"layers_pattern={config.layers_pattern!r}"
        )
    return (
        f"LoRAConfig.target_modules={config.target_modules!r}{layers} matches no module{near}. "
        f"Linear modules here end in {_linear_suffixes(model)}"
    )


def _linear_suffixes(model: nn.Module) -> str:
    paths = [path for path, module in model.named_modules() if counts_as_linear(module)]
    names = sorted({path.rpartition(".")[2] for path in paths if path})
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more}" if names else "(there is none)"


def _near_names(names: Collection[str], paths: Collection[str]) -> str:
    tails = {path.rpartition(".")[2] for path in paths}
    candidates = sorted(tails | set(paths))
    near = [hit for name in names for hit in difflib.get_close_matches(name, candidates, n=3)]
    return f"; near: {', '.join(dict.fromkeys(near))}" if near else ""
