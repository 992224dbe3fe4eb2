# SPDX-License-Identifier: Apache-2.0
"""Model directories and texts that `lorakernels finetune` takes, made on the spot: random weights, bytes as tokens.

write_model(folder, shape)          config.json, sharded safetensors, tokenizer
write_text(path, characters)        JSON Lines: this Python's own sources, one document each
"""

from __future__ import annotations

import json
import sysconfig
import tokenize
from pathlib import Path
from typing import Any

from lorakernels.train.bytes import byte_tokenizer
from lorakernels.train.synthetic import write_checkpoint


def write_model(folder: Path, shape: dict[str, Any], positions: int) -> Path:
    """A Llama of `shape` (LlamaConfig's names) for up to `positions` tokens, in bf16."""
    import transformers

    config = transformers.LlamaConfig(
        max_position_embeddings=positions, rms_norm_eps=1e-5, use_cache=False, **shape
    )
    write_checkpoint(folder, config)
    byte_tokenizer().save_pretrained(folder)
    return folder


def write_text(path: Path, characters: int) -> Path:
    """Whole documents until they hold that many characters."""
    held, lines = 0, []
    for source in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        try:
            with tokenize.open(source) as file:
                text = file.read()
        except (
            SyntaxError,
            UnicodeDecodeError,
        ):  # the standard library's tests hold some on purpose
            continue
        lines.append(json.dumps({"text": text}) + "\n")
        held += len(text)
        if held >= characters:
            break
    path.write_text("".join(lines), encoding="utf-8")
    return path
