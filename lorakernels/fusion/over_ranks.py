# SPDX-License-Identifier: Apache-2.0
"""What a fused layer asks of the ranks that hold it, or its rows, together."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol, cast

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

    def together(self) -> AbstractContextManager[None]:
        """Collective at its end: an exception inside, on one rank, is raised on all."""


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


def over_of(layer: Any) -> Over | None:
    """The ranks that hold a decoder layer together; None for a layer that is not fused, or is whole."""
    parts = vars(layer).get("_fused")
    return None if parts is None else cast("Over | None", parts.over)
