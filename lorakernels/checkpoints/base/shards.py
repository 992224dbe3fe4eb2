# SPDX-License-Identifier: Apache-2.0
"""A directory of safetensors files as a table of tensors. Each tensor is read by itself from the mapped file.

All headers are read before any value. A missing or truncated file, or a wrong index, raises at that point.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
Read = Callable[..., Tensor]  # of a name, and perhaps of the part that is wanted
_SIZES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2, "I16": 2}


@dataclass(frozen=True)
class TensorInfo:
    """The file, shape and dtype of a tensor. `dtype` is safetensors' name, e.g. "BF16" or "F8_E4M3"."""

    shard: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def bytes(self) -> int:
        count = _SIZES.get(self.dtype, 1)
        for size in self.shape:
            count *= size
        return count


class TensorSource(Protocol):
    """The tensors that `load_quantized` reads: a table, and shards that are opened one after the other."""

    @property
    def tensors(self) -> dict[str, TensorInfo]: ...

    def mapped_bytes(self, shard: str) -> int:
        """The bytes that an open shard keeps mapped on the host."""
        ...

    def open(self, shard: str) -> AbstractContextManager[Read]:
        """A context that yields a function from a tensor's name to the tensor on the CPU.

        Where ranks read parts, it is called with slices of the tensor's dimensions, too, and returns that part.
        """
        ...


class Directory:
    """The safetensors files of one directory: the files that the index names, or model.safetensors.

    Raises:
        FileNotFoundError: there is no such directory, it has no safetensors, or a file of the index is missing.
        ValueError: a file is truncated, corrupted or differs from the index, or two files hold a tensor that the
            index does not list. Also if model.safetensors lies beside other files of an index: transformers reads the
            one, and vLLM the others.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise FileNotFoundError(f"path must be a directory with safetensors, found {self.path}")
        index = read_index(self.path)
        self.shards = sorted(set(index.values())) if index else [SINGLE]
        missing = [name for name in self.shards if not (self.path / name).is_file()]
        if missing:
            raise FileNotFoundError(
                f"{self.path} lacks {len(missing)} of {len(self.shards)} files: {', '.join(missing[:5])}"
                f"{self._pickle()}"
            )
        check_one_set(self.path, self.shards)
        self.tensors: dict[str, TensorInfo] = {}
        for name in self.shards:
            for tensor, info in self._header(name, index).items():
                if tensor in self.tensors:
                    other = self.tensors[tensor].shard
                    raise ValueError(f"{tensor} is in {other} and in {name}, but not in {INDEX}")
                self.tensors[tensor] = info

    def mapped_bytes(self, shard: str) -> int:
        return (self.path / shard).stat().st_size

    @contextmanager
    def open(self, shard: str) -> Iterator[Read]:
        from safetensors import SafetensorError, safe_open

        path = self.path / shard
        try:
            with safe_open(path, framework="pt") as file:
                yield reader(file)
        except SafetensorError as error:
            raise ValueError(f"{path} is truncated or corrupted: {error}") from error

    def _pickle(self) -> str:
        """A hint if there are pickles instead of safetensors."""
        names = sorted(path.name for path in self.path.glob("*.bin"))
        if not names or any(self.path.glob("*.safetensors")):
            return ""
        return f"; {names[0]} is a pickle, which could run code: convert it to safetensors"

    def _header(self, shard: str, index: dict[str, str]) -> dict[str, TensorInfo]:
        """The tensors of a file, but those that the index finds in another one."""
        held = header(self.path / shard)
        if lost := sorted({k for k, file_name in index.items() if file_name == shard} - {*held}):
            raise ValueError(
                f"{self.path / shard} lacks {len(lost)} tensors of {INDEX}: {', '.join(lost[:5])}"
            )
        return {name: info for name, info in held.items() if index.get(name, shard) == shard}


def read_index(folder: Path) -> dict[str, str]:
    """{tensor: file} of a folder's index; empty without one.

    Raises:
        ValueError: it cannot be read.
    """
    path = folder / INDEX
    if not path.is_file():
        return {}
    try:
        table = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        return {str(key): str(shard) for key, shard in table.items()}
    except (ValueError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} is not an index of safetensors: {error!r}") from error


def check_one_set(folder: Path, shards: Iterable[str]) -> None:
    """Refuse model.safetensors beside other files of the index, whose files are `shards`."""
    others = sorted({*shards} - {SINGLE})
    if others and (folder / SINGLE).is_file():
        raise ValueError(
            f"{folder} holds two sets of weights, {SINGLE} and {len(others)} other files of {INDEX} (the first is "
            f"{others[0]}), and programs differ in which one they read: move one set away, or the index"
        )


def header(path: Path) -> dict[str, TensorInfo]:
    """The tensors of one safetensors file.

    Raises:
        ValueError: it is truncated or corrupted.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  (not a dict)
            return {
                name: TensorInfo(path.name, tuple(part.get_shape()), part.get_dtype())
                for name, part in parts.items()
            }
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is truncated or corrupted: {error}") from error


def reader(file: Any) -> Read:
    """Reads tensors of an open safetensors file, whole or the part that slices of its dimensions say."""

    def read(name: str, part: tuple[slice, ...] | None = None) -> Tensor:
        tensor: Tensor = file.get_tensor(name) if part is None else file.get_slice(name)[part]
        return tensor

    return read
