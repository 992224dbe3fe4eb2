# SPDX-License-Identifier: Apache-2.0
"""The fields of a row: a text, a list, an object, and what stands in a table's cell as JSON."""

from __future__ import annotations

import difflib
from functools import lru_cache
from typing import Any

from lorakernels.train.data.sources import Row, RowError
from lorakernels.train.files.unique_names import NameTwice, load_json


def is_empty(value: Any) -> bool:
    """Whether a field holds as much as if it were not there. Numbers and truth values always hold something."""
    return value is None or (isinstance(value, (str, list, dict)) and not value)


@lru_cache(1024)  # rows have the same names again and again
def did_you_mean(name: str, names: tuple[str, ...], cutoff: float = 0.8) -> str:
    """The nearest of the known names, as a question in brackets. Empty if none is near."""
    near = difflib.get_close_matches(name.lower(), names, 1, cutoff)
    return f" (did you mean {near[0]!r}?)" if near else ""


def kind_name(value: Any) -> str:
    return "null" if value is None else type(value).__name__


def string_of(row: Row, value: Any, field: str) -> str:
    if not isinstance(value, str):
        raise RowError(f'{row.where}: expected a string under "{field}", found {kind_name(value)}')
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RowError(
            f"{row.where}: character {error.start} of the {field} is a lone surrogate"
        ) from error
    return value


def list_of(row: Row, value: Any, field: str) -> list[Any]:
    """A list. A table's cell may hold it as JSON."""
    value = _loaded(row, value, field, "list")
    if not isinstance(value, list):
        raise RowError(f'{row.where}: expected a list under "{field}", found {kind_name(value)}')
    return value


def object_of(row: Row, value: Any, field: str) -> dict[str, Any]:
    """An object. A table's cell may hold it as JSON."""
    value = _loaded(row, value, field, "object")
    if not isinstance(value, dict):
        raise RowError(f'{row.where}: expected an object under "{field}", found {kind_name(value)}')
    return value


def _loaded(row: Row, value: Any, field: str, wanted: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return load_json(value)
    except NameTwice as error:
        raise RowError(f'{row.where}: the text under "{field}": {error}') from error
    except (ValueError, RecursionError) as error:
        raise RowError(
            f'{row.where}: the text under "{field}" is not a JSON {wanted} ({error})'
        ) from error
