# SPDX-License-Identifier: Apache-2.0
"""The form of a graph of causal attention, and its description for cuDNN (attention.py runs it)."""

from __future__ import annotations

from enum import IntEnum
from functools import cache
from typing import Any, NamedTuple

import torch

OLDEST = 91900  # 9.19.0, the one that was tried
# nvidia-cudnn-frontend's. 1.26 asks cuDNN 9.19 for an attribute that it lacks.
TRIED = ("1.23.", "1.28.")
FP8_TRIED = "1.28."


class TensorId(IntEnum):
    """The tensors of all graphs, in the order in which attention.py names them.

    From DESCALE_Q on they are of FP8 alone: one fp32 number each.
    """

    Q = 1
    K = 2
    V = 3
    OUT = 4
    STATS = 5
    DOUT = 6
    DQ = 7
    DK = 8
    DV = 9
    LENGTHS = 10
    AT_QKV = 11
    AT_OUT = 12
    AT_KV = 13
    AT_STATS = 14
    DESCALE_Q = 15
    DESCALE_K = 16
    DESCALE_V = 17
    DESCALE_S = 18
    SCALE_S = 19
    SCALE_O = 20
    AMAX_S = 21
    AMAX_O = 22
    LENGTHS_KV = 23


# The factors of q, k, v and P, then the scales of P and out, in the order of numerics/fp8_attention.py.
FACTORS = (
    TensorId.DESCALE_Q,
    TensorId.DESCALE_K,
    TensorId.DESCALE_V,
    TensorId.DESCALE_S,
    TensorId.SCALE_S,
    TensorId.SCALE_O,
)


class Form(NamedTuple):
    """The shapes, dtype and options for which a graph is built.

    Attributes:
        rows: rows B, or packed sequences N.
        longest: tokens T of a row, or at most of a sequence.
        tokens: of all packed sequences together, at most; 0 for rows.
        heads, kv_heads, dim: H, Hk, D.
        strides: of q, k and v in elements, each (of a row, of a head, of a token). For packed sequences cuDNN does not
            read a row's stride, but cuDNN 9.10 refuses 0. A token's stride is the same in all three, or q has out's.
        dtype: bf16 or fp16, or e4m3 of q, k, v and out, for forward over rows.
        scale: the factor of q kᵀ.
        deterministic: whether backward sums in the same order each time. It takes 2 B H T² more bytes meanwhile.
        longest_kv, tokens_kv: as `longest` and `tokens`, of keys, where packed sequences have fewer queries than keys.
            Their last query then attends to all keys. 0 where both are equal.
    """

    rows: int
    longest: int
    tokens: int
    heads: int
    kv_heads: int
    dim: int
    strides: tuple[tuple[int, int, int], ...]
    dtype: torch.dtype
    scale: float
    deterministic: bool
    longest_kv: int = 0
    tokens_kv: int = 0

    @property
    def keys(self) -> int:
        """Key tokens of a row, or at most of a sequence."""
        return self.longest_kv or self.longest

    @property
    def out(self) -> tuple[int, int, int]:
        """Strides of out, dout and dq: [B, T, H, D] in memory."""
        return _own(self, self.longest, self.heads)

    @property
    def kv(self) -> tuple[int, int, int]:
        """Strides of dk and dv: [B, T, Hk, D] in memory."""
        return _own(self, self.keys, self.kv_heads)


_IO = {
    torch.bfloat16: "BFLOAT16",
    torch.float16: "HALF",
    torch.float8_e4m3fn: "FP8_E4M3",
}


def _own(form: Form, longest: int, heads: int) -> tuple[int, int, int]:
    return longest * heads * form.dim, form.dim, heads * form.dim


@cache
def frontend() -> Any:
    """The module `cudnn`.

    Raises:
        ImportError: nvidia-cudnn-frontend is not installed.
    """
    import cudnn

    return cudnn


def operation(form: Form, backward: bool, **where: Any) -> Any:
    """cuDNN's graph of one operation, which cuDNN has checked. `where`: a handle, or `sm_version`, for no GPU."""
    cudnn = frontend()
    kinds = cudnn.data_type
    io = getattr(kinds, _IO[form.dtype])
    graph = cudnn.pygraph(
        io_data_type=io,
        intermediate_data_type=kinds.FLOAT,
        compute_data_type=kinds.FLOAT,
        **where,
    )
    _Builder(graph, form, io).add(backward)
    graph.validate()
    graph.build_operation_graph()
    return graph


