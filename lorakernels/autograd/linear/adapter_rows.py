# SPDX-License-Identifier: Apache-2.0
"""Which adapter of a batch each sequence has, if they are not in the adapters' order."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class AdapterRows(NamedTuple):
    """Which adapter each of S segments of rows has.

    Attributes:
        numbers: int64 [S], the number of its adapter; any number for a segment with the base alone.
        base: bool [S, 1, 1], whether it has the base alone; None if no segment has.
    """

    numbers: Tensor
    base: Tensor | None

    @classmethod
    def of(cls, numbers: Sequence[int | None], device: torch.device) -> AdapterRows:
        """`numbers`: of the adapters; None stands for the base alone."""
        indices = torch.tensor([number or 0 for number in numbers], device=device)
        if None not in numbers:
            return cls(indices, None)
        base = torch.tensor([number is None for number in numbers], device=device)
        return cls(indices, base[:, None, None])

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


Packed = Any  # a tensor as the hooks of a checkpoint keep it, or detached, with its version
# .place and .held: where a backward last unpacked a tensor, and the rows of the forward that packed it
_unpacked = threading.local()


def _place() -> tuple[int, int] | None:
    """(backward, autograd node) of the backward that runs now; None outside of a backward."""
    task = torch._C._current_graph_task_id()
    node = torch._C._current_autograd_node()
    return None if task == -1 or node is None else (task, node._sequence_nr())


class Alone:
    """Stands for one AdapterBatch.only: one adapter has all rows. `ran`: a forward has run inside."""

    ran = False


Held = dict[torch.device, AdapterRows] | Alone


class CallRows:
    """Which rows of a call belong to which adapter of one AdapterBatch. The batch's layers share it.

    A checkpoint saves its function's tensors for backward, and unpacks them just before it computes the function again.
    So hooks of saved tensors give a recomputation its forward's rows, wherever backward runs. If other hooks hide them,
    or the function had no tensor, a recomputation raises. A copy has no calls.

    Attributes:
        needs_lookup: whether a call has to call `of`. Otherwise its rows are in the adapters' order.
    """

    _held: ClassVar[dict[CallRows, Held]] = {}  # of all batches, now; replaced as a whole

    def __init__(self) -> None:
        self.needs_lookup = False
        self._used = False  # by a forward that may be computed again
        self._inside = False  # the rows were named inside the backward that runs

    def __reduce__(self) -> tuple[Any, ...]:
        return CallRows, ()

    @contextmanager
    def holding(self, what: Held) -> Iterator[None]:
        """Inside, calls have these rows on each device, or one adapter is alone.

        Raises:
            ValueError: an adapter would be alone inside `AdapterBatch.rows`.
        """
        before, inside = CallRows._held, self._inside
        alone = isinstance(what, Alone)
        if alone and self in before:
            raise ValueError("AdapterBatch.rows and .only exclude each other")
        held = CallRows._held = {**before, self: what}
        self.needs_lookup, self._inside = True, _place() is not None
        unhooked = alone or not torch.is_grad_enabled()
        try:
            with nullcontext() if unhooked else saved_tensors_hooks(*_hooks(held)):
                yield
        finally:
            CallRows._held, self._inside = before, inside
            self.needs_lookup = self._used or self in before

    def of(self, device: torch.device, training: bool) -> AdapterRows | None:
        """The rows of this call, on `device`; None if they lie in the adapters' order, or one adapter is alone.

        Raises:
            RuntimeError: a recomputation's rows are not known.
        """
        now, place = CallRows._held.get(self), _place()
        if place is None:
            self._used = self._used or training or torch.is_grad_enabled()
            if isinstance(now, Alone):
                now.ran = True
        elif not self._inside:
            now = self._of_forward(place, now)
        return now.get(device) if isinstance(now, dict) else None

    def _of_forward(self, place: tuple[int, int], now: Held | None) -> Held | None:
        is_here = getattr(_unpacked, "place", None) == place
        if isinstance(now, Alone):
            if now.ran and not is_here:
                return now
            raise RuntimeError(
                "a checkpoint is computed again inside AdapterBatch.only, and its forward was outside: run backward "
                "outside as well"
            )
        if is_here:
            held: Held | None = _unpacked.held.get(self)
            return held
        raise RuntimeError(
            "a checkpoint is computed again, and the adapters of its rows are not known: name them for all forwards by "
            "AdapterBatch.rows around the model. Inside of it, let no other hooks of saved tensors, such as an "
            "offload's, surround the checkpoint, and give its function tensors by position. A forward inside "
            "AdapterBatch.only has its backward there"
        )


def _hooks(held: dict[CallRows, Held]) -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
    """Hooks of saved tensors that note `held` when one is unpacked. They call the hooks that were there before."""
    before = torch._C._autograd._top_saved_tensors_default_hooks(True)

    def pack(x: Tensor) -> Packed:
        return before[0](x) if before else (x.detach(), x._version)

    def unpack(kept: Packed) -> Tensor:
        if before:
            x: Tensor = before[1](kept)
        else:
            x, version = kept
            if x._version != version:
                raise RuntimeError(
                    f"a tensor {list(x.shape)} that backward needs was changed in place after its forward"
                )
        _unpacked.place, _unpacked.held = _place(), held
        return x

    return pack, unpack
