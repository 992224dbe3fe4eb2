# SPDX-License-Identifier: Apache-2.0
"""YAML in which no mapping has a name twice. PyYAML would silently take the last one."""

from __future__ import annotations

from typing import Any

from lorakernels.train.errors import require
from lorakernels.train.files.unique_names import twice

MERGE = "tag:yaml.org,2002:merge"  # of `<<`, which may bring several mappings, one after the other


def load_yaml(text: str) -> Any:
    """The plain values that a text in YAML describes.

    Raises:
        yaml.YAMLError: it is not YAML, makes other objects, or has a name twice in one mapping. The message says where.
    """
    yaml = require("yaml")
    _check_names(yaml, yaml.compose(text, Loader=yaml.SafeLoader), set())
    return yaml.safe_load(text)


def _check_names(yaml: Any, node: Any, seen: set[int]) -> None:
    """Raise for the first name that stands twice in `node`, or below it. An alias may make a circle of nodes."""
    if id(node) in seen or isinstance(node, yaml.ScalarNode | None):
        return
    seen.add(id(node))
    keys = []
    for child in node.value:
        for part in child if isinstance(child, tuple) else (child,):
            _check_names(yaml, part, seen)
        if isinstance(child, tuple) and isinstance(child[0], yaml.ScalarNode):
            keys += [child[0]] if child[0].tag != MERGE else []
    for name in twice(key.value for key in keys):
        again = [key.start_mark for key in keys if key.value == name][1]
        raise yaml.MarkedYAMLError(
            problem=f"found {name!r} twice in one mapping", problem_mark=again
        )