class _Builder:
    """One graph's tensors and its one operation."""

    def __init__(self, graph: Any, form: Form, io: Any) -> None:
        self.graph, self.form, self.io = graph, form, io
        self.kinds = frontend().data_type
        self.offsets: dict[TensorId, Any] = {}
        mask = "use_causal_mask_bottom_right" if form.tokens_kv else "use_causal_mask"
        self.options: dict[str, Any] = {"attn_scale": form.scale, mask: True}
        if form.tokens:
            rows = [form.rows, 1, 1, 1]
            lengths = self._tensor(TensorId.LENGTHS, rows, [1] * 4, self.kinds.INT32)
            of_keys = lengths
            if form.tokens_kv:
                of_keys = self._tensor(TensorId.LENGTHS_KV, rows, [1] * 4, self.kinds.INT32)
            self.options |= {"use_padding_mask": True, "seq_len_q": lengths, "seq_len_kv": of_keys}

    def _tensor(self, key: TensorId, dim: list[int], stride: list[int], kind: Any) -> Any:
        made = self.graph.tensor(name=key.name, dim=dim, stride=stride, data_type=kind)
        made.set_uid(int(key))
        return made

    def _packed(self, tensor: Any, key: TensorId) -> None:
        """If sequences are packed, let the n-th one of `tensor` begin at element n of the offsets `key`."""
        if self.form.tokens:
            if key not in self.offsets:
                dims = [self.form.rows + 1, 1, 1, 1]
                self.offsets[key] = self._tensor(key, dims, [1] * 4, self.kinds.INT64)
            tensor.set_ragged_offset(self.offsets[key])

    def _dims(self, heads: int, longest: int | None = None) -> list[int]:
        return [self.form.rows, heads, longest or self.form.longest, self.form.dim]

    def _input(
        self, key: TensorId, heads: int, strides: tuple[int, int, int], offsets: TensorId
    ) -> Any:
        longest = self.form.keys if key in (TensorId.K, TensorId.V) else self.form.longest
        made = self._tensor(key, self._dims(heads, longest), [*strides, 1], self.io)
        self._packed(made, offsets)
        return made

    def _output(
        self, made: Any, key: TensorId, layout: tuple[list[int], list[int]], offsets: TensorId
    ) -> None:
        made.set_output(True).set_uid(int(key))
        made.set_dim(layout[0]).set_stride(layout[1])
        wide = key in (TensorId.STATS, TensorId.AMAX_S, TensorId.AMAX_O)
        made.set_data_type(self.kinds.FLOAT if wide else self.io)
        self._packed(made, offsets)

    def _stats(self) -> tuple[list[int], list[int]]:
        """[N, H, T, 1] dense; packed [tokens, H] in memory."""
        form = self.form
        dims = [form.rows, form.heads, form.longest, 1]
        if form.tokens:
            return dims, [form.heads * form.longest, 1, form.heads, 1]
        return dims, [form.heads * form.longest, form.longest, 1, 1]

    def add(self, backward: bool) -> None:
        form = self.form
        heads = (form.heads, form.kv_heads, form.kv_heads)
        q_at = TensorId.AT_OUT if form.strides[0] == form.out else TensorId.AT_QKV
        qkv = [
            self._input(key, n, strides, offsets)
            for key, n, strides, offsets in zip(
                (TensorId.Q, TensorId.K, TensorId.V),
                heads,
                form.strides,
                (q_at, TensorId.AT_QKV, TensorId.AT_QKV),
                strict=True,
            )
        ]
        if backward:
            return self._add_backward(qkv)
        if form.dtype == torch.float8_e4m3fn:
            return self._add_fp8(qkv)
        out, stats = self.graph.sdpa(
            name="attention", q=qkv[0], k=qkv[1], v=qkv[2], is_inference=False, **self.options
        )
        self._output(out, TensorId.OUT, (self._dims(form.heads), [*form.out, 1]), TensorId.AT_OUT)
        self._output(stats, TensorId.STATS, self._stats(), TensorId.AT_STATS)

    def _add_fp8(self, qkv: list[Any]) -> None:
        one = [1, 1, 1, 1]
        factors = {
            key.name.lower(): self._tensor(key, one, one, self.kinds.FLOAT) for key in FACTORS
        }
        outputs = self.graph.sdpa_fp8(
            name="attention_fp8",
            q=qkv[0],
            k=qkv[1],
            v=qkv[2],
            is_inference=False,
            **factors,
            **self.options,
        )
        out = (self._dims(self.form.heads), [*self.form.out, 1])
        layouts = (out, self._stats(), (one, one), (one, one))
        places = (TensorId.OUT, TensorId.STATS, TensorId.AMAX_S, TensorId.AMAX_O)
        for made, key, layout in zip(outputs, places, layouts, strict=True):
            self._output(made, key, layout, TensorId.AT_OUT)

    def _add_backward(self, qkv: list[Any]) -> None:
        form = self.form
        out = self._input(TensorId.OUT, form.heads, form.out, TensorId.AT_OUT)
        dout = self._input(TensorId.DOUT, form.heads, form.out, TensorId.AT_OUT)
        stats = self._tensor(TensorId.STATS, *self._stats(), self.kinds.FLOAT)
        self._packed(stats, TensorId.AT_STATS)
        if form.tokens:
            self.options |= {
                "max_total_seq_len_q": form.tokens,
                "max_total_seq_len_kv": form.tokens_kv or form.tokens,
            }
        gradients = self.graph.sdpa_backward(
            name="attention_backward",
            q=qkv[0],
            k=qkv[1],
            v=qkv[2],
            o=out,
            dO=dout,
            stats=stats,
            use_deterministic_algorithm=form.deterministic,
            **self.options,
        )
        dq = (self._dims(form.heads), [*form.out, 1])
        dkv = (self._dims(form.kv_heads, form.keys), [*form.kv, 1])
        self._output(gradients[0], TensorId.DQ, dq, TensorId.AT_OUT)
        self._output(gradients[1], TensorId.DK, dkv, TensorId.AT_KV)
        self._output(gradients[2], TensorId.DV, dkv, TensorId.AT_KV)
