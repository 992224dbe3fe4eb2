# SPDX-License-Identifier: Apache-2.0
"""What bench_finetune.py gives `lorakernels finetune`: a checkpoint, a tokenizer, and this Python's sources as text.

The weights are those of peers/models.py. They are made on the device and written shard by shard, as transformers
would.
"""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmarks.peers.models import SPECS, Spec, dtype_of, empty_model, value
from benchmarks.peers.texts import library_sources
from lorakernels.train.data.byte_tokenizer import byte_tokenizer

SHARD = 1 << 30  # bytes, about
WRITERS = 4
JOBS = {
    "8b8": replace(
        SPECS["8b"],
        name="8 layers of Llama-3.1-8B",
        shape={**SPECS["8b"].shape, "num_hidden_layers": 8},
        batch=2,
    ),
    "1b": replace(SPECS["1b"], length=2048, batch=4),
    "tiny": replace(SPECS["tiny"], length=64, batch=2),
}
# Before a function, method or class, and its decorators
BLOCK = re.compile(r"^(?= {0,4}(?:def|class|async def) |@)", re.MULTILINE)


def write_checkpoint(spec: Spec, device: torch.device, folder: Path) -> None:
    """config.json, safetensors with their index, and tokenizer files whose tokens are bytes."""
    folder.mkdir(parents=True)
    config = spec.config()
    config.architectures = ["LlamaForCausalLM"]
    config.dtype = dtype_of(device)
    config.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    shapes = {name: tuple(p.shape) for name, p in empty_model(config).named_parameters()}
    size = dtype_of(device).itemsize
    shards: list[list[str]] = [[]]
    room = SHARD
    for name, shape in shapes.items():
        if shards[-1] and room < torch.Size(shape).numel() * size:
            shards.append([])
            room = SHARD
        shards[-1].append(name)
        room -= torch.Size(shape).numel() * size
    files = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]

    def write(names: list[str], file: str) -> None:
        tensors = {n: value(n, shapes[n], device, dtype_of(device)).cpu() for n in names}
        save_file(tensors, folder / file, {"format": "pt"})

    with ThreadPoolExecutor(WRITERS) as pool:
        list(pool.map(write, shards, files))
    places = {name: file for names, file in zip(shards, files, strict=True) for name in names}
    index = {"metadata": {"total_size": sum(map(_bytes, folder.glob("*.safetensors")))}}
    index_file = folder / "model.safetensors.index.json"
    index_file.write_text(json.dumps({**index, "weight_map": places}))


def _bytes(path: Path) -> int:
    return path.stat().st_size


def write_texts(folder: Path, characters: int, length: int) -> dict[str, Path]:
    """Two .jsonl files of at least `characters`, ASCII, so that a character is a token. "mixed": a document is a
    function, a method or what is between them. "long": each document fills a row of `length`, with the tokens that
    begin and end it."""
    mixed: list[str] = []
    total = 0
    for source in library_sources():
        text = source.encode("ascii", "ignore").decode()
        for block in BLOCK.split(text):
            if block.strip():
                mixed.append(block)
                total += len(block)
        if total >= characters:
            break
    else:
        raise ValueError(f"the sources have {total} characters, {characters} were asked for")
    whole, row = "".join(mixed), length - 1
    long = [whole[at : at + row] for at in range(0, len(whole) - row, row)]
    files = {}
    for name, documents in (("mixed", mixed), ("long", long)):
        files[name] = folder / f"{name}.jsonl"
        files[name].write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    return files
