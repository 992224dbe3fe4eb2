# SPDX-License-Identifier: Apache-2.0
"""The other files of a merged model than its weights: a new config.json, and copies of small files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from lorakernels.checkpoints.base.format import undeclare
from lorakernels.checkpoints.export.plan import MergePlan
from lorakernels.checkpoints.export.writer import write_json

_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".tiktoken")
_TEMPLATES = "additional_chat_templates"
_TOKENIZER = (
    "tokenizer",
    "special_tokens_map",
    "added_tokens",
    "chat_template",
    "vocab",
    "merges",
)
_NOT_SMALL_FILES = ("adapter_config.json", "config.json")


def copy_files(model: Path, adapter: Path, folder: Path) -> None:
    """Copy the tokenizer, templates, generation config, licence and other small files of `model` to `folder`.

    If the adapter's directory holds a tokenizer, as trainers write it, that one is copied instead of the model's.
    """
    tokenizer = [path for path in _small(adapter) if path.name.startswith(_TOKENIZER)]
    has_own = any(path.name.startswith("tokenizer") for path in tokenizer)
    for path in _small(model):
        if not (has_own and path.name.startswith(_TOKENIZER)):
            shutil.copyfile(path, folder / path.name)
    for path in tokenizer if has_own else []:
        shutil.copyfile(path, folder / path.name)
    templates = (adapter if has_own else model) / _TEMPLATES
    if templates.is_dir():
        shutil.copytree(templates, folder / _TEMPLATES)


def _small(folder: Path) -> list[Path]:
    def comes_along(path: Path) -> bool:
        name = path.name
        if name in _NOT_SMALL_FILES or name.endswith(".index.json") or name.startswith("."):
            return False
        return name.endswith(_SUFFIXES) or name.upper().startswith(("LICENSE", "NOTICE"))

    return sorted(p for p in folder.iterdir() if p.is_file() and comes_along(p))


def write_config(model: Path, folder: Path, fp8: MergePlan | None, untied: bool) -> None:
    """Write config.json of the merged model: the base's, with new dtype, quantization and tying of the embeddings."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    undeclare(config)
    parts = [config, *(part for part in config.values() if isinstance(part, dict))]
    for part in parts:
        for key in ("dtype", "torch_dtype"):
            if key in part:
                part[key] = "bfloat16"
        if untied and "tie_word_embeddings" in part:
            part["tie_word_embeddings"] = False
    if not {"dtype", "torch_dtype"} & set(config):
        config["dtype"] = "bfloat16"
    if untied:
        config["tie_word_embeddings"] = False
    if fp8 is not None:
        config["quantization_config"] = _fp8_config(fp8)
    write_json(folder / "config.json", config)


def _fp8_config(plan: MergePlan) -> dict[str, Any]:
    """The quantization_config that transformers' FineGrainedFP8Config and vLLM's Fp8Config read."""
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": list(plan.block),
        "modules_to_not_convert": plan.plain,
    }
