# SPDX-License-Identifier: Apache-2.0
"""A property for a number of a layer that compiled ops look up by the layer's handle."""

from __future__ import annotations

from typing import Any

_REQUIRED = object()


def number(name: str, absent: Any = _REQUIRED) -> Any:
    """A property for a value that compiled ops look up by the layer's handle: setting it makes a new handle.

    A layer that was never given one has `absent`, such as a layer from a pickle that is older than the number.

    Each such value has a property because FSDP2 cannot put FP8 parameters into modules whose class has its own
    `__setattr__`.
    """

    def get(layer: Any) -> Any:
        value = layer.__dict__.get(name, absent)
        if value is _REQUIRED:
            raise AttributeError(name)
        return value

    def put(layer: Any, value: Any) -> None:
        layer.__dict__[name] = value
        if "_handle" in layer.__dict__:
            layer.renew_handle()

    return property(get, put)
