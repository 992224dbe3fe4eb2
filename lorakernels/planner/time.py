# SPDX-License-Identifier: Apache-2.0
"""How long a fused layer, the head and a step take on a machine.

    products    rounds of tiles over the multiprocessors, at the machine's rate
    attention   operations below the diagonal, and for each query as many as T0 / 2 keys more take, in each call: a
                sequence of T tokens so has the full rate times T / (T + T0)
    the rest    bytes over the bandwidth, and a fixed time for each kernel

A step that would draw more than the machine's power takes its energy over that power.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from lorakernels.fusion.memory import AWAY, LayerSize, host_bytes
from lorakernels.planner.machine import Machine
from lorakernels.planner.size import ELEMENT, ModelSize, projections, weights

# Fitted to benchmarks/results/h200/decoder_layer_kernels.csv, as docs/plan.md says
KERNEL = 1.5e-6  # seconds that a kernel takes besides moving its bytes
GEMM = 3.5e-6  # seconds that a product takes besides its rounds
TILES = ((128, 256), (128, 128))
ATTENTION = (770e12, 1662)  # forward: operations a second, and T0
ATTENTION_GRAD = (712e12, 2507)
MERGE = (
    6  # bytes moved for each element of attention's result, or of dq, where two calls of it meet
)
# Seconds that an exchange among ranks of a row takes besides moving its bytes: two waits for all ranks, of 6.7 us, and
# 5 us until remote rows are read. From the kernels of two H200s that exchange 4 MB (docs/plan.md)
EXCHANGE = 18e-6
LORA_DOWN = (0.4e-12, 0.027e-12)  # seconds per element of x, and per element and rank: x A
LORA_GRAD_A = (1.1e-12, 0.0135e-12)
LORA_GRAD_B = 0.85e-12  # seconds per element of dy
# Time of a product in blocks ÷ time of a product with a single scale. Forward: the geometric mean over the shapes of an
# H200's fp8_block_linear.csv and fp8_linear_lora.csv, at rank 16. Backward: the mean of five shapes is 1.22 times fast
# sums in one run (docs/facts.md, H59). Times 0.92, as fast sums take 0.89 to 0.95 of the time of split sums.
# fp8_block_grad_input.csv ÷ fp8_grad_input.csv, split, is 1.10 without dropout and 1.16 where only the latter reads a
# mask.
BLOCK_FORWARD, BLOCK_BACKWARD = 1.16, 1.12
REPLAY = 9e-6  # seconds between two graphs; recorded as the 1B shape's by layer less its one graph


@dataclass(frozen=True)
class BatchSize:
    """`sequences` of `length` tokens, each causal by itself. `ranks` share each of them, by context parallel.

    `tp` GPUs together have the tokens of each of these, and a part of every layer, by tensor parallel.
    """

    sequences: int
    length: int
    ranks: int = 1
    tp: int = 1

    @property
    def tokens(self) -> int:
        """The tokens of one GPU's products and attention."""
        return self.sequences * self.length // self.ranks

    @property
    def rows(self) -> int:
        """Its own tokens between split layers, where norms and residuals are."""
        return self.tokens // self.tp


@dataclass(frozen=True)
class KernelSeconds:
    """Seconds of kernels at the highest clock, by kind."""

    gemm: float = 0.0
    attention: float = 0.0
    memory: float = 0.0

    def __add__(self, other: KernelSeconds) -> KernelSeconds:
        return KernelSeconds(
            self.gemm + other.gemm,
            self.attention + other.attention,
            self.memory + other.memory,
        )

    @property
    def seconds(self) -> float:
        return self.gemm + self.attention + self.memory

    def joules(self, machine: Machine) -> float:
        return (
            self.gemm * machine.gemm_watts
            + self.attention * machine.attention_watts
            + self.memory * machine.memory_watts
        )


@dataclass(frozen=True)
class LayerTime:
    """Seconds of a layer in a step: its own kernels, and copies to and from the GPU meanwhile.

    `send` is for activations, which go to the host during a forward and come back during a backward. `rows` is for keys
    and values of the ranks that share rows, and for their gradients, both ways together. Nothing hides it. `split` is
    how long GPUs that hold the layer together wait for rows after their products, both ways together.
    """

    forward: float
    backward: float
    gather: float
    copy: float
    send: float
    rows: float = 0.0
    split: float = 0.0

    @property
    def exposed(self) -> float:
        """Seconds that gathers and copies of both directions take longer than the layer.

        Activations come back in the direction in which weights come, and share its bandwidth. They leave in the other.
        """
        first = max(self.gather, self.copy, self.send)
        last = max(self.gather, self.copy + self.send)
        return max(0.0, first - self.forward) + max(0.0, last - self.backward)


def gemm_seconds(shape: tuple[int, int, int], rate: float, processors: int) -> float:
    """Seconds of a product [M, K] [K, N]. `shape` is (M, N, K), `rate` operations a second where all tiles are busy."""
    m, n, k = shape
    best = min(
        math.ceil(math.ceil(m / rows) * math.ceil(n / columns) / processors) * rows * columns
        for rows, columns in TILES
    )
    return 2 * best * processors * k / rate + GEMM


