# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs of decoder layers in a training loop that knows nothing of them.

A microbatch begins with a training forward of the first layer. The shapes of its arguments are counted. A shape that
has come `warmup_steps` times is recorded and captured; rarer shapes run eagerly. Captures happen between steps only.

A microbatch may never get its backward, because of an exception or a loss that was thrown away. It is dropped when the
next one begins, or at the end of the step.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from lorakernels.graphs import (
    CaptureError,
    GraphManager,
    OrderError,
    TensorSpec,
    flatten,
)

_TRIES = 8  # most steps recorded in vain, and most recaptures
Shape = tuple[Any, ...]


class LayerGraphs:
    """Decides which shapes of the layers are captured, and when.

    Args:
        make: makes a GraphManager of the decoder layers, of `num_microbatches` and one step of warm-up.
        warmup_steps: how often a shape comes before its capture.
        max_shapes: how many shapes the managers capture.

    Attributes:
        why_not: why nothing is replayed (yet).
        failed: whether that is final.
        notes: the warnings given so far.
    """

    def __init__(
        self, make: Callable[..., GraphManager], warmup_steps: int, max_shapes: int
    ) -> None:
        self._make, self.warmup_steps, self.max_shapes = make, warmup_steps, max_shapes
        self.manager: Any = None
        self.failed = False
        self.notes: list[str] = []
        self.why_not: str | None = None
        self._counts: Counter[Shape] = Counter()
        self._captured: set[Shape] = set()
        self._aside = ExitStack()  # keeps the manager off during one microbatch
        self._recorded: Shape | None = None
        self._tries = self._recaptures = 0
        self._changed = False
        self._make_manager(1)  # wrong options raise now
        if warmup_steps > 1:
            self.close()
        self._make_manager_if_due()

    @property
    def replaying(self) -> bool:
        return self.manager is not None and self.manager.phase == "replaying"

    @property
    def replayed(self) -> int:
        """Number of replayed microbatches, of the graphs that exist now."""
        return self.manager.replayed if self.replaying else 0

    def begin_microbatch(self, args: Any, kwargs: Any) -> bool:
        """Called before the first layer's training forward, with its arguments.

        Returns whether a microbatch without a backward was dropped.
        """
        tensors, spec = flatten((args, kwargs))
        shape = (*map(TensorSpec.of, tensors), *map(type, spec))
        self._counts[shape] += 1
        self._aside.close()
        if self.manager is None:
            return False
        if self.replaying:
            return self._begin_replay(shape)
        if self._recorded is None:
            self._recorded = shape
        elif self.manager.between_blocks:  # later microbatches need no recording
            self._aside.enter_context(self.manager.disabled())
        return False

    def _begin_replay(self, shape: Shape) -> bool:
        dropped = not self.manager.goes_on(0)
        if dropped:
            self.manager.discard_iteration()
        reason = self._why_eager(shape) if self.manager.between_blocks else None
        if reason is not None:
            self._note(f"a microbatch runs eagerly: {reason}")
            self._aside.enter_context(self.manager.disabled())
        return dropped

    def _why_eager(self, shape: Shape) -> str | None:
        if (changed := self.manager.changed()) is not None:
            self._changed = True
            return f"{changed}; the layers are captured again after the step"
        if shape in self._captured:
            return None
        if self._counts[shape] < self.warmup_steps:
            return f"its shape {_text(shape)} is new; it is captured when it has come {self.warmup_steps} times"
        if len(self._captured) >= self.max_shapes:
            return f"max_shapes={self.max_shapes} are captured, its shape {_text(shape)} is another"
        self._captured.add(shape)
        return None

    def end_step(self) -> None:
        """Called between steps: capture what was recorded, and drop microbatches without a backward."""
        self._aside.close()
        if self.failed:
            return
        if self.replaying:
            self._end_replayed_step()
        elif self.manager is not None and self._recorded is not None:
            self._end_recorded_step()
        self._recorded = None
        self._make_manager_if_due()

    def _end_replayed_step(self) -> None:
        try:
            self.manager.end_iteration()
            if self._changed:
                self._recapture()
        except OrderError:  # ReplayOrderError: a backward is missing
            self.manager.discard_iteration()
        except CaptureError as error:
            if not self.replaying:
                self.give_up(f"{error}")
                return
            self._note(f"microbatches of a further shape run eagerly: {error}")

    def _recapture(self) -> None:
        self._changed, self._recaptures = False, self._recaptures + 1
        if self._recaptures > _TRIES:
            self.give_up(f"the model changed {_TRIES} times after its capture")
        else:
            self.manager.recapture()

    def _end_recorded_step(self) -> None:
        seen, complete = self.manager.microbatches_seen, self.manager.between_blocks
        if self._counts[self._recorded or ()] < self.warmup_steps:
            self.manager.discard_iteration()
            return
        if not complete or seen != self.manager.num_microbatches:
            self._tries += 1
            self.manager.close()
            self.manager = None
            if self._tries >= _TRIES:
                what = "a forward of the layers had no backward, or they did not all run as often"
                self.give_up(f"{what}, in {_TRIES} steps")
                return
            self._make_manager(seen if complete else 1)
            return
        try:
            self.manager.end_iteration()
        except (CaptureError, OrderError) as error:
            self.give_up(str(error))
            return
        self._captured.add(self._recorded or ())
        self.why_not = None

    def _make_manager_if_due(self) -> None:
        if self.manager is not None or self.failed:
            return
        if max(self._counts.values(), default=0) + 1 >= self.warmup_steps:
            self._make_manager(1)
        seen = "; ".join(f"{_text(s)} × {n}" for s, n in self._counts.most_common(3))
        self.why_not = f"no shape has come {self.warmup_steps} times yet" + (seen and f": {seen}")

    def _make_manager(self, num_microbatches: int) -> None:
        self.manager = self._make(num_microbatches=num_microbatches)

    def _note(self, text: str) -> None:
        """Warn once of each kind of text."""
        kind = text.split("[")[0]
        if not any(note.startswith(kind) for note in self.notes):
            self.notes.append(text)
            warnings.warn(text, RuntimeWarning, stacklevel=2)

    def give_up(self, reason: str) -> None:
        """Run the layers eagerly from now on, with a warning."""
        self.close()
        self.failed, self.why_not = True, reason
        warnings.warn(f"layers run eagerly: {reason}", RuntimeWarning, stacklevel=2)

    def close(self) -> None:
        self._aside.close()
        if self.manager is not None:
            self.manager.close()
            self.manager = None


def _text(shape: Shape) -> str:
    return str(list(shape[0].shape)) if shape and isinstance(shape[0], TensorSpec) else "()"
