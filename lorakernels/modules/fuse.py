# SPDX-License-Identifier: Apache-2.0
"""fuse: rewire a model's decoder layers to run as few kernels over few matrices, in place, and back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lorakernels.autograd import attention as attention_backends
from lorakernels.fp8 import FP8State
from lorakernels.modules.frozen import FrozenFP8Linear
from lorakernels.modules.fuse_checks import LAYERS, check_layers, decoder_layers, projections
from lorakernels.modules.fuse_memory import SAVE, LayerSize, fit
from lorakernels.modules.fused_group import FusedGroup
from lorakernels.modules.fused_layer import (
    DOWN,
    GATE_UP,
    OUTPUT,
    QKV,
    FusedDecoderLayer,
    Parts,
    fused_class,
    original_class,
)
from lorakernels.modules.fused_norm import fuse_norm, is_norm, unfuse_norm
from lorakernels.modules.lora import LoRALinear

_BEFORE = "_lorakernels_before_fuse"  # plain attribute of the model: what `unfuse` puts back


@dataclass(frozen=True)
class LayerReport:
    """One fused layer: what it keeps for backward, and `bytes` per `FuseReport.tokens`, predicted."""

    name: str
    kind: str
    save: str
    bytes: int
    frozen: tuple[str, ...]


@dataclass(frozen=True)
class FuseReport:
    """What `fuse` decided. `print(report)` shows it as a table, with the attention backends taken so far."""

    layers: list[LayerReport]
    tokens: int
    element: int
    attention: str
    sizes: list[LayerSize] = field(repr=False)
    parts: list[Parts] = field(repr=False)
    notes: tuple[str, ...] = ()

    @property
    def saved_bytes(self) -> int:
        """Of all layers, for `tokens` tokens."""
        return sum(layer.bytes for layer in self.layers)

    @property
    def backends(self) -> list[str]:
        """Attention backends that forwards have taken since."""
        return sorted({name for parts in self.parts for name in parts.chosen.values()})

    def __str__(self) -> str:
        per = "token" if self.tokens == 1 else f"{self.tokens:,} tokens"
        taken = ", ".join(self.backends) or "chosen at the first forward"
        lines = [
            f"{len(self.layers)} fused layers keep {self.saved_bytes:,} bytes for backward per {per}",
            f"attention {self.attention}: {taken}",
            *self.notes,
        ]
        for layer in self.layers:
            frozen = f"; now FP8: {', '.join(layer.frozen)}" if layer.frozen else ""
            lines.append(
                f"  {layer.name}: {layer.kind} save={layer.save} {layer.bytes:,} bytes{frozen}"
            )
        for size in dict.fromkeys(self.sizes):
            costs = ", ".join(
                f"{save} {size.saved_bytes(save, self.tokens, self.element):,}" for save in SAVE
            )
            lines.append(f"  a layer of hidden {size.hidden}, ffn {size.ffn} would keep: {costs}")
        return "\n".join(lines)


@dataclass(eq=False)
class _Before:
    """What `fuse` changed."""

    replaced: list[tuple[nn.Module, str, nn.Linear]]
    columns: dict[FusedGroup, list[torch.Tensor]]
    norms: list[nn.Module]
    use_cache: list[tuple[Any, Any]]


def fuse(
    model: nn.Module,
    *,
    save: str = "recompute",
    memory_budget: int | None = None,
    tokens: int | None = None,
    shared_dropout: bool = True,
    attention: str = "auto",
    keep_linears: bool = False,
) -> FuseReport:
    """Rewire the decoder layers of `model` (transformers' Llama, Mistral, Qwen2, Qwen3) in place, after `apply_lora`.

    q, k, v become one matrix, gate and up another, with their adapters; norm, RoPE, SwiGLU, residual and quantization
    happen on the way. Modules, parameters and state_dict names stay; `save_adapter`, `merge_lora` and the rest work as
    before. Plain `nn.Linear` projections become `FrozenFP8Linear`s on the adapters' FP8State (with `fp8=None`: frozen
    in their dtype), which is where the layer's names in state_dict do change, as with `apply_lora`. The norm behind the
    layers becomes one kernel each way; embedding and head are left alone. `model.config.use_cache` becomes False.

    Args:
        model: holds decoder layers, all on one device, with adapters on some of their projections.
        save: what a layer keeps for backward: "full", "recompute", "fp8" or "checkpoint" (fuse_memory.py).
        memory_budget: bytes that all layers may keep together; chooses `save` per layer. Needs `tokens`.
        tokens: per microbatch, for the budget and the report.
        shared_dropout: one mask for the adapters of q, k, v, and one for gate, up; False draws one each, as PEFT does,
            and takes a few kernels more.
        attention: "auto", "cudnn", "flash", "efficient" or "math".
        keep_linears: hold on to the `nn.Linear`s that become FP8, at their full size, for `unfuse` to put back.

    Returns:
        A FuseReport.

    Raises:
        ValueError, TypeError: there is no decoder layer, or one cannot be fused; the message names the layer and why.
            Nothing is changed then.
    """
    if save not in SAVE:
        raise ValueError(f"save must be one of {list(SAVE)}, found {save!r}")
    attention_backends.check(attention)
    if memory_budget is not None and tokens is None:
        raise ValueError(
            f"memory_budget = {memory_budget} needs tokens, the tokens of a microbatch"
        )
    layers = decoder_layers(model)
    adapter = _an_adapter(model)
    state = adapter.fp8_state
    check_layers(layers, state, shared_dropout)
    element = next(iter(layers.values())).get_parameter("input_layernorm.weight").element_size()
    sizes = [LayerSize.of(layer, state is not None) for layer in layers.values()]
    modes = [save] * len(sizes)
    if memory_budget is not None:
        modes = fit(sizes, memory_budget, tokens or 1, element)
    before = _Before([], {}, [], [])
    frozen = {
        path: _freeze(path, layer, adapter, before, keep_linears) for path, layer in layers.items()
    }
    parts = [
        _parts(layer, mode, attention, shared_dropout)
        for layer, mode in zip(layers.values(), modes, strict=True)
    ]
    for layer, p in zip(layers.values(), parts, strict=True):
        _rewire(layer, p, before)
    before.norms += _last_norms(model, layers)
    for norm in before.norms:
        fuse_norm(norm)
    _no_cache(model, before)
    model.__dict__[_BEFORE] = before
    rows = [
        LayerReport(
            path,
            original_class(layer).__name__,
            p.save,
            size.saved_bytes(p.save, tokens or 1, element),
            frozen[path],
        )
        for (path, layer), p, size in zip(layers.items(), parts, sizes, strict=True)
    ]
    notes = ("model.config.use_cache is False from now on",) if before.use_cache else ()
    return FuseReport(rows, tokens or 1, element, attention, sizes, parts, notes)


def unfuse(model: nn.Module) -> None:
    """Undo `fuse`: the layers run their own forward, and every projection owns its memory again.

    A projection that `fuse` turned into a FrozenFP8Linear stays one unless `keep_linears` was given. Histories of the
    FP8 state that nothing was written to since are as before; else the group's x goes to each member, and dy starts
    anew.

    Raises:
        ValueError: `model` is not fused.
    """
    layers = [m for m in model.modules() if isinstance(m, FusedDecoderLayer)]
    before = model.__dict__.pop(_BEFORE, None)
    if before is None or not layers:
        raise ValueError(
            f"{type(model).__name__} is not fused: pass the model that fuse() was given"
        )
    for layer in layers:
        parts: Parts = layer.__dict__.pop("_fused")
        plain: nn.Module = layer  # its class is not FusedDecoderLayer any more
        plain.__class__ = original_class(layer)
        for group in parts.groups:
            group.separate()
            _columns_back(group, before.columns.get(group))
    _put_linears_back(before)
    for norm in before.norms:
        unfuse_norm(norm)
    for config, value in before.use_cache:
        config.use_cache = value


def _an_adapter(model: nn.Module) -> LoRALinear:
    """The first of the adapters, which have one FP8State."""
    adapted = [m for m in model.modules() if isinstance(m, LoRALinear)]
    if not adapted:
        raise ValueError(f"{type(model).__name__} has no LoRALinear: call apply_lora first")
    if any(m.fp8_state is not adapted[0].fp8_state for m in adapted):
        raise ValueError(f"the adapters of {type(model).__name__} must have one FP8State")
    return adapted[0]


def _freeze(
    path: str,
    layer: nn.Module,
    adapters: LoRALinear,
    before: _Before,
    keep_linears: bool,
) -> tuple[str, ...]:
    """Turn the layer's plain projections into FrozenFP8Linears, all on the adapters' FP8State; their names."""
    state, names = adapters.fp8_state, []
    for name, parent, module in projections(layer):
        full = f"{path}.{name}" if path else name
        if isinstance(module, FrozenFP8Linear):
            _join_state(module, full, state)
            continue
        assert isinstance(module, nn.Linear)
        _register(full, state)
        new = FrozenFP8Linear.from_linear(
            module,
            None if state is None else state.recipe,
            weight_layout=adapters.weight_layout,
            fp8_state=state,
            name=full,
        )
        new._parameters["bias"] = module._parameters[
            "bias"
        ]  # trained or not, an optimizer may have it
        leaf = name.rpartition(".")[2]
        if keep_linears:
            before.replaced.append((parent, leaf, module))
        parent._modules[leaf] = new
        names.append(leaf)
    return tuple(names)


def _register(name: str, state: FP8State | None) -> None:
    if state is not None and name not in state.names:
        state.register(name)


def _join_state(module: FrozenFP8Linear, name: str, state: FP8State | None) -> None:
    """A FrozenFP8Linear that has an FP8State of its own comes to `state`, with its histories."""
    theirs = module.fp8_state
    if state is None or theirs is None or theirs is state:
        return
    _register(name, state)
    column = state.column(name)
    state.set_values(column, theirs.values(module._column))
    module.fp8_state, module._column, module.name = state, column, name


def _put_linears_back(before: _Before) -> None:
    for parent, leaf, module in before.replaced:
        parent._modules[leaf] = module


def _parts(layer: Any, save: str, attention: str, shared_dropout: bool) -> Parts:
    config, attn = layer.self_attn.config, layer.self_attn
    groups = [
        FusedGroup([getattr(owner, name) for name in names], shared_dropout)
        for owner, names in ((attn, QKV), (attn, OUTPUT), (layer.mlp, GATE_UP), (layer.mlp, DOWN))
    ]
    places = [
        (path, layer.get_submodule(owner)._modules, name, module)
        for path, module in layer.named_modules()
        for owner, _, name in [path.rpartition(".")]
        if path
    ]
    return Parts(
        groups[0],
        groups[1],
        groups[2],
        groups[3],
        places,
        config.num_attention_heads,
        config.num_key_value_heads,
        attn.scaling,
        layer.input_layernorm.variance_epsilon,
        save,
        attention,
    )


def _rewire(layer: nn.Module, parts: Parts, before: _Before) -> None:
    for group in parts.groups:
        before.columns[group] = _take_columns(group)
        group.join()
    layer.__dict__["_fused"] = parts
    layer.__class__ = fused_class(type(layer))


def _last_norms(model: nn.Module, layers: Iterable[str]) -> list[nn.Module]:
    """The `norm` beside each list of layers, where it is one of transformers' RMSNorms."""
    owners = dict.fromkeys(path.rpartition(".")[0].rpartition(".")[0] for path in layers)
    norms = (model.get_submodule(owner)._modules.get("norm") for owner in owners)
    return [norm for norm in norms if norm is not None and is_norm(norm)]


