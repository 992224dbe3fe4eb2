# SPDX-License-Identifier: Apache-2.0
"""Check every layer before `fuse` changes anything. transformers is not imported: classes are compared by name."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from lorakernels.config import BlockScaling, Recipe
from lorakernels.fusion.call_checks import refuse_hooks
from lorakernels.fusion.families import KNOWN, family_of, spec_of
from lorakernels.fusion.layer import FusedDecoderLayer
from lorakernels.modules.linear.dora import DoRALinear
from lorakernels.modules.linear.frozen import FrozenFP8Linear, is_sharded
from lorakernels.modules.linear.lora import LoRALinear
from lorakernels.modules.linear.projections import projection
from lorakernels.modules.marks import is_held
from lorakernels.modules.model.trained_parts import keeps_weight
from lorakernels.modules.order import refuse_module
from lorakernels.numerics.blocks import BLOCK


def decoder_layers(model: nn.Module) -> dict[str, nn.Module]:
    """{path: layer} of the layers that `fuse` knows.

    Raises:
        ValueError: there is none, one is fused already, or two places share one.
        TypeError: all decoder layers are of other classes.
    """
    found: dict[str, nn.Module] = {}
    others: dict[str, str] = {}
    seen: dict[int, str] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        kind = type(module).__name__
        if isinstance(module, FusedDecoderLayer):
            raise ValueError(f"{path} is fused already: call unfuse(model) first")
        if family_of(type(module)):
            if id(module) in seen:
                raise ValueError(
                    f"{path} and {seen[id(module)]} are one layer, which cannot be fused"
                )
            seen[id(module)] = path
            found[path] = module
        elif kind.endswith(("DecoderLayer", "Block")):
            others[path] = kind
    if others and not found:
        path, kind = next(iter(others.items()))
        raise TypeError(f"{path} is a {kind}: fuse knows {KNOWN} of transformers")
    if not found:
        raise ValueError(f"{type(model).__name__} has no decoder layer: fuse knows {KNOWN}")
    return found


def projections(layer: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Module]]:
    """(path, parent, module) of all projections, in the order in which they run."""
    for group in spec_of(layer).groups:
        for path in group:
            parent = layer.get_submodule(path.rpartition(".")[0])
            yield path, parent, projection(layer.get_submodule(path))


def check_layers(layers: dict[str, nn.Module], adapter: LoRALinear, shared_dropout: bool) -> None:
    """Refuse what a fused layer would compute wrongly, or not at all.

    Raises:
        TypeError: a module has a class or a place that a fused layer does not know.
        ValueError: a setting is not supported, a module has hooks, or projections for one matrix do not fit together.
            Or a weight is tied, trained, sharded, merged or not finite.
        RuntimeError: the FP8 state's memory is pinned, and new layers would have to be registered.
    """
    state = adapter.fp8_state
    for path, layer in layers.items():
        _check_structure(path, layer)
        _check_classes(path, layer)
        for objection in spec_of(layer).objections(layer):
            raise ValueError(f"{path}: {objection}")
        for name, module in layer.named_modules():
            if name:
                refuse_hooks(f"{path}.{name}", module)
        _check_projections(path, layer, adapter.recipe, shared_dropout)
    _check_not_shared(layers)
    new = [p for p, layer in layers.items() for _, _, m in projections(layer) if _is_plain(m)]
    if state is not None and new and state.pinned_by:
        raise RuntimeError(
            f"{len(new)} projections would be registered in the FP8State, whose memory is pinned by "
            f"{state.pinned_by}: fuse before capturing graphs"
        )


def _is_plain(module: nn.Module) -> bool:
    return type(module) is nn.Linear


def _check_structure(path: str, layer: nn.Module) -> None:
    spec = spec_of(layer)
    for owner, names in spec.children().items():
        children = set(layer.get_submodule(owner)._modules)
        function = {spec.activation.rpartition(".")[2]}  # which need not be a module
        if children - names or not names <= children | function:
            raise TypeError(
                f"{path}{'.' + owner if owner else ''} must have the modules {sorted(names)}, "
                f"found {sorted(children)}"
            )
    for name, _, module in projections(layer):
        refuse_module(f"{path}.{name}", module, "fuse")
        if not (_is_plain(module) or isinstance(module, FrozenFP8Linear)):
            raise TypeError(
                f"{path}.{name} is a {type(module).__name__}, expected nn.Linear, LoRALinear or FrozenFP8Linear"
            )


def _check_classes(path: str, layer: nn.Module) -> None:
    """Refuse classes and forwards other than transformers' own: a fused layer computes what those compute."""
    spec = spec_of(layer)
    parts = {"": "DecoderLayer", spec.attention: "Attention", spec.mlp: "MLP"}
    parts |= dict.fromkeys(spec.all_norms, "RMSNorm")
    for name, part in parts.items():
        where, kind = f"{path}.{name}" if name else path, type(layer.get_submodule(name))
        if kind is not spec.own_class(layer, part):
            raise TypeError(
                f"{where} is a {kind.__module__}.{kind.__qualname__}, expected "
                f"{type(layer).__module__}.{spec.family}{part}"
            )
        home = getattr(inspect.unwrap(kind.forward), "__module__", "")
        if home != kind.__module__:
            raise TypeError(
                f"{where}: the forward of {kind.__name__} was replaced by {home}'s, which a fused layer would not run"
            )
    for name, module in layer.named_modules():
        if "forward" in vars(module):
            where = f"{path}.{name}" if name else path
            raise ValueError(
                f"{where} has a forward of its own, set on the instance, which a fused layer would not run: remove it"
            )