def moved(machine: Machine, size: float, kernels: int) -> KernelSeconds:
    """Kernels that read and write `size` bytes together."""
    return KernelSeconds(memory=size / machine.bandwidth + kernels * KERNEL)


@lru_cache(maxsize=1024)
def forward(size: LayerSize, batch: BatchSize, machine: Machine, form: str) -> KernelSeconds:
    """A layer's forward; `form` is one of `fuse`'s. What leaves for the host is read, too.

    `size` is what a GPU has of the layer. What split layers exchange is apart (tensor.py).
    """
    save = form.removesuffix(AWAY)
    m, rows, k, f = batch.tokens, batch.rows, size.hidden, size.ffn
    wide, narrow = size.heads * size.head_dim, size.kv_heads * size.head_dim
    between = 2 * 3 * k  # norms
    row = 4 * (wide + narrow) + 3 * wide + 5 * f  # RoPE, o's input, SwiGLU
    if size.normed_heads:
        row += 4 * (wide + narrow)
    if save == "fp8":
        row += 2 * f
    if size.ranks[3]:
        row += 4 * f  # SwiGLU's result in bf16, written and read
    apart = size.blocks and size.ranks[1] > 0  # o's input is read for s, and again for its blocks
    total = moved(machine, rows * between + m * (row + 2 * wide * apart), 6 + apart)
    inputs = (rows, m, rows, m)  # rows that q k v, o, gate up and down quantize
    for (n, inner, rank), quantized in zip(projections(size), inputs, strict=True):
        seconds = gemm_seconds((m, n, inner), _forward_rate(size, machine), machine.processors)
        total += KernelSeconds(seconds) + _lora_forward(quantized * inner, rank)
    total += _carried(size, batch, machine, form)
    total += _laid_down(size, batch, machine) + _merged(size, batch, machine)
    return total + _attention(size, batch, 1.0, ATTENTION)


@lru_cache(maxsize=1024)
def backward(size: LayerSize, batch: BatchSize, machine: Machine, form: str) -> KernelSeconds:
    """A layer's backward, with the forward that "checkpoint" runs again in it. What comes from the host is written."""
    save = form.removesuffix(AWAY)
    m, rows, k, f = batch.tokens, batch.rows, size.hidden, size.ffn
    wide, narrow = size.heads * size.head_dim, size.kv_heads * size.head_dim
    qkv, o, gate_up, down = map(bool, size.ranks)
    between = 2 * 3 * k + 2 * 8 * k
    row = 8 * f + 4 * (wide + narrow) + 3 * (wide + 2 * narrow)
    if save == "fp8":
        row -= 2 * f
    if save != "full":  # inputs are quantized again
        between += 3 * k * (qkv + gate_up)
        row += 3 * wide * o
    if gate_up:
        row += 6 * f  # dgate, dup in bf16, and quantized in a pass of their own
    if down:
        row += f
    # dy of an adapted o, or down, is read for ds and dB, and again for its blocks
    apart = o + down if size.blocks else 0
    between += 2 * k * apart
    moves = rows * between + m * row + 2 * weights(size)
    total = moved(machine, moves, 9 + apart + 3 * (save != "full"))
    rate = machine.fp8_backward / (BLOCK_BACKWARD if size.blocks else 1.0)
    # rows of the input, for dA, and of dy
    sides = ((rows, m), (m, rows), (rows, m), (m, rows))
    for (n, inner, rank), (inputs, outputs) in zip(projections(size), sides, strict=True):
        seconds = gemm_seconds((m, inner, n), rate, machine.processors)
        total += KernelSeconds(seconds) + _lora_backward(inputs * inner, outputs * n, rank)
    total += _attention(size, batch, 2.5, ATTENTION_GRAD) + _carried(size, batch, machine, form)
    total += _laid_down_by_rank(size, batch, machine) + _merged(size, batch, machine)
    return total + _again(size, batch, machine) if save == "checkpoint" else total


def _forward_rate(size: LayerSize, machine: Machine) -> float:
    """Operations a second of the layer's products in forward."""
    return machine.fp8_forward / (BLOCK_FORWARD if size.blocks else 1.0)


def _carried(size: LayerSize, batch: BatchSize, machine: Machine, form: str) -> KernelSeconds:
    """The kernel time of a copy of activations, which uses the GPU's own bandwidth."""
    return KernelSeconds(memory=host_bytes(size, form, batch.tokens, ELEMENT) / machine.bandwidth)


def whole_rows(size: LayerSize, batch: BatchSize) -> int:
    """Bytes of a layer's keys and values of all ranks that share rows, in 16 bits; 0 of one rank."""
    if batch.ranks == 1:
        return 0
    return 2 * ELEMENT * batch.sequences * batch.length * size.kv_heads * size.head_dim


def _laid_down(size: LayerSize, batch: BatchSize, machine: Machine) -> KernelSeconds:
    """This rank's keys and values are read, and written where the other ranks read them."""
    if batch.ranks == 1:
        return KernelSeconds()
    return moved(machine, 2 * whole_rows(size, batch) / batch.ranks, 1)


