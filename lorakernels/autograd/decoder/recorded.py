# SPDX-License-Identifier: Apache-2.0
"""The nodes of a decoder layer by recorded calls (recorded/node.py), or by the ops."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lorakernels.autograd.decoder.layer import (
    MLPCall,
    MLPNode,
    NormQKVNode,
    OutputCall,
    OutputNode,
    QKVCall,
)
from lorakernels.autograd.linear.projections import Projections, RecordedProjections
from lorakernels.recorded.node import RECORDINGS, Operands, RecordedNode, run_node
from lorakernels.recorded.routing import NOT_PLAIN, OVER_RANKS, PLAIN, WATCHED, are_plain, is_plain
from lorakernels.recorded.shared import shared
from lorakernels.recorded.stand_in import Recorder, Site, column_offset
from lorakernels.values import Dropout

_TENSORS = (
    "weight",
    "scale_inv",
    "grad_scale_inv",
    "bias",
    "multiplier",
    "lora_A",
    "factors",
)


class _ProjectionsKind:
    """The forms that several Projections have in common. It is compared by identity."""

    def __init__(self, forms: Hashable) -> None:
        self.forms = forms


def recorded_projections(
    to: Projections, drawn: tuple[float, ...], params: Sequence[Tensor | None]
) -> RecordedProjections | None:
    """The tensors and addresses that recordings take from `to`.

    None over a plain base, for projections that are split over ranks, and if a tensor's class is not torch's own.

    Args:
        drawn: the dropout probability of each mask, 0 where none is drawn.
        params: the projections' parameters for autograd (`Trained` in node.py).
    """
    tensors, states = _tensors(to), (to.state_x, to.state_dy)
    if not to.in_fp8 or to.over is not None:
        return None
    if not are_plain(*states, *tensors, *params):
        return None
    forms = tuple(
        None if t is None else (t.shape, t.dtype) for t in (*tensors, *params, to.state_x)
    )
    key = (forms, to.rows, to.ranks, drawn, to.spec.numbers)
    kind = shared(_ProjectionsKind, key)
    offset = column_offset(to.spec.column)
    addresses = tuple(s.data_ptr() + offset for s in states if s is not None)
    return RecordedProjections(kind, [t for t in tensors if t is not None], addresses)


def _tensors(to: Projections) -> list[Tensor | None]:
    return [*(getattr(to, name) for name in _TENSORS), *to.weights]


class _NodeCall(NamedTuple):
    """One call of a node.

    Attributes:
        node: the autograd Function.
        tensors: its first arguments.
        call: its next argument, a dataclass.
        params: its last arguments.
        tos: the Projections in `call`, by the names of their fields.
        tables: the tensors in `call` itself, likewise.
    """

    node: Any
    tensors: tuple[Tensor | None, ...]
    call: Any
    params: list[Tensor | None]
    tos: dict[str, Projections]
    tables: dict[str, Tensor]

    def key(self, constants: tuple[Hashable, ...], flags: list[bool]) -> Hashable:
        shapes = [
            None if t is None else (t.shape, t.dtype, t.stride(), t.device)
            for t in (*self.tensors, *self.tables.values())
        ]
        kinds = [to.recorded and to.recorded.kind for to in self.tos.values()]
        return (self.node, *kinds, *shapes, *constants, *flags)

    def operands(self, recorder: Recorder) -> Operands:
        """Stand-ins for everything."""
        first = [_stand_in(recorder, t) for t in self.tensors]
        params = [_stand_in(recorder, t) for t in self.params]
        tables = {name: _stand_in(recorder, t) for name, t in self.tables.items()}
        stand_ins, states, sites = [*first, *params, *tables.values()], [], 0
        tos = {}
        for name, to in self.tos.items():
            tensors = [_stand_in(recorder, t) for t in _tensors(to)]
            masks: list[Dropout | None] = []
            for mask in to.masks:
                if mask is None:
                    masks.append(None)
                else:
                    tensors.append(_stand_in(recorder, mask.slot))
                    masks.append(mask._replace(slot=tensors[-1], site=Site(sites)))
                    sites += 1
            both = (to.state_x, to.state_dy)
            columns_of_states = [None if t is None else recorder.column(t.shape) for t in both]
            states += columns_of_states
            stand_ins += tensors
            n = len(_TENSORS)
            tos[name] = to._replace(
                **dict(zip(_TENSORS, tensors[:n], strict=True)),
                weights=tuple(tensors[n : n + len(to.weights)]),
                masks=tuple(masks),
                state_x=columns_of_states[0],
                state_dy=columns_of_states[1],
                spec=to.spec.numbers.spec,
            )
        call = replace(self.call, **tables, **tos)
        places = (*range(len(first)), *range(len(first) + 1, len(first) + 1 + len(params)))
        present = [t for t in (*stand_ins, *states) if t is not None]
        columns = sum(state is not None for state in states)
        return Operands(present, (*first, call, *params), places, columns)

    def run(self, recorded: RecordedNode) -> Any:
        """The node's results, or None where it has to run by the ops."""
        seen = (*self.tensors, *self.params)
        tensors = [t for t in (*seen, *self.tables.values()) if t is not None]
        columns: tuple[int, ...] = ()
        sites: list[int] = []
        for to in self.tos.values():
            assert to.recorded is not None
            tensors += to.recorded.tensors
            columns += to.recorded.addresses
            for mask in to.masks:
                if mask is not None:
                    tensors.append(mask.slot)
                    sites.append(mask.site)
        addresses: tuple[Tensor | int, ...] = (*tensors, *columns)
        return run_node(recorded, addresses, seen, columns, tuple(sites), {"call": self.call})


