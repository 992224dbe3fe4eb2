# SPDX-License-Identifier: Apache-2.0
"""Arguments of every op for the tests that all of them pass: odd sizes, with and without the optional values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lorakernels.ops import Dropout, Scaled, Scaling, SideBySide, Up, Weight

BF16, FP32, UINT8 = torch.bfloat16, torch.float32, torch.uint8
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
K, N, R = 24, 10, 3
MAXIMA = (448.0, 57344.0)
Table = dict[str, dict[str, tuple[Any, ...]]]


class Made:
    """Fresh tensors on `device`, of M = `rows` where they have rows."""

    def __init__(self, device: torch.device | str, rows: int) -> None:
        self.device, self.rows = device, rows
        self.one = torch.ones(1, device=device)
        self.slot = torch.tensor([5, 9], device=device)

    def randn(self, *shape: int, dtype: torch.dtype = FP32) -> Tensor:
        return torch.randn(shape, device=self.device).to(dtype)

    def rand(self, *shape: int) -> Tensor:
        return torch.rand(shape, device=self.device)

    def fp8(self, *shape: int, dtype: torch.dtype = E4M3) -> Tensor:
        return self.randn(*shape).to(dtype).view(UINT8)

    def x(self, dtype: torch.dtype = FP32, columns: int = K) -> Tensor:
        return self.randn(self.rows, columns, dtype=dtype)

    def dropout(self, row0: int = 0, col0: int = 0) -> Dropout:
        return Dropout(self.slot, 0.3, 3, row0, col0)

    def scaling(self, column: int = 1) -> Scaling:
        return Scaling(torch.zeros(5, 2, device=self.device), column, True)

    def up(self, dtype: torch.dtype = BF16, columns: int = R) -> Up:
        return Up(self.randn(N, R), self.x(dtype, columns), 0.5)


def arguments(device: torch.device | str, rows: int = 7) -> Table:
    """{op: {case: the op's arguments}}, made anew at each call."""
    made = Made(device, rows)
    tables = (linear(made), gradients(made), norms(made), swiglu(made), rope(made), others(made))
    return {op: cases for table in tables for op, cases in table.items()}


def linear(m: Made) -> Table:
    x8, w8 = Scaled(m.fp8(m.rows, K), m.one), m.fp8(N, K)
    bias, a = m.randn(N), m.randn(R, K)
    by_row = Weight(w8, m.rand(N))
    return {
        "quantize_lora_down": {
            "fp8": (m.x(), a, m.scaling(), m.dropout()),
            "base only": (m.x(), None, Scaling(m.scaling().state, 0, False), None),
            "plain": (m.x(), a, None, None),
        },
        "fp8_linear_lora": {
            "fp8": (x8, Weight(w8, m.one), bias, m.up(FP32), BF16),
            "scales, residual": (x8, by_row, None, None, BF16, False, m.x(BF16, N)),
            "plain": (Scaled(m.x()), Weight(m.randn(N, K)), None, None, FP32),
        },
        "transpose_fp8": {"odd": (m.fp8(m.rows, K),)},
    }


def gradients(m: Made) -> Table:
    dy, ds, a, w8 = m.x(BF16, N), m.x(BF16, R), m.randn(R, K), m.fp8(N, K)
    x8, dy8 = Scaled(m.fp8(m.rows, K), m.one), Scaled(m.fp8(m.rows, N, dtype=E5M2), m.one)
    kept, plain = Weight(w8, m.one, w8.t().contiguous()), Weight(m.randn(N, K))
    side = SideBySide([4, 1, 5], [R, 0, R])
    return {
        "quantize_grad": {
            "fp8": (dy, m.up(), m.scaling(), E5M2),
            "base only": (dy, None, m.scaling(), E5M2),
            "frozen B": (dy, Up(m.randn(N, R), None, 0.5), None, E5M2),
            "side by side": (dy, m.up(columns=2 * R), m.scaling(), E5M2, side),
        },
        "quantize_grad_and_mask": {
            "fp8": (dy, m.up(), m.scaling(), E5M2, m.dropout(), K),
            "side by side": (dy, m.up(columns=2 * R), m.scaling(), E5M2, m.dropout(2, 8), K, side),
        },
        "fp8_grad_input": {
            "fp8": (dy8, E5M2, kept, ds, a, m.dropout(), BF16),
            "plain": (Scaled(dy), E5M2, plain, None, None, None, BF16),
        },
        "lora_grad_a": {
            "fp8": (ds, x8, m.dropout(), FP32),
            "plain": (ds, Scaled(m.x()), None, BF16),
        },
    }


def norms(m: Made) -> Table:
    x, wide, rstd = m.x(BF16), m.x(), 1 + m.rand(m.rows)
    return {
        "rms_norm_quantize": {
            "fp8": (wide, m.randn(K), 1e-5, m.scaling(), True),
            "x8 only": (
                x,
                m.randn(K, dtype=BF16),
                1e-5,
                Scaling(m.scaling().state, 1, False),
                False,
            ),
            "plain": (x, m.randn(K, dtype=BF16), 1e-5, None, True),
        },
        "rms_norm_backward": {
            "trained": (m.x(), wide, m.randn(K), rstd, m.x(), True),
            "frozen": (m.x(BF16), x, m.randn(K, dtype=BF16), rstd, None, False),
        },
    }


def swiglu(m: Made) -> Table:
    packed, two = Scaled(m.fp8(m.rows, K), 1 + m.rand(m.rows, 1)), m.rand(2)
    return {
        "swiglu_quantize": {
            "fp8": (Scaled(m.x()), m.scaling(), True),
            "bytes": (packed, m.scaling(), False, BF16),
            "plain": (Scaled(m.x(BF16)), None, True),
        },
        "swiglu_quantize_and_pack": {"fp8": (m.x(), m.scaling(), True)},
        "swiglu_quantize_grad": {
            "fp8": (m.x(BF16, K // 2), Scaled(m.x(BF16)), two, m.scaling(), E5M2, True),
            "bytes": (m.x(columns=K // 2), packed, two, m.scaling(), E5M2, False),
            "plain": (m.x(columns=K // 2), Scaled(m.x()), two, None, E5M2, True),
        },
    }


def rope(m: Made) -> Table:
    """M sequences of 5 tokens, 2 heads of queries and 1 of keys and values, of 4 columns."""
    angles = m.randn(5, 4), m.randn(5, 4)
    dq, dk, dv = (m.randn(m.rows, heads, 5, 4, dtype=BF16) for heads in (2, 1, 1))
    return {
        "rope_qkv_": {"sequences": (m.randn(5 * m.rows, 16), *angles, 2, 1)},
        "rope_qkv_backward": {"sequences": (dq, dk, dv, *angles, m.rand(3))},
    }


def others(m: Made) -> Table:
    x, bias = m.x(), m.randn(K)
    labels = torch.arange(m.rows, device=m.device)
    forward, backward = m.rand(5, m.rows), m.rand(5, m.rows)
    side, parts = SideBySide([m.rows, N], [K, R]), SideBySide([m.rows, N], [4, 0])
    return {
        "bias_dropout_add": {
            "shard": (x, bias, m.x(), m.dropout(2, 3)),
            "bare": (x, None, None, None),
        },
        "bias_dropout_add_": {"no bias": (x, None, m.x(), m.dropout())},
        "bias_dropout_add_backward": {
            "bias": (x, m.dropout(), BF16),
            "no mask": (x, None, FP32),
        },
        "amax_and_scale_update": {
            "gated": (forward, backward, None, True, *MAXIMA, 0, False),
            "given": (
                m.rand(5, m.rows),
                m.rand(5, m.rows),
                m.rand(2 * m.rows),
                False,
                *MAXIMA,
                1,
                True,
            ),
        },
        "cross_entropy_": {
            "gradient": (m.x(), labels, m.one, 3, True),
            "losses only": (m.x(BF16), labels, None, 3, False),
        },
        "block_diagonal": {
            "two": ([m.x(), m.randn(N, R)], side, m.rand(2, 2)),
            "compact": (
                [m.x(columns=R), m.randn(N, R)],
                SideBySide([m.rows, N], [R, R]),
                m.rand(2, 2),
                True,
            ),
        },
        "block_diagonal_parts": {"one adapter": (m.randn(m.rows + N, 4), parts, m.rand(2))},
    }
