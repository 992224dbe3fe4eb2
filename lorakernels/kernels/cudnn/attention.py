# SPDX-License-Identifier: Apache-2.0
"""Causal attention by cuDNN's graphs: rows, and sequences of any lengths packed into rows, forward and backward.

    P = softmax(scale q kᵀ), out = P v; stats = log Σ exp(scale q kᵀ), fp32, is what backward reads instead of P

torch's own cuDNN backend takes no packed sequences and refuses deterministic algorithms. A graph is built once for a
`Form` and device. It reads and writes at addresses that each execution gives, in memory that torch allocated, so that
executions can be captured in a CUDA graph.

Sequences may have fewer queries than keys, which is a rank's part of packed rows: the last query sees all keys.

Packed sequences are cuDNN's "ragged" layout: sequence n begins `starts[n] ×` the row's stride elements after the
tensor's first element. Sequences without tokens have length 0. Backward of packed sequences
needs a q that is laid out as dq. cuDNN 9.19 looks for dq's fp32 sums at the offsets of q, and does not check them.
"""

from __future__ import annotations

import threading
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lorakernels.kernels.cudnn.form import FACTORS, Form, TensorId, frontend, operation


class _Graph(NamedTuple):
    built: Any
    workspace: int  # bytes


_LOCK = threading.Lock()  # of building
_GRAPHS: dict[tuple[Form, int, bool], _Graph] = {}


@cache
def _handle(device: int, thread: int) -> Any:
    with torch.cuda.device(device):
        return frontend().create_handle()


def _graph(form: Form, device: int, backward: bool) -> _Graph:
    key = form, device, backward
    graph = _GRAPHS.get(key)
    if graph is None:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"cuDNN's attention was not built before this stream was captured: run a step of {form} first"
            )
        with _LOCK, torch.cuda.device(device):
            graph = _GRAPHS.get(key)
            if graph is None:
                graph = _GRAPHS[key] = _built(form, device, backward)
    return graph


def _built(form: Form, device: int, backward: bool) -> _Graph:
    graph = operation(form, backward, handle=_handle(device, threading.get_ident()))
    mode = frontend().heur_mode
    graph.create_execution_plans([mode.A, mode.FALLBACK])
    graph.check_support()
    graph.build_plans()
    return _Graph(graph, graph.get_workspace_size())


def rounded(number: int, least: int = 1) -> int:
    """The power of two from `number` on, from `least` on."""
    return max(least, 1 << max(0, number - 1).bit_length())


