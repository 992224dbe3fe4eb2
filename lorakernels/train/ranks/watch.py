# SPDX-License-Identifier: Apache-2.0
"""Each rank watches the one before it, and ends when that one has ended.

A rank that waits for a kernel of NCCL, or computes, cannot see before NCCL's own timeout that its peer is gone. A
thread therefore waits for a message over gloo, whose connection breaks with the peer's process. It tells the next rank
at once, so that all ranks wait for `GRACE` together, however many they are.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from threading import Thread

import torch
import torch.distributed as dist

RUN = timedelta(days=365)  # longer than any run
GRACE = 5.0  # seconds in which this rank may end by itself, with a message of its own
# what a rank tells the one after it: all end together, or one of them has ended
ENDED, LOST = 0.0, 1.0


class RankWatch:
    """Collective: the ranks of the default group watch each other from now on, until `end`.

    Args:
        said: what the process says, on its standard error, before it exits with code 1.
    """

    def __init__(self, said: Callable[[], str]) -> None:
        self._said, self._leaves = said, False
        rank, size = dist.get_rank(), dist.get_world_size()
        self._before, self._after = (rank - 1) % size, (rank + 1) % size
        self._group = dist.new_group(backend="gloo", timeout=RUN)
        self._thread = Thread(target=self._wait, name="watch", daemon=True)
        self._thread.start()

    def end(self, with_the_others: bool) -> None:
        """Stop watching.

        Args:
            with_the_others: whether all ranks end here. It then waits for the rank before, so that no connection
                breaks under the one after. Else the others see that this rank ends.
        """
        self._leaves = True
        if with_the_others:
            dist.send(torch.tensor([ENDED]), self._after, group=self._group)
            self._thread.join()

    def _wait(self) -> None:
        message = torch.tensor([LOST])
        with contextlib.suppress(RuntimeError):  # of gloo: the connection broke
            dist.recv(message, self._before, group=self._group)
        if float(message) == ENDED:
            return
        # The one after may have ended. The group is no longer torch's, if this rank is about to end by itself.
        with contextlib.suppress(RuntimeError):
            self._sent = self._group.send([torch.tensor([LOST])], self._after, 0)
        time.sleep(GRACE)
        if not self._leaves:
            print(f"error: {self._said()}", file=sys.stderr, flush=True)
            os._exit(1)
