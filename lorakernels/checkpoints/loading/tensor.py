# SPDX-License-Identifier: Apache-2.0
"""Read a rank's part of each weight that `parallelize` splits, and no byte of other ranks' parts.

    W [N, K] in bf16, one scale     amax of the part → largest amax of all ranks → the part's bytes, as of the whole
    W8 in blocks, all scales equal  the part's bytes
    W8 in blocks, other scales      the part in fp32 → as from bf16
    BlockScaling                    the part's blocks, which no other rank needs
    embedding and head [V, H]       this rank's V/T rows, with `vocabulary`

Until adapters are drawn, a weight [N, K] is memory without meaning, which all weights share. So adapters are drawn as
in one process, and cut afterwards.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lorakernels.checkpoints.loading.plan import LoadPlan
from lorakernels.checkpoints.loading.stand_ins import StandIns
from lorakernels.modules.linear.frozen import quantize_weight
from lorakernels.modules.model.convert import dequantize, held_weight
from lorakernels.parallel.base.shard import check_mesh
from lorakernels.parallel.ranks import comm
from lorakernels.parallel.ranks.group import Ranks
from lorakernels.parallel.tensor.check import check_sizes, check_vocabulary, targets_by, targets_in
from lorakernels.parallel.tensor.layers import KINDS, why_not_blocks
from lorakernels.parallel.tensor.split import LoadedParts, split_linear, split_vocabulary
from lorakernels.recipes import BlockScaling, Recipe
from lorakernels.values import Weight

Part = tuple[slice, slice]


class TensorSplit(NamedTuple):
    """The arguments `tp` and `vocabulary` of `load_quantized`.

    Attributes:
        mesh: one dimension of a DeviceMesh.
        plan, vocabulary: as for `parallelize`.
    """

    mesh: Any
    plan: Any = None
    vocabulary: bool = False

    @classmethod
    def of(cls, tp: Any, vocabulary: bool) -> TensorSplit | None:
        """`tp`: a mesh, (mesh, plan), or None.

        Raises:
            ValueError: the mesh has several dimensions, or has not this rank. Also `vocabulary` without a mesh.
        """
        if tp is None:
            if vocabulary:
                raise ValueError("vocabulary=True needs tp, found None")
            return None
        mesh, plan = tp if isinstance(tp, tuple) else (tp, None)
        check_mesh(mesh)
        return cls(mesh, plan, vocabulary)


class TensorParts:
    """The parts of `model`'s linear layers that this rank reads.

    Args:
        model: before it has weights, with its own `nn.Linear`s.
        split: over which ranks, and by which plan.
        plan: of the checkpoint's tensors. It reads parts from now on.
        recipe: what the layers will follow.
        places: the device of the model's weights, and the group in which ranks wait for each other's reading.

    Raises:
        TypeError, ValueError: as for `parallelize`. Also if a part ends inside a block, or ranks have other tensors.
    """

    def __init__(
        self,
        model: nn.Module,
        split: TensorSplit,
        plan: LoadPlan,
        recipe: Recipe,
        places: tuple[torch.device, Any],
    ) -> None:
        self.ranks, self._plan, (device, self._group) = Ranks(split.mesh.get_group()), plan, places
        targets = targets_in(model) if split.plan is None else targets_by(model, split.plan)
        check_sizes(model, targets, self.ranks.size)
        if split.vocabulary:
            check_vocabulary(model, targets, self.ranks)
        self._cuts, self._recipe, self._stand_ins = targets.cuts, recipe, StandIns(device)
        self._read: dict[str, Weight] = {}
        self._parts = {f"{path}.weight": self._part(model, path) for path in self._cuts}
        self._tokens = self._rows_of_tokens(model) if split.vocabulary else {}
        plan.read_parts(self._parts)

    def __contains__(self, name: str) -> bool:
        """Whether the tensor `name` is read in parts."""
        return name in self._parts

    def _part(self, model: nn.Module, path: str) -> Part:
        name = f"{path}.weight"
        linear: Any = model.get_submodule(path)
        dim = KINDS[self._cuts[path], False].dimensions["weight"]
        size = linear.weight.shape[dim]
        if name not in self._plan.take or len(self._plan.holders[name]) > 1:
            raise ValueError(f"tp: {name} is tied to another weight: it cannot be read in parts")
        in_blocks = isinstance(self._recipe, BlockScaling) and path in self._plan.quantized
        if in_blocks and (why_not := why_not_blocks(size, dim, self.ranks.size)):
            raise ValueError(f"{path} {why_not}")
        return self._share(name, dim, size)

    def _rows_of_tokens(self, model: Any) -> dict[str, str]:
        """{path: name of the tensor that is read} of embedding and head. Each rank reads a part of their rows."""
        modules = {module: path for path, module in model.named_modules()}
        both = (model.get_input_embeddings(), model.get_output_embeddings())
        paths = [modules[module] for module in both]
        names = {}
        for path, module in zip(paths, both, strict=True):
            holders = self._plan.holders[f"{path}.weight"]
            if path in self._plan.adapted or path in self._plan.saved:
                raise ValueError(
                    f"vocabulary=True takes a frozen embedding and head, {path} is to be trained"
                )
            if other := {*holders} - {f"{other_path}.weight" for other_path in paths}:
                raise ValueError(f"vocabulary=True: {path}.weight is tied to {sorted(other)}")
            names[path] = next(name for name in self._plan.take if name in holders)
            part = self._share(names[path], 0, len(module.weight))
            self._parts |= dict.fromkeys((n for n in holders if n in self._plan.read), part)
        return names

    def _share(self, name: str, dim: int, size: int) -> Part:
        """This rank's part of a tensor that is cut in its dimension `dim`, of `size`."""
        block = self._plan.block[dim]
        blocks = self._plan.blocks_of(name)
        if blocks and size % (self.ranks.size * block):
            raise ValueError(
                f"tp: {name}_scale_inv has a scale for each {block} of {size}: a part of {size // self.ranks.size} "
                f"would end inside a block; {self.ranks.size} ranks · {block} must divide the side, or load the whole "
                "model on each rank"
            )
        part = [slice(None), slice(None)]
        part[dim] = self.ranks.share(size)
        return part[0], part[1]

    def agree(self) -> None:
        """Collective inside `together`: ValueError unless all ranks read the same tensors in one order."""
        mine = {
            "vocabulary": bool(self._tokens),
            "the checkpoint": [(name, self._plan.info(name)) for name in self._plan.take],
            "the plan": self._cuts,
            "the layers in FP8": self._plan.quantized,
            "the recipe": self._recipe,
        }
        first, *others = comm.ask(self._group, mine)
        for rank, other in enumerate(others, 1):
            for name in mine:
                if other[name] != first[name]:
                    raise ValueError(f"tp: {name} of rank {rank} must be as on rank 0")

    def scales(self, name: str, scales: Tensor) -> Tensor:
        """The scales of this rank's part of a weight in blocks; one scale [1] if all scales of the whole are equal."""
        if scales.numel() == 1:
            return scales.flatten()
        as_numbers = scales.view(torch.uint8) if scales.element_size() == 1 else scales
        first = as_numbers.flatten()[:1]
        if not isinstance(self._recipe, BlockScaling) and bool((as_numbers == first).all()):
            return scales.flatten()[:1]
        pairs = zip(self._parts[name], self._plan.block, strict=True)
        return scales[tuple(_in_blocks(part, block) for part, block in pairs)].contiguous()

    def keep(self, path: str, tensor: Tensor, dtype: torch.dtype, fp8: Any) -> Weight:
        """Keep this rank's part of a weight that is held in FP8. Collective. Returns a stand-in for the whole weight.

        Args:
            path: of the layer.
            tensor: the part as it was read.
            dtype: weights are rounded to it before they become FP8.
            fp8: the part of a block-FP8 weight with its `scales`, as convert.py reads it, or None.

        Raises:
            ValueError: the weight is not finite, or another rank raised.
        """
        blocks = self._recipe if isinstance(self._recipe, BlockScaling) else None
        # a part that is one block has one scale [1, 1], which other ranks do not have
        if fp8 is not None and (blocks is not None or fp8.weight_scale_inv.dim() < 2):
            part = held_weight(fp8, self._recipe)
        else:
            plain = tensor.to(dtype) if fp8 is None else dequantize(fp8)
            part = Weight(*quantize_weight(plain, blocks, self._largest))
        self._read[path] = part
        return self._stand_ins.weight(self._whole(path, part.data), blocks)

    def keep_plain(self, name: str, value: Tensor) -> Tensor:
        """Keep this rank's part of a weight that stays plain. Returns what stands for the whole."""
        path = name.removesuffix(".weight")
        self._read[path] = Weight(value)
        return self._stand_ins.tensor(value, self._whole(path, value))

    def kept(self, name: str) -> Tensor:
        """The part of the tensor `name` that `keep_plain` kept."""
        return self._read[name.removesuffix(".weight")].data

    def cut(self, model: nn.Module) -> None:
        """Give the layers their parts, after adapters were put on the whole model."""
        cuts = {
            path: split_linear(model, (path, by), self.ranks, False, self._read.pop(path))
            for path, by in self._cuts.items()
        }
        rows = {path: self.kept(name) for path, name in self._tokens.items()}
        vocabulary = split_vocabulary(model, self.ranks, rows) if rows else {}
        self._read.clear()
        LoadedParts(self.ranks, cuts, vocabulary).leave(model)

    def _whole(self, path: str, part: Tensor) -> torch.Size:
        shape = list(part.shape)
        by = self._cuts.get(path)
        dim = 0 if by is None else KINDS[by, False].dimensions["weight"]  # None: of tokens
        shape[dim] *= self.ranks.size
        return torch.Size(shape)

    def _largest(self, amax: Tensor) -> Tensor:
        amaxes = comm.ask(self._group, float(amax))
        return torch.full_like(amax, max(amaxes))


def _in_blocks(part: slice, block: int) -> slice:
    if part.start is None:
        return part
    return slice(part.start // block, part.stop // block)