def _stand_in(recorder: Recorder, tensor: Tensor | None) -> Any:
    if tensor is None:
        return None
    return recorder.tensor(tensor.shape, tensor.dtype, tensor.stride())


def _recorded(call: _NodeCall, constants: tuple[Hashable, ...]) -> Any:
    """The node's results, or None where it has to run by the ops."""
    if not is_plain() or any([to.recorded is None for to in call.tos.values()]):
        return None
    first, others = call.tensors[0], (*call.tensors[1:], *call.tables.values())
    assert first is not None
    if not first.numel() or type(first) not in PLAIN or not are_plain(*others):
        return None
    grad = torch.is_grad_enabled()
    tensors = (*call.tensors, *call.params)
    flags = [grad and t is not None and t.requires_grad for t in tensors]
    n, device = len(call.tensors), call.tensors[0].device  # type: ignore[union-attr]

    def make() -> RecordedNode:
        return RecordedNode(call.node, device, call.operands, (*flags[:n], False, *flags[n:]))

    key = call.key((*constants, device.index), flags)
    try:
        recorded = RECORDINGS[key]
    except KeyError:
        recorded = RECORDINGS.make(key, make)
    return None if recorded is None else call.run(recorded)


def ways_of_kinds() -> dict[Hashable, str]:
    """{kind of Projections that ran on a GPU: "" if recorded, or else why by the ops}."""
    ways: dict[Hashable, str] = {}
    for key, why_not in RECORDINGS.ways():
        for kind in key:
            if isinstance(kind, _ProjectionsKind):
                ways[kind] = why_not and ways.get(kind, why_not)
    return ways


def way_of(to: Projections, kinds: Mapping[Hashable, str]) -> str:
    """ "" if a node is recorded, or else why it ran by the ops. `kinds`: `ways_of_kinds()`."""
    if to.over is not None:
        return OVER_RANKS
    return NOT_PLAIN if to.recorded is None else kinds.get(to.recorded.kind, WATCHED)


def norm_qkv(
    h: Tensor,
    norm: Tensor | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    call: QKVCall,
    params: list[Tensor | None],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q [B, H, T, D], k and v [B, Hk, T, D] after RoPE, and h [B, T, K] itself. `params`: as `Trained` lists them."""
    results = None
    if h.is_cuda:
        h = h.contiguous()
        tables = {"cos": call.cos, "sin": call.sin}
        made = _NodeCall(
            NormQKVNode, (h, norm, q_norm, k_norm), call, params, {"to": call.to}, tables
        )
        results = _recorded(made, (call.eps, call.heads, call.kv_heads, call.save))
    if results is None:
        results = NormQKVNode.apply(h, norm, q_norm, k_norm, call, *params)
    q, k, v, h = results
    return q, k, v, h


def output(out: Tensor, residual: Tensor, call: OutputCall, params: list[Tensor | None]) -> Tensor:
    """residual [B, T, K] + o(out [B, H, T, D]). `params`: as `Trained` lists them.

    With `call.adds=False` the residual gives the shape and dtype alone, and has no gradient. With `call.bytes_` it runs
    by the ops.
    """
    y: Tensor | None = None
    if out.is_cuda and call.bytes_ is None:
        # mostly no copy: attention wrote it so
        out = out.transpose(1, 2).contiguous().transpose(1, 2)
        made = _NodeCall(OutputNode, (out, residual), call, params, {"to": call.to}, {})
        y = _recorded(made, (call.save, call.adds))
    return OutputNode.apply(out, residual, call, *params) if y is None else y


def mlp(h: Tensor, norm: Tensor | None, call: MLPCall, params: list[Tensor | None]) -> Tensor:
    """h [B, T, K] + down(act(gate) ⊙ up) of RMSNorm(h). `params`: of gate and up, then of down.

    Where gate and up are kept away from the node, or act is no kernel of ours, it runs by the ops.
    """
    y: Tensor | None = None
    if h.is_cuda and call.away is None and call.act == "silu":
        h = h.contiguous()
        tos = {"gate_up": call.gate_up, "down": call.down}
        made = _NodeCall(MLPNode, (h, norm), call, params, tos, {})
        y = _recorded(made, (call.eps, call.save, call.output, call.adds))
    return MLPNode.apply(h, norm, call, *params) if y is None else y
