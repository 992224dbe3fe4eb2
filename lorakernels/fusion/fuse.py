# SPDX-License-Identifier: Apache-2.0
"""fuse: rewire a model's decoder layers in place, to run few kernels over few matrices. unfuse: undo it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn

from lorakernels.autograd.attention import choose as attention_backends
from lorakernels.autograd.attention import fp8 as fp8_attention
from lorakernels.autograd.decoder.recorded import ways_of_kinds
from lorakernels.fusion.check import check_layers
from lorakernels.fusion.describe import LayerDescription, describe_layers
from lorakernels.fusion.find import decoder_layers
from lorakernels.fusion.memory import AWAY, OFFLOADED, SAVE, LayerSize, fit, kept_bytes
from lorakernels.fusion.parts import Parts
from lorakernels.fusion.rewire import Options, changed, rewire, unwire
from lorakernels.modules.linear.lora import LoRALinear
from lorakernels.modules.linear.projections import adapted, frozen_layers, share_state
from lorakernels.modules.model.report_text import folded, lines_of
from lorakernels.modules.model.undo import all_or_nothing
from lorakernels.modules.order import refuse
from lorakernels.recorded.routing import counted


@dataclass(frozen=True)
class LayerReport:
    """One fused layer: its mode `save`, and the predicted `bytes` that it keeps for `FuseReport.tokens` tokens.

    `frozen` names the projections that became FrozenFP8Linears.
    """

    name: str
    kind: str
    save: str
    bytes: int
    frozen: tuple[str, ...]

    @property
    def text(self) -> str:
        """The layer's line in `print(report)`, which prints equal lines once."""
        frozen = f"; now FP8: {', '.join(self.frozen)}" if self.frozen else ""
        return f"{self.kind} save={self.save} {self.bytes:,} bytes{frozen}"


class ChosenBackend(NamedTuple):
    """An attention backend, and the reason why "auto" chose a slower one than cuDNN's graphs on Hopper; else ""."""

    name: str
    why_not_graph: str = ""


