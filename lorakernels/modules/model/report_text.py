# SPDX-License-Identifier: Apache-2.0
"""Write the modules with equal report text as one path: model.layers.{0-79}.self_attn.{q,k,v,o}_proj."""

from __future__ import annotations

from collections.abc import Iterable

_Parts = tuple[tuple[str, ...], ...]  # a path at its dots: each part's alternatives


def grouped(said: Iterable[tuple[str, str]]) -> list[tuple[str, int, str]]:
    """Turn (path, text) pairs into (path with braces, number of paths, text), in order of the texts' first appearance.

    Only paths that differ in one part are joined. So the braces stand for every combination.
    """
    groups: dict[str, list[_Parts]] = {}
    for path, text in said:
        groups.setdefault(text, []).append(tuple((part,) for part in path.split(".")))
    return [
        (".".join(map(_braces, parts)), _count(parts), text)
        for text, paths in groups.items()
        for parts in _joined(paths)
    ]


def lines_of(said: Iterable[tuple[str, str]]) -> list[str]:
    """A report's lines of (path, text) pairs, one line for paths with equal text."""
    return [f"  {paths}{f' ({n})' if n > 1 else ''}: {text}" for paths, n, text in grouped(said)]


def folded(paths: Iterable[str]) -> str:
    """Paths with braces, separated by commas."""
    return ", ".join(path for path, _, _ in grouped((path, "") for path in paths))


def _joined(paths: list[_Parts]) -> list[_Parts]:
    """Join paths that differ in one part: first in numbers, then in names, each from the last part to the first."""
    longest = max(map(len, paths))
    for numbers in (True, False):
        for index in reversed(range(longest)):
            paths = _joined_at(index, paths, numbers)
    return paths


def _joined_at(index: int, paths: list[_Parts], numbers: bool) -> list[_Parts]:
    joined: dict[tuple[object, ...], _Parts] = {}
    for parts in paths:
        if index >= len(parts) or all(part.isdecimal() for part in parts[index]) != numbers:
            joined[(parts,)] = parts
            continue
        key = (parts[:index], parts[index + 1 :])
        before = joined.get(key)
        joined[key] = (
            parts
            if before is None
            else (*parts[:index], before[index] + parts[index], *parts[index + 1 :])
        )
    return list(joined.values())


def _count(parts: _Parts) -> int:
    count = 1
    for part in parts:
        count *= len(part)
    return count


def _braces(part: tuple[str, ...]) -> str:
    if len(part) == 1:
        return part[0]
    if all(name.isdecimal() for name in part):
        return f"{{{_ranges(sorted(map(int, part)))}}}"
    words = [name.split("_") for name in part]
    most = min(map(len, words)) - 1
    start = _same(words, most)
    end = _same([name[::-1] for name in words], most - start)
    middles = ["_".join(name[start : len(name) - end]) for name in words]
    ends = words[0][len(words[0]) - end :]
    return "_".join([*words[0][:start], f"{{{','.join(middles)}}}", *ends])


def _same(words: list[list[str]], most: int) -> int:
    """The number of leading words, at most `most`, that all lists have in common."""
    columns = list(zip(*words, strict=False))[:most]
    return next((i for i, column in enumerate(columns) if len(set(column)) > 1), len(columns))


def _ranges(numbers: list[int]) -> str:
    """Sorted numbers as ranges: 0, 1, 2, 3 and 7 become 0-3,7."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ",".join("-".join(map(str, run)) for run in runs)
