# SPDX-License-Identifier: Apache-2.0
"""How tensors get into a captured call and out of it, through buffers in the graphs' memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ..compare.signature import TensorSpec

storage_uses = torch._C._storage_Use_Count


def _nothing() -> None:
    return None


class ExposedBuffer:
    """A buffer that eager code gets to see: an output, or the gradient of an input.

    `chained`: another layer's graph reads the same memory. Such a buffer is handed out as an alias, which eager code
    must have dropped before the memory is used again. If eager code was seen to keep it longer, it gets copies.
    """

    def __init__(self, name: str, layer: str, alias: Tensor, chained: bool) -> None:
        self.name, self.layer, self.alias, self.chained = name, layer, alias, chained
        self.copy = True
        self.kept = False
        self.ref: Callable[[], Tensor | None] = _nothing
        # Of the tensor handed out; -1 for gradients, which eager code may change in place
        self.version = -1
        self._storage: StorageWeakRef | None = None
        self._held = alias.untyped_storage()
        self.cdata = self._held._cdata
        self.base = storage_uses(self.cdata)

    def expose(self) -> Tensor:
        """The tensor that eager code gets: an alias or a copy."""
        return self.alias.clone() if self.copy else self.alias.detach()

    def remember(self, x: Tensor) -> None:
        """Note the tensor that eager code got, to recognize it as an input of another call."""
        self.ref, self.version = weakref.ref(x), x._version
        if self.copy:
            self._storage = StorageWeakRef(x.untyped_storage())

    def probe(self) -> None:
        """During the trial, when the memory would be used again: note whether anybody still has the copy."""
        if self._storage is not None and not self._storage.expired():
            self.kept = True


class InputGroup:
    """Inputs of several calls that are one object. The first call copies it, and later calls must get the same one."""

    def __init__(self, first: str) -> None:
        self.ref: Callable[[], Tensor | None] = _nothing
        self.version = 0
        self.first = first


class CallInput:
    """How one tensor of a call reaches its buffer.

    Either this call copies it, or an earlier call has copied the same object. Or it is another call's output, which
    lies in the graphs' memory already.
    """

    def __init__(self, path: str, spec: TensorSpec) -> None:
        self.path, self.spec = path, spec
        self.static: Tensor | None = None  # where this call copies it to
        self.repeats = False  # the caller's tensor has expanded dimensions, which `static` lacks
        self.group: InputGroup | None = None
        self.same_as = -1  # an earlier input of this call that is the same object
        self.origin: ExposedBuffer | None = None
        self.expected: ExposedBuffer | InputGroup | None = None  # it must be this one's object

    def like(self, x: Tensor) -> bool:
        """Whether `x` has the captured shape, strides, dtype, device and requires_grad."""
        spec = self.spec
        return (
            x.shape == spec.shape
            and x.stride() == spec.stride
            and x.dtype is spec.dtype
            and x.requires_grad is spec.requires_grad
            and x.device == spec.device
        )