@dataclass(frozen=True)
class FuseReport:
    """What `fuse` decided. `print(report)` shows it, with equal layers in one line and the attention backends so far.

    `tokens` is the number of tokens that bytes are counted for, `element` the bytes per number.
    """

    layers: list[LayerReport]
    tokens: int
    element: int
    attention: str
    sizes: list[LayerSize] = field(repr=False)
    parts: list[Parts] = field(repr=False)
    notes: tuple[str, ...] = ()

    @property
    def saved_bytes(self) -> int:
        """Bytes that all layers keep for the backward of `tokens` tokens, predicted."""
        forms = [layer.save for layer in self.layers]
        return kept_bytes(self.sizes, forms, self.tokens, self.element)

    @property
    def backends(self) -> list[str]:
        """The attention backends that forwards have used so far."""
        return sorted({name for parts in self.parts for name in parts.chosen.values()})

    @property
    def eager_forwards(self) -> str:
        """How the groups of projections (q, k, v; o; gate, up; down) ran, outside of graphs and traces.

        A recorded forward takes less of the host's time (recorded/). A backward may run by the ops.
        """
        kinds = ways_of_kinds()
        groups = (group for parts in self.parts for group in parts.groups)
        return counted(way for group in groups for way in group.eager_ways(kinds))

    def trust_longest(self) -> None:
        """Leave out the check of `max_length_q` in each call of a fused layer. The caller has measured its documents.

        FlashAttention-2 then silently computes no token of a longer document behind `max_length_q`. Call this before
        graphs are captured: they keep the check that they were captured with.
        """
        for parts in self.parts:
            parts.checks_longest = False

    def backend_for(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rows: str | torch.Tensor,
        longest: int | None = None,
    ) -> ChosenBackend:
        """The attention backend that forwards with such tensors will use; "eager" where scores are capped.

        Args:
            q: [B, H, T, D].
            k, v: [B, Hk, T, D].
            rows: "causal", "packed" for sequences that are given by their starts, or a mask.
            longest: the `max_length_q` of packed sequences; T if None.

        Raises:
            ValueError: the backend `attention` does not take these tensors.
            RuntimeError: it is "cudnn", and this process has loaded parts of two cuDNNs.
        """
        if any(parts.cap is not None for parts in self.parts):
            return ChosenBackend("eager")
        if isinstance(rows, torch.Tensor):
            return ChosenBackend(attention_backends.choose(self.attention, q, k, v, rows, False))
        most = (longest or q.shape[2]) if rows == "packed" else None
        if most is None:
            name = attention_backends.choose(self.attention, q, k, v, None, True)
        else:
            short = most <= attention_backends.SHORT
            name = attention_backends.choose_packed(self.attention, q, k, v, short)
        if self.attention != "auto":
            return ChosenBackend(name)
        return ChosenBackend(name, attention_backends.why_not_graph(name, q, k, v, most))

    def __str__(self) -> str:
        per = "token" if self.tokens == 1 else f"{self.tokens:,} tokens"
        taken = ", ".join(self.backends) or "chosen at the first forward"
        lines = [
            f"{len(self.layers)} fused layers keep {self.saved_bytes:,} bytes for backward per {per}",
            f"attention {self.attention}: {taken}",
            f"forward passes of projections without CUDA graphs: {self.eager_forwards}",
            *self.notes,
        ]
        lines += lines_of((layer.name, layer.text) for layer in self.layers)
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
    offload_activations: bool = False,
) -> FuseReport:
    """Rewire the decoder layers of `model` in place, after `apply_lora`.

    fusion/families has the layers that it knows (transformers' Llama, Mistral, Qwen2, Qwen3, Phi3, Granite, SmolLM3,
    Olmo2, Gemma2, Gemma3).

    q, k and v become one matrix, gate and up another, and so do their adapters, unless they are packed already. Norm
    and SwiGLU share kernels with quantization, and the residual is added by the GEMMs. Modules, parameters and
    state_dict names stay; `save_adapter`, `merge_lora` and the rest work as before.

    A plain `nn.Linear` projection becomes a `FrozenFP8Linear` on the adapters' FP8State. Its names in state_dict
    change, as with `apply_lora`. With `fp8=None` it is frozen in its dtype. The norm after the last layer becomes one
    kernel each way. Embedding and head stay as they are. `model.config.use_cache` becomes False.

    Args:
        model: holds decoder layers, all on one device, with adapters on some of their projections.
        save: what a layer keeps for backward: "full", "recompute", "fp8" or "checkpoint" (fusion/memory.py).
        memory_budget: bytes that all layers together may keep. It replaces `save` by a choice per layer, and needs
            `tokens`.
        tokens: number of tokens in a microbatch, for the budget and the report.
        shared_dropout: True draws one mask for the adapters of q, k, v, and one for gate, up. False draws one mask per
            adapter, as PEFT does, and runs a few more kernels. A packed projection has one adapter.
        attention: "auto", "cudnn", "cudnn_graph", "fp8", "flash", "efficient" or "math" (docs/attention.md). Only
            "auto" takes scores with a cap (Gemma 2). "fp8" takes long causal rows on a Hopper GPU alone.
        offload_activations: with "fp8", gate and up wait for backward in pinned host memory, and with "checkpoint" the
            layer's input does. They are copied while kernels run. A budget may then choose both forms as well.
        keep_linears: keep the `nn.Linear`s that become FP8, in full size, so that `unfuse` can put them back.

    Load the state_dict of a fused model into a fused model, or with `strict=True`. With `strict=False`, torch copies
    the FP8 values without their scales into the `nn.Linear`s of a model that is not fused, and does not notice.

    Returns:
        A FuseReport.

    Raises:
        ValueError, TypeError: there is no decoder layer, or one cannot be fused. The message names the layer and why.
            Or `context_parallel` or `pipeline_parallel` was called on the model. Both have to come after `fuse`.
        RuntimeError: the memory of the FP8 state is pinned by a graph.

    No exception leaves a change behind, not even a later one, for example when the device is full.
    """
    if save not in SAVE:
        raise ValueError(f"save must be one of {list(SAVE)}, found {save!r}")
    forms = OFFLOADED if offload_activations else SAVE
    if memory_budget is None and offload_activations:
        save += AWAY
        if save not in forms:
            raise ValueError(
                'offload_activations needs save="fp8" or "checkpoint", or a memory_budget, found '
                f'save="{save.removesuffix(AWAY)}"'
            )
    attention_backends.check(attention)
    refuse(model, "fuse", ())
    if memory_budget is not None and tokens is None:
        raise ValueError(
            f"memory_budget = {memory_budget} needs tokens, the tokens of a microbatch"
        )
    layers = decoder_layers(model, fused=False)
    options = Options(attention, shared_dropout, keep_linears)
    with all_or_nothing(model):
        adapter = _an_adapter(model)
        state = adapter.fp8_state
        described = describe_layers(layers)
        check_layers(described, adapter, shared_dropout)
        _check_attention(described, attention)
        element = described[0].norm_weight.element_size()
        in_fp8 = attention == attention_backends.FP8
        kind = state is not None, in_fp8, adapter.block_scaling is not None
        sizes = [LayerSize.of(layer, *kind) for layer in described]
        modes = [save] * len(sizes)
        if memory_budget is not None:
            modes = fit(sizes, memory_budget, tokens or 1, element, forms)
        parts = rewire(model, described, adapter, modes, options)
    rows = [
        LayerReport(
            layer.path,
            layer.spec.layer,
            mode,
            size.saved_bytes(mode, tokens or 1, element),
            tuple(p.name for p in layer.projections if p.is_plain),
        )
        for layer, mode, size in zip(described, modes, sizes, strict=True)
    ]
    off = bool(changed(model).use_cache)
    notes = ("model.config.use_cache is False from now on",) if off else ()
    return FuseReport(rows, tokens or 1, element, attention, sizes, parts, notes)


