# SPDX-License-Identifier: Apache-2.0
"""A property for a number of a layer that compiled ops look up by the layer's handle."""

from __future__ import annotations

from typing import Any


def number(name: str) -> Any:
    """A property for a value that compiled ops look up by the layer's handle: setting it makes a new handle.

    Each such value has a property because FSDP2 cannot put FP8 parameters into modules whose class has its own
    `__setattr__`.
    """

    def get(layer: Any) -> Any:
        try:
            return layer.__dict__[name]
        except KeyError:
            raise AttributeError(name) from None

    def put(layer: Any, value: Any) -> None:
        layer.__dict__[name] = value
        if "_handle" in layer.__dict__:
            layer.renew_handle()

    return property(get, put)
