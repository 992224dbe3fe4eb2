# SPDX-License-Identifier: Apache-2.0
"""What goes into a captured call and comes out of it: buffers of the graphs' memory as eager code gets to see them."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ..signature import TensorSpec

storage_uses = torch._C._storage_Use_Count


def _nothing() -> None:
    return None


class ExposedBuffer:
    """A buffer that eager code gets to see: an output, or the gradient of an input.

    `chained`: the next layer's graph reads the same memory. Such a buffer is handed out as an alias, which must be gone
    when the memory is used again, or, if somebody was seen to keep it longer, as a copy.
    """

    def __init__(self, name: str, layer: str, alias: Tensor, chained: bool) -> None:
        self.name, self.layer, self.alias, self.chained = name, layer, alias, chained
        self.copy = True
        self.kept = False
        self.ref: Callable[[], Tensor | None] = _nothing
        self.version = -1  # of what the caller got; gradients may be changed in place
        self._storage: StorageWeakRef | None = None
        self._held = alias.untyped_storage()
        self.cdata = self._held._cdata
        self.base = storage_uses(self.cdata)

    def expose(self) -> Tensor:
        return self.alias.clone() if self.copy else self.alias.detach()

    def remember(self, x: Tensor) -> None:
        """Note what the caller got, to know it again."""
        self.ref, self.version = weakref.ref(x), x._version
        if self.copy:
            self._storage = StorageWeakRef(x.untyped_storage())

    def probe(self) -> None:
        """In a trial, at the end of the buffer's life: does anybody still have it?"""
        if self._storage is not None and not self._storage.expired():
            self.kept = True


class SharedInput:
    """Inputs of several calls that are one object."""

    def __init__(self, first: str) -> None:
        self.ref: Callable[[], Tensor | None] = _nothing
        self.version = 0
        self.first = first


class CallInput:
    """How one tensor of a call reaches its buffer: copied by this call, copied by an earlier call of its group, or
    there already as the output of another call."""

    def __init__(self, path: str, spec: TensorSpec) -> None:
        self.path, self.spec = path, spec
        self.static: Tensor | None = None  # set: this call copies
        self.repeats = False  # it has expanded dimensions, which `static` lacks
        self.group: SharedInput | None = None
        self.same_as = -1  # an earlier input of this call that is the same object
        self.origin: ExposedBuffer | None = None
        self.expected: ExposedBuffer | SharedInput | None = None  # whose object it has to be

    def like(self, x: Tensor) -> bool:
        spec = self.spec
        return (
            x.shape == spec.shape
            and x.stride() == spec.stride
            and x.dtype is spec.dtype
            and x.requires_grad is spec.requires_grad
            and x.device == spec.device
        )
