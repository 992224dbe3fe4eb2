# SPDX-License-Identifier: Apache-2.0
"""Adapters in one batch: rows [M, …] in J segments of M / J rows, one after the other, each with an adapter of its own.

The ops take such adapters as A [J, R, K] and B [J, N, R]. One adapter for all rows is A [R, K] and B [N, R].
"""

from __future__ import annotations

import torch
from torch import Tensor


def adapters_of(factor: Tensor | None) -> int:
    """J of an adapter's A or B; 0 where one serves all rows."""
    return factor.shape[0] if factor is not None and factor.dim() == 3 else 0


def check_segments(name: str, factor: Tensor | None, rows: int) -> None:
    """ValueError unless J divides `rows`."""
    adapters = adapters_of(factor)
    if factor is not None and factor.dim() == 3 and (adapters == 0 or rows % adapters):
        raise ValueError(
            f"{name} {list(factor.shape)} has {adapters} adapters, which must divide the rows, found {rows}"
        )


def check_sequences(x: Tensor, adapters: int) -> None:
    """ValueError if a sequence of x [B, T, …] would have two adapters. Rows [M, K] have no sequences to check."""
    if adapters and x.dim() > 2 and x.shape[0] % adapters:
        raise cut_sequence(x, adapters)


def cut_sequence(x: Tensor, adapters: int) -> ValueError:
    """The error of an x [B, …] of B sequences that `adapters` do not divide."""
    return ValueError(
        f"{adapters} adapters must divide the sequences, found {x.shape[0]} in x {list(x.shape)}: one would be cut "
        "between two adapters"
    )


def segments(x: Tensor, adapters: int) -> Tensor:
    """[J, M / J, …] of x [M, …], without a copy if x has none between its rows."""
    return x.view(adapters, x.shape[0] // adapters, *x.shape[1:])


def rows_times(x: Tensor, factor: Tensor, alpha: float = 1.0) -> Tensor:
    """alpha · x F [M, N], of F [K, N], or of each segment's own from F [J, K, N]; one dtype, rounded once."""
    adapters = adapters_of(factor)
    if not adapters:
        out = x.new_empty(x.shape[0], factor.shape[1])
        return torch.addmm(out, x, factor, beta=0.0, alpha=alpha)
    parts = segments(x, adapters)
    out = x.new_empty(*parts.shape[:2], factor.shape[2])
    return torch.baddbmm(out, parts, factor, beta=0.0, alpha=alpha).flatten(0, 1)


def add_rows_times(y: Tensor, x: Tensor, factor: Tensor, alpha: float = 1.0) -> Tensor:
    """y [M, N] += alpha · x F, as `rows_times`; y has no gaps between its rows."""
    adapters = adapters_of(factor)
    if not adapters:
        return y.addmm_(x, factor, alpha=alpha)
    segments(y, adapters).baddbmm_(segments(x, adapters), factor, alpha=alpha)
    return y


def sum_over_rows(a: Tensor, b: Tensor, adapters: int = 0, alpha: float = 1.0) -> Tensor:
    """alpha · aᵀ b [R, N] of a [M, R] and b [M, N]; of J adapters each segment's own, [J, R, N]."""
    if not adapters:
        return rows_times(a.t(), b, alpha)
    a, b = segments(a, adapters), segments(b, adapters)
    out = a.new_empty(adapters, a.shape[2], b.shape[2])
    return torch.baddbmm(out, a.mT, b, beta=0.0, alpha=alpha)
