# SPDX-License-Identifier: Apache-2.0
"""The bytes of one GPU in training, part by part."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from lorakernels.fusion.memory import AWAY, LayerSize, host_bytes, kept_bytes, mixes
from lorakernels.parallel.optimizer.sharded_adamw import BUCKET_BYTES
from lorakernels.parallel.ranks.exchange import LEAST
from lorakernels.planner.machine import Machine
from lorakernels.planner.size import ELEMENT, ModelSize, projections, weights
from lorakernels.planner.tensor import rows_exchanged
from lorakernels.planner.time import BatchSize, whole_rows

SLOTS = 2  # whole layers of a sharded base
STAGES = 3  # device copies of weights that lie on the host: one in use, two on their way
TRAINED = 16  # bytes of a trained parameter: fp32 value, gradient and two moments
CHUNK = 2048  # tokens whose logits exist at a time, linear_cross_entropy's default
LOGITS = 10  # bytes of one of a part's: exp, its product with the factor, and that in bf16 (tensor/vocabulary.py)
CONTEXT = 720_000_000  # bytes of a CUDA context with the modules of a probe, on an H200
FRAGMENTS = 0.04  # of a GPU's memory: 6 GiB of an H200's, as benchmarks/peers/training.py leaves


@dataclass(frozen=True)
class Placement:
    """The placement of the layers' frozen base: over `ranks` GPUs, 1 for whole on each; `offload` of it on the host.

    On one GPU no memory slot is needed. Over several GPUs, slots hold layers that are gathered for use. With
    `embeddings`, embedding and head are split over them, too, and whole only while in use. `optimizer` is the number of
    GPUs over which AdamW's state is split, as ShardedAdamW does.
    """

    ranks: int = 1
    offload: float = 0.0
    embeddings: bool = False
    optimizer: int = 1

    def split(self, model: ModelSize) -> tuple[int, ...]:
        """Bytes of the embedding and of the head, if they are split."""
        return model.ends if self.embeddings and self.ranks > 1 else ()


@dataclass(frozen=True)
class Bytes:
    """Bytes of one GPU, but `host` of the whole host. `peak` is what torch's allocator and the shards hold.

    `waiting` is the part of `host` in which activations wait, of one GPU. `exchange` is what other GPUs read of keys,
    values and their gradients, and `rows` what they read and write of rows between split layers.
    """

    base: int
    slots: int
    outside: int
    adapters: int
    optimizer: int
    kept: int
    workspace: int
    context: int
    fragments: int
    host: int
    waiting: int
    exchange: int = 0
    rows: int = 0

    @property
    def peak(self) -> int:
        parts = (self.base, self.slots, self.outside, self.adapters, self.optimizer)
        return sum(parts) + self.kept + self.workspace

    @property
    def total(self) -> int:
        return self.peak + self.exchange + self.rows + self.context + self.fragments


def fractions(size: LayerSize) -> list[float]:
    """The fractions of a layer's base that can be on the host, in order. The weights of one input stay together."""
    groups = [n * k for n, k, _ in projections(size)]
    sets = (s for count in range(len(groups)) for s in combinations(groups, count))
    return sorted({sum(chosen) / sum(groups) for chosen in sets})


def bytes_of(
    model: ModelSize,
    batch: BatchSize,
    machine: Machine,
    gpus: int,
    placement: Placement,
    saves: Sequence[str],
) -> Bytes:
    """The peak bytes of a GPU. `saves` names what each layer keeps for backward, as in `fuse`.

    `model` is the whole model. If `batch.tp` GPUs hold layers together, each has its part.
    """
    n, rho = placement.ranks, placement.offload
    whole, model = model, model.over(batch.tp)
    largest = max(map(weights, model.layers))
    pairs = zip(model.layers, saves, strict=True)
    waiting = sum(host_bytes(size, save, batch.tokens, ELEMENT) for size, save in pairs)
    split = placement.split(model)
    copies = 1 if n > 1 else gpus  # each process pins a base of its own where it is not sharded
    return Bytes(
        base=math.ceil(model.base * (1 - rho) / n),
        slots=math.ceil(largest * (STAGES * rho + SLOTS * (1 - rho) * (n > 1))),
        outside=model.outside - sum(split) + math.ceil(sum(split) / n),
        adapters=model.trained * TRAINED // 2,
        optimizer=_optimizer(model.trained, placement.optimizer),
        kept=kept_of(whole, batch, saves),
        workspace=_workspace(model, batch, saves, split),
        context=CONTEXT,
        fragments=int(FRAGMENTS * machine.memory),
        host=copies * math.ceil(model.base * rho) + gpus * waiting,
        waiting=waiting,
        exchange=_exchange(model, batch),
        rows=rows_exchanged(model, batch, machine),
    )


