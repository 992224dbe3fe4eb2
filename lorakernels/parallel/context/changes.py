# SPDX-License-Identifier: Apache-2.0
"""The changes that `context_parallel` makes to a model, so that attention runs over the ranks. They can be undone."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn

from lorakernels.fusion.families import spec_of
from lorakernels.modules.linear.lora import LoRALinear
from lorakernels.modules.linear.projections import frozen_layers, share_state
from lorakernels.modules.marks import Became, became, mark
from lorakernels.modules.model.angles import angles_by_document, document_angles
from lorakernels.parallel.context.attention import ContextAttention
from lorakernels.parallel.context.rows import OwnChunks
from lorakernels.parallel.ranks.group import Ranks
from lorakernels.state.fp8 import FP8State

ATTENTION = "lorakernels_context_parallel"  # among transformers' attention functions


class Changes:
    """Undoes attributes that were set and hooks that were registered. A deep copy is for the copied objects."""

    def __init__(self) -> None:
        # (owner, attribute, the value before; ... if there was none)
        self._before: list[tuple[Any, str, Any]] = []
        self._marked: list[tuple[nn.Module, str]] = []  # (module, field of its record)
        self._hooks: list[Any] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> Changes:
        made = memo[id(self)] = Changes()
        for owner, name, value in self._before:
            copied = copy.deepcopy(owner, memo)
            made._before.append((copied, name, value))
            if isinstance(owner, FP8State):  # a copied state has no groups
                copied.shared_over = owner.shared_over
        made._marked, made._hooks = copy.deepcopy((self._marked, self._hooks), memo)
        return made

    def put(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute."""
        self._before.append((owner, name, getattr(owner, name, ...)))
        setattr(owner, name, value)

    def mark(self, module: nn.Module, **marks: Any) -> None:
        """Mark a module that does not have these marks yet."""
        self._marked += ((module, name) for name in marks)
        mark(module, **marks)

    def hook(self, module: nn.Module, before: Any) -> None:
        """Register a forward_pre_hook with keyword arguments."""
        self._hooks.append(module.register_forward_pre_hook(before, with_kwargs=True))

    def keep(self, handles: list[Any]) -> None:
        """Record the handles of hooks that were registered elsewhere."""
        self._hooks += handles

    def undo(self) -> None:
        """Undo all changes, the last one first."""
        while self._hooks:
            self._hooks.pop().remove()
        while self._marked:
            module, field = self._marked.pop()
            mark(module, **{field: getattr(Became, field)})
        while self._before:
            owner, name, value = self._before.pop()
            if value is ...:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


def share_rows(model: Any, ranks: Ranks, layers: dict[str, nn.Module], changes: Changes) -> None:
    """Make the model's attention run over the ranks, and its adapters draw the dropout masks of this rank's tokens.

    Args:
        model: a causal language model of transformers, or one rank's stages of it.
        ranks: the ranks that share its rows.
        layers: its decoder layers; only this rank's, if it was cut into stages.
        changes: records all changes, also if an exception ends this function.
    """
    contexts: dict[str, ContextAttention] = {}
    adapters = [m for m in model.modules() if isinstance(m, LoRALinear)]
    own_chunks = OwnChunks(adapters, ranks)
    _register()
    for layer in layers.values():
        module, wanted = layer.get_submodule(spec_of(layer).attention), "auto"
        parts = became(layer).fused
        if parts is not None:
            wanted = parts.attention
        context = contexts.setdefault(wanted, ContextAttention(ranks, wanted, own_chunks.of))
        changes.mark(module, context_attention=context)
        if parts is not None:
            changes.put(parts, "context", context)  # a fused layer calls `own_chunks.of` itself
        elif adapters:
            changes.hook(module, own_chunks.before)
    for module in (m for m in model.modules() if m._parameters):
        changes.mark(module, rows_over_ranks=True)
    changes.put(model.config.get_text_config(), "_attn_implementation", ATTENTION)
    changes.keep(angles_by_document(model))
    for hook in document_angles(model):
        changes.put(hook, "to_end", None)  # ContextParallel sets it in each call
    share_state(frozen_layers(model))  # otherwise `attach` would replace these states
    states = {id(s): s for m in model.modules() if (s := getattr(m, "fp8_state", None))}
    for state in states.values():
        changes.put(state, "shared_over", (*state.shared_over, ranks.group))
    inside = {id(m) for layer in layers.values() for m in layer.modules()}
    for adapter in adapters:
        changes.put(adapter, "chunks", adapter.chunks)
        changes.put(adapter, "row0", 0)
        if id(adapter) not in inside:
            changes.hook(adapter, own_chunks.before)


def _register() -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if ATTENTION not in ALL_ATTENTION_FUNCTIONS:
        ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _attend)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: out [B, T, H, D]. It has no mask for this name, and makes none."""
    context = became(module).context_attention
    assert context is not None
    if attention_mask is not None or kwargs.get("dropout"):
        raise ValueError("attention over ranks does not support attention_mask and dropout")
    longest = kwargs.get("max_length_q") or query.shape[0] * query.shape[2] * context.size
    documents = kwargs.get("cu_seq_lens_q"), longest
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return context.attend(query, key, value, documents, scale).transpose(1, 2).contiguous(), None
