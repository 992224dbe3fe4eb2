# SPDX-License-Identifier: Apache-2.0
"""Choose which linear layers without an adapter are held in FP8, for `load_quantized` and `apply_lora`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection

from torch import Tensor, nn

from lorakernels.modules.model.owners import why_plain
from lorakernels.modules.model.targets import check_class, counts_as_linear, quantized_with

_ROUTER = re.compile(r"(^|_)(gate|router)$")  # for a path's last name; not for gate_proj
HOOKS = (  # the tables of an nn.Module
    "_forward_pre_hooks",
    "_forward_hooks",
    "_backward_pre_hooks",
    "_backward_hooks",
)


def frozen_targets(
    model: nn.Module, adapted: Collection[str], saved: Collection[str]
) -> tuple[list[str], dict[str, str]]:
    """(paths of layers to hold in FP8, {path of a linear layer that stays as it is: reason}), in module order.

    Args:
        model: the model to choose from. A FrozenFP8Linear of it is in neither result.
        adapted: paths that get an adapter. They are in neither result.
        saved: paths of `modules_to_save`, which train and stay as they are.
    """
    head = getattr(model, "get_output_embeddings", lambda: None)()
    names = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    taken: list[str] = []
    stays: dict[str, str] = {}
    for path, module in model.named_modules():
        if not path or path in adapted or not counts_as_linear(module) or _is_frozen(module):
            continue
        above, _, name = path.rpartition(".")
        reason = "head" if module is head else _why_it_stays(path, module, saved)
        reason = reason or why_plain(model.get_submodule(above), name)
        if not reason and names[id(module.weight)] > 1:
            reason = "its weight is tied to another module's"
        if reason:
            stays[path] = reason
        else:
            taken.append(path)
    return taken, stays


def _is_frozen(module: nn.Module) -> bool:
    return any(base.__name__ == "FrozenFP8Linear" for base in type(module).__mro__)


def _why_it_stays(path: str, module: nn.Module, saved: Collection[str]) -> str:
    if any(path == name or path.startswith(f"{name}.") for name in saved):
        return "trained, in modules_to_save"
    if _ROUTER.search(path.rpartition(".")[2]):
        return "router"
    if scales := quantized_with(module):
        return f"quantized, with {', '.join(scales)}"
    if "forward" in vars(module) or any(vars(module)[name] for name in HOOKS):
        return "hooks, or a forward of its own"
    try:
        check_class(path, module)
    except (TypeError, ValueError):
        return f"not a plain nn.Linear but a {type(module).__name__}"
    if not isinstance(module.weight, Tensor) or not module.weight.is_floating_point():
        return "its weight is not floating point"
    return ""
