# SPDX-License-Identifier: Apache-2.0
"""Put FP8 weights into the shards of a sharded base while a checkpoint is read, one matrix at a time.

Every rank reads and quantizes every matrix, and keeps its part of the bytes. Until all are read, a layer's weight is
memory that all layers share and that has no values.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lorakernels.parallel import ShardedBase, comm
from lorakernels.parallel.blocks import Block, Shape
from lorakernels.parallel.layers import block_of, decoder_layers
from lorakernels.parallel.sharded_base import agreed_layout, finish
from lorakernels.parallel.shards import Shards

SLOTS, PREFETCH = 2, 1


class ShardedWeights:
    """Collective: the shards of the FP8 weights of `model`'s decoder layers.

    Args:
        model: before it has weights, with its own `nn.Linear`s.
        quantized: paths of the linear layers that will be held in FP8.
        mesh: a DeviceMesh of one axis.
        device: of the model's weights.

    Raises:
        ValueError: a decoder layer has a linear layer that is not in `quantized`, or ranks differ.
        TypeError, RuntimeError: as for `shard_base`.
    """

    def __init__(
        self, model: nn.Module, quantized: Iterable[str], mesh: Any, device: torch.device
    ) -> None:
        wanted = set(quantized)
        find = lambda: _layout(model, wanted, mesh.size())  # noqa: E731
        self._layers, blocks = agreed_layout(mesh, find, ())
        group = mesh.get_group()
        name, reason = comm.choose("auto", group, device)
        transport = comm.make(name, group, device)
        sizes = [shape[0] * shape[1] for block in blocks for _, shape, _ in block.entries]
        with comm.together(group):  # one rank's GPU may be full
            memory = transport.allocate(Shards.bytes_of(blocks, mesh.size()))
            self._stand_in = torch.empty(max(sizes), dtype=torch.uint8, device=device)
        self._group = group
        self._shards = Shards(blocks, mesh.get_local_rank(), mesh.size(), memory)
        self._chosen = transport, reason
        self._entries = {
            f"{path}.{entry.name}": (index, entry)
            for index, (path, block) in enumerate(zip(self._layers, blocks, strict=True))
            for entry in block.entries
        }

    def __contains__(self, path: str) -> bool:
        return path in self._entries

    def keep(self, path: str, weight: Tensor) -> Tensor:
        """Keep this rank's part of the e4m3 bytes [N, K]. Returns what stands for the weight, uint8 [N, K]."""
        layer, entry = self._entries[path]
        self._shards.write(layer, entry, weight)
        return self._stand_in[: weight.numel()].view(weight.shape)

    def finish(self) -> ShardedBase:
        """Collective: give the layers their weights, after all were kept."""
        return finish(self._group, self._layers, self._shards, self._chosen, SLOTS, PREFETCH)


def _layout(
    model: nn.Module, quantized: set[str], ranks: int
) -> tuple[dict[str, nn.Module], list[Block]]:
    layers = decoder_layers(model)
    return layers, [
        block_of(layer, _shapes(path, layer, quantized), ranks) for path, layer in layers.items()
    ]


def _shapes(path: str, layer: nn.Module, quantized: set[str]) -> dict[str, Shape]:
    """{path in the layer: [N, K]} of its linear layers.

    Raises:
        ValueError: one of them is not held in FP8.
    """
    found: dict[str, Shape] = {}
    for name, module in layer.named_modules():
        if isinstance(module, nn.Linear):
            if f"{path}.{name}" not in quantized:
                raise ValueError(
                    f'mesh: {path}.{name} stays plain, but a sharded base is in FP8: take frozen="fp8" and leave it '
                    "out of modules_to_save"
                )
            found[name] = (module.out_features, module.in_features)
    return found
