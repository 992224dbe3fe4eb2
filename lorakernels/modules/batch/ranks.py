# SPDX-License-Identifier: Apache-2.0
"""Adapters of an AdapterBatch with a rank below the layers': a part of A [R, K] and B [N, R] is theirs.

The rest is zeros. Then s has zeros in its columns, dA and dB are zeros there, and an optimizer leaves them zeros.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

FACTORS = ("lora_A", "lora_B")


def within(factor: Tensor, path: str, rank: int) -> Tensor:
    """The view of `factor`, A [R, K] or B [N, R] as the last name of `path` says, that an adapter of `rank` has."""
    dim = _dim(path)
    return factor.narrow(dim, 0, min(rank, factor.shape[dim]))


def beyond(factor: Tensor, path: str, rank: int) -> Tensor:
    """The rest of `factor` after `within`."""
    dim = _dim(path)
    start = min(rank, factor.shape[dim])
    return factor.narrow(dim, start, factor.shape[dim] - start)


def _dim(path: str) -> int:
    return FACTORS.index(path.rpartition(".")[2])


def check_rests(name: str, padded: Mapping[str, Tensor], rank: int) -> None:
    """Raise ValueError if adapter `name` has values beyond its `rank` in its `padded` parts."""
    for path, part in padded.items():
        if bool(beyond(part.data, path, rank).any()):
            raise ValueError(
                f"{path} has values of adapter {name!r} beyond its rank {rank}, which run and which no file would "
                "hold: set them to zero, and write to AdapterBatch.parameters only"
            )


def check_dense(
    name: str, parts: Mapping[str, nn.Parameter], padded: Mapping[str, nn.Parameter]
) -> None:
    """Raise RuntimeError if one of the `parts` is no longer in the memory of its `padded` part."""
    for path, part in parts.items():
        if part.data_ptr() != padded[path].data_ptr():
            raise RuntimeError(
                f"{path}: an optimizer has given the part of adapter {name!r} other memory, which the layer does not "
                "see. Make it from param_groups(padded=True), which has dense tensors"
            )


class RefuseWider:
    """A hook of a layer before `load_state_dict`: ValueError if an adapter's values go beyond its rank."""

    def __init__(self, names: Sequence[str], ranks: Mapping[str, int]) -> None:
        self._names, self._ranks = tuple(names), dict(ranks)

    def __call__(self, _: nn.Module, state: Mapping[str, Any], prefix: str, *__: Any) -> None:
        for factor in FACTORS:
            whole = state.get(prefix + factor)
            if not isinstance(whole, Tensor) or whole.dim() != 3 or whole.is_meta:
                continue
            for name, part in zip(self._names, whole, strict=False):
                if name in self._ranks:
                    check_rests(name, {prefix + factor: part}, self._ranks[name])
