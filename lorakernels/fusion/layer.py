# SPDX-License-Identifier: Apache-2.0
"""FusedDecoderLayer: the class that `fuse` gives a transformers decoder layer. The layer's modules stay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lorakernels.autograd.attention import fp8 as fp8_attention
from lorakernels.autograd.attention import graphed as graphed_attention
from lorakernels.autograd.attention.choose import (
    FP8,
    GRAPH,
    SHORT,
    attend,
    attend_capped,
    attend_capped_packed,
    attend_packed,
    choose,
    choose_packed,
)
from lorakernels.autograd.decoder.layer import MLPCall, OutputCall, QKVCall
from lorakernels.autograd.decoder.recorded import mlp, norm_qkv, output
from lorakernels.autograd.decoder.rms_norm import rms_norm
from lorakernels.fusion.call_checks import check_call, check_documents, check_window
from lorakernels.fusion.parts import Parts
from lorakernels.values import Scaled

Attended = Callable[
    [Tensor, Tensor, Tensor], tuple[Tensor, Scaled | None]
]  # q, k, v → out, its bytes


@dataclass(frozen=True)
class _Call:
    """The arguments of one forward: one call per autograd node, with masks drawn, and the parameters for autograd."""

    qkv: QKVCall
    o: OutputCall
    mlp: MLPCall
    params: tuple[list[Tensor | None], ...]


class FusedDecoderLayer(nn.Module):
    """Mixin before a decoder layer's class. `forward` takes the arguments of that class.

    With a key-value cache, in eval, the layer's own forward runs over the same parameters. Sequences packed into rows
    may be passed as for transformers' flash attention, by `cu_seq_lens_q` and `max_length_q`. `attention_mask` is not
    read then (autograd/attention/choose.py). `cu_seq_lens_k` and `max_length_k`, if given, must equal them.

    When `torch.compile` traces a model around it, the layer is a graph break and runs as it is.
    """

    lorakernels: Any  # its record (modules/marks.py): an attribute is read faster than by a call

    def renew_derived(self) -> list[Tensor]:  # graphs/replay/derived.py
        return [x for group in parts_of(self).groups for x in group.renew()]

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Raise RuntimeError. The layer's kernels are fused already, and GraphManager saves the host their launches."""
        parts = parts_of(self)
        path = parts.qkv.first.name.rpartition(f".{parts.spec.qkv[0]}")[0]
        raise RuntimeError(
            f"{path or type(self).__name__} is fused and cannot be compiled: replay it with "
            "lorakernels.graphs.GraphManager, or unfuse the model and then compile its layers"
        )

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = False,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """[B, T, K] → [B, T, K].

        Raises:
            RuntimeError: there is a cache where gradients are computed, a module was exchanged since `fuse`, or
                autocast is to another dtype. Or torch.jit.trace records it.
            TypeError, ValueError: an argument does not fit a fused layer, or a module in it has a hook.

        A `cu_seq_lens_q` of a GPU with a document longer than `max_length_q` is a device assertion
        (autograd/attention/longest_document.py).
        """
        parts: Parts = self.lorakernels.fused
        if past_key_values is not None or kwargs.get("past_key_value") is not None:
            if self.training and torch.is_grad_enabled():
                raise RuntimeError(
                    "a fused layer trains without a key-value cache: set model.config.use_cache = False"
                )
            if parts.flat:
                raise RuntimeError(
                    "a key-value cache needs whole rows: call parallelize with sequence_parallel=False"
                )
            out: Tensor = super().forward(
                hidden_states,
                attention_mask=attention_mask,
                position_ids=position_ids,
                past_key_values=past_key_values,
                use_cache=use_cache,
                position_embeddings=position_embeddings,
                **kwargs,
            )
            return out
        hidden_states = _widened(parts, hidden_states)
        check_call(self, parts, hidden_states, attention_mask, kwargs)
        if parts.over is not None:
            parts.over.check(hidden_states)
        check_window(self, parts, hidden_states, kwargs)
        check_documents(parts, hidden_states, kwargs)
        call = _call(parts, hidden_states, position_embeddings)
        attended = partial(_attended, parts, _visible(parts, hidden_states, attention_mask, kwargs))
        if not torch.is_grad_enabled():
            return _run(parts, attended, hidden_states, call)
        if parts.offload is not None:
            return _offloaded(parts, attended, hidden_states, call)
        if parts.save == "checkpoint":
            return _checkpointed(parts, attended, hidden_states, call)
        return _run(parts, attended, hidden_states, call)


