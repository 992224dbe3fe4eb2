# SPDX-License-Identifier: Apache-2.0
"""Check every layer before `fuse` changes anything. transformers is not imported: classes are compared by name."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from lorakernels.fusion.call_checks import refuse_hooks
from lorakernels.fusion.describe import LayerDescription
from lorakernels.modules.linear.dora import DoRALinear
from lorakernels.modules.linear.frozen import FrozenFP8Linear, is_sharded
from lorakernels.modules.linear.lora import LoRALinear
from lorakernels.modules.marks import is_held
from lorakernels.modules.model.trained_parts import keeps_weight
from lorakernels.modules.order import refuse_module
from lorakernels.numerics.blocks import BLOCK
from lorakernels.recipes import BlockScaling, Recipe


def check_layers(
    layers: Sequence[LayerDescription], adapter: LoRALinear, shared_dropout: bool
) -> None:
    """Refuse what a fused layer would compute wrongly, or not at all.

    Raises:
        TypeError: a module has a class or a place that a fused layer does not know.
        ValueError: a setting is not supported, a module has hooks, or projections for one matrix do not fit together.
            Or a weight is tied, trained, sharded, merged or not finite.
        RuntimeError: the FP8 state's memory is pinned, and new layers would have to be registered.
    """
    state = adapter.fp8_state
    for layer in layers:
        _check_linears(layer)
        _check_classes(layer)
        for objection in layer.spec.objections(layer.module):
            raise ValueError(f"{layer.path}: {objection}")
        for name, module in layer.module.named_modules():
            if name:
                refuse_hooks(layer.where(name), module)
        _check_projections(layer, adapter.recipe, shared_dropout)
    _check_not_shared(layers)
    new = [p for layer in layers for p in layer.projections if p.is_plain]
    if state is not None and new and state.pinned_by:
        raise RuntimeError(
            f"{len(new)} projections would be registered in the FP8State, whose memory is pinned by "
            f"{state.pinned_by}: fuse before capturing graphs"
        )


def _check_linears(layer: LayerDescription) -> None:
    for p in layer.projections:
        refuse_module(p.full_path, p.linear, "fuse")
        if not (p.is_plain or isinstance(p.linear, FrozenFP8Linear)):
            raise TypeError(
                f"{p.full_path} is a {type(p.linear).__name__}, expected nn.Linear, LoRALinear or FrozenFP8Linear"
            )


def _check_classes(layer: LayerDescription) -> None:
    """Refuse classes and forwards other than transformers' own: a fused layer computes what those compute."""
    spec, module = layer.spec, layer.module
    parts = {"": "DecoderLayer", spec.attention: "Attention", spec.mlp: "MLP"}
    parts |= dict.fromkeys(spec.all_norms, "RMSNorm")
    for name, part in parts.items():
        where, kind = layer.where(name), type(module.get_submodule(name))
        if kind is not spec.own_class(module, part):
            raise TypeError(
                f"{where} is a {kind.__module__}.{kind.__qualname__}, expected "
                f"{type(module).__module__}.{spec.family}{part}"
            )
        home = getattr(inspect.unwrap(kind.forward), "__module__", "")
        if home != kind.__module__:
            raise TypeError(
                f"{where}: the forward of {kind.__name__} was replaced by {home}'s, which a fused layer would not run"
            )
    for name, inner in module.named_modules():
        if "forward" in vars(inner):
            raise ValueError(
                f"{layer.where(name)} has a forward of its own, set on the instance, which a fused layer would not "
                "run: remove it"
            )


