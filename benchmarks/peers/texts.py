# SPDX-License-Identifier: Apache-2.0
"""Texts that every Python installation has: its sources, and pydoc's help, as documents and as rows of bytes."""

from __future__ import annotations

import sysconfig
import tokenize
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from lorakernels.train.demo import help_texts


def sources_below(folder: Path, skipped: Sequence[str] = ()) -> list[str]:
    """The .py files below `folder`, in the order of their names. Folders with a name in `skipped` are left out."""
    paths = sorted(folder.rglob("*.py"))
    wanted = (p for p in paths if not set(p.relative_to(folder).parts[:-1]) & set(skipped))
    return [_read(path) for path in wanted]


def library_sources() -> list[str]:
    """The top-level files of this Python's standard library, in the order of their names.

    Raises:
        FileNotFoundError: there are none.
    """
    library = Path(sysconfig.get_path("stdlib"))
    texts = [_read(path) for path in sorted(library.glob("*.py"))]
    if not texts:
        raise FileNotFoundError(f"no .py file in {library}: the standard library has no sources")
    return texts


def _read(path: Path) -> str:
    with tokenize.open(path) as file:  # decodes with the encoding that the source declares
        return file.read()


def demo_texts(length: int) -> tuple[Tensor, Tensor]:
    """This Python's sources, and pydoc's help texts, one document after the other: int64 [rows, length] each."""
    first, second = (
        _rows("\n".join(texts).encode(), length) for texts in (library_sources(), help_texts())
    )
    return first, second


def _rows(text: bytes, length: int) -> Tensor:
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    return tokens[: len(tokens) // length * length].view(-1, length)
