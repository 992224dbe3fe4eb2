# SPDX-License-Identifier: Apache-2.0
"""A checkpoint with one matrix for each projection of each expert, read as the layers of LoRAExperts.

    ….mlp.experts.gate_up_proj.E.weight [2 F, H]    w1 and w3, or gate_proj and up_proj, one below the other
    ….mlp.experts.down_proj.E.weight [H, F]         w2, or down_proj

Mixtral's files say `block_sparse_moe` for `mlp`. Each matrix is read by itself, so that experts are quantized as they
are read, as other layers are. Where each has one scale, a layer of two matrices gets that of its matrix for each block.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lorakernels.checkpoints.base.shards import TensorInfo, TensorSource
from lorakernels.modules.experts.classes import STACKED
from lorakernels.modules.experts.layer import LoRAExperts, stacked_experts, unstack_owner

_PART = re.compile(
    r"(?P<owner>.*\.)(?:block_sparse_moe|mlp)\.experts\.(?P<number>\d+)\."
    r"(?P<part>w1|w2|w3|gate_proj|up_proj|down_proj)\.(?P<end>weight(?:_scale_inv)?|activation_scale|input_scale)"
)
_ROUTER = re.compile(r"(.*\.)block_sparse_moe\.gate\.weight")
# {name in the files: (parameter, which of its halves, from the top)}
_LAYER = {
    **dict.fromkeys(("w1", "gate_proj"), ("gate_up_proj", 0)),
    **dict.fromkeys(("w3", "up_proj"), ("gate_up_proj", 1)),
    **dict.fromkeys(("w2", "down_proj"), ("down_proj", 0)),
}
_PARTS = {"gate_up_proj": 2, "down_proj": 1}


def with_experts(source: TensorSource, model: nn.Module, block: tuple[int, ...]) -> TensorSource:
    """`source` by the names of `model`, whose experts become LoRAExperts where the files have them one by one.

    Args:
        source: a checkpoint's tensors.
        model: on the meta device; it is changed.
        block: the block of a block-FP8 checkpoint.

    Raises:
        ValueError: an expert's gate is there without its up projection, or differs from it in shape or dtype. Or the
            rows of a block-FP8 gate are no multiple of the block's. Or LoRAExperts does not compute such experts.
    """
    parts = expert_parts(source.tensors).values()
    if not parts:
        return source
    owners = {part.layer.rsplit(".", 2)[0] for part in parts}
    experts = stacked_experts(model)
    for path, why_not in experts.items():
        if why_not and path in owners:
            raise ValueError(
                f"the files have each expert of {path!r} apart, and LoRAExperts cannot take them: {STACKED[0]!r} "
                f"{why_not}. Or load the model by transformers, and call apply_lora"
            )
    for path in (path for path, why_not in experts.items() if not why_not):
        unstack_owner(model, path)
    if not any(isinstance(module, LoRAExperts) for module in model.modules()):
        return source
    return _Experts(source, block)


class ExpertPart(NamedTuple):
    """Which rows of an expert's layer a tensor of a checkpoint has.

    Attributes:
        layer: ….mlp.experts.gate_up_proj.3
        place, parts: it is part `place` of `parts` equal ones, one below the other.
    """

    layer: str
    place: int
    parts: int


def expert_parts(names: Iterable[str]) -> dict[str, ExpertPart]:
    """{name in the files: its part} of the weights that belong to one expert."""
    parts = {}
    for name in names:
        match = _PART.fullmatch(name)
        if match and match["end"] == "weight":
            layer, place = _LAYER[match["part"]]
            path = f"{match['owner']}mlp.experts.{layer}.{match['number']}"
            parts[name] = ExpertPart(path, place, _PARTS[layer])
    return parts


class _Experts:
    """A TensorSource that puts the parts of an expert's layer together."""

    def __init__(self, source: TensorSource, block: tuple[int, ...]) -> None:
        self.source = source
        self._parts: dict[str, tuple[str, ...]] = {}
        self._blocks: dict[
            str, tuple[int, int]
        ] = {}  # of each part of a layer with one scale for each
        self._renamed: dict[str, str] = {}
        self.tensors: dict[str, TensorInfo] = {}
        joined: dict[str, dict[int, str]] = {}
        for name, info in source.tensors.items():
            if match := _PART.fullmatch(name):
                layer, place = _LAYER[match["part"]]
                path = f"{match['owner']}mlp.experts.{layer}.{match['number']}.{match['end']}"
                joined.setdefault(path, {})[place] = name
            else:
                router = _ROUTER.fullmatch(name)
                shown = f"{router[1]}mlp.gate.weight" if router else name
                self._renamed[shown] = name
                self.tensors[shown] = info
        for path, parts in joined.items():
            self._join(path, parts, block)

    def _join(self, path: str, parts: Mapping[int, str], block: tuple[int, ...]) -> None:
        names = tuple(parts[place] for place in sorted(parts))
        infos = [self.source.tensors[name] for name in names]
        expected = _PARTS[path.split(".")[-3]]
        alike = len({(info.shape, info.dtype) for info in infos}) == 1
        if len(names) != expected or not alike:
            said = ", ".join(
                f"{n} {i.dtype} {list(i.shape)}" for n, i in zip(names, infos, strict=True)
            )
            raise ValueError(f"{path} must be of {expected} tensors that are alike, found {said}")
        first = infos[0]
        rows = first.shape[0] if first.shape else 1
        quantized = path.endswith("weight") and f"{names[0]}_scale_inv" in self.source.tensors
        if expected > 1 and quantized and rows % block[0]:
            raise ValueError(
                f"{names[0]} has {rows} rows, expected a multiple of the block's {block[0]}: the projection below it "
                "would begin inside a block"
            )
        shape = first.shape
        if expected > 1 and path.endswith("_scale_inv") and math.prod(shape) == 1:
            n, k = self.source.tensors[names[0].removesuffix("_scale_inv")].shape
            shape = self._blocks[path] = (-(-n // block[0]), -(-k // block[1]))
        self._parts[path] = names
        self.tensors[path] = replace(
            first, shape=(shape[0] * expected, *shape[1:]) if shape else ()
        )

    def mapped_bytes(self, shard: str) -> int:
        return self.source.mapped_bytes(shard)

    @contextmanager
    def open(self, shard: str) -> Iterator[Callable[[str], Tensor]]:
        with self.source.open(shard) as read:

            def one(name: str) -> Tensor:
                other = self.source.tensors[name].shard
                if other == shard:
                    return read(name)
                with self.source.open(other) as read_other:
                    return read_other(name).clone()

            def whole(name: str) -> Tensor:
                if name in self._renamed:
                    return one(self._renamed[name])
                parts = [one(part) for part in self._parts[name]]
                if name in self._blocks:
                    parts = [part.reshape(1, 1).expand(self._blocks[name]) for part in parts]
                return parts[0] if len(parts) == 1 else torch.cat(parts)

            yield whole
