# SPDX-License-Identifier: Apache-2.0
"""What is trained besides adapters, `modules_to_save` and biases: originals are kept, to show the base again."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

# Plain attributes, not children or buffers: absent from state_dict, carried by deepcopy and pickle.
_ORIGINAL = "_lorakernels_original"
_SAVED = "_lorakernels_saved"
_SHOWN = "_lorakernels_shows_original"


def mark_saved(module: nn.Module, shared: set[int]) -> list[str]:
    """Make every parameter of `module` trainable and keep the originals.

    Parameters whose `data_ptr` is in `shared` (tied to another module) get storage of their own first, as
    PEFT's copy of such a module has: training lm_head must not train the embedding. Returns their names.
    """
    untied = []
    for path, child in module.named_modules():
        for name, parameter in list(child._parameters.items()):
            if parameter is not None and parameter.data_ptr() in shared:
                child._parameters[name] = nn.Parameter(parameter.detach().clone())
                untied.append(f"{path}.{name}" if path else name)
        keep_original(child, child._parameters)
    module.__dict__[_SAVED] = True
    return untied


def keep_original(module: nn.Module, names: Iterable[str]) -> None:
    """Train the parameters `names` of `module` itself and remember their values as they are now."""
    originals: dict[str, Tensor] = module.__dict__.setdefault(_ORIGINAL, {})
    for name in names:
        parameter = module._parameters[name]
        if parameter is not None:
            parameter.requires_grad_(True)
            originals[name] = parameter.detach().clone()


def saved_modules(model: nn.Module) -> dict[str, nn.Module]:
    """{path: module} of the `modules_to_save` that `apply_lora` marked."""
    return {name: m for name, m in model.named_modules() if m.__dict__.get(_SAVED)}


def forget_originals(model: nn.Module) -> None:
    """What is shown now stays; nothing is marked as trained besides adapters any more."""
    for module in model.modules():
        for name in (_ORIGINAL, _SAVED, _SHOWN):
            module.__dict__.pop(name, None)


def hidden_originals(model: nn.Module) -> list[nn.Module]:
    """The modules of `model` that have originals and show what was trained."""
    held = (m for m in model.modules() if m.__dict__.get(_ORIGINAL))
    return [m for m in held if not m.__dict__.get(_SHOWN, False)]


def swap_originals(model: nn.Module, show: bool) -> list[nn.Module]:
    """Show the original values (`show`) or the trained ones; returns the modules that changed over."""
    changed = []
    for module in model.modules():
        if module.__dict__.get(_ORIGINAL) and module.__dict__.get(_SHOWN, False) != show:
            _swap(module)
            module.__dict__[_SHOWN] = show
            changed.append(module)
    return changed


def _swap(module: nn.Module) -> None:
    """Exchange the storages: a graph that already saved the trained values keeps them, as a reference model between a
    policy's forward and its backward needs."""
    originals = module.__dict__[_ORIGINAL]
    pairs = []
    for name, original in originals.items():
        parameter = module._parameters[name]
        assert parameter is not None
        pairs.append((name, parameter, original.to(parameter.device, parameter.dtype)))
    for name, parameter, then in pairs:
        originals[name], parameter.data = parameter.data, then