def parts_of(layer: FusedDecoderLayer) -> Parts:
    """How it runs."""
    parts: Parts = layer.lorakernels.fused
    return parts


def _widened(parts: Parts, h: Tensor) -> Tensor:
    """h in the dtype that the layer's own norms would return."""
    if parts.spec.norms_in_fp32:
        return h
    for weight in map(parts.scale, parts.norms):
        if weight is not None and weight.dtype != h.dtype:
            h = h.to(torch.promote_types(h.dtype, weight.dtype))
    return h


def _call(parts: Parts, h: Tensor, angles: tuple[Tensor, Tensor] | None) -> _Call:
    if angles is None:
        raise ValueError("position_embeddings must be (cos, sin) [1 or B, T, D], found None")
    batch, length = _whole(parts, h, angles[0])
    for name, table in zip(("cos", "sin"), angles, strict=True):
        if table.dim() != 3 or table.shape[1] != length or table.shape[0] not in (1, batch):
            raise ValueError(
                f"{name} of position_embeddings must be [1 or {batch}, {length}, D], found {list(table.shape)}"
            )
    cos, sin = (t.reshape(t.shape[:-1].numel(), t.shape[-1]).contiguous() for t in angles)
    if not parts.turns:
        cos, sin = torch.ones_like(cos), torch.zeros_like(sin)
    if parts.context is not None:
        parts.context.begin(length)
    calls, params = zip(*(group.call() for group in parts.groups), strict=True)
    qkv, o, gate_up, down = calls
    save, adds, act = parts.save, parts.adds, parts.spec.act
    whole = (batch, length) if parts.flat else None
    return _Call(
        QKVCall(qkv, parts.eps, parts.heads.query, parts.heads.key, cos, sin, save, whole),
        OutputCall(o, save, adds),
        MLPCall(gate_up, down, parts.eps, save, adds=adds, act=act),
        (params[0], params[1], [*params[2], *params[3]]),
    )


def _whole(parts: Parts, h: Tensor, cos: Tensor) -> tuple[int, int]:
    """(B, T) of all tokens. If ranks split the rows, the shape [M / ranks, 1, K] of h does not tell B and T."""
    if not parts.flat:
        return h.shape[0], h.shape[1]
    length = cos.shape[-2]
    return h.shape[:2].numel() * parts.spread // length, length


class _Visible(NamedTuple):
    """The tokens that a token attends to: by a mask, or all up to itself, in its row or in its packed sequence."""

    mask: Tensor | None
    causal: bool
    starts: Tensor | None
    longest: int


def _visible(parts: Parts, h: Tensor, mask: Tensor | None, kwargs: dict[str, Any]) -> _Visible:
    starts, tokens = kwargs.get("cu_seq_lens_q"), parts.tokens(h)
    if starts is not None:
        return _Visible(None, True, starts, kwargs.get("max_length_q") or tokens)
    causal = (
        mask is None and (h.shape[1] > 1 or parts.flat) and kwargs.get("is_causal") is not False
    )
    return _Visible(mask, causal, None, tokens)


def _run(parts: Parts, attended: Attended, h: Tensor, call: _Call) -> Tensor:
    first, second = map(parts.scale, parts.norms)
    of_q, of_k = map(parts.scale, parts.head_norms)
    q, k, v, residual = norm_qkv(h, first, of_q, of_k, call.qkv, call.params[0])
    out, bytes_ = attended(q, k, v)
    del q, k, v  # with bytes_, backward needs neither them nor out
    to_o = call.o if bytes_ is None else replace(call.o, bytes_=bytes_)
    result = output(out, residual if to_o.adds else residual.detach(), to_o, call.params[1])
    del out
    if to_o.adds:
        return mlp(result, second, call.mlp, call.params[2])
    h = _added(parts, residual, result, parts.post_norms[0])
    return _added(parts, h, mlp(h, second, call.mlp, call.params[2]), parts.post_norms[1])


def _added(parts: Parts, residual: Tensor, branch: Tensor, norm: nn.Module | None) -> Tensor:
    """residual + f RMSNorm(branch), or residual + f branch."""
    weight = parts.scale(norm)
    normed = branch if weight is None else rms_norm(branch, weight, parts.eps)
    return torch.add(residual, normed, alpha=parts.factor)


