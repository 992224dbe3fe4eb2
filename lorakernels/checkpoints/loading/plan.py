# SPDX-License-Identifier: Apache-2.0
"""Decide from headers which tensor of a checkpoint goes to which place in a model, and check it, before reading
values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from lorakernels.checkpoints.base.file_names import left_out
from lorakernels.checkpoints.base.format import of_input
from lorakernels.checkpoints.base.shards import TensorInfo
from lorakernels.config import LoRAConfig
from lorakernels.modules.experts.layer import expert_layers
from lorakernels.modules.model.frozen_targets import frozen_targets
from lorakernels.modules.model.targets import match_saved, match_targets


class LoadPlan:
    """The place of each tensor of a checkpoint in a model, decided from headers alone.

    Attributes:
        left_out: the tensors that are not read, as the model does not compute with them.
    """

    def __init__(
        self,
        model: nn.Module,
        infos: dict[str, TensorInfo],
        lora: LoRAConfig | None,
        frozen: str,
        block: tuple[int, ...],
        config: Any = None,
    ) -> None:
        self.block = block
        self.holders = holders_of(model)
        self.adapted = [] if lora is None else match_targets(model, lora)
        self.saved = saved = () if lora is None else tuple(match_saved(model, lora))
        wanted = set(self.adapted)
        if frozen == "fp8":
            wanted |= set(frozen_targets(model, self.adapted, saved)[0])
        if lora is not None and not lora.target_parameters:  # as apply_lora leaves them
            wanted -= set(expert_layers(model))
        # A weight that is tied to another stays plain here, because apply_lora must see it to untie it.
        self.quantized = [
            path
            for path in (name for name, _ in model.named_modules())
            if path in wanted
            and len(self.holders[f"{path}.weight"]) == 1
            and not any(path == name or path.startswith(f"{name}.") for name in saved)
        ]
        self.copies: dict[str, str] = {}
        self.scales = {k for k in infos if k.endswith(".weight_scale_inv")}
        weights = {k: i for k, i in infos.items() if k not in self.scales}
        self.left_out = [k for k in weights if of_input(k, infos)]
        self.take = self._match(
            model, {k: i for k, i in weights.items() if k not in self.left_out}, config
        )
        self.left_out += [k for k in self.scales if k.removesuffix("_scale_inv") in self.left_out]
        self.scales -= {*self.left_out}
        self._check_shapes(model)
        self.elsewhere: list[str] = []
        self.parts: dict[str, tuple[slice, ...]] = {}
        self._infos = dict(infos)

    @property
    def read(self) -> list[str]:
        """Names of the tensors to read."""
        return [*self.scales, *self.take, *self.copies]

    @property
    def bytes(self) -> int:
        """Size of the tensors to read."""
        return sum(self._infos[name].bytes for name in self.read)

    def info(self, name: str) -> TensorInfo:
        """File, shape and dtype of a tensor, or of the part of it that is read."""
        return self._infos[name]

    def blocks_of(self, name: str) -> bool:
        """Whether a weight has a scale for each block."""
        scale = self._infos.get(f"{name}_scale_inv")
        return scale is not None and math.prod(scale.shape) > 1

    def read_parts(self, parts: Mapping[str, tuple[slice, ...]]) -> None:
        """Read no more of the tensors of `parts` than the slices of their dimensions."""
        for name, part in parts.items():
            info = self._infos[name]
            sides = zip(part, info.shape, strict=True)
            shape = tuple(len(range(size)[span]) for span, size in sides)
            self._infos[name] = replace(info, shape=shape)
        self.parts = dict(parts)

    def leave_out(self, inside: tuple[str, ...]) -> None:
        """Read no tensor whose names all begin with one of `inside`. Those left out go into `elsewhere`."""
        gone = [n for n in self.take if all(held.startswith(inside) for held in self.holders[n])]
        self.elsewhere = gone
        self.take = {name: info for name, info in self.take.items() if name not in gone}
        self.scales = {k for k in self.scales if k.removesuffix("_scale_inv") in self.take}
        self.copies = {k: original for k, original in self.copies.items() if original in self.take}

    def _match(
        self, model: nn.Module, infos: dict[str, TensorInfo], config: Any
    ) -> dict[str, TensorInfo]:
        """{name: info} of the tensors to read, one name of each tied group.

        The group's other names go into `copies`; their values must be equal. What the model does not compute with goes
        into `left_out`.
        """
        groups = {id(group): group for group in self.holders.values()}
        take, missing, matched = {}, [], set()
        for group in groups.values():
            there = [name for name in group if name in infos]
            matched |= set(there)
            self.copies |= {name: there[0] for name in there[1:]}
            if there:
                take[there[0]] = infos[there[0]]
            else:
                missing.append(group[0])
        unexpected = [k for k in infos if k not in matched]
        gone = left_out(model, config, unexpected)
        self.left_out += gone
        unexpected = [k for k in unexpected if k not in gone]
        if missing or unexpected:
            parts = [
                f"{len(names)} {what} ({', '.join(sorted(names)[:5])})"
                for what, names in (("missing", missing), ("unexpected", unexpected))
                if names
            ]
            raise ValueError(
                f"the checkpoint does not fit {type(model).__name__}: {' and '.join(parts)}"
            )
        return take

    def _check_shapes(self, model: nn.Module) -> None:
        for name, info in self.take.items():
            path, _, attribute = name.rpartition(".")
            current = getattr(model.get_submodule(path), attribute)
            if tuple(current.shape) != info.shape:
                raise ValueError(
                    f"{name} is {list(info.shape)} in the checkpoint, {list(current.shape)} in the model"
                )


def holders_of(model: nn.Module) -> dict[str, list[str]]:
    """{name of a parameter or persistent buffer: all names of the same tensor}."""
    by_id: dict[int, list[str]] = {}
    holders = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        holders[name] = by_id.setdefault(id(tensor), [])
        holders[name].append(name)
    return holders
