# SPDX-License-Identifier: Apache-2.0
"""What a fused layer asks of the ranks that hold it, or its rows, together."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Over(Protocol):
    """What a layer asks of `FusedGroup.over` where ranks hold it together (parallel/tensor_fused.py).

    Attributes:
        spread: how many times the rows of a rank all are.
        flat: whether a rank's rows come as [M / ranks, 1, K].
    """

    @property
    def spread(self) -> int: ...

    @property
    def flat(self) -> bool: ...

    def check(self, h: Tensor) -> None:
        """Refuse an input that split layers do not take."""


class Context(Protocol):
    """Attention over ranks that have some of each row's tokens (parallel/context_attention.py).

    Attributes:
        size: how many times a rank's tokens all are.
    """

    size: int

    def begin(self, tokens: int) -> None:
        """A layer runs on so many tokens of this rank."""

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, documents: tuple[Tensor | None, int], scale: float
    ) -> Tensor:
        """out [B, H, T, D] of this rank's q, k and v. `documents`: where they begin, and the tokens of the longest."""
