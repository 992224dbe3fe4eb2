# SPDX-License-Identifier: Apache-2.0
"""Causal attention of some chunks of a row to all keys up to each chunk's end, by kernels for squares and rectangles.

torch's kernels know one causal form, of as many queries as keys. So a chunk that begins at b attends twice: causally to
its own keys, and to the b keys before them without a mask. The two meet by their logsumexps, in fp32:

    l = log(exp l₁ + exp l₂)      out = w out₁ + (1 − w) out₂      w = exp(l₁ − l) = sigmoid(l₁ − l₂)

On a GPU one kernel does it, and rounds out once (kernels/triton/merge_attention.py). On a CPU torch's ops do.

Backward runs each kernel's own with out and l of both, where P = exp(scale q kᵀ − l):

    dS = P ⊙ (dout vᵀ − rowsum(dout ⊙ out))

It is what ring attention does (Liu et al. 2023, arXiv 2310.01889), over keys that are all here. dq of both is added in
q's dtype. dk and dv are left apart, as the kernels gave them: context_attention.py of parallel adds them over ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lorakernels.autograd.attention import expanded
from lorakernels.kernels.triton.chunk_rows import Gradients
from lorakernels.kernels.triton.merge_attention import merge_attention


class _Kernel(NamedTuple):
    """Attention with its logsumexp.

    Attributes:
        forward: (q, k, v, causal, scale) → (out, logsumexp, what backward needs besides).
        backward: (dout, q, k, v, out, logsumexp, the rest, causal, scale) → (dq, dk, dv).
        merge: (out₁, l₁, out₂, l₂, where out goes) → l.
    """

    forward: Callable[..., tuple[Tensor, Tensor, Any]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]
    merge: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


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
    out, lse = attend(q, *expanded("efficient", q, k, v), 0.0, causal, scale=scale)
    return out, lse, ()


def _cpu_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rest: Any, *how: Any
) -> Any:
    causal, scale = how
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    heads = expanded("efficient", q, k, v)
    dq, *wide = backward(dout, q, *heads, out, lse.squeeze(-1), 0.0, causal, scale=scale)
    if heads[0] is not k:  # in fp32 at least
        sums = torch.promote_types(k.dtype, torch.float32)
        wide = [x.unflatten(1, (k.shape[1], -1)).sum(2, dtype=sums) for x in wide]
    return dq, *wide


def _merge(one: Tensor, l1: Tensor, two: Tensor, l2: Tensor, out: Tensor) -> Tensor:
    wide = torch.promote_types(one.dtype, torch.float32)
    weight = torch.sigmoid(l1 - l2).to(wide)
    out.copy_((one * weight).addcmul_(two, 1 - weight))
    return torch.logaddexp(l1, l2)


# by the names that `choose` of attention.py returns
_KERNELS = {
    "cudnn": _Kernel(_cudnn, _cudnn_backward, merge_attention),
    "torch": _Kernel(_cpu, _cpu_backward, _merge),
}
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


class Call(NamedTuple):
    """How chunks attend.

    Attributes:
        name: of NAMES.
        begins: where each chunk begins in its row.
        scale: the factor of q kᵀ.
    """

    name: str
    begins: tuple[int, ...]
    scale: float


class Attended(NamedTuple):
    """What `attend_chunks` computed.

    Attributes:
        out: [B, H, T, D]; [B, T, H, D] in memory, as the next product reads it.
        sums: of each chunk the logsumexps [B, H, C, 1].
        rest: what backward needs besides, of each call of a kernel.
    """

    out: Tensor
    sums: list[Tensor]
    rest: list[Any]


def attend_chunks(call: Call, q: Tensor, k: Tensor, v: Tensor) -> Attended:
    """Each query attends to all keys of its row up to its own. There is no gradient: `chunk_gradients` computes it.

    Args:
        call: how.
        q: [B, H, T, D], equal chunks of a row one behind the other.
        k, v: [B, Hk, S, D] of the whole row.
    """
    kernel, size = _KERNELS[call.name], q.shape[2] // len(call.begins)
    batch, heads, tokens, dim = q.shape
    out = q.new_empty(batch, tokens, heads, dim).transpose(1, 2)
    sums, rest = [], []
    for part, place, begin in zip(q.split(size, 2), out.split(size, 2), call.begins, strict=True):
        met = list[tuple[Tensor, Tensor]]()
        for keys in _ranges(begin, size):
            given = part, keys.of(k), keys.of(v), keys.causal, call.scale
            own, lse, more = kernel.forward(*given)
            met.append((own, lse.view(batch, heads, size, 1)))
            rest.append(more)
        (own, lse), *before = met
        if before:
            lse = kernel.merge(own, lse, *before[0], place)
        else:
            place.copy_(own)
        sums.append(lse)
    return Attended(out, sums, rest)


def chunk_gradients(
    call: Call, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, attended: Attended
) -> tuple[Tensor, list[Gradients]]:
    """(dq [B, H, T, D], what has to be added for dk and dv: those of each range of keys that a chunk attended to).

    dk and dv are in the dtype of k, or in fp32 at least where heads share keys on a CPU.
    """
    kernel, size = _KERNELS[call.name], q.shape[2] // len(call.begins)
    dq, others, rest = torch.empty_like(attended.out), list[Gradients](), iter(attended.rest)
    parts = (x.split(size, 2) for x in (dout, q, attended.out, dq))
    for d, part, own, place, lse, begin in zip(*parts, attended.sums, call.begins, strict=True):
        each = []
        for keys in _ranges(begin, size):
            given = d, part, keys.of(k), keys.of(v), own, lse, next(rest)
            dpart, dk, dv = kernel.backward(*given, keys.causal, call.scale)
            each.append(dpart)
            others.append(Gradients(keys.begin, dk, dv))
        place.copy_(each[0]) if len(each) == 1 else torch.add(*each, out=place)
    return dq, others
