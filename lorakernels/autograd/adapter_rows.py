# SPDX-License-Identifier: Apache-2.0
"""Which adapter of a batch each sequence has, where they do not lie in the adapters' order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class AdapterRows(NamedTuple):
    """Of each of S segments of rows.

    Attributes:
        numbers: int64 [S], the number of its adapter; any for one that has the base alone.
        base: bool [S, 1, 1], whether it has the base alone; None where none has.
    """

    numbers: Tensor
    base: Tensor | None

    @classmethod
    def of(cls, numbers: Sequence[int | None], device: torch.device) -> AdapterRows:
        """`numbers`: of the adapters; None stands for the base alone."""
        known = torch.tensor([number or 0 for number in numbers], device=device)
        if None not in numbers:
            return cls(known, None)
        base = torch.tensor([number is None for number in numbers], device=device)
        return cls(known, base[:, None, None])

    def factors(self, lora_A: Tensor, lora_B: Tensor) -> tuple[Tensor, Tensor]:
        """(A [S, R, K], B [S, N, R]) of [J, R, K] and [J, N, R], differentiable. The base alone has a B of zeros.

        Raises:
            ValueError: there are not several adapters.
        """
        if lora_A.dim() != 3:
            raise ValueError(
                f"lora_A must be [J, R, K], found {list(lora_A.shape)}: AdapterBatch.rows and .only exclude each other"
            )
        a, b = (factor.index_select(0, self.numbers) for factor in (lora_A, lora_B))
        return a, b if self.base is None else b.masked_fill(self.base, 0.0)
