# SPDX-License-Identifier: Apache-2.0
"""Tensors that a layer derived from its weights on an eager forward, and that its graphs read at fixed addresses.

A replay runs no Python of the layer, so that a weight written in place would leave them stale. A module that derives
such tensors has a method `renew_derived()`. It renews what is stale, at the same addresses unless a weight was moved,
and returns the tensors that it derives from. It is called before a capture, and before a replay that follows a write to
one of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from ..compare.signature import extension


def renew_derived(layer: nn.Module) -> list[Tensor]:
    """Renew stale tensors that the modules inside `layer` derived. Returns the tensors that they are derived from."""
    owners: list[Any] = [m for m in layer.modules() if hasattr(type(m), "renew_derived")]
    return [x for owner in owners for x in owner.renew_derived()]


class DerivedVersions:
    """Versions of the tensors from which the modules inside `layers` derived others.

    A write through `.data` is not seen, as it does not change the tensor's version.
    """

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        self._layers = list(layers)
        self._renew()

    def _renew(self) -> None:
        watch = extension().Watch()
        for layer in self._layers:
            for x in renew_derived(layer):
                watch.add_attribute(x, "_version", x._version)
        self._check = watch.check

    def renew_if_written(self) -> None:
        """Before a replay. Without a write it takes half a microsecond for ten tensors."""
        if self._check() >= 0:
            self._renew()
