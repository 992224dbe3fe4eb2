# SPDX-License-Identifier: Apache-2.0
"""Scaled dot product attention through the fastest backend that takes the tensors: torch's, or cuDNN's graphs.

"fp8" is FP8 forward and 16-bit backward (fp8.py), which "auto" never takes: it rounds q, k, v and out.
"cudnn_graph" is cuDNN's graphs of graphed.py. They take what torch's cuDNN refuses: packed sequences, and
causal rows under deterministic algorithms.

Causal SDPA, 64 heads × 128, 8192 tokens, forward and backward, on one H200: flash 12.9 ms, cuDNN 7.3 ms.
Packed, 32 / 8 heads × 128, 4096 tokens: flash 1.90 ms for one document, 0.60 for eight; graphs 1.12 and 0.40.
Flash takes no mask. "efficient" needs as many key heads as query heads, so it gets copies of k and v.

Sequences packed into rows may be given by `starts`, int32 [N + 1]: the running count of tokens, from 0 to B T. Flash
takes them as variable lengths and computes nothing between sequences. Two equal neighbours are a sequence without
tokens, so that N may be fixed. Backends without variable lengths get a mask.

Under context parallelism (parallel/context/share.py) a rank has some of the queries and all keys. `Segments` say which
keys belong to which queries. The last query of a segment attends to all its keys, and each query before it to one key
less.
"""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lorakernels.autograd.attention import fp8, graphed
from lorakernels.device import capability_of, cudnn_folders

# torch's switches. Its context manager `sdpa_kernel` sets the same ones in several times the host's time.
_ENABLE = {
    "cudnn": torch.backends.cuda.enable_cudnn_sdp,
    "flash": torch.backends.cuda.enable_flash_sdp,
    "efficient": torch.backends.cuda.enable_mem_efficient_sdp,
    "math": torch.backends.cuda.enable_math_sdp,
}
_IS_ENABLED = {
    "cudnn": torch.backends.cuda.cudnn_sdp_enabled,
    "flash": torch.backends.cuda.flash_sdp_enabled,
    "efficient": torch.backends.cuda.mem_efficient_sdp_enabled,
    "math": torch.backends.cuda.math_sdp_enabled,
}
GRAPH = "cudnn_graph"
FP8 = "fp8"
BACKENDS = (*_ENABLE, GRAPH, FP8)
OWN = (GRAPH, FP8)  # by graphs of ours
GPUS_ALONE = ("cudnn", "efficient")  # torch has no such kernel for CPUs
SHORT = 128  # tokens of the longest packed sequence up to which flash is faster than graphs (docs/facts.md, P16)
# Keys of the longest segment from which on graphs are faster: 0.73 of flash's time for 8,192, and 1.0 for 2,048
# (an H100; docs/facts.md, P15)
LONG = 4096
AMPERE, HOPPER = (8, 0), (9, 0)
HALVES = (torch.bfloat16, torch.float16)


class Segments(NamedTuple):
    """Queries, and the keys that they attend to, in N segments.

    Attributes:
        q, k: int32 [N + 1], running counts of queries and of keys. A segment may have keys without queries.
        longest_q, longest_k: the most queries, and the most keys, of a segment.
    """

    q: Tensor
    k: Tensor
    longest_q: int
    longest_k: int


def preference(capability: tuple[int, int] | None, masked: bool) -> tuple[str, ...]:
    """Names of backends, the best first. Without a capability (on a CPU), torch chooses."""
    if capability is None:
        return ("torch",)
    if masked:
        return ("efficient", "math")
    if capability >= HOPPER:
        return ("cudnn", GRAPH, "flash", "efficient", "math")
    return ("flash", "efficient", "math")