def _check_projections(
    path: str, layer: nn.Module, recipe: Recipe | None, shared_dropout: bool
) -> None:
    tensors = list(layer.named_parameters())
    devices = {str(t.device) for _, t in tensors}
    if len(devices) > 1:
        raise ValueError(f"{path} must be on one device, found {sorted(devices)}")
    for name, tensor in tensors:
        if tensor.is_meta:
            raise ValueError(
                f"{path}.{name} is on the meta device: give the model its weights first"
            )
        if is_sharded(tensor):
            raise ValueError(f"{path}.{name} is sharded: fused weights need whole ones")
    for name, _, module in projections(layer):
        weight = module.weight
        assert isinstance(weight, Tensor)
        if weight.requires_grad:
            raise ValueError(f"{path}.{name}.weight is trained: a fused layer trains adapters only")
        if keeps_weight(module):
            raise ValueError(
                f"{path}.{name} is in modules_to_save: a fused layer does not keep its weight from before training, "
                "nor that it is to be saved; call merge_and_unload first"
            )
        if _is_plain(module) and recipe is not None and not bool(weight.isfinite().all()):
            raise ValueError(f"{path}.{name}.weight must be finite to be held in FP8")
        if isinstance(module, FrozenFP8Linear):
            if isinstance(module, DoRALinear):
                raise ValueError(
                    f"{path}.{name} has use_dora=True, which a fused layer does not compute"
                )
            if module.recipe != recipe:
                raise ValueError(
                    f"{path}.{name} follows {module.recipe}, the model's adapters {recipe}"
                )
    for names in spec_of(layer).groups:
        group = {f"{path}.{name}": projection(layer.get_submodule(name)) for name in names}
        if len(group) > 1:
            _check_group(group, recipe, shared_dropout)


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
        found = set(values)
        if len(found) > 1:
            raise ValueError(
                f"{', '.join(group)} must have one {name}, found {sorted(map(str, found))}"
            )


def check_blocks(group: Mapping[str, Any]) -> None:
    """Refuse members of one matrix, by their paths, whose blocks are not those of the matrix.

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


def _check_not_shared(layers: dict[str, nn.Module]) -> None:
    owners: dict[int, str] = {}
    held = {
        id(m._parameters["weight"])
        for layer in layers.values()
        for m in layer.modules()
        if is_held(m)
    }
    for path, layer in layers.items():
        for name, parameter in layer.named_parameters(remove_duplicate=False):
            if id(parameter) in held:  # layers of a sharded base take turns in one memory
                continue
            full, pointer = f"{path}.{name}", parameter.data_ptr()
            if pointer and owners.setdefault(pointer, full) != full:
                raise ValueError(
                    f"{full} shares its memory with {owners[pointer]}: tied weights cannot be fused"
                )
