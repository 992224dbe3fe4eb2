# SPDX-License-Identifier: Apache-2.0
"""Checks of a config's fields. An error names the field, the value and what is expected."""

from __future__ import annotations

import math


def unexpected(where: str, name: str, value: object, expected: str) -> ValueError:
    return ValueError(f"{where}.{name} must be {expected}, got {value!r}")


def check_bool(where: str, name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{where}.{name} must be True or False, got {value!r}")


def check_int(where: str, name: str, value: object, at_least: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{where}.{name} must be an int, got {value!r}")
    if at_least is not None and value < at_least:
        raise unexpected(where, name, value, f"at least {at_least}")


def check_number(where: str, name: str, value: object, above: float | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{where}.{name} must be a number, got {value!r}")
    if not math.isfinite(value):
        raise unexpected(where, name, value, "finite")
    if above is not None and value <= above:
        raise unexpected(where, name, value, f"greater than {above:g}")


def check_choice(where: str, name: str, value: object, choices: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in choices:
        raise unexpected(where, name, value, " or ".join(map(repr, choices)))
