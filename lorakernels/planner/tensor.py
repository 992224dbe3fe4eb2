# SPDX-License-Identifier: Apache-2.0
"""The cost of T GPUs holding each layer together: their exchanges of rows, overlapped with products or in turn.

    column   forward gathers x8 and s        backward sums dx in bf16, and ds; dA is summed over all rows
    row      forward sums y in bf16, and s   backward gathers dy8 and ds; dB is summed over all rows

A GPU has M/T of the M rows between split layers. Each exchange moves (T − 1) / T of all rows of the layer's width, in
and out of each GPU, at the links' rate. Overlapped exchanges follow tensor/projections.py and ranks/exchange.py:

    gather   the GPU's own rows are multiplied while copy engines bring the other rows; only the excess is exposed
    sum      rows for other GPUs are multiplied first, its own last; each part is sent while the next is computed

A product in pieces takes more rounds of tiles. Exchanges overlap with it where the rule of `parallelize` allows it.
Sending and receiving also moves bytes in the GPU's own memory, as the gathers of a sharded base do. In turn, each
wait for signals and each copy counts as a kernel. Overlapped, they take the times of that rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from lorakernels.autograd.linear.rows import Product
from lorakernels.fusion.memory import LayerSize
from lorakernels.ops.hardware import why_not_wgmma_gemm
from lorakernels.parallel.ranks.exchange import GATHERED, LEAST, START, SUMMED, aligned
from lorakernels.planner.machine import Machine
from lorakernels.planner.size import ELEMENT, ModelSize, projections
from lorakernels.planner.time import KERNEL, BatchSize, KernelSeconds, gemm_seconds, moved

GRADIENT = 4  # bytes of a number of dA and dB, which travel in fp32
CHUNK = 2048  # tokens whose logits exist at a time (tensor/vocabulary.py)
# Bytes that torch's ops of a chunk move for each logit of a part (tensor/vocabulary.py): bf16 written 2, fp32 made of
# it 6, the largest 4, its difference 8, exp 8, the sum 4, divided 8, masked 8, times the factor 8, to bf16 6, read 2.
LOGIT, LOGIT_KERNELS = 64, 16
PLAIN_LOGIT = 8  # of them, what plan_time.head counts
HOPPER = (9, 0)


class Crossing(NamedTuple):
    """The cost of exchanges in a layer: kernels and copies of the GPU itself, and seconds of waiting for other GPUs."""

    parts: KernelSeconds = KernelSeconds()
    waits: float = 0.0

    def plus(self, other: Crossing) -> Crossing:
        return Crossing(self.parts + other.parts, self.waits + other.waits)


class Exchange(NamedTuple):
    """One exchange of a split layer, overlapped with its product or not.

    Attributes:
        product: the GEMM that the exchange belongs to. Rows are gathered before it or summed after it.
        width: of the rows, in numbers.
        element: bytes of a number: 1 of gathered ones, 2 of summed ones.
        rank: R of the factor that travels along; 0 without an adapter.
        totals: bytes of gradients that are also summed, over all rows.
        added: whether a residual is added to the sum.
    """

    product: Product
    width: int
    element: int
    rank: int
    totals: int = 0
    added: bool = False

    def sent(self, batch: BatchSize) -> int:
        """Bytes of rows that a GPU sends, and receives."""
        return (batch.tp - 1) * batch.rows * self.width * self.element

    def pieces(self, batch: BatchSize) -> list[list[int]]:
        """Rows of each piece of the product, for each GPU of another place."""
        rows, size = batch.rows, batch.tp
        if self.element > 1:
            return [[rows] * size]
        return [
            [r for r in (rows, rank * rows, (size - 1 - rank) * rows) if r] for rank in range(size)
        ]

    def is_beside(self, size: LayerSize, batch: BatchSize, machine: Machine) -> bool:
        """Whether `parallelize` overlaps it with the product, on GPUs that read each other's memory."""
        if not size.fp8 or why_not_wgmma_gemm(HOPPER, *self.product.weight):
            return False
        gain = self.sent(batch) / (SUMMED if self.element > 1 else GATHERED)
        slower = [self.product.slower_in(p, machine.processors) for p in self.pieces(batch)]
        return gain > START + max(slower)

    def taken(self, size: LayerSize, batch: BatchSize, machine: Machine) -> Crossing:
        """The cost that it adds to the layer. The undivided product is counted already."""
        cost = _beside if self.is_beside(size, batch, machine) else _in_turn
        small = 2 * (batch.tp - 1) * batch.rows * self.rank + (batch.tp - 1) * self.totals
        more = cost(self, size, batch, machine)
        return more._replace(waits=more.waits + small / machine.peer)


def _in_turn(exchange: Exchange, size: LayerSize, batch: BatchSize, machine: Machine) -> Crossing:
    """Rows are written, waited for and read. Nothing overlaps."""
    local_bytes = batch.rows * exchange.width * exchange.element
    sent, barriers = exchange.sent(batch), 2
    if (
        exchange.element == 1
    ):  # the GPU's own rows are written, then copied once more next to the received ones
        local, kernels = 4 * local_bytes, 2 + batch.tp
    else:  # rows for other GPUs are written; its own are read, and the sum is written
        local, kernels = 2 * sent + (2 + exchange.added) * local_bytes, batch.tp
        barriers += 2 * bool(exchange.totals)  # gradients are an exchange of their own
    kernels += 3 * bool(exchange.rank) + 3 * bool(exchange.totals)
    return Crossing(moved(machine, local, kernels), sent / machine.peer + barriers * KERNEL)