def many(tokens: int) -> int:
    """At least `tokens`, at most an eighth more from 1024 on: few numbers for which graphs are built."""
    step = max(128, rounded(tokens + 1) >> 4)
    return -(-tokens // step) * step


def built() -> int:
    """The number of graphs that this process has built. They stay, since captured streams may hold their kernels."""
    return len(_GRAPHS)


def is_built(form: Form, device: torch.device) -> bool:
    """Whether the graph of forward is there."""
    return (form, device.index, False) in _GRAPHS


class Offsets(NamedTuple):
    """The lengths and first elements of packed sequences.

    Attributes:
        lengths: int32 [N], tokens of each, or [2, N], queries and keys of each.
        elements: int64 [4, N + 1]: `starts` times a row's elements in q, k and v; in out; in dk; in stats. With
            `lengths` of queries and keys, q begins where out does.
    """

    lengths: Tensor
    elements: Tensor


@cache
def _multipliers(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device=device).view(-1, 1)


def offsets_of(form: Form, starts: Tensor) -> Offsets:
    """Three small kernels, or four. `starts`: int32 [N + 1], or [2, N + 1] of queries and of keys; N ≤ form.rows:
    sequences without tokens are added at the end.

    Raises:
        RuntimeError: the stream is captured, and `form` has not run before.
    """
    device = starts.device
    prepare(form, device)  # what is cached below must not be made in a capture
    if missing := form.rows + 1 - starts.shape[-1]:
        more = starts[..., -1:].expand(*starts.shape[:-1], missing)
        starts = torch.cat((starts, more), -1)
    numbers = (form.strides[1][2], form.out[2], form.kv[2], form.heads)
    lengths = starts.diff()
    if starts.dim() == 2:
        starts = starts.flip(0).repeat(2, 1)  # of k and v, out, dk, stats
    return Offsets(lengths, starts * _multipliers(numbers, device))


def for_backward(form: Form) -> Form:
    """The form of backward, whose q lies as out does if there are packed sequences."""
    return form._replace(strides=(form.out, *form.strides[1:])) if form.tokens else form


def prepare(form: Form, device: torch.device) -> None:
    """Build the graph of forward.

    Raises:
        RuntimeError: the stream is captured, and `form` has not run before.
    """
    _graph(form, device.index, False)


def _execute(
    form: Form,
    backward: bool,
    device: torch.device,
    tensors: dict[TensorId, Tensor],
    offsets: Offsets | None,
) -> None:
    graph = _graph(form, device.index, backward)
    pointers = {int(key): t.data_ptr() for key, t in tensors.items()}
    if offsets is not None:
        first, step = offsets.elements.data_ptr(), offsets.elements.stride(0) * 8
        pointers[int(TensorId.LENGTHS)] = offsets.lengths.data_ptr()
        if form.tokens_kv:
            pointers[int(TensorId.LENGTHS_KV)] = offsets.lengths[1].data_ptr()
        for n, key in enumerate(
            (TensorId.AT_QKV, TensorId.AT_OUT, TensorId.AT_KV, TensorId.AT_STATS)
        ):
            pointers[int(key)] = first + n * step
        if not backward:
            del pointers[int(TensorId.AT_KV)]
    workspace = torch.empty(graph.workspace, dtype=torch.uint8, device=device)
    handle = _handle(device.index, threading.get_ident())
    with torch.cuda.device(device):
        frontend().set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
        graph.built.execute(pointers, workspace.data_ptr(), handle)


def forward(
    form: Form, q: Tensor, k: Tensor, v: Tensor, offsets: Offsets | None
) -> tuple[Tensor, Tensor]:
    """out [B, T, H, D], packed [B T, H, D], and stats, of q [B, H, T, D], k and v [B, Hk, T, D]."""
    tokens = q.shape[0] * q.shape[2]
    shape = (tokens,) if form.tokens else (form.rows, form.longest)
    out = q.new_empty((*shape, form.heads, form.dim))
    n = (tokens, form.heads) if form.tokens else (form.rows, form.heads, form.longest)
    stats = torch.empty(n, dtype=torch.float32, device=q.device)
    tensors = dict(zip(TensorId, (q, k, v, out, stats), strict=False))
    _execute(form, False, q.device, tensors, offsets)
    return out, stats


def forward_fp8(form: Form, data: Tensor, factors: Tensor) -> tuple[Tensor, Tensor]:
    """o8 uint8 [B, T, H, D] and stats fp32 [B, H, T] of `numerics.fp8_attention.quantize_heads`' result, in rows."""
    heads, kv = form.heads, form.kv_heads
    out = torch.empty((*data.shape[:2], heads, form.dim), dtype=torch.uint8, device=data.device)
    stats = torch.empty((form.rows, heads, form.longest), dtype=torch.float32, device=data.device)
    amaxes = torch.empty(
        2, 4, dtype=torch.float32, device=data.device
    )  # cuDNN writes them; they are not read
    q, k, v = data.split([heads, kv, kv], 2)
    tensors = dict(zip(TensorId, (q, k, v, out, stats), strict=False))
    tensors |= {TensorId.AMAX_S: amaxes[0], TensorId.AMAX_O: amaxes[1]}
    tensors |= dict(zip(FACTORS, factors.unbind(), strict=False))
    _execute(form, False, data.device, tensors, None)
    return out, stats


def backward(
    form: Form, kept: tuple[Tensor, ...], dout: Tensor, offsets: Offsets | None
) -> tuple[Tensor, Tensor, Tensor]:
    """dq as out, dk and dv [B, T, Hk, D] or [B T, Hk, D]. `kept`: q, k, v, out and stats; dout lies as out does.

    `form` is from `for_backward`; of packed sequences q lies as out does, too.
    """
    q, k, _, out, _ = kept
    dq = torch.empty_like(out)
    shape = (*out.shape[:-2], form.kv_heads, form.dim)
    if form.tokens_kv:  # keys without queries get nothing
        shape = (k.shape[0] * k.shape[2], *shape[-2:])
    dk, dv = (q.new_zeros(shape) if form.tokens_kv else q.new_empty(shape) for _ in range(2))
    tensors = dict(zip(TensorId, (*kept, dout, dq, dk, dv), strict=False))
    _execute(form, True, q.device, tensors, offsets)
    return dq, dk, dv
