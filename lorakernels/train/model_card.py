# SPDX-License-Identifier: Apache-2.0
"""README.md beside an adapter, in the form of PEFT's: what it was trained from, on and with, and its losses."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch

import lorakernels
from lorakernels.train.options.options import FinetuneOptions

TEXT = """\
---
base_model: {quoted}
library_name: peft
pipeline_tag: text-generation
tags:
- {tag}
- lora
- lorakernels
---

# LoRA adapter for {name}

{state}
{held}

## Use

```python
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

base = AutoModelForCausalLM.from_pretrained({quoted})
model = PeftModel.from_pretrained(base, "path/to/this/directory")
tokenizer = AutoTokenizer.from_pretrained("path/to/this/directory")
```

## Training data

{data}

## Hyper-parameters

{settings}

## Versions

{versions}
"""
FP8 = (
    "The frozen base was held in FP8 while the adapter learned: over a base in another dtype the "
    "logits differ by that rounding."
)
PLAIN = "The frozen base was held in its own dtype while the adapter learned."
SETTINGS = (
    "r", "lora_alpha", "lora_dropout", "target_modules", "use_rslora", "use_dora", "init_lora_weights", "seq_len",
    "optim", "lr", "lr_scheduler_type", "warmup", "loraplus_lr_ratio", "weight_decay", "max_grad_norm",
    "train_on_inputs", "seed",
)  # fmt: skip


def model_card(
    base: Path, options: FinetuneOptions, trained_on: str, state: str, sizes: Mapping[str, int]
) -> bytes:
    """The card. `trained_on` describes the data, `state` steps and losses, and `sizes` are more settings by name."""
    import transformers

    values = {name: getattr(options, name) for name in SETTINGS} | dict(sizes)
    shown = {
        name: ", ".join(value) if isinstance(value, list) else value
        for name, value in values.items()
    }
    packages = (lorakernels, torch, transformers)
    text = TEXT.format(
        quoted=_quoted(str(base)),
        tag=_quoted(f"base_model:adapter:{base}"),
        name=base.name,
        state=state,
        held=FP8 if options.fp8 else PLAIN,
        data=trained_on,
        settings="\n".join(f"- {name}: {value}" for name, value in shown.items()),
        versions="\n".join(f"- {package.__name__}: {package.__version__}" for package in packages),
    )
    return text.encode(errors="replace")  # a path may hold bytes that are not UTF-8


def _quoted(text: str) -> str:
    """A string in double quotes, as YAML, JSON and Python read it."""
    return json.dumps(text, ensure_ascii=False)
