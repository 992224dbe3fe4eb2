# SPDX-License-Identifier: Apache-2.0
"""What a fused layer asks of the ranks that hold it, or its rows, together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Protocol

from torch import Tensor

from lorakernels.modules.marks import became


class Over(Protocol):
    """What a layer asks of `FusedGroup.over` where ranks hold it together (parallel/tensor/fused.py).

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
    """Attention over ranks that have some of each row's tokens (parallel/context/attention.py).

    Attributes:
        size: how many times a rank's tokens all are.
    """

    size: int

    def begin(self, own: int) -> None:
        """A layer runs on rows of each of which this rank has so many tokens."""

    def together(self) -> AbstractContextManager[None]:
        """As `Over.together`."""

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, documents: tuple[Tensor | None, int], scale: float
    ) -> Tensor:
        """out [B, H, T, D] of this rank's q, k and v. `documents`: where they begin, and the tokens of the longest."""


def together_of(layers: Iterable[Any]) -> Callable[[], AbstractContextManager[None]]:
    """For `GraphOptions.together`: of the ranks that hold fused layers, or their rows, together."""
    parts = [p for layer in layers if (p := became(layer).fused) is not None]
    found: list[Context | Over] = [
        *dict.fromkeys(r for p in parts[:1] for r in (p.context, p.over) if r is not None)
    ]

    @contextmanager
    def together() -> Iterator[None]:
        with ExitStack() as stack:
            for ranks in found:
                stack.enter_context(ranks.together())
            yield

    return together if found else nullcontext