def _laid_down_by_rank(size: LayerSize, batch: BatchSize, machine: Machine) -> KernelSeconds:
    """Gradients of all keys and values are read, and written in fp32 for the ranks that own them."""
    if batch.ranks == 1:
        return KernelSeconds()
    return moved(machine, 3 * whole_rows(size, batch), 1)


def exchanged(size: LayerSize, batch: BatchSize, machine: Machine, form: str) -> float:
    """Seconds of a layer's exchanges among the n ranks that share rows; nothing hides them.

    The forward receives (n − 1) / n of keys and values from other ranks. The backward sends as much of their gradients,
    in fp32, which is twice the bytes (context/attention.py). "checkpoint" gathers again. The kernel that reads remote
    memory reads and writes its own GPU's memory meanwhile. Ranks wait for each other before and after they write.
    """
    if batch.ranks == 1:
        return 0.0
    again = form.startswith("checkpoint")
    received = (3 + again) * (batch.ranks - 1) / batch.ranks * whole_rows(size, batch)
    return received / machine.peer + (2 + again) * EXCHANGE


def _again(size: LayerSize, batch: BatchSize, machine: Machine) -> KernelSeconds:
    """The forward that "checkpoint" runs in backward, without the last product."""
    shape = (batch.tokens, size.hidden, size.ffn)
    last = gemm_seconds(shape, _forward_rate(size, machine), machine.processors)
    return forward(size, batch, machine, "full") + KernelSeconds(-last)


def calls(batch: BatchSize) -> tuple[int, float]:
    """(calls of attention's kernels, their queries) of a sequence, on the rank that has most of both.

    Two chunks of C of a sequence attend to their own keys in one call, to keys before both in another and, but of the
    last ones, the second chunk to those between them. All ranks attend to as many keys (autograd/attention/chunk.py).
    """
    if batch.ranks == 1:
        return 1, batch.length
    chunk, between = batch.length / (2 * batch.ranks), batch.ranks > 2
    return 2 + between, (4 + between) * chunk


def _attention(
    size: LayerSize, batch: BatchSize, times: float, rate: tuple[float, int]
) -> KernelSeconds:
    (count, queries), (fastest, start) = calls(batch), rate
    keys = batch.length * batch.length / (2 * batch.ranks) + queries * start / 2
    operations = 4 * batch.sequences * keys * size.heads * size.head_dim * times
    return KernelSeconds(attention=operations / fastest + 3 * count * KERNEL)


def _merged(size: LayerSize, batch: BatchSize, machine: Machine) -> KernelSeconds:
    """Results of all calls but the first are added to those that are there."""
    count, queries = calls(batch)
    if count == 1:
        return KernelSeconds()
    queries -= batch.length / batch.ranks
    elements = batch.sequences * queries * size.heads * size.head_dim
    return moved(machine, MERGE * elements, count - 1)


def _lora_forward(inputs: int, rank: int) -> KernelSeconds:
    fixed, per_rank = LORA_DOWN
    return KernelSeconds(memory=inputs * (fixed + per_rank * rank) + 2 * KERNEL if rank else 0.0)


def _lora_backward(inputs: int, outputs: int, rank: int) -> KernelSeconds:
    fixed, per_rank = LORA_GRAD_A
    seconds = inputs * (fixed + per_rank * rank) + outputs * LORA_GRAD_B + 4 * KERNEL
    return KernelSeconds(memory=seconds if rank else 0.0)


def around(model: ModelSize, batch: BatchSize, machine: Machine, ranks: int = 1) -> KernelSeconds:
    """The work of a step outside of the layers: `head`, and AdamW over fp32 adapters, split over `ranks`."""
    return head(model, batch, machine) + adamw(model, machine, ranks)


def head(model: ModelSize, batch: BatchSize, machine: Machine) -> KernelSeconds:
    """Head and loss in bf16, last norm, scales, of a microbatch. `model` is what a GPU has of it."""
    hidden, m = model.layers[0].hidden, batch.tokens
    products = 2 * 2 * m * hidden * model.vocabulary / machine.bf16
    logits = moved(machine, 4 * 2 * m * model.vocabulary, 4)
    return KernelSeconds(products) + logits + moved(machine, 12 * batch.rows * hidden, 20)


def adamw(model: ModelSize, machine: Machine, ranks: int = 1) -> KernelSeconds:
    """AdamW, or ShardedAdamW over several `ranks`, which copies all gradients into its buffer and out of it."""
    # bytes a parameter: zeroed 4, copied in 8, scaled 8, copied out 8
    copied = 28 if ranks > 1 else 0
    return moved(machine, (40 / ranks + copied) * model.trained, 2 * len(model.layers))


def stretched(parts: KernelSeconds, machine: Machine, waits: float = 0.0) -> float:
    """How many times longer the kernels take than at the highest clock, which the power limit may not allow.

    In `waits`, seconds between them, a GPU draws no more than kernels that move bytes.
    """
    joules = parts.joules(machine) + waits * machine.memory_watts
    return max(1.0, (joules / machine.power - waits) / parts.seconds)
