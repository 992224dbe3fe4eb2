# SPDX-License-Identifier: Apache-2.0
"""Causal attention through cuDNN's graphs (kernels/cudnn/attention.py): which tensors they take, and autograd's node.

torch's own cuDNN backend takes neither packed sequences nor deterministic algorithms; these graphs take both. They need
the package nvidia-cudnn-frontend, which has no kernels: those are of the cuDNN that torch has loaded.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from lorakernels.device import capability_of
from lorakernels.kernels.cudnn import attention as kernel
from lorakernels.kernels.cudnn import form as described
from lorakernels.recorded.once import once_differentiable

HALVES = (torch.bfloat16, torch.float16)
WIDTHS = (64, 128)  # D that were measured
ALIGNED = 16  # bytes. cuDNN computes wrong values from rows that begin elsewhere, and does not refuse them
MOST = 512  # graphs, two for each shape of rows. Each takes 0.1 to 0.7 s of the host and stays
BUDGET = 64  # deterministic backwards may take one 64th of a GPU's memory


def why_not(q: Tensor, k: Tensor, v: Tensor, packed: bool) -> str:
    """Why cuDNN's graphs do not take these tensors, causal and without a mask; "" if they do.

    Args:
        q: [B, H, T, D].
        k, v: [B, Hk, T, D].
        packed: whether sequences are packed into the rows.
    """
    return (
        why_not_here(q.device)
        or _why_not_shapes(q, k, v)
        or _why_not_strides(q, k, v, packed)
        or _why_not_size(q, packed)
    )


def why_not_segments(q: Tensor, k: Tensor, v: Tensor) -> str:
    """Why they do not take some of the queries with all keys (choose.py's `Segments`); "" if they do.

    Args:
        q: [B, H, T, D].
        k, v: [B, Hk, S, D].
    """
    return (
        why_not_here(q.device)
        or ("deterministic algorithms are on" if _deterministic() else "")
        or ("k and v have fewer tokens than q" if k.shape[2] < q.shape[2] else "")
        or _why_not_shapes(q, k[:, :, : q.shape[2]], v[:, :, : q.shape[2]])
        or _why_not_strides(k, k, v, True)
        or _why_not_size(q, True)
    )


def why_not_copies(q: Tensor, k: Tensor, v: Tensor) -> str:
    """As `why_not`, for rows on a GPU that has cuDNN's graphs, and for copies that lie as cuDNN takes them."""
    return _why_not_shapes(q, k, v) or _why_not_size(q, False)


def _why_not_size(q: Tensor, packed: bool) -> str:
    return (
        ("rows have one token" if q.shape[2] == 1 and not packed else "")
        or ("" if packed else _why_not_memory(q.shape[0], q.shape[1], q.shape[2], q.device))
        or ("" if kernel.built() < MOST else f"graphs for {MOST // 2} shapes are built already")
    )


def why_not_here(device: torch.device) -> str:
    """Why this machine has none of cuDNN's graphs for `device`, "" if it has."""
    if device.type != "cuda":
        return "cuDNN needs a GPU"
    if capability_of(device)[0] != 9:
        return "cuDNN's graphs were tried on Hopper GPUs alone"
    return why_not_installed()


@cache
def why_not_installed() -> str:
    try:
        package = str(described.frontend().__version__)
        version = described.frontend().backend_version()
    except ImportError:
        return "nvidia-cudnn-frontend is not installed: pip install lorakernels[cudnn]"
    except Exception as error:  # no library, or one that lacks a symbol
        return f"nvidia-cudnn-frontend finds no cuDNN: {error}"
    if not package.startswith(described.TRIED):
        return f"nvidia-cudnn-frontend {package} was not tried: pip install lorakernels[cudnn]"
    return (
        "" if version >= described.OLDEST else f"cuDNN {version} is older than {described.OLDEST}"
    )


def _why_not_shapes(q: Tensor, k: Tensor, v: Tensor) -> str:
    if q.dtype not in HALVES:
        return f"q is {q.dtype}, not bf16 or fp16"
    if k.shape != v.shape or q.shape[0] != k.shape[0] or q.shape[2:] != k.shape[2:]:
        return f"k {tuple(k.shape)} and v {tuple(v.shape)} do not have q's rows, tokens and width {tuple(q.shape)}"
    if q.shape[1] % k.shape[1]:
        return f"{q.shape[1]} heads of q do not divide among {k.shape[1]} of k"
    if q.shape[3] not in WIDTHS:
        return f"heads have {q.shape[3]} columns, not {' or '.join(map(str, WIDTHS))}"
    return "" if q.numel() else "there are no tokens"


def _why_not_strides(q: Tensor, k: Tensor, v: Tensor, packed: bool) -> str:
    for name, x in zip("qkv", (q, k, v), strict=True):
        if x.stride(3) != 1:
            return f"{name}'s columns are {x.stride(3)} elements apart"
        if any(x.stride(i) * x.element_size() % ALIGNED for i in range(3) if x.shape[i] > 1):
            return (
                f"{name} has strides {x.stride()}, of which one is no multiple of {ALIGNED} bytes"
            )
        if packed and x.shape[0] > 1 and x.stride(0) != x.shape[2] * x.stride(2):
            return f"{name}'s rows do not follow each other in memory"
    if packed and not q.stride(2) == k.stride(2) == v.stride(2):
        return "q, k and v are not columns of one matrix"
    return ""


def _deterministic() -> bool:
    return torch.are_deterministic_algorithms_enabled()


def _why_not_memory(rows: int, heads: int, tokens: int, device: torch.device) -> str:
    """Why the memory of a deterministic backward is too much. `tokens`: of a row, or of the longest sequence."""
    if not _deterministic():
        return ""
    needed, most = 2 * rows * heads * tokens**2, _memory(device) // BUDGET
    if needed <= most:
        return ""
    return (
        f"cuDNN's deterministic backward takes {needed:,} bytes for {rows} sequences of up to {tokens} tokens, "
        f"more than {most:,}"
    )


def _memory(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).total_memory


def check_addresses(**tensors: Tensor) -> None:
    """Raises ValueError if one does not begin at a multiple of ALIGNED bytes."""
    for name, x in tensors.items():
        if x.data_ptr() % ALIGNED:
            raise ValueError(
                f"{name} begins {x.data_ptr() % ALIGNED} bytes behind a multiple of {ALIGNED}, where cuDNN computes "
                "wrong values: pass a copy"
            )


def _form(q: Tensor, k: Tensor, v: Tensor, sequences: tuple[int, int] | None, scale: float) -> Any:
    """`sequences`: how many, and the longest; None for rows."""
    strides = tuple((x.stride(0), x.stride(1), x.stride(2)) for x in (q, k, v))
    rows, longest = sequences or (q.shape[0], q.shape[2])
    return described.Form(
        rows,
        longest,
        kernel.many(q.shape[0] * q.shape[2]) if sequences else 0,
        q.shape[1],
        k.shape[1],
        q.shape[3],
        tuple((longest * s[2], *s[1:]) for s in strides) if sequences else strides,
        q.dtype,
        scale,
        _deterministic(),
    )


def _packed_form(
    q: Tensor, k: Tensor, v: Tensor, n: int, longest: int | tuple[int, int], scale: float
) -> described.Form:
    """Of n sequences with at most `longest` tokens, or of n segments with at most so many queries and keys."""
    tokens = [kernel.many(x.shape[0] * x.shape[2]) for x in (q, k)]
    both = (longest, longest) if isinstance(longest, int) else longest
    most = [min(kernel.rounded(one, 128), all_) for one, all_ in zip(both, tokens, strict=True)]
    form: described.Form = _form(q, k, v, (kernel.rounded(n), most[0]), scale)
    if isinstance(longest, int):
        return form
    strides = tuple((most[1] * x.stride(2), x.stride(1), x.stride(2)) for x in (k, v))
    return form._replace(strides=(form.out, *strides), longest_kv=most[1], tokens_kv=tokens[1])


def has_no_room(
    q: Tensor, k: Tensor, v: Tensor, n: int, longest: int | tuple[int, int], scale: float
) -> bool:
    """Whether this process has `MOST` graphs, and none for these tensors.

    Args:
        q, k, v, scale: as for `attend_sequences`, or for `attend_segments`.
        n: sequences, or segments.
        longest: what `attend_sequences`, or `attend_segments`, takes.
    """
    if kernel.built() < MOST:
        return False
    return not kernel.is_built(_packed_form(q, k, v, n, longest, scale), q.device)


def attend_rows(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """out [B, H, T, D]: each token attends to its row up to itself. The tensors are such that `why_not` is "".

    Raises:
        ValueError: a tensor does not begin at a multiple of 16 bytes.
        RuntimeError: the stream is captured, and cuDNN has not run with these shapes before.
    """
    out: Tensor = _GraphedAttention.apply(q, k, v, None, _form(q, k, v, None, scale))
    return out


def attend_sequences(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int, scale: float
) -> Tensor:
    """As `attend_rows`, each token to its own sequence. `starts`: int32 [N + 1], on the device, read there only.

    Raises ValueError, too, under deterministic algorithms if N sequences of `longest` need too much.

    cuDNN's graph is for at most so many sequences and tokens. N and `longest` are rounded up to powers of two, and
    tokens by an eighth at most, so that few graphs serve any documents. Sequences without tokens are added behind the
    last one.
    """
    form = _packed_form(q, k, v, len(starts) - 1, longest, scale)
    if why := _why_not_memory(form.rows, q.shape[1], form.longest, q.device):
        raise ValueError(
            f"attention of packed sequences: {why}; take another backend, or fewer and shorter ones"
        )
    out: Tensor = _GraphedAttention.apply(q, k, v, starts, form)
    return out


def attend_segments(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: tuple[int, int], scale: float
) -> Tensor:
    """out [B, H, T, D]: the last query of a segment attends to all its keys, and each query before it to one key less.

    The tensors are such that `why_not_segments` is "". Numbers are rounded up as in `attend_sequences`.

    Args:
        q: [B, H, T, D].
        k, v: [B, Hk, S, D].
        starts: int32 [2, N + 1], running counts of queries and of keys, on the device, read there only.
        longest: queries and keys that no segment has more of.
        scale: the factor of q kᵀ.
    """
    q = q.transpose(1, 2).contiguous().transpose(1, 2)
    form = _packed_form(q, k, v, starts.shape[1] - 1, longest, scale)
    out: Tensor = _GraphedAttention.apply(q, k, v, starts, form)
    return out


class _GraphedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None, form: described.Form
    ) -> Tensor:
        check_addresses(q=q, k=k, v=v)
        offsets = None if starts is None else kernel.offsets_of(form, starts)
        out, stats = kernel.forward(form, q, k, v, offsets)
        ctx.save_for_backward(q, k, v, out, stats, *(offsets or ()))
        ctx.form = form
        return out.view(q.shape[0], q.shape[2], *out.shape[-2:]).transpose(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, stats, *offsets = ctx.saved_tensors
        shapes = [(x.shape[0], x.shape[2]) for x in (q, k, v)]
        dout = dout.transpose(1, 2).contiguous()
        if dout.data_ptr() % ALIGNED:
            dout = dout.clone()
        where = kernel.Offsets(*offsets) if offsets else None
        if where is not None:
            q = q.transpose(1, 2).contiguous()
        form = kernel.for_backward(ctx.form)
        grads = kernel.backward(form, (q, k, v, out, stats), dout, where)
        dq, dk, dv = (
            g.view(*shape, *g.shape[-2:]).transpose(1, 2)
            for g, shape in zip(grads, shapes, strict=True)
        )
        return dq, dk, dv, None, None