def _beside(exchange: Exchange, size: LayerSize, batch: BatchSize, machine: Machine) -> Crossing:
    """The product in pieces, while copy engines read and write the GPU's memory.

    Launches, signals and small copies take START, as in the rule that decides about overlapping.
    """
    rate = machine.fp8_backward if exchange.product.backward else machine.fp8_forward
    n, k, m = exchange.product.cols, exchange.product.depth, batch.tokens
    whole = gemm_seconds((m, n, k), rate, machine.processors)

    def longer(pieces: Sequence[int]) -> float:
        times = (gemm_seconds((rows, n, k), rate, machine.processors) for rows in pieces)
        return sum(times) - whole

    sent, local_bytes = exchange.sent(batch), batch.rows * exchange.width * exchange.element
    piece = gemm_seconds((batch.rows, n, k), rate, machine.processors)
    copy = local_bytes / machine.peer + KERNEL
    local = 2 * sent
    if exchange.element == 1:
        waits = max(0.0, (batch.tp - 1) * copy - piece)
    else:
        gone = 0.0
        for number in range(1, batch.tp):
            gone = max(gone, number * piece) + copy
        waits = max(0.0, gone - batch.tp * piece)
        local += (batch.tp + 1 + exchange.added) * local_bytes
    parts = KernelSeconds(max(map(longer, exchange.pieces(batch)))) + moved(machine, local, 0)
    return Crossing(parts, waits + START)


def _forward(size: LayerSize, batch: BatchSize) -> list[Exchange]:
    exchanges = []
    for number, (n, k, rank) in enumerate(projections(size)):
        product = Product(n, k, backward=False, split=False)
        if number % 2:
            exchanges.append(Exchange(product, n, ELEMENT, rank, added=True))
        else:
            exchanges.append(Exchange(product, k, 1, rank))
    return exchanges


def _backward(size: LayerSize, batch: BatchSize) -> list[Exchange]:
    exchanges = []
    for number, (n, k, rank) in enumerate(projections(size)):
        product = Product(k, n, backward=True, split=True)
        if number % 2:
            exchanges.append(Exchange(product, n, 1, rank, GRADIENT * n * rank))
        else:
            exchanges.append(Exchange(product, k, ELEMENT, rank, GRADIENT * k * rank))
    return exchanges


@lru_cache(maxsize=1024)
def crossings(
    size: LayerSize, batch: BatchSize, machine: Machine, form: str
) -> tuple[Crossing, Crossing]:
    """The cost of the exchanges in a layer's forward and in its backward. `size` is one GPU's part of the layer.

    "checkpoint" runs the forward again in backward, without the last product and its sum.
    """
    none = Crossing()
    if batch.tp == 1:
        return none, none

    def of(exchanges: Sequence[Exchange]) -> Crossing:
        total = none
        for exchange in exchanges:
            total = total.plus(exchange.taken(size, batch, machine))
        return total

    ahead = _forward(size, batch)
    again = ahead[:-1] if form == "checkpoint" else []
    return of(ahead), of([*_backward(size, batch), *again])


def ends(model: ModelSize, batch: BatchSize, machine: Machine) -> Crossing:
    """The cost for a microbatch of exchanges at the embedding, after the last norm and at the loss. Nothing hides it.

    torch all-reduces the embedding's rows, and their gradient at the head. `model` is one GPU's part.
    """
    if batch.tp == 1:
        return Crossing()
    whole, size = ELEMENT * batch.tokens * model.layers[0].hidden, batch.tp
    # rows behind the last norm come from all GPUs
    received, local, kernels = whole * (size - 1) / size, 4 * whole / size, 4 + size
    if model.split:
        reduced = 2 * whole * (size - 1) / size
        received += 2 * reduced
        chunks = -(-batch.tokens // CHUNK)
        local += (LOGIT - PLAIN_LOGIT) * batch.tokens * model.vocabulary
        local += 6 * whole  # rows found, masked, and the gradient times the loss's
        kernels += chunks * LOGIT_KERNELS + 6
    return Crossing(moved(machine, local, kernels), received / machine.peer)


def rows_exchanged(model: ModelSize, batch: BatchSize, machine: Machine) -> int:
    """Bytes of the memory in which GPUs exchange rows. `PeerRows` allocates more for each exchange that needs more.

    Older memory stays allocated. `model` is one GPU's part.
    """
    held = most = 0
    for size in dict.fromkeys(model.layers if batch.tp > 1 else ()):
        for exchange in (*_forward(size, batch), *_backward(size, batch)):
            beside = exchange.is_beside(size, batch, machine)
            gathers = exchange.element == 1
            rows = batch.rows if gathers and not beside else batch.tokens
            sizes = [
                rows * exchange.width * exchange.element,
                ELEMENT * rows * exchange.rank,
                exchange.totals,
            ]
            wanted = sum(map(aligned, sizes))
            if wanted > most:
                most = max(LEAST, 1 << (wanted - 1).bit_length())
                held += most
    return held
