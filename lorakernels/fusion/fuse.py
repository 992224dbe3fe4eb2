# SPDX-License-Identifier: Apache-2.0
"""fuse: rewire a model's decoder layers to run as few kernels over few matrices, in place, and back."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field

import torch
from torch import nn

from lorakernels.autograd import attention as attention_backends
from lorakernels.fusion.check import LAYERS, check_layers, decoder_layers
from lorakernels.fusion.layer import Parts, original_class
from lorakernels.fusion.memory import SAVE, LayerSize, fit
from lorakernels.fusion.rewire import Options, changed, rewire, unwire
from lorakernels.modules.lora import LoRALinear
from lorakernels.modules.projections import adapted, frozen_layers, share_state
from lorakernels.modules.undo import all_or_nothing


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

    def backend_for(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: str | torch.Tensor
    ) -> str:
        """The attention backend that forwards of such q, k and v will take. `rows` is "causal", "packed" for documents
        by where they begin, or a mask. ValueError if `attention` does not take them."""
        if isinstance(rows, torch.Tensor):
            return attention_backends.choose(self.attention, q, k, v, rows, False)
        if rows == "packed":
            return attention_backends.choose_packed(self.attention, q, k, v)
        return attention_backends.choose(self.attention, q, k, v, None, True)

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
        save: what a layer keeps for backward: "full", "recompute", "fp8" or "checkpoint" (fusion/memory.py).
        memory_budget: bytes that all layers may keep together; chooses `save` per layer. Needs `tokens`.
        tokens: per microbatch, for the budget and the report.
        shared_dropout: one mask for the adapters of q, k, v, and one for gate, up; False draws one each, as PEFT does,
            and takes a few kernels more.
        attention: "auto", "cudnn", "flash", "efficient" or "math".
        keep_linears: hold on to the `nn.Linear`s that become FP8, at their full size, for `unfuse` to put back.

    `load_state_dict(strict=False)` of a fused model's state into one that is not fused copies FP8 values unscaled into
    its `nn.Linear`s, which torch does not tell apart: load it with `strict=True`, or into a fused model.

    Returns:
        A FuseReport.

    Raises:
        ValueError, TypeError: there is no decoder layer, or one cannot be fused; the message names the layer and why.
            Nothing is changed then, nor where an exception comes later, such as one of a full device.
    """
    if save not in SAVE:
        raise ValueError(f"save must be one of {list(SAVE)}, found {save!r}")
    attention_backends.check(attention)
    if memory_budget is not None and tokens is None:
        raise ValueError(
            f"memory_budget = {memory_budget} needs tokens, the tokens of a microbatch"
        )
    layers = decoder_layers(model)
    options = Options(attention, shared_dropout, keep_linears)
    with all_or_nothing(model):
        adapter = _an_adapter(model)
        state = adapter.fp8_state
        check_layers(layers, state, shared_dropout)
        element = next(iter(layers.values())).get_parameter("input_layernorm.weight").element_size()
        sizes = [LayerSize.of(layer, state is not None) for layer in layers.values()]
        modes = [save] * len(sizes)
        if memory_budget is not None:
            modes = fit(sizes, memory_budget, tokens or 1, element)
        parts, frozen = rewire(model, layers, adapter, modes, options)
    rows = [
        LayerReport(
            path,
            original_class(layer).__name__,
            p.save,
            size.saved_bytes(p.save, tokens or 1, element),
            names,
        )
        for (path, layer), p, size, names in zip(layers.items(), parts, sizes, frozen, strict=True)
    ]
    off = bool(changed(model).use_cache)
    notes = ("model.config.use_cache is False from now on",) if off else ()
    return FuseReport(rows, tokens or 1, element, attention, sizes, parts, notes)


def unfuse(model: nn.Module) -> None:
    """Undo `fuse`: the layers run their own forward, and every projection owns its memory again.

    A projection that `fuse` turned into a FrozenFP8Linear stays one unless `keep_linears` was given. The kept
    `nn.Linear` comes back in the layer's dtype and on its device if the FP8 weight still is what it was made into;
    a warning names those that do not. Histories of the FP8 state that nothing was written to since are as before; else
    the group's x goes to each member, and dy starts anew. An exception in the middle leaves the model fused.

    Raises:
        ValueError: `model` is not fused.
    """
    stale = unwire(model)
    if stale:
        warnings.warn(
            f"{', '.join(stale)} stay FrozenFP8Linears: they hold another weight than the nn.Linears that fuse kept, "
            "which are dropped",
            RuntimeWarning,
            stacklevel=2,
        )


def _an_adapter(model: nn.Module) -> LoRALinear:
    """The first of the adapters. Where they were made one by one, they have one FP8State from now on."""
    found = list(adapted(model))
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no LoRALinear: call apply_lora first, or, with PEFT, register or patch of "
            "lorakernels.integrations.peft"
        )
    share_state(frozen_layers(model))
    if any(m.fp8_state is not found[0].fp8_state for m in found):
        raise ValueError(f"the adapters of {type(model).__name__} must have one FP8State")
    return found[0]


__all__ = ["LAYERS", "FuseReport", "LayerReport", "fuse", "unfuse"]
