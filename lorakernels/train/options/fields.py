# SPDX-License-Identifier: Apache-2.0
"""The form of an option: a dataclass field whose metadata holds its group, its help text and its choices."""

from __future__ import annotations

from dataclasses import field
from typing import Any

ALL_LINEAR = "all-linear"


def about(
    group: str,
    text: str,
    metavar: str | None = None,
    choices: tuple[str, ...] = (),
    brief: str | None = None,
) -> dict[str, Any]:
    """Metadata of an option. With `choices` the option takes one of them, and --help-all shows them.

    --help has the options that most runs set. These have a `brief` text for it, of one line. "" takes the whole one.
    """
    shown = "{" + ",".join(choices) + "}" if choices else metavar
    return {"group": group, "help": text, "metavar": shown, "choices": choices, "brief": brief}


def option(
    default: Any,
    group: str,
    text: str,
    metavar: str | None = None,
    choices: tuple[str, ...] = (),
    brief: str | None = None,
) -> Any:
    return field(default=default, metadata=about(group, text, metavar, choices, brief))


def names_of(items: list[str]) -> list[str]:
    """Names that spaces, commas or both separate. Where there are none, the items stay, for the check to name them."""
    return [name for item in items for name in item.replace(",", " ").split()] or items


def targets_of(names: list[str]) -> str | list[str]:
    """target_modules of the command line as `LoRAConfig` takes them."""
    names = names_of(names)
    return ALL_LINEAR if names == [ALL_LINEAR] else names
