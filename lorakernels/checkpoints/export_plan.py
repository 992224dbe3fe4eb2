# SPDX-License-Identifier: Apache-2.0
"""Which tensors a merged checkpoint has, and what each is made of, decided from headers before any value is read.

A tensor of the base goes over as it is, gets an adapter added (W + scaling · B A), or is replaced by one that was
trained whole. Floating-point values become bf16, but for tensors that are fp32 in a base whose embedding is not. With
FP8 the linear layers' weights become e4m3 with one scale_inv per block, as transformers' FineGrainedFP8Config says.
Layers whose sizes are no multiples of the block stay bf16: transformers derives the block from the shapes when it
dequantizes, and vLLM shards by whole blocks. So do projections that vLLM packs with such a layer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from lorakernels.checkpoints.adapter_keys import check_keys, expected_slots, without_peft_copies
from lorakernels.checkpoints.loading_plan import E4M3, holders_of
from lorakernels.checkpoints.peft_format import WEIGHTS_NAME, read_config, read_weights
from lorakernels.checkpoints.shards import Source, TensorInfo
from lorakernels.modules.targets import match_saved, match_targets

_PREFIX = "base_model.model."
_FLOATS = ("F64", "F32", "BF16", "F16", E4M3, "F8_E5M2")
_PACKED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_SIZES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}


@dataclass(frozen=True)
class Adapter:
    """`deltas`: path → (A, B, scaling). `values`: a tensor's name → what takes its place."""

    deltas: dict[str, tuple[Tensor, Tensor, float]]
    values: dict[str, Tensor]