def unfuse(model: nn.Module) -> None:
    """Undo `fuse`: the layers run their own forward, and every projection owns its memory again.

    A projection that `fuse` turned into a FrozenFP8Linear stays one unless `keep_linears` was given. A kept
    `nn.Linear` comes back, in the layer's dtype and on its device, if the FrozenFP8Linear still holds what was made of
    it. Otherwise it is dropped, and a warning names it.

    FP8 histories that nothing has written since `fuse` are restored. Otherwise each member of a group gets the group's
    history of x, and its history of dy starts empty. An exception leaves the model fused.

    Raises:
        ValueError: `model` is not fused, or `context_parallel` or `pipeline_parallel` was called on it since.
        RuntimeError: `parallelize` or `shard_base` was.
    """
    refuse(model, "unfuse")
    stale = unwire(model)
    if stale:
        warnings.warn(
            f"{folded(stale)} stay FrozenFP8Linears: they hold another weight than the nn.Linears that fuse kept, "
            "which are dropped",
            RuntimeWarning,
            stacklevel=2,
        )


def _check_attention(layers: Sequence[LayerDescription], attention: str) -> None:
    """Refuse a named backend for capped scores, which "auto" alone computes, and FP8 where it cannot run."""
    for layer in layers:
        if attention != "auto" and (cap := layer.spec.cap_of(layer.module)) is not None:
            raise ValueError(
                f'{layer.path} caps attention\'s scores at {cap}: attention must be "auto", found {attention!r}'
            )
        if attention == attention_backends.FP8:
            device = next(layer.module.parameters()).device
            if why := fp8_attention.why_not_here(device, layer.heads.dim):
                raise ValueError(f"{layer.path} has no attention={attention!r}: {why}; try 'auto'")


def _an_adapter(model: nn.Module) -> LoRALinear:
    """The first adapter of `model`. Adapters that were made one by one share one FP8State from now on.

    Raises:
        ValueError: there is no adapter, or they cannot share one FP8State.
    """
    adapters = list(adapted(model))
    if not adapters:
        raise ValueError(
            f"{type(model).__name__} has no LoRALinear: call apply_lora first, or, with PEFT, register or patch of "
            "lorakernels.integrations.peft"
        )
    share_state(frozen_layers(model))
    if any(m.fp8_state is not adapters[0].fp8_state for m in adapters):
        raise ValueError(f"the adapters of {type(model).__name__} must have one FP8State")
    return adapters[0]


__all__ = ["ChosenBackend", "FuseReport", "LayerReport", "fuse", "unfuse"]
