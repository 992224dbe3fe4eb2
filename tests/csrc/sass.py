# SPDX-License-Identifier: Apache-2.0
"""nvdisasm's listing of a cubin as functions, and which of their instructions follow which."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import NamedTuple

LINE = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*(.*)$")
LABEL = re.compile(r"^(\.L_x_\w+):")
TARGET = re.compile(r"`\((\.L_x_\w+)\)")
ENDS = ("EXIT", "BRA", "RET", "BREAK")  # without a predicate, what is written next does not follow
LOCAL = ("LDL", "STL")  # from and to a thread's own memory: what registers do not hold


class Instruction(NamedTuple):
    """`is_sure`: it has no predicate."""

    name: str
    arguments: str
    is_sure: bool


class Function:
    """A kernel, by its mangled name, with the most threads of a block."""

    def __init__(self, name: str, text: str, threads: int) -> None:
        self.name, self.threads = name, threads
        self.code, self.labels = list[Instruction](), dict[str, int]()
        for line in text.splitlines():
            if label := LABEL.match(line):
                self.labels[label[1]] = len(self.code)
            elif found := LINE.match(line):
                self.code.append(Instruction(found[2], found[3], found[1] is None))

    def __repr__(self) -> str:
        return self.name

    @property
    def names(self) -> set[str]:
        """Of its instructions, without what follows a dot."""
        return {each.name.partition(".")[0] for each in self.code}

    def places(self, *names: str) -> list[int]:
        return [i for i, each in enumerate(self.code) if each.name.startswith(names)]

    @cached_property
    def _next(self) -> list[list[int]]:
        """Behind each instruction. What reconverges (BSSY's label) may follow what diverges."""
        found = []
        for i, each in enumerate(self.code):
            targets = [self.labels[t] for t in TARGET.findall(each.arguments) if t in self.labels]
            ends = each.is_sure and each.name.partition(".")[0] in ENDS
            found.append(targets + [i + 1] * (not ends and i + 1 < len(self.code)))
        return found

    def loops(self) -> list[range]:
        """The code from each jump's target to the jump behind it."""
        return [
            range(to, at + 1) for at, nexts in enumerate(self._next) for to in nexts if to <= at
        ]

    def reached(self, start: int, but: Iterable[int] = ()) -> set[int]:
        """What may run after instruction `start`, on ways that do not go through any of `but`."""
        found, waiting, closed = set[int](), [*self._next[start]], set(but)
        while waiting:
            at = waiting.pop()
            if at not in found and at not in closed:
                found.add(at)
                waiting += self._next[at]
        return found


def functions(listing: str) -> Iterator[Function]:
    """Of `nvdisasm CUBIN`."""
    sections = re.split(r"^\t?\.section\t(\S+?),", listing, flags=re.MULTILINE)[1:]
    texts = dict(zip(sections[::2], sections[1::2], strict=True))
    for section, text in texts.items():
        if section.startswith(".text."):
            name = section.removeprefix(".text.")
            most = re.search(
                r"EIATTR_MAX_THREADS(?:.*\n)+?.*\.word\s+0x(\w+)", texts.get(f".nv.info.{name}", "")
            )
            yield Function(name, text, int(most[1], 16) if most else 0)
