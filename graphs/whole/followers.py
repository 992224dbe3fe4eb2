# SPDX-License-Identifier: Apache-2.0
"""Followers of a captured step: objects with a record on the host, which a replay would make untrue.

Such an object calls `follow` when it is used. While a step is captured, it becomes one of that step's followers. It
gets a call at the capture's end and, from then on, before every replay.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Follower(Protocol):
    def end_capture(self, failed: bool) -> None:
        """The capture ends. It is running still, so that work on other streams can be joined, unless it `failed`."""

    def before_replay(self) -> None:
        """The step is going to be replayed on the current stream."""


# a plain global, as the backward of the step runs in threads of autograd's; only one step is captured at a time
_now: list[Follower] | None = None


def follow(follower: Follower) -> bool:
    """Whether a whole step is being captured now; if so, `follower` follows it."""
    if _now is None:
        return False
    if not any(one is follower for one in _now):
        _now.append(follower)
    return True


@contextmanager
def following() -> Iterator[list[Follower]]:
    """The list of the objects that call `follow` inside. The end of the context calls their `end_capture`."""
    global _now
    followers = _now = []
    failed = True
    try:
        yield followers
        failed = False
    finally:
        _now = None
        for follower in followers:
            follower.end_capture(failed)
