# SPDX-License-Identifier: Apache-2.0
"""Merge an adapter into its base. Both are directories, and so is the merged model.

    export_model("path/to/llama", "path/to/adapter", "merged")                  # bf16
    export_model("path/to/llama", "path/to/adapter", "merged", format="fp8")    # transformers' fine-grained FP8

Only one tensor of the base is in memory at a time. W + scaling · B A is added in fp32 and rounded once. For a bf16
base the result equals `merge_and_unload` with `fp8=None`, bit for bit. Block-FP8 weights of the base are
dequantized first. In the FP8 format, block-FP8 weights without an adapter keep their bytes. transformers reads both
formats with `from_pretrained`. The FP8 config also tells vLLM which modules stay bf16.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lorakernels.checkpoints.base.file_names import Renamed, check_places, names_in_model
from lorakernels.checkpoints.base.format import take_format
from lorakernels.checkpoints.base.shards import INDEX, SINGLE, Directory, TensorSource
from lorakernels.checkpoints.base.skeleton import causal_lm, config_of
from lorakernels.checkpoints.export.files import copy_files, write_config
from lorakernels.checkpoints.export.plan import (
    AdapterChanges,
    MergePlan,
    Out,
    plan_merge,
    read_adapter,
)
from lorakernels.checkpoints.export.writer import (
    DTYPES,
    ShardWriter,
    new_directory,
    recover,
    write_json,
)
from lorakernels.checkpoints.loading.load import FP8Weight
from lorakernels.modules.linear.lora import delta_of
from lorakernels.modules.model.convert import dequantize
from lorakernels.numerics.blocks import quantize_weight_blocks

FORMATS = ("bf16", "fp8")
_SPARE = 1 << 24  # bytes to leave free for configs, tokenizer and the file system


@dataclass(frozen=True)
class Exported:
    """The result of `export_model`.

    Attributes:
        path: the directory of the merged model.
        format: "bf16" or "fp8".
        shards: number of weight files.
        bytes: total size of all tensors.
        merged: number of linear layers that had an adapter.
        plain: with "fp8", the paths of the linear layers that stay bf16.
    """

    path: Path
    format: str
    shards: int
    bytes: int
    merged: int
    plain: tuple[str, ...]


def export_model(
    model: str | os.PathLike[str],
    adapter: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    format: str = "bf16",
    overwrite: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Exported:
    """Merge `adapter` into `model` and write the result to the directory `output`, which appears whole or not at
    all.

    The tokenizer, chat template, generation config and other small files are copied from `model`. A tokenizer
    beside the adapter takes precedence. Memory holds the adapter, one tensor of the base and its fp32 copies.

    Args:
        model: a directory with config.json and safetensors, in one or many files, plain or block FP8.
        adapter: a directory in PEFT's format. Patterns, rslora, trained biases and modules_to_save are supported.
        output: a new or empty directory. With `overwrite` it may hold a model, which is replaced.
        format: "bf16", or "fp8" for e4m3 with a scale per 128×128 block in all linear layers but the head.
        overwrite: whether to replace the model that `output` holds.
        progress: called with (bytes written, total bytes).

    Raises:
        ValueError: `output` is, contains or lies in one of the other directories, or it is not empty. Also if the
            adapter does not fit the model, a kind of adapter or quantization is not known, or a merged weight is
            not finite.
        FileNotFoundError: a file is missing.
        OSError: the disk lacks the space, or a file cannot be written. `output` is then as it was before the call.
    """
    if format not in FORMATS:
        raise ValueError(f"format must be {' or '.join(map(repr, FORMATS))}, found {format!r}")
    base, source, target = (Path(p).expanduser().resolve() for p in (model, adapter, output))
    _check_places(target, {"model": base, "adapter": source})
    skeleton, files, block = _opened(base)
    changes = read_adapter(skeleton, source, files)
    plan = plan_merge(skeleton, files, changes, block, format == "fp8")
    recover(target)
    _check_target(target, overwrite)
    _check_space(target, plan.bytes)
    with new_directory(target) as folder:
        names = _Merge(files, plan, changes, progress).write(folder)
        copy_files(base, source, folder)
        write_config(base, folder, plan if format == "fp8" else None, plan.untied)
    return Exported(target, format, names, plan.bytes, len(changes.deltas), tuple(plan.plain))


def check_export(
    model: str | os.PathLike[str], output: str | os.PathLike[str], *, format: str = "bf16"
) -> int:
    """Check everything about an export that does not depend on the adapter. `output` may be overwritten.

    Returns the bytes of the merged model's tensors.

    Raises:
        ValueError, FileNotFoundError: as `export_model`.
    """
    skeleton, files, block = _opened(Path(model))
    plan = plan_merge(skeleton, files, AdapterChanges({}, {}), block, format == "fp8")
    _check_target(Path(output), overwrite=True)
    return plan.bytes


def _opened(base: Path) -> tuple[Any, Renamed, tuple[int, ...]]:
    """Read configs and headers, and refuse formats that are not supported.

    Returns the model on the meta device, the tensors by the model's names, and the block of the base's FP8.
    """
    files, config = Directory(base), config_of(base, None)
    block = take_format(files, config).block
    make = causal_lm(config, "merge_and_unload merges the adapter into a model in memory")
    with torch.device("meta"):
        skeleton = make.from_config(config).eval()
    renamed = Renamed(files, names_in_model(skeleton, files.tensors))
    modules = dict(skeleton.named_modules())
    # What belongs to none of them is copied
    check_places(skeleton, config, [n for n in renamed.tensors if n.rpartition(".")[0] in modules])
    return skeleton, renamed, block


def _check_places(target: Path, others: dict[str, Path]) -> None:
    for name, other in others.items():
        if target == other or target in other.parents or other in target.parents:
            how = (
                "is" if target == other else "contains" if target in other.parents else "is inside"
            )
            raise ValueError(
                f"output {target} {how} {name} {other}: take a directory apart from it"
            )


def _check_target(target: Path, overwrite: bool) -> None:
    if not target.exists():
        return
    if not target.is_dir():
        raise ValueError(f"output {target} is a file, expected a directory")
    if target.is_mount():
        raise ValueError(
            f"output {target} is where a file system is mounted, whose place nothing can take: give a directory in it"
        )
    if not any(target.iterdir()):
        return
    if not overwrite:
        raise ValueError(f"output {target} is not empty: give --overwrite to replace it as a whole")
    if not (target / "config.json").is_file():
        raise ValueError(
            f"output {target} holds files but no config.json, so it is no model to replace: remove it by hand"
        )


def _check_space(target: Path, size: int) -> None:
    parent = next(p for p in target.parents if p.is_dir())
    free = shutil.disk_usage(parent).free
    if free < size + _SPARE:
        raise OSError(
            errno.ENOSPC,
            f"the merged model takes {size / 1e9:.2f} GB, {free / 1e9:.2f} are free",
            str(parent),
        )


class _Merge:
    """Writes the merged tensors, one shard of the base after the other."""

    def __init__(
        self,
        files: TensorSource,
        plan: MergePlan,
        adapter: AdapterChanges,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self.files, self.plan, self.adapter, self.progress = files, plan, adapter, progress
        self._scales: dict[str, Tensor] = {}
        self._done = 0

    @torch.no_grad()
    def write(self, folder: Path) -> int:
        """Fill `folder` with the weights and, for several files, their index. Returns the number of weight files."""
        self._read_scales()
        count, weight_map = len(self.plan.shards), {}
        for index, (shard, outs) in enumerate(self.plan.shards.items(), 1):
            name = SINGLE if count == 1 else f"model-{index:05}-of-{count:05}.safetensors"
            self._write_shard(folder / name, shard, outs)
            weight_map.update({key: name for out in outs for key in out.layout})
        if count > 1:
            total = {"total_size": self.plan.bytes}
            index_file = {"metadata": total, "weight_map": dict(sorted(weight_map.items()))}
            write_json(folder / INDEX, index_file)
        return count

    def _read_scales(self) -> None:
        """Read all scales up front: they are small, and a scale may be in another file than its weight."""
        wanted = {f"{out.source}_scale_inv" for out in self.plan.outs} & set(self.files.tensors)
        for shard in sorted({self.files.tensors[name].shard for name in wanted}):
            with self.files.open(shard) as read:
                for name in wanted:
                    if self.files.tensors[name].shard == shard:
                        self._scales[name] = read(name).clone()

    def _write_shard(self, path: Path, shard: str, outs: list[Out]) -> None:
        layout = {key: entry for out in outs for key, entry in out.layout.items()}
        file = ShardWriter(path, layout)
        try:
            with self.files.open(shard) as read:
                for out in outs:
                    for name, value in self._made(out, read).items():
                        file.write(name, value)
                        self._done += value.numel() * value.element_size()
                    if self.progress is not None:
                        self.progress(self._done, self.plan.bytes)
            file.close()
        finally:
            file.abandon()

    def _made(self, out: Out, read: Callable[[str], Tensor]) -> dict[str, Tensor]:
        name, scale_name = out.written
        if out.keeps:
            return {
                name: read(out.source),
                scale_name: _as_float(self._scales[f"{out.source}_scale_inv"]),
            }
        value = self._value(out, read)
        if not value.is_floating_point():
            return {name: value}
        if out.block:
            self._check_finite(out.name, value)
            bytes_, scales = quantize_weight_blocks(value, out.block)
            return {name: bytes_, scale_name: scales}
        value = value.to(DTYPES[out.dtype])
        path = out.name.removesuffix(".weight")
        if path in self.adapter.deltas or out.name in self.adapter.values:
            self._check_finite(out.name, value)
        return {name: value}

    def _value(self, out: Out, read: Callable[[str], Tensor]) -> Tensor:
        """The merged value before it is rounded."""
        value = self.adapter.values.get(out.name)
        if value is None:
            value = read(out.source)
            if (scales := self._scales.get(f"{out.source}_scale_inv")) is not None:
                value = dequantize(FP8Weight(out.source, value, scales, self.plan.block))
        path = out.name.removesuffix(".weight")
        if path in self.adapter.deltas and path != out.name:
            value = value.float() + delta_of(*self.adapter.deltas[path])
        return value

    def _check_finite(self, name: str, value: Tensor) -> None:
        if not bool(value.isfinite().all()):
            raise ValueError(f"{name}: the merged weight is not finite")


def _as_float(scales: Tensor) -> Tensor:
    return (scales.view(torch.float8_e8m0fnu) if scales.dtype == torch.uint8 else scales).float()
