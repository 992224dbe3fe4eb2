# SPDX-License-Identifier: Apache-2.0
"""Change a model for `fuse`, and change it back for `unfuse`. Either happens completely or not at all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from lorakernels.fusion.check import projections
from lorakernels.fusion.families import spec_of
from lorakernels.fusion.families.spec import epsilon
from lorakernels.fusion.group import FusedGroup
from lorakernels.fusion.kept_linears import KeptLinear
from lorakernels.fusion.layer import FusedDecoderLayer, fused_class, original_class, parts_of
from lorakernels.fusion.memory import AWAY
from lorakernels.fusion.norm import fuse_norm, unfuse_norm
from lorakernels.fusion.offload import ActivationOffload
from lorakernels.fusion.parts import Parts
from lorakernels.modules.linear.frozen import FrozenFP8Linear
from lorakernels.modules.linear.lora import LoRALinear
from lorakernels.modules.linear.projections import (
    forget_projections,
    is_inside_projection,
    keep_projection,
)
from lorakernels.modules.marks import became, bring, mark
from lorakernels.modules.model.angles import angles_by_document
from lorakernels.modules.model.columns import join_state
from lorakernels.modules.model.trained_parts import hand_over_originals
from lorakernels.modules.model.undo import Before, all_or_nothing

_NONE = (None, None)


@dataclass(frozen=True)
class Options:
    """What is the same for all layers: options of `fuse`, and where activations go that leave the device."""

    attention: str
    shared_dropout: bool
    keep_linears: bool
    offload: ActivationOffload = field(default_factory=ActivationOffload)


@dataclass(eq=False)
class Changed:
    """A record of what `rewire` did to a model, for `unwire`."""

    kept: list[KeptLinear] = field(default_factory=list)
    columns: dict[FusedGroup, list[torch.Tensor]] = field(default_factory=dict)
    norms: list[nn.Module] = field(default_factory=list)
    angles: list[Any] = field(default_factory=list)  # handles of hooks
    use_cache: list[tuple[Any, Any]] = field(default_factory=list)


def changed(model: nn.Module) -> Changed:
    """The record of `model`'s changes.

    Raises:
        ValueError: `fuse` was not given this model, but a module above or inside it, or none.
    """
    found = became(model).before_fuse
    if found is None or not any(isinstance(m, FusedDecoderLayer) for m in model.modules()):
        raise ValueError(
            f"{type(model).__name__} is not fused: pass the model that fuse() was given"
        )
    return found


def rewire(
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    adapter: LoRALinear,
    modes: Sequence[str],
    options: Options,
) -> tuple[list[Parts], list[tuple[str, ...]]]:
    """Fuse `layers` and the last norm of `model`.

    Args:
        model: changed in place.
        layers: {path: decoder layer}.
        adapter: any adapter of the model; its FP8State is the model's.
        modes: `save` of each layer.
        options: for all layers.

    Returns:
        For each layer, its Parts and the names of its projections that became FrozenFP8Linears.
    """
    found, frozen, parts = Changed(), [], []
    with all_or_nothing(model, _configs(model)) as before, _apart_on_failure(found.columns):
        for path, layer in layers.items():
            frozen.append(_freeze(path, layer, adapter, found, options, before))
        for layer, mode in zip(layers.values(), modes, strict=True):
            parts.append(_parts(layer, mode, options))
        for layer, p in zip(layers.values(), parts, strict=True):
            _join(layer, p, found, before)
        for norm, adds_one in _last_norms(model, layers):
            found.norms.append(norm)
            fuse_norm(norm, adds_one)
        _no_cache(model, found)
        found.angles += angles_by_document(model)
        mark(model, before_fuse=found)
    return parts, frozen


def unwire(model: nn.Module) -> list[str]:
    """Undo `rewire`. Returns the paths of kept nn.Linears that stay out, as their weights are no longer the model's."""
    found = changed(model)
    stale: list[str] = []
    with all_or_nothing(model, [config for config, _ in found.use_cache]):
        weights = [kept.weight() for kept in found.kept]
        for layer in [m for m in model.modules() if isinstance(m, FusedDecoderLayer)]:
            parts = parts_of(layer)
            plain: nn.Module = layer  # its class is not FusedDecoderLayer any more
            mark(plain, fused=None)
            plain.__class__ = original_class(layer)
            for group in parts.groups:
                group.separate()
                _columns_back(group, found.columns.get(group))
        for kept, weight in zip(found.kept, weights, strict=True):
            if weight is None:
                stale.append(kept.path)
            else:
                kept.put_back(weight)
        forget_projections(model)
        for norm in found.norms:
            unfuse_norm(norm)
        for hook in found.angles:
            hook.remove()
        for config, value in found.use_cache:
            config.use_cache = value
        mark(model, before_fuse=None)
    return stale


def let_go(model: nn.Module, gone: Sequence[nn.Module]) -> None:
    """Free the memory of decoder layers and norms that `model` will not get back, fused or not.

    The record for `unwire` then has only those that it still has. A report of `fuse` that somebody keeps holds no
    memory of them.
    """
    modules = {id(m) for each in gone for m in each.modules()}
    if (found := became(model).before_fuse) is not None:
        found.kept = [kept for kept in found.kept if id(kept.layer) not in modules]
        found.norms = [norm for norm in found.norms if id(norm) not in modules]
        found.columns = {
            group: kept for group, kept in found.columns.items() if id(group.first) not in modules
        }
    for module in (m for each in gone for m in each.modules()):
        if isinstance(module, FusedDecoderLayer):
            for group in parts_of(module).groups:
                group.__setstate__(group.__getstate__())  # as a copy that has joined nothing yet
        module._parameters.clear()
        module._buffers.clear()


