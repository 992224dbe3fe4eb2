# SPDX-License-Identifier: Apache-2.0
"""Which modules of a model get an adapter: PEFT's rules, its quirks included, written anew.

target_modules   str: `re.fullmatch` on the dotted path; list: the whole path, or its tail after a
                 dot; "all-linear": every Linear but a transformers model's output embedding
exclude_modules  the same two rules, and it wins
modules_to_save  neither such a module nor anything below one is a target
layers_to_transform, layers_pattern
                 hold only for a list's names matched by the tail: a whole path is never held back.
                 The layer index is the first number in the path (behind layers_pattern, if given)
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection

from torch import nn

from lorakernels.config import LoRAConfig

_SHOWN = 8
_PEFT_HEADS = {"classifier", "score"}  # PEFT adds both for SEQ_CLS; a model has one of them


def match_targets(model: nn.Module, config: LoRAConfig) -> list[str]:
    """The paths of the modules that get an adapter, in the order of `model.named_modules()`.

    ValueError if there is none; TypeError if one of them is not a linear layer that we can adapt.
    """
    wanted = _wanted(model, config)
    if wanted is None:
        raise ValueError(
            "LoRAConfig.target_modules is None: name the modules to adapt, or use 'all-linear'. "
            f"Linear modules here end in {_linear_suffixes(model)}"
        )
    paths = [path for path, _ in model.named_modules() if path]
    chosen = [path for path in paths if _is_wanted(config, wanted, path)]
    found = [path for path in chosen if not _is_excluded(config, path)]
    if not found:
        raise ValueError(_no_match(model, config, chosen))
    for path in found:
        _check_class(path, model.get_submodule(path))
    return found


def match_saved(model: nn.Module, config: LoRAConfig) -> list[str]:
    """The paths that end with a name of `config.modules_to_save`, after a dot or not."""
    names = tuple(config.modules_to_save or ())
    paths = [path for path, _ in model.named_modules(remove_duplicate=False) if path]
    found = [path for path in paths if names and path.endswith(names)]
    for name in names:
        other_head = found and name in _PEFT_HEADS and _PEFT_HEADS.issubset(names)
        if not (other_head or any(path.endswith(name) for path in paths)):
            near = _near_names([name], paths)
            raise ValueError(f"LoRAConfig.modules_to_save: no module ends with {name!r}{near}")
    for path in found:
        _check_saved(model, config, path)
    return found


def _check_saved(model: nn.Module, config: LoRAConfig, path: str) -> None:
    module, wanted = model.get_submodule(path), _wanted(model, config)
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        raise TypeError(
            f"modules_to_save: {path!r} is a {type(module).__name__}, "
            "which has no forward of its own: name the modules in it"
        )
    for name, _ in module.named_modules(prefix=path):
        if wanted and _is_wanted(config, wanted, name) and not _is_excluded(config, name):
            raise ValueError(
                f"{name!r} would be both adapted and trained whole: {path!r} ends with a name of "
                f"modules_to_save={config.modules_to_save!r}, which PEFT takes without a dot too"
            )


def _wanted(model: nn.Module, config: LoRAConfig) -> str | Collection[str] | None:
    wanted = config.target_modules
    if isinstance(wanted, str) and wanted.lower() == "all-linear":
        return _all_linear(model)
    return wanted


def is_target(config: LoRAConfig, path: str) -> bool:
    """Whether the rules choose `path`. For "all-linear" ask match_targets: it takes a model."""
    wanted = config.target_modules
    return (
        wanted is not None and _is_wanted(config, wanted, path) and not _is_excluded(config, path)
    )


def _is_wanted(config: LoRAConfig, wanted: str | Collection[str], path: str) -> bool:
    if isinstance(wanted, str):
        return re.fullmatch(wanted, path) is not None
    if path in wanted:
        return True
    return any(path.endswith(f".{name}") for name in wanted) and _in_layers(config, path)


def _is_excluded(config: LoRAConfig, path: str) -> bool:
    exclude = config.exclude_modules
    if isinstance(exclude, str) and exclude:
        if re.fullmatch(exclude, path):
            return True
    elif exclude and any(path == name or path.endswith(f".{name}") for name in exclude):
        return True
    return any(re.match(rf"(^|.*\.){name}($|\..*)", path) for name in config.modules_to_save or ())


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


def _all_linear(model: nn.Module) -> set[str]:
    output_embedding = getattr(model, "get_output_embeddings", lambda: None)()
    return {
        path
        for path, module in model.named_modules()
        if path and module is not output_embedding and _counts_as_linear(module)
    }


def _counts_as_linear(module: nn.Module) -> bool:
    names = {base.__name__ for base in type(module).__mro__}
    return isinstance(module, nn.Linear) or bool(names & {"Conv1D", "FrozenFP8Linear"})


def _check_class(path: str, module: nn.Module) -> None:
    kind = type(module)
    names = {base.__name__ for base in kind.__mro__}
    if "LoRALinear" in names:
        raise TypeError(f"target {path!r} is a LoRALinear already: one adapter per module")
    if is_fp8_linear(module) or kind.__name__ == "FrozenFP8Linear":
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


def is_fp8_linear(module: nn.Module) -> bool:
    """Whether `module` is transformers' FP8Linear (asked by name: transformers is not imported)."""
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
    paths = [path for path, module in model.named_modules() if _counts_as_linear(module)]
    names = sorted({path.rpartition(".")[2] for path in paths if path})
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more}" if names else "(there is none)"


def _near_names(names: Collection[str], paths: Collection[str]) -> str:
    tails = {path.rpartition(".")[2] for path in paths}
    candidates = sorted(tails | set(paths))
    near = [hit for name in names for hit in difflib.get_close_matches(name, candidates, n=3)]
    return f"; near: {', '.join(dict.fromkeys(near))}" if near else ""
