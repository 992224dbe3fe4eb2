# SPDX-License-Identifier: Apache-2.0
"""Put FP8 weights into the shards of a sharded base while a checkpoint is read, one matrix at a time.

Every rank reads and quantizes every matrix, and keeps its part of the bytes. Until all are read, a layer's weight is
memory that all layers share and that has no values.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor, nn

from lorakernels.fusion.find import decoder_layers
from lorakernels.parallel import Offload, ShardedBase
from lorakernels.parallel.base.offload import as_offload
from lorakernels.parallel.base.shard import (
    agreed_embeddings,
    agreed_layout,
    check_offload,
    choose_transport,
    finish,
    unchecked_fraction,
)
from lorakernels.parallel.base.stores import (
    BaseLayout,
    Member,
    allocate,
    discard,
    lay_out_base,
    write,
)
from lorakernels.parallel.base.vocabulary import ShardedVocabulary
from lorakernels.parallel.ranks import comm
from lorakernels.parallel.ranks.blocks import Shape

SLOTS, PREFETCH = 2, 1


class ShardedWeights:
    """Collective: the shards of the FP8 weights of `model`'s decoder layers.

    Args:
        model: before it has weights, with its own `nn.Linear`s.
        quantized: paths of the linear layers that will be held in FP8.
        member: this rank, and the device of the model's weights.
        offload, embeddings: as for `shard_base`. Embedding and head are split in the end.

    Raises:
        ValueError: a decoder layer has a linear layer that is not in `quantized`, or ranks differ.
        TypeError, RuntimeError: as for `shard_base`.
    """

    def __init__(
        self,
        model: nn.Module,
        quantized: Iterable[str],
        member: Member,
        offload: float | Offload,
        embeddings: bool = False,
    ) -> None:
        wanted = set(quantized)
        find = lambda: _layout(model, wanted, member, offload)  # noqa: E731
        options = {"offload": unchecked_fraction(offload), "embeddings": embeddings}
        self._model, self._embeddings = model, embeddings
        self._member, self._layout = member, agreed_layout(member, find, options)
        self._chosen = choose_transport("auto", member)
        self._stores = allocate(member, self._layout, as_offload(offload), self._chosen)
        kept = [blocks for blocks in (self._layout.on_gpu, self._layout.on_host) if blocks]
        self._entries = {
            f"{path}.{entry.name}": (index, entry)
            for blocks in kept
            for index, (path, block) in enumerate(zip(self._layout.layers, blocks, strict=True))
            for entry in block.entries
        }
        size = max(entry.end - entry.offset for _, entry in self._entries.values())
        try:
            with comm.together(member.group):
                self._stand_in = torch.empty(size, dtype=torch.uint8, device=member.device)
        except BaseException:
            self.discard()
            raise

    def __contains__(self, path: str) -> bool:
        return path in self._entries

    def keep(self, path: str, weight: Tensor) -> Tensor:
        """Keep this rank's part of the e4m3 bytes [N, K]. Returns what stands for the weight, uint8 [N, K]."""
        layer, entry = self._entries[path]
        write(self._stores, layer, entry.name, weight)
        return self._stand_in[: weight.numel()].view(weight.shape)

    def finish(self) -> ShardedBase:
        """Collective: give the layers their weights, after all were kept."""
        with self:
            embeddings = agreed_embeddings(self._model, self._member, self._embeddings)
            name = self._chosen[0]
            vocabulary = embeddings and ShardedVocabulary.of(
                self._model, embeddings, self._member, name
            )
            return finish(self._member, self._layout, self._stores, (SLOTS, PREFETCH), vocabulary)

    def __enter__(self) -> ShardedWeights:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.discard()

    def discard(self) -> None:
        """Give back what was pinned, when loading failed."""
        discard(self._stores)


def _layout(
    model: nn.Module, quantized: set[str], member: Member, offload: float | Offload
) -> BaseLayout:
    shapes = partial(_shapes, quantized)
    fraction = check_offload(offload, member)
    return lay_out_base(decoder_layers(model, fused=True), shapes, member.ranks, fraction)


def _shapes(quantized: set[str], path: str, layer: nn.Module) -> dict[str, Shape]:
    """{path in the layer: [N, K]} of its linear layers.

    Raises:
        ValueError: one of them is not held in FP8.
    """
    shapes: dict[str, Shape] = {}
    for name, module in layer.named_modules():
        if isinstance(module, nn.Linear):
            if f"{path}.{name}" not in quantized:
                raise ValueError(
                    f'mesh: {path}.{name} stays plain, but a sharded base is in FP8: take frozen="fp8" and leave it '
                    "out of modules_to_save"
                )
            shapes[name] = (module.out_features, module.in_features)
    return shapes
