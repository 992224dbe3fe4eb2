# SPDX-License-Identifier: Apache-2.0
"""Names that stand once: JSON, YAML and tables would silently keep the last of several values of one name."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from typing import Any


class NameTwice(ValueError):
    """A JSON object has a name twice. The text is valid JSON, but it is unclear which value is meant."""


def twice(names: Iterable[str]) -> list[str]:
    """The names that are there more than once, by alphabet."""
    return sorted(name for name, count in Counter(names).items() if count > 1)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        names = ", ".join(repr(name) for name in twice(name for name, _ in pairs))
        raise NameTwice(f"one object has {names} twice: leave one of them")
    return entries


_UNIQUE = json.JSONDecoder(object_pairs_hook=_object)
_ANY = json.JSONDecoder()


def load_json(text: str) -> Any:
    """The value that a text in JSON describes.

    Raises:
        NameTwice: an object in it, at any depth, has a name twice.
        ValueError, RecursionError: it is not JSON, an integer has too many digits, or it is too deep.
    """
    return _UNIQUE.decode(text)


def load_json_at(text: str, start: int) -> tuple[Any, int]:
    """(the JSON value that begins at `start`, where it ends). A NameTwice stands for a value with a repeated name.

    Raises:
        ValueError, RecursionError: as for `load_json`.
    """
    try:
        return _UNIQUE.raw_decode(text, start)
    except NameTwice as error:
        return error, _ANY.raw_decode(text, start)[1]