def _optimizer(trained: int, ranks: int) -> int:
    """AdamW's moments of all trained parameters, or what ShardedAdamW keeps of them on one of several `ranks`.

    That is fp32 values, gradients and moments of its part, and one buffer for a whole bucket.
    """
    if ranks == 1:
        return trained * TRAINED // 2
    return math.ceil(trained * TRAINED / ranks) + min(trained * TRAINED // 4, BUCKET_BYTES)


def kept_of(model: ModelSize, batch: BatchSize, saves: Sequence[str]) -> int:
    """Bytes that layers keep of a microbatch: `fuse`'s count, and the extra bytes of ranks that share rows.

    That is the keys and values of all ranks. This rank's own keys and values lie with q in one block, which is kept as
    well. An adapted o keeps the results of both chunks together; attention of packed documents keeps them one by one.
    With "full" it keeps only their bytes in FP8. Layers that only keep their input keep neither.

    `model` is the whole model, also if `batch.tp` GPUs hold layers together.
    """
    return _kept(own_layers(model, batch), batch, saves)


def _kept(layers: Sequence[LayerSize], batch: BatchSize, saves: Sequence[str]) -> int:
    more = 0
    for size, save in zip(layers, saves, strict=True):
        if batch.ranks == 1 or save.startswith("checkpoint"):
            continue
        more += whole_rows(size, batch)
        if save != "full" and size.ranks[1]:
            more += ELEMENT * batch.tokens * size.heads * size.head_dim
    return kept_bytes(layers, saves, batch.tokens, ELEMENT) + more


def own_layers(model: ModelSize, batch: BatchSize) -> tuple[LayerSize, ...]:
    """One GPU's layers: `fuse` counts for them and `batch.tokens` the bytes that the GPU keeps.

    A GPU has its heads and columns of a split layer, for all tokens. It keeps hidden states only for its own tokens.
    They take as many bytes as a part of the width for all tokens. s of o and down, R wide, counts as whole.
    """
    if batch.tp == 1:
        return model.layers
    parts = model.over(batch.tp).layers
    return tuple(replace(size, hidden=size.hidden // batch.tp) for size in parts)


def saves_within(
    model: ModelSize,
    batch: BatchSize,
    room: int,
    forms: Sequence[str],
    placement: Placement = Placement(),
    in_flight: int = 1,
) -> list[str] | None:
    """The fastest of `mixes` whose bytes, with the workspace, are at most `room`; None if nothing fits.

    This counts more than `fuse` does: `in_flight` microbatches, rows that ranks share, and the memory of a backward,
    which depends on the last layer's form.
    """
    split, sizes, layers = placement.split(model), model.over(batch.tp), own_layers(model, batch)
    for saves in mixes(layers, batch.tokens, ELEMENT, forms):
        kept = in_flight * _kept(layers, batch, saves)
        if kept + _workspace(sizes, batch, saves, split) <= room:
            return saves
    return None


def _workspace(
    model: ModelSize, batch: BatchSize, saves: Sequence[str], split: Sequence[int]
) -> int:
    """Bytes between forward and backward, when all layers hold what they keep: the loss, or the last layer's backward.

    A head that is split, the last of `split`, is whole at the loss. Ranks that share rows then have gradients of all
    keys and values: of both chunks in 16 bits, their sum in fp32, and the sum ordered by rank (context/attention.py).
    Ranks that read each other's memory have only the first of these.

    Ranks that hold layers together have hidden states of their own tokens. At the loss each has all hidden states, and
    their gradient (tensor/vocabulary.py). `model` is one rank's part.
    """
    hidden, tokens = ELEMENT * batch.rows * model.layers[-1].hidden, min(batch.tokens, CHUNK)
    loss = ELEMENT * tokens * model.vocabulary + sum(split[-1:])
    if batch.tp > 1:
        element = LOGITS if model.split else ELEMENT
        loss = element * tokens * model.vocabulary + 2 * batch.tp * hidden
    layer = _layer(model.layers[-1], batch, saves[-1])
    return 3 * hidden + max(loss, layer + 6 * whole_rows(model.layers[-1], batch))


def _layer(size: LayerSize, batch: BatchSize, form: str) -> int:
    """Bytes of one layer's backward: gradients of h, gate and up, and what a recomputed layer keeps.

    A part of a layer has a gradient of h for all tokens, which ranks sum, and two more for its own tokens. A gradient
    in blocks also needs the transposed weight.
    """
    save, tokens = form.removesuffix(AWAY), batch.tokens
    row = 4 * size.ffn
    if size.ranks[2]:
        row += 4 * size.ffn
    if save == "fp8":
        row += size.ffn
    again = 0
    if save == "checkpoint":
        kept = replace(size, hidden=size.hidden // batch.tp)
        again = kept.saved_bytes("recompute", tokens) - kept.saved_bytes("checkpoint", tokens)
    gradient = 4 * batch.rows * size.hidden
    sums = 2 * tokens * size.hidden if batch.tp > 1 else 0
    turned = max(n * k for n, k, _ in projections(size)) if size.blocks else 0
    return tokens * row + gradient + sums + again + turned


def _exchange(model: ModelSize, batch: BatchSize) -> int:
    """Bytes that ranks which share rows keep for their exchange (ranks/exchange.py), in memory that only grows.

    A rank's own keys and values come first, and then the gradients of all, in fp32. Each is a power of two of bytes.
    """
    if batch.ranks == 1:
        return 0
    rows = max(whole_rows(size, batch) for size in model.layers)
    first, then = (max(LEAST, 1 << (b - 1).bit_length()) for b in (rows // batch.ranks, 2 * rows))
    return then if first == then else first + then
