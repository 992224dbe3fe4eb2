# SPDX-License-Identifier: Apache-2.0
"""Causal attention of two chunks of a row to all keys up to each chunk's end, by kernels for squares and rectangles.

torch's kernels know one causal form, of as many queries as keys. Chunks of C tokens begin at b₁ < b₂. So there are
up to three calls of kernels:

    both chunks attend causally to their own 2C keys, as the second chunk's keys follow the first chunk's
    both chunks attend without a mask to the b₁ keys before both
    the second chunk attends without a mask to the b₂ − b₁ − C keys between them

Each key is in one of these. Their size in all is C² + C (b₁ + b₂), which is equal for the two chunks of each rank. A
rank needs two calls if it has the first chunk, or if its chunks are neighbours. The results of two calls for a query
are merged by their logsumexps, in fp32:

    l = log(exp l₁ + exp l₂)      out = w out₁ + (1 − w) out₂      w = exp(l₁ − l) = sigmoid(l₁ − l₂)

On a GPU one kernel merges, and rounds out once (kernels/triton/merge_attention.py). On a CPU torch's ops do. If a query
has three calls, out is rounded twice.

Backward runs each kernel's own with out and l of all, where P = exp(scale q kᵀ − l):

    dS = P ⊙ (dout vᵀ − rowsum(dout ⊙ out))

Ring attention does the same (Liu et al. 2023, arXiv 2310.01889). Here a rank has all keys at once. The parts of dq
are added in q's dtype. dk and dv stay apart, as the kernels return them: parallel/context/attention.py adds them over
ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lorakernels.autograd.attention.choose import expanded
from lorakernels.kernels.triton.chunk_rows import KeyGradients
from lorakernels.kernels.triton.merge_attention import merge_attention


class _Kernel(NamedTuple):
    """Attention with its logsumexp.

    Attributes:
        forward: (q, k, v, causal, scale) → (out, logsumexp, what backward needs besides).
        backward: (dout, q, k, v, out, logsumexp, the rest, causal, scale) → (dq, dk, dv).
        merge: (out₁, l₁, out₂, l₂): out₁ becomes out, and l₁ l.
    """

    forward: Callable[..., tuple[Tensor, Tensor, Any]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]
    merge: Callable[[Tensor, Tensor, Tensor, Tensor], None]


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
    arguments = (dout, q, k, v, out, lse, *rest, None, *lengths, 0.0, causal)
    return backward(*arguments, scale=scale)


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


def _merge(one: Tensor, l1: Tensor, two: Tensor, l2: Tensor) -> None:
    wide = torch.promote_types(one.dtype, torch.float32)
    weight = torch.sigmoid(l1 - l2).to(wide).unsqueeze(-1)
    one.copy_((one * weight).addcmul_(two, 1 - weight))
    l1.copy_(torch.logaddexp(l1, l2))


# by the names that `choose` returns
_KERNELS = {
    "cudnn": _Kernel(_cudnn, _cudnn_backward, merge_attention),
    "torch": _Kernel(_cpu, _cpu_backward, _merge),
}
NAMES = frozenset(_KERNELS)


class ChunkCall(NamedTuple):
    """How two chunks attend.

    Attributes:
        name: of NAMES.
        begins: where the chunks begin in their row, the first one first.
        scale: the factor of q kᵀ.
    """

    name: str
    begins: tuple[int, int]
    scale: float

    def others(self, size: int) -> list[tuple[int, slice]]:
        """(the first query, the keys) of each call for keys that are not the chunks' own. A chunk has `size` tokens."""
        first, second = self.begins
        ranges = [(0, slice(0, first)), (size, slice(first + size, second))]
        return [(query, keys) for query, keys in ranges if keys.start < keys.stop]


class AttendedChunks(NamedTuple):
    """The result of `attend_chunks`.

    Attributes:
        out: [B, H, 2C, D]; [B, 2C, H, D] in memory, as the next product reads it.
        lse: fp32 [B, H, 2C], the logsumexps.
        rest: the other results of each kernel call that backward needs.
    """

    out: Tensor
    lse: Tensor
    rest: list[Any]


Keys = tuple[Tensor, Tensor]  # and values


def attend_chunks(call: ChunkCall, q: Tensor, chunk_keys: Keys, row_keys: Keys) -> AttendedChunks:
    """Each query attends to all keys of its row up to its own. There is no gradient: `chunk_gradients` computes it.

    Args:
        call: how they attend.
        q: [B, H, 2C, D], two chunks of a row, the first one first.
        chunk_keys: k and v [B, Hk, 2C, D] of the same tokens.
        row_keys: k and v [B, Hk, S, D] of the row.
    """
    kernel, tokens = _KERNELS[call.name], q.shape[2]
    out, lse, more = kernel.forward(q, *chunk_keys, True, call.scale)
    out, lse, rest = _by_token(out), lse.view(q.shape[:3]), [more]
    for query, keys in call.others(tokens // 2):
        k, v = (x[:, :, keys] for x in row_keys)
        two, l2, more = kernel.forward(q[:, :, query:], k, v, False, call.scale)
        kernel.merge(out[:, :, query:], lse[:, :, query:], two, l2.view(two.shape[:3]))
        rest.append(more)
    return AttendedChunks(out, lse, rest)


def chunk_gradients(
    call: ChunkCall,
    dout: Tensor,
    q: Tensor,
    chunk_keys: Keys,
    row_keys: Keys,
    attended: AttendedChunks,
) -> tuple[Tensor, list[KeyGradients]]:
    """(dq [B, H, 2C, D], dk and dv of each range of keys that a chunk attended to). No key is in two of them.

    dk and dv are in the dtype of k, or in fp32 at least where heads share keys on a CPU.
    """
    kernel, size = _KERNELS[call.name], q.shape[2] // 2
    out, lse, (more, *rest) = attended
    shape = *q.shape[:3], 1
    dq, dk, dv = kernel.backward(dout, q, *chunk_keys, out, lse.view(shape), more, True, call.scale)
    dq = _by_token(dq)
    pairs = zip(call.begins, dk.split(size, 2), dv.split(size, 2), strict=True)
    key_gradients = [KeyGradients(*pair) for pair in pairs]
    for (query, keys), more in zip(call.others(size), rest, strict=True):
        k, v = (x[:, :, keys] for x in row_keys)
        d, part, mine = (x[:, :, query:] for x in (dout, q, out))
        sums = lse[:, :, query:].contiguous().unsqueeze(-1)
        dpart, dk, dv = kernel.backward(d, part, k, v, mine, sums, more, False, call.scale)
        dq[:, :, query:].add_(dpart)
        key_gradients.append(KeyGradients(keys.start, dk, dv))
    return dq, key_gradients


def _by_token(x: Tensor) -> Tensor:
    """[B, H, T, D] that lies as [B, T, H, D]. Kernels' results lie as q does, and then nothing is copied."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)