def _take_columns(group: FusedGroup) -> list[torch.Tensor]:
    """The members' columns of the FP8 state; a group's dy then has one of its own, which starts anew."""
    state = group.first.fp8_state
    if state is None:
        return []
    columns = [state.values(m._column) for m in group.members]
    if len(group.members) > 1:
        state.backward[:, group.first._column] = 0.0
        state.joint.add(group.first._column)
    return columns


def _columns_back(group: FusedGroup, columns: list[torch.Tensor] | None) -> None:
    state = group.first.fp8_state
    if state is None or not columns or len(group.members) == 1:
        return
    state.joint.discard(group.first._column)
    now = state.values(group.first._column)
    device = now.device
    if not bool(now[:, 1].any()) and torch.equal(now[:, 0], columns[0][:, 0].to(device)):
        for member, column in zip(group.members, columns, strict=True):
            state.set_values(member._column, column.to(device))
        return
    now[:, 1] = 0.0
    for member in group.members:
        state.set_values(member._column, now)


def _configs(model: nn.Module) -> Iterator[Any]:
    seen: set[int] = set()
    for module in model.modules():
        config = getattr(module, "config", None)
        if isinstance(getattr(config, "use_cache", None), bool) and id(config) not in seen:
            seen.add(id(config))
            yield config


def _no_cache(model: nn.Module, before: _Before) -> None:
    for config in _configs(model):
        if config.use_cache:
            before.use_cache.append((config, True))
            config.use_cache = False


__all__ = ["LAYERS", "FuseReport", "LayerReport", "fuse", "unfuse"]
