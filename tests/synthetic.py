# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of any size with random weights, written shard by shard: the model is never held.

    write_checkpoint(folder, LlamaConfig(...), shard_bytes=5 << 30)      # an ordinary sharded directory
    load_quantized(Synthetic(config, scratch), config=config, ...)       # a shard exists only while it is read

Values: matrices normal with the config's initializer_range, vectors 1 (norms' weights). Every tensor is a window into
one pool of
2²⁴ normal numbers, at an offset drawn from its name: as random as timing and power need, at the speed of memory.
"""

from __future__ import annotations

import contextlib
import copy
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from lorakernels.checkpoints.base.shards import Read, reader
from lorakernels.train.errors import require
from lorakernels.train.files.files import replace_file

_NAMES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
POOL = 1 << 24
BLOCK = 128
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Info:
    """As `load_quantized` asks for it."""

    shard: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def bytes(self) -> int:
        size = {"F8_E4M3": 1, "F32": 4}.get(self.dtype, 2)
        return size * int(torch.Size(self.shape).numel())


class Values:
    """name, shape → a tensor; the same for the same seed."""

    def __init__(self, std: float, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._pool = torch.randn(POOL, generator=generator).mul_(std)
        self._by_dtype: dict[torch.dtype, Tensor] = {}
        self._seed = seed

    def pieces(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Iterator[Tensor]:
        """The tensor, flat, in pieces no longer than the pool."""
        count = int(torch.Size(shape).numel())
        if name.endswith("_scale_inv"):
            yield torch.full((count,), 2.0**-9)  # e4m3 of order 10 becomes 0.02
            return
        if len(shape) < 2:
            yield torch.ones(count, dtype=dtype)
            return
        pool = self._by_dtype.get(dtype)
        if pool is None:
            wide = self._pool if dtype != torch.float8_e4m3fn else self._pool * 2.0**9
            pool = self._by_dtype[dtype] = wide.to(dtype)
        at = zlib.crc32(f"{self._seed} {name}".encode()) % POOL
        while count:
            piece = pool[at : at + count]
            yield piece
            count -= len(piece)
            at = 0


def shapes(config: Any) -> tuple[dict[str, tuple[int, ...]], set[str]]:
    """(shape of each tensor of a causal LM's checkpoint, names of the linear layers' weights but the head's)."""
    transformers = require("transformers")
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(config))
    head = model.get_output_embeddings()
    linear = {
        f"{path}.weight"
        for path, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and module is not head
    }
    return {name: tuple(p.shape) for name, p in model.named_parameters()}, linear


class Synthetic:
    """A source for `load_quantized` whose shards are written to `folder` when opened, and deleted when closed.

    Args:
        config: of a transformers causal LM.
        folder: on a disk (or memory file system) with room for one shard.
        dtype: of the weights.
        block_fp8: linear weights in e4m3 with a scale_inv per 128 × 128 block, as DeepSeek's checkpoints.
        shard_bytes: tensors go into a shard until it holds as much.
    """

    def __init__(
        self,
        config: Any,
        folder: str | Path,
        *,
        dtype: torch.dtype = torch.bfloat16,
        block_fp8: bool = False,
        shard_bytes: int = 5 << 30,
        seed: int = 0,
    ) -> None:
        if dtype not in _NAMES:
            raise ValueError(f"dtype must be one of {[*_NAMES]}, found {dtype}")
        self.folder, self.dtype = Path(folder), dtype
        self._values = Values(getattr(config, "initializer_range", 0.02), seed)
        self.tensors = _deal(config, dtype, block_fp8, shard_bytes)

    @property
    def shards(self) -> list[str]:
        return sorted({info.shard for info in self.tensors.values()})

    def mapped_bytes(self, shard: str) -> int:
        return sum(info.bytes for info in self.tensors.values() if info.shard == shard)

    @contextlib.contextmanager
    def open(self, shard: str) -> Iterator[Read]:
        safetensors = require("safetensors")
        path = self.folder / shard
        try:
            self.write(shard)
            with safetensors.safe_open(path, framework="pt") as file:
                yield reader(file)
        finally:
            path.unlink(missing_ok=True)

    def write(self, shard: str) -> Path:
        """One file of the checkpoint."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / shard
        mine = {name: info for name, info in self.tensors.items() if info.shard == shard}
        with path.open("wb") as file:
            _write_header(file, mine)
            for name, info in mine.items():
                for piece in self._values.pieces(name, info.shape, _torch_dtype(info.dtype)):
                    file.write(piece.view(torch.uint8).numpy().data)
        return path


def _torch_dtype(name: str) -> torch.dtype:
    return {"F8_E4M3": torch.float8_e4m3fn, **{v: k for k, v in _NAMES.items()}}[name]


def _deal(config: Any, dtype: torch.dtype, block_fp8: bool, limit: int) -> dict[str, Info]:
    """Tensors to shards, in the model's order."""
    wanted: list[tuple[str, tuple[int, ...], str]] = []
    all_shapes, linear = shapes(config)
    for name, shape in all_shapes.items():
        if block_fp8 and name in linear:
            wanted.append((name, shape, "F8_E4M3"))
            wanted.append((f"{name}_scale_inv", tuple(-(-n // BLOCK) for n in shape), "F32"))
        else:
            wanted.append((name, shape, _NAMES[dtype]))
    numbers, number, held = [], 0, 0
    for _, shape, kind in wanted:
        size = Info("", shape, kind).bytes
        if held and held + size > limit:
            number, held = number + 1, 0
        held += size
        numbers.append(number)
    return {
        name: Info(f"model-{n + 1:05d}-of-{number + 1:05d}.safetensors", shape, kind)
        for n, (name, shape, kind) in zip(numbers, wanted, strict=True)
    }


def _write_header(file: BinaryIO, tensors: dict[str, Info]) -> None:
    """safetensors: a little-endian length, then JSON padded with spaces to 8 bytes; offsets count from its end."""
    header, at = {}, 0
    for name, info in tensors.items():
        header[name] = {
            "dtype": info.dtype,
            "shape": list(info.shape),
            "data_offsets": [at, at + info.bytes],
        }
        at += info.bytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)


def write_checkpoint(folder: str | Path, config: Any, **options: Any) -> Path:
    """A whole sharded checkpoint with its config.json; `options` are `Synthetic`'s. Peak memory: the pool, 64 MiB and
    its copy in the dtype."""
    source = Synthetic(config, folder, **options)
    for shard in source.shards:
        source.write(shard)
    path = Path(folder)
    weight_map = {name: info.shard for name, info in source.tensors.items()}
    total = sum(info.bytes for info in source.tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    replace_file(path / INDEX, json.dumps(index, indent=1).encode())
    written = copy.deepcopy(config)
    if options.get("block_fp8"):
        written.quantization_config = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
    written.architectures = written.architectures or _architecture(config)
    written.save_pretrained(path)
    return path


def _architecture(config: Any) -> list[str]:
    mapping = require("transformers.models.auto.modeling_auto").MODEL_FOR_CAUSAL_LM_MAPPING
    return [mapping[type(config)].__name__]
