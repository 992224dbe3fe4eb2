# SPDX-License-Identifier: Apache-2.0
"""grouped_quantize_lora_down: cases, bytes, scales and amaxes bit for bit, and a bound of s from float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from lorakernels import ops
from lorakernels.numerics.groups import spans
from lorakernels.ops import Groups, Scaling
from tests.ops.contract import (
    BF16,
    E4M3,
    FP16,
    FP32,
    Arguments,
    Call,
    Case,
    Checked,
    Contract,
    Made,
    Refusal,
    near,
    quantized,
    same,
)

TOKENS = 50  # of which rows are copies


class Down(NamedTuple):
    """x [TOKENS, K] and which rows of it are the groups'; rank 0: no adapter."""

    k: int
    rank: int
    dtype: torch.dtype = BF16
    a: torch.dtype = BF16
    kind: str = "kept"

    def __call__(self, m: Made) -> Arguments:
        groups, blocks = m.groups()
        rows = [-1] * m.rows
        for _, _, own in blocks:
            rows[own] = [i * 7 % TOKENS for i in range(own.start, own.stop)]
        x = m.randn(TOKENS, self.k, dtype=self.dtype)
        lora_A = m.randn(3, self.rank, self.k, dtype=self.a) if self.rank else None
        source = torch.tensor(rows, dtype=torch.int32, device=m.device)
        return x, source, groups, lora_A, scaling_of(m, self.kind)


def scaling_of(m: Made, kind: str) -> Scaling:
    """By columns 1 to 3 of a state; "mixed": the first group has a scale, the others have none."""
    state = torch.zeros(4, 5, device=m.device)
    known = {"kept": (7.0, 211.7, 3.0), "mixed": (7.0, 0.0, 0.0)}.get(kind, (0.0,) * 3)
    state[-1, 1:4] = torch.tensor(known)
    state[0] = 0.25
    return Scaling(state, 1, kind != "eval")


def of_groups(
    name: str,
    x: Tensor,
    groups: Groups,
    found: tuple[Tensor, Tensor],
    scalings: tuple[Scaling, Scaling],
    fp8: torch.dtype,
) -> Iterator[Checked]:
    """Bytes, scale_inv and amax of each group as if it were alone, and zeros behind its end; x [M, …]."""
    (before, column, delayed), after = scalings
    state = before.clone()
    data, scale_inv = found
    expected = torch.zeros_like(data)
    for g, own in spans(groups):
        single = Scaling(state, column + g, delayed)
        later = Scaling(state.clone(), column + g, delayed)
        parts = list(
            quantized(name, x[own], (data[own], scale_inv[g : g + 1]), (single, later), fp8)
        )
        yield from parts[:2]
        expected[own] = data[own]
        if delayed and own.stop > own.start:
            most = x[own].abs().amax().float()
            state[0, column + g] = torch.maximum(state[0, column + g], most)
    yield same("state", after.state, state)
    yield same(f"{name} behind the ends", data, expected)


def bound(call: Call) -> Iterator[Checked]:
    """s: A is rounded to x's dtype, one rounding at the store, and fp32 sums of K products."""
    x, rows, groups, lora_A, scaling = call.before
    x8, scale_inv, s = call.results
    gathered = x[rows.long()].masked_fill((rows < 0)[:, None], 0.0)
    yield from of_groups("x8", gathered, groups, (x8, scale_inv), (scaling, call.after[4]), E4M3)
    if lora_A is None:
        yield same("s", s, s.new_empty(0))
        return
    exact, size = (torch.zeros(s.shape, dtype=torch.float64, device=s.device) for _ in range(2))
    for g, own in spans(groups):
        d, a = gathered[own].double(), lora_A[g].to(x.dtype).double().t()
        exact[own], size[own] = d @ a, d.abs() @ a.abs()
    yield near("s", s, exact, size, x.shape[1] + 4)


EMPTY = torch.zeros(0, dtype=torch.int32)
NONE = Groups(EMPTY, *[torch.zeros(3, dtype=torch.int32)] * 2)
CONTRACTS = (
    Contract(
        ops.grouped_quantize_lora_down,
        {
            "fp8": Case(Down(48, 3), 256),
            "fp16, fp32 A": Case(Down(80, 5, FP16, FP32), 256),
            "base only": Case(Down(48, 0, kind="mixed"), 256),
            "eval, fp16": Case(Down(33, 16, FP16, FP16, kind="eval"), 256),
            "fp32": Case(Down(48, 3, FP32), 256, why_not="x is torch.float32"),
            "rank": Case(Down(48, 129), 256, why_not="rank 129"),
        },
        bound,
        {
            "1024x1000 r16": Case(Down(1000, 16, kind="mixed"), 1024),
            "128x4096 r64": Case(Down(4096, 64, a=FP32), 128),
            "512x528 r128": Case(Down(528, 128, kind="eval"), 512),
        },
        {
            "x": torch.zeros(2, 8),
            "rows": EMPTY,
            "groups": NONE,
            "lora_A": torch.zeros(3, 2, 8),
            "scaling": Scaling(torch.zeros(3, 4), 0, True),
        },
        {
            "rows": Refusal({"rows": torch.zeros(100).int()}, ValueError, "a multiple of 128, found 100"),
            "group_of": Refusal({"rows": torch.zeros(128).int()}, ValueError, r"group_of must be \[1\] on cpu"),
            "lora_A": Refusal(
                {"lora_A": torch.zeros(2, 2, 8)}, ValueError, r"lora_A must be \[3, …, 8\] on cpu, found \[2, 2, 8\]"
            ),
            "floats": Refusal({"rows": torch.zeros(0)}, TypeError, "rows must be torch.int32, found torch.float32"),
        },
    ),
)  # fmt: skip
