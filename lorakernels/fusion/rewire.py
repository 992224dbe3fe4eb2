# SPDX-License-Identifier: Apache-2.0
"""Change a model for `fuse`, and change it back for `unfuse`. Either happens completely or not at all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from lorakernels.fusion.describe import LayerDescription
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


@dataclass(frozen=True)
class Options:
    """Options of `fuse` for all layers, and the host memory for offloaded activations."""

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
    record = became(model).before_fuse
    if record is None or not any(isinstance(m, FusedDecoderLayer) for m in model.modules()):
        raise ValueError(
            f"{type(model).__name__} is not fused: pass the model that fuse() was given"
        )
    return record


def rewire(
    model: nn.Module,
    layers: Sequence[LayerDescription],
    adapter: LoRALinear,
    modes: Sequence[str],
    options: Options,
) -> list[Parts]:
    """Fuse `layers` and the last norm of `model`. Returns the Parts of each layer.

    Args:
        model: changed in place.
        layers: its decoder layers, which `check_layers` has passed.
        adapter: any adapter of the model; its FP8State is the model's.
        modes: `save` of each layer.
        options: for all layers.
    """
    record = Changed()
    with all_or_nothing(model, _configs(model)) as before, _apart_on_failure(record.columns):
        for layer in layers:
            _freeze(layer, adapter, record, options, before)
        parts = [_parts(layer, mode, options) for layer, mode in zip(layers, modes, strict=True)]
        for layer, p in zip(layers, parts, strict=True):
            _join(layer.module, p, record, before)
        for norm, adds_one in _last_norms(model, layers):
            record.norms.append(norm)
            fuse_norm(norm, adds_one)
        _no_cache(model, record)
        record.angles += angles_by_document(model)
        mark(model, before_fuse=record)
    return parts


def unwire(model: nn.Module) -> list[str]:
    """Undo `rewire`. Returns the paths of kept nn.Linears that are dropped, since the model has other weights now."""
    record = changed(model)
    stale: list[str] = []
    with all_or_nothing(model, [config for config, _ in record.use_cache]):
        weights = [kept.weight() for kept in record.kept]
        for layer in [m for m in model.modules() if isinstance(m, FusedDecoderLayer)]:
            parts = parts_of(layer)
            plain: nn.Module = layer  # its class is not FusedDecoderLayer any more
            mark(plain, fused=None)
            plain.__class__ = original_class(layer)
            for group in parts.groups:
                group.separate()
                _columns_back(group, record.columns.get(group))
        for kept, weight in zip(record.kept, weights, strict=True):
            if weight is None:
                stale.append(kept.path)
            else:
                kept.put_back(weight)
        forget_projections(model)
        for norm in record.norms:
            unfuse_norm(norm)
        for hook in record.angles:
            hook.remove()
        for config, value in record.use_cache:
            config.use_cache = value
        mark(model, before_fuse=None)
    return stale


def let_go(model: nn.Module, gone: Sequence[nn.Module]) -> None:
    """Free the memory of the decoder layers and norms `gone`, fused or not, which `model` will not get back.

    The record for `unwire` then has only the layers that remain. A report of `fuse` that a caller keeps does not keep
    their memory.
    """
    modules = {id(m) for layer in gone for m in layer.modules()}
    if (record := became(model).before_fuse) is not None:
        record.kept = [kept for kept in record.kept if id(kept.norm) not in modules]
        record.norms = [norm for norm in record.norms if id(norm) not in modules]
        record.columns = {
            group: kept for group, kept in record.columns.items() if id(group.first) not in modules
        }
    for module in (m for layer in gone for m in layer.modules()):
        if isinstance(module, FusedDecoderLayer):
            for group in parts_of(module).groups:
                group.forget()
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
    layer: LayerDescription,
    adapter: LoRALinear,
    record: Changed,
    options: Options,
    before: Before,
) -> None:
    """Turn the layer's plain projections into FrozenFP8Linears, and move all to the adapters' FP8State."""
    state, recipe = adapter.fp8_state, adapter.recipe
    for p in layer.projections:
        if not p.is_plain:
            join_state(p.linear, p.full_path, state)
            continue
        if state is not None and p.full_path not in state.names:
            state.register(p.full_path)
        make = partial(
            FrozenFP8Linear.from_linear, p.linear, recipe, fp8_state=state, name=p.full_path
        )
        new = before.patiently(make)
        # keep the Parameter itself: trained or not, an optimizer may hold it
        new._parameters["bias"] = p.linear._parameters["bias"]
        hand_over_originals(p.linear, new)
        if options.keep_linears:
            record.kept.append(KeptLinear.of(layer, p))
        p.parent._modules[p.name] = new


def _parts(layer: LayerDescription, save: str, options: Options) -> Parts:
    """How the layer runs, once its projections are frozen."""
    spec, module = layer.spec, layer.module
    qkv, o, gate_up, down = (
        FusedGroup([keep_projection(p.in_model) for p in group], options.shared_dropout, results)
        for group, results in zip(layer.groups, spec.results, strict=True)
    )
    places = [
        (path, module.get_submodule(owner)._modules, name, inner)
        for path, inner in module.named_modules()
        for owner, _, name in [path.rpartition(".")]
        if path and not is_inside_projection(module, owner)
    ]
    return Parts(
        spec=spec,
        qkv=qkv,
        o=o,
        gate_up=gate_up,
        down=down,
        norms=layer.norms,
        head_norms=layer.head_norms,
        post_norms=layer.post_norms,
        places=places,
        heads=layer.heads,
        eps=epsilon(layer.first_norm),
        turns=spec.turns(module),
        factor=spec.factor_of(module),
        cap=spec.cap_of(module),
        save=save.removesuffix(AWAY),
        attention=options.attention,
        offload=options.offload if save.endswith(AWAY) else None,
    )


def _join(layer: nn.Module, parts: Parts, record: Changed, before: Before) -> None:
    for group in parts.groups:
        record.columns[group] = _take_columns(group)
        bring(group.first)
        before.patiently(group.join)
    mark(layer, fused=parts)
    layer.__class__ = fused_class(type(layer))


def _last_norms(
    model: nn.Module, layers: Sequence[LayerDescription]
) -> Iterator[tuple[nn.Module, bool]]:
    """Yield the norm behind each list of layers, if it has the class of the layers' norms, and whether it adds 1 to its
    weight."""
    owners = {layer.path.rpartition(".")[0].rpartition(".")[0]: layer for layer in layers}
    for owner, layer in owners.items():
        norm = model.get_submodule(owner)._modules.get(layer.spec.last_norm)
        if norm and type(norm) is layer.spec.own_class(layer.module, "RMSNorm"):
            yield norm, layer.spec.norms_add_one


def _take_columns(group: FusedGroup) -> list[torch.Tensor]:
    """Copies of the members' columns of the FP8 state.

    If there are several members, the group takes over the first one's column of dy, which starts empty.
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


def _no_cache(model: nn.Module, record: Changed) -> None:
    for config in _configs(model):
        if config.use_cache:
            record.use_cache.append((config, True))
            config.use_cache = False