@dataclass(frozen=True)
class Out:
    """One tensor to write: `source` is its name in the base, `dtype` by safetensors' name.

    block: of FP8 with a scale per block, which is a tensor of its own, named `name` + "_scale_inv".
    keeps: the source's bytes, and scales, as they are.
    """

    name: str
    source: str
    dtype: str
    shape: tuple[int, ...]
    block: tuple[int, ...] = ()
    keeps: bool = False

    @property
    def layout(self) -> dict[str, tuple[str, tuple[int, ...], int]]:
        found = {self.name: (self.dtype, self.shape, self._bytes(self.shape, self.dtype))}
        if self.block:
            scales = tuple(-(-n // b) for n, b in zip(self.shape, self.block, strict=True))
            found[f"{self.name}_scale_inv"] = ("F32", scales, self._bytes(scales, "F32"))
        return found

    def _bytes(self, shape: tuple[int, ...], dtype: str) -> int:
        return TensorInfo("", shape, dtype).bytes


@dataclass
class MergePlan:
    """`shards`: shard of the base → what is made of it. `plain`: linear layers that FP8 leaves in bf16."""

    shards: dict[str, list[Out]]
    block: tuple[int, ...]
    untied: bool
    plain: list[str] = field(default_factory=list)

    @property
    def outs(self) -> list[Out]:
        return [out for outs in self.shards.values() for out in outs]

    @property
    def bytes(self) -> int:
        return sum(size for out in self.outs for _, _, size in out.layout.values())


def read_adapter(model: nn.Module, folder: Path) -> Adapter:
    """The adapter in `folder`, whose every tensor has a place in `model`, which may be on the meta device.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is not valid, uses what we do not have, or does not fit `model`.
    """
    config = read_config(folder, None, "single")
    tensors = read_weights(folder)
    try:
        slots, saved = expected_slots(model, config), match_saved(model, config)
        paths = match_targets(model, config)
    except (ValueError, TypeError) as error:
        raise ValueError(f"the adapter in {folder} does not fit this model: {error}") from error
    tensors = without_peft_copies(tensors, saved)
    check_keys(folder / WEIGHTS_NAME, slots, tensors)
    deltas = {}
    for path in paths:
        lora_A, lora_B = (
            tensors.pop(f"{_PREFIX}{path}.lora_{which}.weight") for which in ("A", "B")
        )
        deltas[path] = (lora_A, lora_B, config.scaling_for(path))
    values = {
        key.removeprefix(_PREFIX).replace(".base_layer.", "."): value
        for key, value in tensors.items()
    }
    return Adapter(deltas, values)


def plan_merge(
    model: nn.Module, files: Source, adapter: Adapter, block: tuple[int, ...], fp8: bool
) -> MergePlan:
    """What to write for the base in `files`, whose modules `model` has, perhaps on the meta device.

    Raises:
        ValueError: the base lacks a tensor that the adapter changes, holds one of another shape, or FP8 without scales;
            or `fp8` would change no layer.
    """
    found = {k: i for k, i in files.tensors.items() if not _is_side(k)}
    _check_scales(found, files)
    _check_shapes(model, found)
    names, untied = _names(model, found, adapter)
    main = _main_dtype(model, found)
    linear, plain = _fp8_linear(model, found, block) if fp8 else (set(), [])
    if fp8 and not linear:
        raise ValueError(
            f'format "fp8": no linear layer of this model is made of whole {block[0]}×{block[1]} blocks; take "bf16"'
        )
    changed = {f"{path}.weight" for path in adapter.deltas} | set(adapter.values)
    shards: dict[str, list[Out]] = {}
    for name, source in names.items():
        info = found[source]
        out = Out(name, source, _dtype_of(name, info, adapter, main), info.shape)
        if name in linear:
            same = name not in changed and info.dtype == E4M3
            same = same and files.tensors[f"{source}_scale_inv"].shape == _blocks(info, block)
            out = Out(name, source, E4M3, info.shape, block, keeps=same)
        shards.setdefault(info.shard, []).append(out)
    return MergePlan(dict(sorted(shards.items())), block, untied, plain)


def _is_side(name: str) -> bool:
    """Of a weight in FP8: its scales, and fixed scales of activations, which merged weights outdate."""
    return name.endswith(("_scale_inv", ".activation_scale", ".input_scale"))


def _check_scales(found: dict[str, TensorInfo], files: Source) -> None:
    for name, info in found.items():
        if info.dtype == E4M3 and f"{name}_scale_inv" not in files.tensors:
            raise ValueError(f"{name} is {E4M3} without {name}_scale_inv")


def _check_shapes(model: nn.Module, found: dict[str, TensorInfo]) -> None:
    for name, own in model.state_dict().items():
        if name in found and found[name].shape != tuple(own.shape):
            raise ValueError(
                f"{name} is {list(found[name].shape)} in the base, {list(own.shape)} by its config.json"
            )


def _names(
    model: nn.Module, found: dict[str, TensorInfo], adapter: Adapter
) -> tuple[dict[str, str], bool]:
    """(Every tensor to write → the one of the base that it is made of, whether tied ones differ from now on)."""
    names, untied = {name: name for name in found}, False
    holders = holders_of(model)
    for name in (*(f"{path}.weight" for path in adapter.deltas), *adapter.values):
        group = holders.get(name, [name])
        there = [other for other in group if other in found]
        if not there:
            raise ValueError(f"the adapter changes {name}, which the base does not hold")
        untied = untied or len(group) > 1
        for other in group:
            names.setdefault(other, there[0])
    return names, untied


def _main_dtype(model: Any, found: dict[str, TensorInfo]) -> str:
    """Of the input embedding, or of the first floating-point tensor."""
    embedding = model.get_input_embeddings()
    for path, module in model.named_modules():
        if module is embedding and f"{path}.weight" in found:
            return found[f"{path}.weight"].dtype
    return next((i.dtype for i in found.values() if i.dtype in _FLOATS), "BF16")


def _dtype_of(name: str, info: TensorInfo, adapter: Adapter, main: str) -> str:
    if info.dtype not in _FLOATS:
        return info.dtype
    merged = name.removesuffix(".weight") in adapter.deltas
    keeps = _SIZES.get(info.dtype, 1) > 2 and info.dtype != main
    return info.dtype if keeps and not merged else "BF16"


def _blocks(info: TensorInfo, block: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(-(-n // b) for n, b in zip(info.shape, block, strict=True))


def _fp8_linear(
    model: Any, found: dict[str, TensorInfo], block: tuple[int, ...]
) -> tuple[set[str], list[str]]:
    """(weights to write in FP8, modules that transformers must leave alone)."""
    head = model.get_output_embeddings()
    linear = {p: m for p, m in model.named_modules() if type(m) is nn.Linear}
    whole = {
        path
        for path, m in linear.items()
        if m is not head
        and f"{path}.weight" in found
        and m.out_features % block[0] == 0
        and m.in_features % block[1] == 0
    }
    for path in linear:
        parent, _, name = path.rpartition(".")
        for packed in _PACKED:
            group = {f"{parent}.{other}" for other in packed} & set(linear)
            if name in packed and not group <= whole:
                whole -= group
    experts = [p for p, _ in model.named_modules() if p.endswith(".experts")]
    return {f"{path}.weight" for path in whole}, [*(p for p in linear if p not in whole), *experts]