def choose(wanted: str, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> str:
    """The backend for these tensors: `wanted`, or with "auto" the first of `preference` that takes them.

    If this process has loaded parts of two cuDNNs, torch's attention computes NaN with them. "auto" then leaves cuDNN
    out and warns.

    Args:
        wanted: "auto" or a name in BACKENDS.
        q: [B, H, T, D].
        k, v: [B, Hk, T, D].
        mask: as `attn_mask` of torch's scaled_dot_product_attention, or None.
        causal: whether tokens attend only to tokens up to themselves.

    Raises:
        ValueError: `wanted` is unknown, or does not take these tensors.
        RuntimeError: `wanted` is a backend of cuDNN, and this process has loaded parts of two cuDNNs.
    """
    check(wanted)
    if wanted == FP8:
        _takes_graph(wanted, _why_not_causal(mask, causal) or fp8.why_not(q, k, v))
        return FP8
    capability = capability_of(q.device) if q.is_cuda else None
    names = preference(capability, mask is not None) if wanted == "auto" else (wanted,)
    if capability is None and wanted in GPUS_ALONE:
        raise ValueError(f"attention={wanted!r} is for a GPU, found q on {q.device}; try 'auto'")
    if capability is None and wanted != GRAPH:
        return names[0]
    for name in names:
        if name == GRAPH:
            why = _why_not_causal(mask, causal) or graphed.why_not(q, k, v, False)
            if _takes_graph(wanted, why):
                return name
            continue
        heads = (q, *expanded(name, q, k, v))
        params = torch.backends.cuda.SDPAParams(*heads, mask, 0.0, causal, _grouped(q, heads[1]))
        if name == "math" or _takes(name)(params):
            if name == "cudnn" and (mixed := _mixed_cudnn()):
                if wanted == "cudnn":
                    raise RuntimeError(f'attention="cudnn": {mixed}')
                warnings.warn(f"attention without cuDNN: {mixed}", RuntimeWarning, stacklevel=2)
                continue
            return name
    raise ValueError(
        f"attention={wanted!r} does not take q {tuple(q.shape)} {q.dtype}, k {tuple(k.shape)}, "
        f"mask {None if mask is None else tuple(mask.shape)} here; try 'auto'"
    )


def choose_packed(wanted: str, q: Tensor, k: Tensor, v: Tensor, short: bool = False) -> str:
    """As `choose`, for sequences packed into rows: "cudnn_graph", "packed" for flash's variable lengths, else a
    backend for a mask. `short`: no sequence is longer than SHORT tokens.
    """
    check(wanted)
    if wanted == FP8:
        _takes_graph(wanted, fp8.PACKED)
    if wanted == GRAPH and _takes_graph(wanted, graphed.why_not(q, k, v, True)):
        return GRAPH
    if wanted == "auto" and _takes_graph(wanted, _why_not_packed(q, k, v, short)):
        return GRAPH
    return _flash_or_masked(wanted, q, k, v)


def choose_segments(wanted: str, q: Tensor, k: Tensor, v: Tensor, long: bool = False) -> str:
    """The backend for `attend_segments`: "cudnn_graph", "packed" for flash's variable lengths, else one for a mask.

    "auto" takes graphs where segments are `long`: one may have LONG keys or more.

    Raises:
        ValueError: `wanted` is unknown, or takes no segments.
    """
    check(wanted)
    if wanted == FP8:
        raise ValueError(
            f"attention={wanted!r} does not take a part of the queries with all keys; try 'auto'"
        )
    graphs = wanted == GRAPH or (wanted == "auto" and long)
    if graphs and _takes_graph(wanted, graphed.why_not_segments(q, k, v)):
        return GRAPH
    return _flash_or_masked(wanted, q, k, v)


def _flash_or_masked(wanted: str, q: Tensor, k: Tensor, v: Tensor) -> str:
    takes = q.is_cuda and capability_of(q.device) >= AMPERE and q.dtype in HALVES
    if wanted in ("auto", "flash") and takes and q.shape[3] % 8 == 0 and q.shape[3] <= 256:
        return "packed"
    rows = _one_row(q), _one_row(k), _one_row(v)
    queries, keys = rows[0].shape[2], rows[1].shape[2]  # "efficient" needs a mask's last stride 1
    mask = torch.ones(keys, dtype=torch.bool, device=q.device).expand(1, 1, queries, keys)
    return choose(wanted, *rows, mask, False)


def check(wanted: str) -> None:
    if wanted != "auto" and wanted not in BACKENDS:
        raise ValueError(f"attention must be one of {['auto', *BACKENDS]}, found {wanted!r}")


def _why_not_causal(mask: Tensor | None, causal: bool) -> str:
    return "it is causal and takes no mask" if mask is not None or not causal else ""


def _takes_graph(wanted: str, objection: str) -> bool:
    """Whether cuDNN's graphs can run. If they are `wanted`, an objection is raised instead."""
    if objection:
        if wanted in OWN:
            raise ValueError(
                f"attention={wanted!r} does not take these rows: {objection}; try 'auto'"
            )
        return False
    if mixed := _mixed_cudnn():
        if wanted in OWN:
            raise RuntimeError(f"attention={wanted!r}: {mixed}")
        warnings.warn(f"attention without cuDNN: {mixed}", RuntimeWarning, stacklevel=3)
    return not mixed


def _why_not_packed(q: Tensor, k: Tensor, v: Tensor, short: bool) -> str:
    """Why "auto" does not let cuDNN's graphs take packed sequences, "" if it does."""
    if short:
        return f"no sequence is longer than {SHORT} tokens, up to which FlashAttention-2 is faster"
    if torch.are_deterministic_algorithms_enabled():
        return "its deterministic backward takes 2 N H T² bytes for N sequences of up to T tokens"
    return graphed.why_not(q, k, v, True)


def why_not_graph(name: str, q: Tensor, k: Tensor, v: Tensor, longest: int | None) -> str:
    """Why "auto" chose `name`, not cuDNN's graphs, for sequences of up to `longest` tokens, or for causal rows where
    that is None; else "".
    """
    if name not in ("packed", "flash", "efficient", "math") or not q.is_cuda:
        return ""
    if capability_of(q.device) < HOPPER:
        return ""
    if longest is not None:
        return _why_not_packed(q, k, v, longest <= SHORT)
    return graphed.why_not(q, k, v, False)


def _mixed_cudnn() -> str:
    """Why this process' cuDNN does not work, and what helps; "" unless it has loaded parts of two."""
    folders = [] if torch.compiler.is_compiling() else cudnn_folders()
    if len(folders) < 2:
        return ""
    return (
        f"this process has loaded parts of cuDNN from {' and '.join(folders)}, which do not fit together. Start it "
        "with CUDNN_HOME and LD_LIBRARY_PATH at torch's, or do not import the package that loads the other"
    )


@cache
def _takes(name: str) -> Any:
    return getattr(torch.backends.cuda, f"can_use_{name}_attention")


def _grouped(q: Tensor, k: Tensor) -> bool:
    return q.shape[1] != k.shape[1]


def expanded(name: str, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """k and v for the backend: [B, Hk, T, D], for "efficient" repeated to [B, H, T, D]."""
    if name != "efficient" or not _grouped(q, k):
        return k, v
    n = q.shape[1] // k.shape[1]
    return k.repeat_interleave(n, 1), v.repeat_interleave(n, 1)


def attend(
    name: str, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> Tensor:
    """out [B, H, T, D] of q [B, H, T, D], k and v [B, Hk, T, D], by the backend that `choose` returned."""
    if name == FP8:
        return fp8.attend_rows(q, k, v, scale).out
    if name == GRAPH:
        return graphed.attend_rows(q, k, v, scale)
    k, v = expanded(name, q, k, v)
    arguments: dict[str, Any] = {
        "attn_mask": mask,
        "is_causal": causal,
        "scale": scale,
        "enable_gqa": _grouped(q, k),
    }
    if name == "torch":
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, **arguments)
    before = [is_enabled() for is_enabled in _IS_ENABLED.values()]
    try:
        for other, enable in _ENABLE.items():
            enable(other == name)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, **arguments)
    finally:
        for enable, was in zip(_ENABLE.values(), before, strict=True):
            enable(was)


def attend_packed(
    name: str, q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int, scale: float
) -> Tensor:
    """out [B, H, T, D]: each token attends to its own sequence up to itself.

    `name` is from `choose_packed`, `starts` int32 [N + 1]. No sequence is longer than `longest` tokens.
    """
    if name == GRAPH:
        return graphed.attend_sequences(q, k, v, starts, longest, scale)
    return attend_segments(name, q, k, v, Segments(starts, starts, longest, longest), scale)


def attend_segments(
    name: str, q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float
) -> Tensor:
    """out [B, H, T, D] of q [B, H, T, D], k and v [B', Hk, S, D]; B T queries and B' S keys in `segments`.

    `name` is from `choose_segments`, or from `choose_packed` but for "cudnn_graph".
    """
    if name == GRAPH:
        longest = segments.longest_q, segments.longest_k
        return graphed.attend_segments(q, k, v, torch.stack(segments[:2]), longest, scale)
    if name == "packed":
        flash = torch.ops.aten._flash_attention_forward
        tokens = (_tokens(q), _tokens(k), _tokens(v))
        out: Tensor = flash(*tokens, *segments, 0.0, True, False, scale=scale)[0]
        return out.view(q.shape[0], q.shape[2], *out.shape[1:]).transpose(1, 2)
    mask = segments_mask(segments, q.shape[0] * q.shape[2], k.shape[0] * k.shape[2])
    return _rows(attend(name, _one_row(q), _one_row(k), _one_row(v), mask, False, scale), q)


def attend_capped(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float, cap: float
) -> Tensor:
    """out [B, H, T, D] with scores s = cap · tanh(scale · q kᵀ / cap), by the formula of transformers' "eager".

    Scores [B, H, T, T] exist in q's dtype, and their softmax in fp32. They are not kept for backward, which computes
    them again. `mask` is bool, True where a token sees another, or else it is added to s.
    """
    arguments = (q, k, v, mask, causal, scale, cap)
    if not torch.is_grad_enabled():
        return _capped(*arguments)
    out: Tensor = checkpoint(_capped, *arguments, use_reentrant=False, preserve_rng_state=False)
    return out


def _capped(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float, cap: float
) -> Tensor:
    n = q.shape[1] // k.shape[1]
    k, v = (k, v) if n == 1 else (k.repeat_interleave(n, 1), v.repeat_interleave(n, 1))
    scores = torch.tanh(q @ k.transpose(2, 3) * scale / cap) * cap
    if causal:
        mask = torch.ones(scores.shape[2:], dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        hidden = mask.dtype == torch.bool
        least = torch.finfo(scores.dtype).min
        scores = scores.masked_fill(~mask, least) if hidden else scores + mask
    weights = scores.softmax(-1, dtype=torch.float32).to(q.dtype)
    return (weights @ v).transpose(1, 2).contiguous().transpose(1, 2)


def attend_capped_packed(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, scale: float, cap: float
) -> Tensor:
    """As `attend_capped`, of packed sequences. It computes scores of all B T tokens."""
    mask = packed_mask(starts, q.shape[0] * q.shape[2])
    row = attend_capped(_one_row(q), _one_row(k), _one_row(v), mask, False, scale, cap)
    return _rows(row, q)


def packed_mask(starts: Tensor, tokens: int) -> Tensor:
    """bool [1, 1, B T, B T] from `starts`: True where a token (row) attends to another (column)."""
    return segments_mask(Segments(starts, starts, tokens, tokens), tokens, tokens)


def segments_mask(segments: Segments, queries: int, keys: int) -> Tensor:
    """bool [1, 1, queries, keys]: True where a query (row) attends to a key (column)."""
    segment_q, from_end_q = _places(segments.q, queries)
    segment_k, from_end_k = _places(segments.k, keys)
    same, sees = segment_q[:, None] == segment_k, from_end_q[:, None] <= from_end_k
    return (same & sees)[None, None]


def _places(starts: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """(the segment of each of `tokens`, how far before its end it is)."""
    positions = torch.arange(tokens, device=starts.device, dtype=starts.dtype)
    ends = starts[1:].contiguous()
    segment = torch.searchsorted(ends, positions, right=True)
    return segment, ends[segment.clamp(max=len(ends) - 1)] - positions


def _tokens(x: Tensor) -> Tensor:
    """[B, H, T, D] → [B T, H, D]. This is a view if `norm_qkv` returned x."""
    return x.transpose(1, 2).flatten(0, 1)


def _rows(row: Tensor, like: Tensor) -> Tensor:
    """[1, H, B T, D] → [B, H, T, D], the B and T of `like`."""
    out = row.transpose(1, 2)
    return out.reshape(like.shape[0], like.shape[2], *out.shape[2:]).transpose(1, 2)


def _one_row(x: Tensor) -> Tensor:
    """[B, H, T, D] → [1, H, B T, D]."""
    return _tokens(x)[None].transpose(1, 2)