@contextmanager
def _apart_on_failure(groups: Iterable[FusedGroup]) -> Iterator[None]:
    """When an exception passes, give the members of `groups` memory of their own again.

    Without memory for that, they stay rows of one matrix. Their values are the same.
    """
    try:
        yield
    except BaseException:
        for group in groups:
            with suppress(torch.OutOfMemoryError):
                group.separate()
        raise


def _freeze(
    path: str,
    layer: nn.Module,
    adapters: LoRALinear,
    found: Changed,
    options: Options,
    before: Before,
) -> tuple[str, ...]:
    """Turn the layer's plain projections into FrozenFP8Linears, and move all to the adapters' FP8State.

    Returns the names of the projections that were plain.
    """
    state, names = adapters.fp8_state, []
    for name, parent, module in projections(layer):
        full = f"{path}.{name}" if path else name
        if isinstance(module, FrozenFP8Linear):
            join_state(module, full, state)
            continue
        assert isinstance(module, nn.Linear)
        if state is not None and full not in state.names:
            state.register(full)
        recipe = adapters.recipe
        make = partial(FrozenFP8Linear.from_linear, module, recipe, fp8_state=state, name=full)
        new = before.patiently(make)
        # keep the Parameter itself: trained or not, an optimizer may hold it
        new._parameters["bias"] = module._parameters["bias"]
        hand_over_originals(module, new)
        leaf = name.rpartition(".")[2]
        if options.keep_linears:
            found.kept.append(KeptLinear.of(full, layer, parent, leaf, module))
        parent._modules[leaf] = new
        names.append(leaf)
    return tuple(names)


def _parts(layer: nn.Module, save: str, options: Options) -> Parts:
    spec = spec_of(layer)
    qkv, o, gate_up, down = (
        FusedGroup(
            [keep_projection(layer.get_submodule(path)) for path in paths],
            options.shared_dropout,
            results,
        )
        for paths, results in zip(spec.groups, spec.results, strict=True)
    )
    first, second, of_q, of_k, *post = (
        None if path is None else layer.get_submodule(path)
        for path in (*spec.norms, *(spec.head_norms or _NONE), *(spec.post_norms or _NONE))
    )
    places = [
        (path, layer.get_submodule(owner)._modules, name, module)
        for path, module in layer.named_modules()
        for owner, _, name in [path.rpartition(".")]
        if path and not is_inside_projection(layer, owner)
    ]
    return Parts(
        spec=spec,
        qkv=qkv,
        o=o,
        gate_up=gate_up,
        down=down,
        norms=(first, second),
        head_norms=(of_q, of_k),
        post_norms=(post[0], post[1]),
        places=places,
        heads=spec.heads(layer),
        eps=epsilon(layer.get_submodule(spec.all_norms[0])),
        turns=spec.turns(layer),
        factor=spec.factor_of(layer),
        cap=spec.cap_of(layer),
        save=save.removesuffix(AWAY),
        attention=options.attention,
        offload=options.offload if save.endswith(AWAY) else None,
    )


def _join(layer: nn.Module, parts: Parts, found: Changed, before: Before) -> None:
    for group in parts.groups:
        found.columns[group] = _take_columns(group)
        bring(group.first)
        before.patiently(group.join)
    mark(layer, fused=parts)
    layer.__class__ = fused_class(type(layer))


def _last_norms(
    model: nn.Module, layers: Mapping[str, nn.Module]
) -> Iterator[tuple[nn.Module, bool]]:
    """The last norm beside each list of layers, if its class is that of the layers' norms, and whether it adds 1 to its
    weight."""
    owners = {path.rpartition(".")[0].rpartition(".")[0]: layer for path, layer in layers.items()}
    for owner, layer in owners.items():
        spec = spec_of(layer)
        norm = model.get_submodule(owner)._modules.get(spec.last_norm)
        if norm and type(norm) is spec.own_class(layer, "RMSNorm"):
            yield norm, spec.norms_add_one


def _take_columns(group: FusedGroup) -> list[torch.Tensor]:
    """Copies of the members' columns of the FP8 state.

    With several members, the first one's column of dy becomes the group's and starts empty.
    """
    state = group.first.fp8_state
    if state is None:
        return []
    columns = [state.values(m.column) for m in group.members]
    if len(group.members) > 1:
        state.backward[:, group.first.column] = 0.0
        state.joint.add(group.first.column)
    return columns


def _columns_back(group: FusedGroup, columns: list[torch.Tensor] | None) -> None:
    state = group.first.fp8_state
    if state is None or not columns or len(group.members) == 1:
        return
    state.joint.discard(group.first.column)
    now = state.values(group.first.column)
    device = now.device
    if not bool(now[:, 1].any()) and torch.equal(now[:, 0], columns[0][:, 0].to(device)):
        for member, column in zip(group.members, columns, strict=True):
            state.set_values(member.column, column.to(device))
        return
    now[:, 1] = 0.0
    for member in group.members:
        state.set_values(member.column, now)


def _configs(model: nn.Module) -> Iterator[Any]:
    seen: set[int] = set()
    for module in model.modules():
        config = getattr(module, "config", None)
        if isinstance(getattr(config, "use_cache", None), bool) and id(config) not in seen:
            seen.add(id(config))
            yield config


def _no_cache(model: nn.Module, found: Changed) -> None:
    for config in _configs(model):
        if config.use_cache:
            found.use_cache.append((config, True))
            config.use_cache = False
