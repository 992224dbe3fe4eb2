# SPDX-License-Identifier: Apache-2.0
"""Protocols of ranks that share a fused layer's weights (Over) or its rows (Context)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Protocol

from torch import Tensor

from lorakernels.modules.marks import became


class Over(Protocol):
    """`FusedGroup.over` of a layer whose weights are split over ranks (parallel/tensor/projections.py).

    Attributes:
        spread: the rows of all ranks, divided by the rows of one.
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
    """Attention over ranks that have some of each row's tokens (parallel/context/attention.py).

    Attributes:
        size: the tokens of all ranks, divided by the tokens of one.
    """

    size: int

    def begin(self, tokens: int) -> None:
        """A layer begins to run on rows. This rank has `tokens` tokens of each."""

    def together(self) -> AbstractContextManager[None]:
        """As `Over.together`."""

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, documents: tuple[Tensor | None, int], scale: float
    ) -> Tensor:
        """out [B, H, T, D] of this rank's q, k and v. `documents`: their starts, and the tokens of the longest one."""


def together_of(layers: Iterable[Any]) -> Callable[[], AbstractContextManager[None]]:
    """`GraphOptions.together` of the ranks that share the fused layers among `layers`, or their rows."""
    parts = [p for layer in layers if (p := became(layer).fused) is not None]
    shared: list[Context | Over] = [
        *dict.fromkeys(r for p in parts[:1] for r in (p.context, p.over) if r is not None)
    ]

    @contextmanager
    def together() -> Iterator[None]:
        with ExitStack() as stack:
            for ranks in shared:
                stack.enter_context(ranks.together())
            yield

    return together if shared else nullcontext