def _checkpointed(parts: Parts, attended: Attended, h: Tensor, call: _Call) -> Tensor:
    again, first = _recomputed(parts, call), [call]

    def body(x: Tensor) -> Tensor:
        return _run(parts, attended, x, first.pop() if first else again)

    out: Tensor = checkpoint(body, h, use_reentrant=False, preserve_rng_state=False)
    return out


def _offloaded(parts: Parts, attended: Attended, h: Tensor, call: _Call) -> Tensor:
    """As `_checkpointed`, or as "fp8". Nothing here holds h on the device until backward."""
    assert parts.offload is not None
    visit = parts.offload.visit(h)
    if parts.save == "checkpoint":
        kept, again, grad = visit.keep(h), _recomputed(parts, call), h.requires_grad
        first = [(visit.joined(h), call)]

        def body(_: Tensor) -> Tensor:
            h, now = first.pop() if first else (kept.bring().detach().requires_grad_(grad), again)
            return _run(parts, attended, h, now)

        # an empty tensor tells `checkpoint` the kind of device
        device = h.new_empty(0)
        out: Tensor = checkpoint(body, device, use_reentrant=False, preserve_rng_state=False)
    else:
        call = replace(call, mlp=replace(call.mlp, away=visit))
        out = _run(parts, attended, visit.joined(h), call)
    visit.end()
    return out


def _recomputed(parts: Parts, call: _Call) -> _Call:
    """`call` for a recomputation. It leaves out down's result, unless a norm behind it keeps that for backward."""
    if parts.post_norms[1] is not None:
        return call
    return replace(call, mlp=replace(call.mlp, output=False))


def _attended(
    parts: Parts, visible: _Visible, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Scaled | None]:
    """out [B, H, T, D], and with FP8 attention the same in e4m3 (`AttendedRows.bytes_`)."""
    mask, causal, starts, longest = visible
    if parts.context is not None:
        if mask is not None or not causal:
            raise ValueError("attention over ranks is causal: attention_mask must be None")
        return parts.context.attend(q, k, v, (starts, longest), parts.heads.scale), None
    if parts.cap is not None:
        parts.chosen[("capped",)] = "eager"
        how = parts.heads.scale, parts.cap
        if starts is not None:
            return attend_capped_packed(q, k, v, starts, *how), None
        return attend_capped(q, k, v, mask, causal, *how), None
    shape = None if mask is None else mask.shape
    exact = torch.are_deterministic_algorithms_enabled()
    short = longest <= SHORT
    key = (q.shape, k.shape, q.dtype, shape, causal, starts is None, short, q.requires_grad, exact)
    name = parts.chosen.get(key)
    if starts is not None:
        if name is None:
            name = parts.choose(key, choose_packed(parts.attention, q, k, v, short))
        how = longest, parts.heads.scale
        if name == GRAPH and graphed_attention.has_no_room(q, k, v, len(starts) - 1, *how):
            name = parts.choose((*key, "no room"), choose_packed(parts.attention, q, k, v, short))
        return attend_packed(name, q, k, v, starts, *how), None
    if name is None:
        name = parts.choose(key, choose(parts.attention, q, k, v, mask, causal))
    if name == FP8:
        return fp8_attention.attend_rows(q, k, v, parts.heads.scale)
    return attend(name, q, k, v, mask, causal, parts.heads.scale), None


_classes: dict[type, type] = {}


def fused_class(kind: type[nn.Module]) -> type[nn.Module]:
    """The class `Fused<kind>`, whose bases are FusedDecoderLayer and `kind`."""
    if kind not in _classes:
        name = f"Fused{kind.__name__}"
        reason = (
            f"{name} is fused already and is not traced; unfuse the model to compile its layers"
        )
        members = {
            "__reduce_ex__": _reduce_fused,
            "__module__": kind.__module__,
            "forward": torch.compiler.disable(FusedDecoderLayer.forward, reason=reason),
        }
        _classes[kind] = type(name, (FusedDecoderLayer, kind), members)
    return _classes[kind]


def _reduce_fused(self: nn.Module, _: Any) -> tuple[Any, ...]:
    """For pickle and deepcopy: loading makes the class again, as no module defines it."""
    return _new_fused, (original_class(self),), self.__dict__


def original_class(layer: nn.Module) -> type[nn.Module]:
    """The decoder layer's class before `fuse`."""
    classes = type(layer).__mro__
    kind: type[nn.Module] = classes[classes.index(FusedDecoderLayer) + 1]
    return kind


def _new_fused(kind: type[nn.Module]) -> nn.Module:
    new = fused_class(kind)
    module: nn.Module = new.__new__(new)
    return module
