# SPDX-License-Identifier: Apache-2.0
"""A directory that PEFT, TRL and vLLM open: the adapter's two files, the tokenizer's files and a model card.

A checkpoint holds the same files as the adapter of the finished run.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from lorakernels.train.files.files import replace_dir, write_bytes

WEIGHTS = "adapter_model.safetensors"
CARD = "README.md"


@dataclass(frozen=True)
class AdapterFiles:
    """Writes the current adapter of `model`.

    Attributes:
        model: the adapted model.
        base: the base model's directory, which the adapter's config names.
        beside: {path in the directory: contents} of the other files.
        card: the model card as it is now; None writes none.
        around: in which the model is whole, where ranks have stages of it.
    """

    model: nn.Module
    base: Path
    beside: Mapping[str, bytes]
    card: Callable[[], bytes] | None = None
    around: Callable[[], AbstractContextManager[None]] = nullcontext

    def write(self, folder: Path) -> None:
        """Write all files into the existing directory `folder`. Every file is synced.

        Raises:
            OSError: a file could not be written.
        """
        from lorakernels import save_adapter

        with self.around():
            save_adapter(
                self.model, folder, base_model_name_or_path=str(self.base), task_type="CAUSAL_LM"
            )
        card = {} if self.card is None else {CARD: self.card()}
        for name, data in {**self.beside, **card}.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            write_bytes(folder / name, data)


def tokenizer_files(tokenizer: Any) -> dict[str, bytes]:
    """{name: contents} of the files that `tokenizer.save_pretrained` writes."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        root = Path(folder)
        return {
            path.relative_to(root).as_posix(): path.read_bytes()
            for path in sorted(root.rglob("*"))
            if path.is_file()
        }


def save_adapter_files(files: AdapterFiles, target: Path) -> Path:
    """Write the directory that PEFT opens, complete or not at all."""
    with replace_dir(target) as temporary:
        files.write(temporary)
    return target
