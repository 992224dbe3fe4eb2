# SPDX-License-Identifier: Apache-2.0
"""transpose_fp8: cases; its results are bytes that it moves."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial

import torch

from lorakernels import ops
from tests.ops.contract import UINT8, Arguments, Call, Case, Checked, Contract, Made, Refusal, same


def made(columns: int, step: int, m: Made) -> Arguments:
    """Every so many-th column of bytes of any value."""
    whole = torch.randint(0, 256, (m.rows, columns * step), dtype=UINT8, device=m.device)
    return (whole[:, ::step],)


def misaligned(columns: int, m: Made) -> Arguments:
    whole = torch.randint(0, 256, (m.rows * columns + 3,), dtype=UINT8, device=m.device)
    return (whole[3:].view(m.rows, columns),)


def bound(call: Call) -> Iterator[Checked]:
    """Bytes are only moved, to memory without gaps."""
    (weight,), (turned,) = call.before, call.results
    yield same("bytes", turned, weight.t())
    assert turned.is_contiguous()


DRAW = random.Random(2)
SIZES = [
    (1, 1),
    (16, 16),
    (128, 128),
    (144, 272),
    (2048, 16),
    (16, 2064),
    (127, 129),
    (130, 256),
    (256, 130),
    (4096, 8192),
    *((step * DRAW.randrange(1, 700 // step), step * DRAW.randrange(1, 700 // step)) for step in (1, 16) * 12),
]  # fmt: skip
CONTRACTS = (
    Contract(
        ops.transpose_fp8,
        {
            "odd": Case(partial(made, 24, 1)),
            "every second column": Case(partial(made, 24, 2), why_not="must be contiguous"),
            "misaligned": Case(partial(misaligned, 48), 64),
        },
        bound,
        {f"{n}x{k}": Case(partial(made, k, 1), n) for n, k in SIZES},
        {"weight": torch.zeros(4, 6, dtype=UINT8)},
        {
            f"{len(shape)} dimensions": Refusal(
                {"weight": torch.zeros(shape, dtype=UINT8)}, ValueError, r"weight must be \[N, K\], found \["
            )
            for shape in ((16,), (2, 16, 16))
        },
    ),
)  # fmt: skip
