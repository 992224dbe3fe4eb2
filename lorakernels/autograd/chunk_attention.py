# SPDX-License-Identifier: Apache-2.0
"""Causal attention of some chunks of a row to all keys up to each chunk's end, by kernels for squares and rectangles.

torch's kernels know one causal form, of as many queries as keys. So a chunk that begins at b attends twice: causally to
its own keys, and to the b keys before them without a mask. The two meet by their logsumexps, in fp32:

    l = log(exp l₁ + exp l₂)      out = w out₁ + (1 − w) out₂      w = exp(l₁ − l) = sigmoid(l₁ − l₂)

Backward runs each kernel's own with out and l of both, where P = exp(scale q kᵀ − l):

    dS = P ⊙ (dout vᵀ − rowsum(dout ⊙ out))

It is what ring attention does (Liu et al. 2023, arXiv 2310.01889), over keys that are all here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lorakernels.plans.once import once_differentiable


class _Kernel(NamedTuple):
    """Attention with its logsumexp.

    Attributes:
        forward: (q, k, v, causal, scale) → (out, logsumexp, what backward needs besides).
        backward: (dout, q, k, v, out, logsumexp, the rest, causal, scale) → (dq, dk, dv).
    """

    forward: Callable[..., tuple[Tensor, Tensor, Any]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


def _cudnn(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Any:
    attend = torch.ops.aten._scaled_dot_product_cudnn_attention
    out, lse, *_, seed, offset, _ = attend(q, k, v, None, True, 0.0, causal, False, scale=scale)
    return out, lse, (seed, offset)


def _cudnn_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rest: Any, *how: Any
) -> Any:
    causal, scale = how
    backward = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
    lengths = (None, None, q.shape[2], k.shape[2])
    given = (dout, q, k, v, out, lse, *rest, None, *lengths, 0.0, causal)
    return backward(*given, scale=scale)


def _cpu(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Any:
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = attend(q, k, v, 0.0, causal, scale=scale)
    return out, lse, ()


def _cpu_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rest: Any, *how: Any
) -> Any:
    causal, scale = how
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return backward(dout, q, k, v, out, lse, 0.0, causal, scale=scale)


# by the names that `choose` of attention.py returns
_KERNELS = {"cudnn": _Kernel(_cudnn, _cudnn_backward), "torch": _Kernel(_cpu, _cpu_backward)}
NAMES = frozenset(_KERNELS)


class _Range(NamedTuple):
    """The keys that a chunk attends to in one call."""

    begin: int
    end: int
    causal: bool

    def of(self, x: Tensor) -> Tensor:
        return x[:, :, self.begin : self.end]


def _ranges(begin: int, size: int) -> Iterator[_Range]:
    yield _Range(begin, begin + size, True)
    if begin:
        yield _Range(0, begin, False)


class _Chunks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, name: str, begins: tuple[int, ...], scale: float
    ) -> Tensor:
        kernel, size = _KERNELS[name], q.shape[2] // len(begins)
        batch, heads, tokens, dim = q.shape
        out = q.new_empty(batch, tokens, heads, dim).transpose(1, 2)  # as the next product reads it
        sums, rest = [], []
        parts = zip(q.split(size, 2), out.split(size, 2), begins, strict=True)
        for part, place, begin in parts:
            met: tuple[Tensor, Tensor] | None = None
            for keys in _ranges(begin, size):
                own, lse, more = kernel.forward(part, keys.of(k), keys.of(v), keys.causal, scale)
                rest.append(more)
                lse = lse.view(batch, heads, size, 1)
                met = (own, lse) if met is None else _merged(*met, own, lse)
            assert met is not None
            place.copy_(met[0])
            sums.append(met[1])
        ctx.save_for_backward(q, k, v, out, *sums)
        ctx.call, ctx.rest = (kernel, begins, scale), rest
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, *sums = ctx.saved_tensors
        (kernel, begins, scale), rest = ctx.call, iter(ctx.rest)
        size = q.shape[2] // len(begins)
        wide = torch.promote_types(q.dtype, torch.float32)
        dk, dv = (torch.zeros(x.shape, dtype=wide, device=x.device) for x in (k, v))
        dq = torch.empty_like(out)
        parts = (x.split(size, 2) for x in (dout, q, out, dq))
        for d, part, own, place, lse, begin in zip(*parts, sums, begins, strict=True):
            each = []
            for keys in _ranges(begin, size):
                shaped = lse if kernel is _KERNELS["cudnn"] else lse.squeeze(-1)
                given = (d, part, keys.of(k), keys.of(v), own, shaped, next(rest))
                dpart, *others = kernel.backward(*given, keys.causal, scale)
                each.append(dpart)
                for total, value in zip((dk, dv), others, strict=True):
                    keys.of(total).add_(value)
            place.copy_(each[0]) if len(each) == 1 else torch.add(*each, out=place)
        return dq, dk.to(k.dtype), dv.to(v.dtype), None, None, None


def _merged(one: Tensor, l1: Tensor, two: Tensor, l2: Tensor) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(one.dtype, torch.float32)
    weight = torch.sigmoid(l1 - l2).to(wide)
    return (one * weight).addcmul_(two, 1 - weight), torch.logaddexp(l1, l2)


def attend_chunks(
    name: str, q: Tensor, k: Tensor, v: Tensor, begins: tuple[int, ...], scale: float
) -> Tensor:
    """out [B, H, T, D]: each query attends to all keys of its row up to its own.

    Args:
        name: of NAMES.
        q: [B, H, T, D], equal chunks of a row one behind the other.
        k, v: [B, Hk, S, D] of the whole row. On a CPU Hk is H.
        begins: where each chunk begins in the row.
        scale: the factor of q kᵀ.
    """
    found: Tensor = _Chunks.apply(q, k, v, name, begins, scale)
    return found
