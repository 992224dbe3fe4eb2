# SPDX-License-Identifier: Apache-2.0
"""Train `modules_to_save` and biases besides the adapters. Original values are kept, to show the base model again."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from torch import Tensor, nn

from lorakernels.modules.marks import became, mark


@dataclass(eq=False)
class Originals:
    """`values` of a module's parameters by name: the originals, or the trained ones while the originals are `shown`."""

    values: dict[str, Tensor] = field(default_factory=dict)
    shown: bool = False


def mark_saved(module: nn.Module, shared: set[int]) -> list[str]:
    """Make every parameter of `module` trainable and keep the originals.

    A parameter whose `data_ptr` is in `shared` is tied to another module. It gets its own storage first, as in PEFT's
    copy of such a module: training lm_head must not train the embedding. Returns the names of these parameters.
    """
    untied = []
    for path, child in module.named_modules():
        for name, parameter in list(child._parameters.items()):
            if parameter is not None and parameter.data_ptr() in shared:
                child._parameters[name] = nn.Parameter(parameter.detach().clone())
                untied.append(f"{path}.{name}" if path else name)
        keep_original(child, child._parameters)
    mark(module, saved=True)
    return untied


def keep_original(module: nn.Module, names: Iterable[str]) -> None:
    """Make the parameters `names` of `module` itself trainable, and keep copies of their present values."""
    originals = became(module).originals or Originals()
    mark(module, originals=originals)
    for name in names:
        parameter = module._parameters[name]
        if parameter is not None:
            parameter.requires_grad_(True)
            originals.values[name] = parameter.detach().clone()


def hand_over_originals(old: nn.Module, new: nn.Module) -> None:
    """Let `new`, which has the parameters of `old`, share the originals that `old` keeps."""
    mark(new, originals=became(old).originals)


def change_originals(module: nn.Module, change: Callable[[str, Tensor], Tensor]) -> None:
    """Let `module` keep `change(name, original)` for each of its parameters, which have changed in the same way."""
    if (kept := _kept(module)) is not None:
        kept.values.update({name: change(name, x) for name, x in kept.values.items()})


def kept_parameters(module: nn.Module) -> list[nn.Parameter]:
    """The parameters of `module` itself of which it keeps the originals."""
    kept = _kept(module)
    parameters = [] if kept is None else [module._parameters[name] for name in kept.values]
    return [p for p in parameters if p is not None]


def keeps_weight(module: nn.Module) -> bool:
    """Whether `module` keeps the weight that it had before training, as a linear in `modules_to_save` does."""
    kept = _kept(module)
    return kept is not None and "weight" in kept.values


def saved_modules(model: nn.Module) -> dict[str, nn.Module]:
    """{path: module} of the `modules_to_save` that `apply_lora` marked."""
    return {name: m for name, m in model.named_modules() if became(m).saved}


def forget_originals(model: nn.Module) -> None:
    """Drop all kept values and marks. Parameters keep the values that they show now."""
    for module in model.modules():
        mark(module, originals=None, saved=False)


def hidden_originals(model: nn.Module) -> list[nn.Module]:
    """The modules of `model` that have kept originals and now show their trained values."""
    return [m for m in model.modules() if (kept := _kept(m)) is not None and not kept.shown]


def swap_originals(model: nn.Module, show: bool) -> list[nn.Module]:
    """Show the original values (`show=True`) or the trained ones. Returns the modules that changed."""
    changed = []
    for module in model.modules():
        kept = _kept(module)
        if kept is not None and kept.shown != show:
            _swap(module, kept.values)
            kept.shown = show
            changed.append(module)
    return changed


def _kept(module: nn.Module) -> Originals | None:
    """The originals that `module` keeps; None without any."""
    kept = became(module).originals
    return kept if kept is not None and kept.values else None


def _swap(module: nn.Module, originals: dict[str, Tensor]) -> None:
    """Exchange storages rather than values, so that an autograd graph keeps the trained values that it has saved.

    A reference model that runs between a policy's forward and its backward needs this.
    """
    pairs = []
    for name, original in originals.items():
        parameter = module._parameters[name]
        assert parameter is not None
        pairs.append((name, parameter, original.to(parameter.device, parameter.dtype)))
    for name, parameter, then in pairs:
        originals[name], parameter.data = parameter.data, then