def _check_projections(
    layer: LayerDescription, recipe: Recipe | None, shared_dropout: bool
) -> None:
    tensors = list(layer.module.named_parameters())
    devices = {str(t.device) for _, t in tensors}
    if len(devices) > 1:
        raise ValueError(f"{layer.path} must be on one device, found {sorted(devices)}")
    for name, tensor in tensors:
        if tensor.is_meta:
            raise ValueError(
                f"{layer.where(name)} is on the meta device: give the model its weights first"
            )
        if is_sharded(tensor):
            raise ValueError(f"{layer.where(name)} is sharded: fused weights need whole ones")
    for p in layer.projections:
        _check_weight(p.full_path, p.linear, recipe)
        if isinstance(p.linear, FrozenFP8Linear):
            _check_frozen(p.full_path, p.linear, recipe)
    for group in layer.groups:
        if len(group) > 1:
            _check_group({p.full_path: p.linear for p in group}, recipe, shared_dropout)


def _check_weight(path: str, module: nn.Module, recipe: Recipe | None) -> None:
    weight = module.weight
    assert isinstance(weight, Tensor)
    if weight.requires_grad:
        raise ValueError(f"{path}.weight is trained: a fused layer trains adapters only")
    if keeps_weight(module):
        raise ValueError(
            f"{path} is in modules_to_save: a fused layer does not keep its weight from before training, "
            "nor that it is to be saved; call merge_and_unload first"
        )
    if type(module) is nn.Linear and recipe is not None and not bool(weight.isfinite().all()):
        raise ValueError(f"{path}.weight must be finite to be held in FP8")


def _check_frozen(path: str, module: FrozenFP8Linear, recipe: Recipe | None) -> None:
    if isinstance(module, DoRALinear):
        raise ValueError(f"{path} has use_dora=True, which a fused layer does not compute")
    if module.recipe != recipe:
        raise ValueError(f"{path} follows {module.recipe}, the model's adapters {recipe}")


def _check_group(
    group: Mapping[str, nn.Module], recipe: Recipe | None, shared_dropout: bool
) -> None:
    members = list(group.values())
    adapted = [m for m in members if isinstance(m, LoRALinear)]
    what: dict[str, Iterable[Any]] = {
        "weight dtype": (_dtype(m, recipe is not None) for m in members),
        "adapter dtype": (p.dtype for m in adapted for p in (m.lora_A, m.lora_B)),
        "bias dtype": (m.bias.dtype for m in members if isinstance(m.bias, Tensor)),
    }
    if shared_dropout:
        what["lora_dropout"] = (m.lora_dropout for m in adapted)
        what["rng_state"] = (id(m.rng_state) for m in adapted)
    if isinstance(recipe, BlockScaling):
        check_blocks(group)
    for name, values in what.items():
        if len(different := set(values)) > 1:
            raise ValueError(
                f"{', '.join(group)} must have one {name}, found {sorted(map(str, different))}"
            )


def check_blocks(group: Mapping[str, Any]) -> None:
    """Refuse members of one matrix, by their paths, if their blocks would not be blocks of the matrix.

    Raises:
        ValueError: a member but the last has rows that do not end with a block.
    """
    for path, member in list(group.items())[:-1]:
        rows = member.out_features
        if rows % BLOCK:
            raise ValueError(
                f"{path} has {rows} rows, which must be a multiple of {BLOCK} under BlockScaling"
            )


def _dtype(module: nn.Module, fp8: bool) -> str:
    """The weight's dtype in the fused layer. With an FP8 state, plain weights become e4m3 as well."""
    if fp8:
        return "e4m3"
    weight = module.weight
    assert isinstance(weight, Tensor)
    return str(weight.dtype)


def _check_not_shared(layers: Sequence[LayerDescription]) -> None:
    owners: dict[int, str] = {}
    held = {
        id(m._parameters["weight"])
        for layer in layers
        for m in layer.module.modules()
        if is_held(m)
    }
    for layer in layers:
        for name, parameter in layer.module.named_parameters(remove_duplicate=False):
            if id(parameter) in held:  # layers of a sharded base take turns in one memory
                continue
            path, pointer = layer.where(name), parameter.data_ptr()
            if pointer and owners.setdefault(pointer, path) != path:
                raise ValueError(
                    f"{path} shares its memory with {owners[pointer]}: tied weights cannot be fused"
                )
