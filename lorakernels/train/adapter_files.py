# SPDX-License-Identifier: Apache-2.0
"""A directory that PEFT, TRL and vLLM open: the adapter's two files, the tokenizer's files and a model card.

A checkpoint holds the same files as the adapter of the finished run.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor, nn

from lorakernels.train.files import write_bytes
from lorakernels.train.options import FinetuneOptions

WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."  # prefix of PEFT's names
CARD = """\
---
base_model: {base}
library_name: peft
pipeline_tag: text-generation
tags:
- lora
- lorakernels
---

# LoRA adapter for {name}

Rank {r}, alpha {alpha:g}, dropout {dropout:g}, on {targets}.
Trained with lorakernels {version} on packed rows of {seq_len} tokens. {held}

```python
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

base = AutoModelForCausalLM.from_pretrained("{base}")
model = PeftModel.from_pretrained(base, "path/to/this/directory")
tokenizer = AutoTokenizer.from_pretrained("path/to/this/directory")
```
"""
FP8 = (
    "The frozen base was held in FP8 while the adapter learned: over a base in another dtype the "
    "logits differ by that rounding."
)
PLAIN = "The frozen base was held in its own dtype while the adapter learned."


@dataclass(frozen=True)
class AdapterFiles:
    """Writes the current adapter of `model`.

    Attributes:
        model: the adapted model.
        base: the base model's directory, which the adapter's config names.
        beside: {path in the directory: contents} of the other files.
    """

    model: nn.Module
    base: Path
    beside: Mapping[str, bytes]

    def write(self, folder: Path) -> None:
        """Write all files into the existing directory `folder`. Every file is synced.

        Raises:
            OSError: a file could not be written.
        """
        from lorakernels import save_adapter

        save_adapter(
            self.model, folder, base_model_name_or_path=str(self.base), task_type="CAUSAL_LM"
        )
        for name, data in self.beside.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            write_bytes(folder / name, data)


def read_trained(data: bytes) -> dict[str, Tensor]:
    """{parameter name in the model: tensor} of the adapters' matrices.

    ``data`` are the bytes of an adapter_model.safetensors.
    """
    found = safetensors.torch.load(data)
    ends = (".lora_A.weight", ".lora_B.weight")
    return {
        key.removeprefix(_PREFIX).removesuffix(".weight"): tensor
        for key, tensor in found.items()
        if key.startswith(_PREFIX) and key.endswith(ends)
    }


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


def model_card(base: Path, options: FinetuneOptions) -> bytes:
    text = CARD.format(
        base=base,
        name=base.name,
        r=options.r,
        alpha=options.lora_alpha,
        dropout=options.lora_dropout,
        targets=", ".join(options.target_modules),
        version=version("lorakernels"),
        seq_len=options.seq_len,
        held=FP8 if options.fp8 else PLAIN,
    )
    return text.encode()
