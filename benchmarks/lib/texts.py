# SPDX-License-Identifier: Apache-2.0
"""The demo's documents as rows of bytes, one document after the other."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from lorakernels.train.demo import write_texts


def demo_texts(length: int) -> tuple[Tensor, Tensor]:
    """This Python's sources, and pydoc's help texts: int64 [rows, length] each."""
    with tempfile.TemporaryDirectory() as folder:
        paths = write_texts(Path(folder))
        texts = [
            "\n".join(json.loads(line)["text"] for line in path.read_text().splitlines())
            for path in paths
        ]
    first, second = (_rows(text.encode(), length) for text in texts)
    return first, second


def _rows(text: bytes, length: int) -> Tensor:
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    return tokens[: len(tokens) // length * length].view(-1, length)
