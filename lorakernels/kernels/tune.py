# SPDX-License-Identifier: Apache-2.0
"""Tile sizes of the GEMMs: data, one table per compute capability, chosen by shape class and never by timing.

`LORAKERNELS_PRINT_CONFIGS=1` prints every choice of the Triton GEMM's once to stderr.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True)
class KernelConfig:
    """One program computes tiles of [block_m, block_n], block_k of the contraction at a time."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group: int  # row tiles that share their column tiles in the L2 cache
    resident: int = 1  # programs per multiprocessor


@dataclass(frozen=True)
class Problem:
    """An FP8 GEMM [m, k] × [k, n] with `rank` extra columns of bf16 or fp16; rank 0: none."""

    m: int
    n: int
    k: int
    rank: int


PREFETCHED_RANK = 64  # up to here s and B are loaded in one piece, before the loop over K
RANK_STEP = 32  # above, in such pieces, after it; at 64, Triton 3.6 spills registers
MAX_RANK = 256
TILES = {  # largest first. Hopper's are the fastest of those tried on an H200 (docs/facts.md, H58)
    (9, 0): (
        KernelConfig(128, 256, 128, num_warps=8, num_stages=3, group=8),
        KernelConfig(128, 128, 128, num_warps=4, num_stages=3, group=8, resident=2),
        KernelConfig(64, 64, 128, num_warps=4, num_stages=5, group=8, resident=2),
    )
}
DEFAULT = (KernelConfig(128, 128, 64, num_warps=8, num_stages=3, group=8),)
SHARED_MEMORY = {(9, 0): 227 << 10}
SMALLEST_SHARED_MEMORY = 99 << 10  # of all GPUs with FP8 tensor cores


def shared_memory(config: KernelConfig) -> int:
    """Bytes: the pipeline's stages and half a tile of y. The adapter's tiles reuse the stages."""
    stage = (config.block_m + config.block_n) * config.block_k
    return config.num_stages * stage + config.block_m * config.block_n + 1024


def is_valid(config: KernelConfig, problem: Problem, capability: tuple[int, int]) -> bool:
    """Whether this GPU can keep `resident` programs, and at most half of a row tile is padding when there is one."""
    available = SHARED_MEMORY.get(capability, SMALLEST_SHARED_MEMORY) // config.resident
    fits = shared_memory(config) <= available
    return fits and problem.rank <= MAX_RANK and (config.block_m <= 64 or problem.m > 64)


# {how: {tile: its time ÷ the time of 128 × 128 with split sums}}, H200: 8192³, and 4096² with a depth of 28672.
# Tiles of LOW rows are for outputs of no more: of others they would read the weight twice as often.
# Their 0.6 is not measured: it only puts them before others where they may be taken.
LOW = 64
CSRC_TILES = {
    "split": {(192, 128): 1.33, (128, 128): 1.0},
    "fast": {(128, 256): 1.71, (128, 128): 0.9, (64, 128): 0.6},
    "turned": {(192, 128): 1.38, (128, 128): 0.97},
    "turned fast": {(256, 128): 1.73, (128, 128): 0.91},
    "blocks": {(128, 256): 1.83, (128, 128): 1.0},
}


@lru_cache(4096)
def choose(problem: Problem, capability: tuple[int, int], multiprocessors: int) -> KernelConfig:
    """The largest valid tiles that give enough of them; else the smallest.

    Enough: one for each multiprocessor, or for every second one where two programs share one.
    """
    configs = TILES.get(capability, DEFAULT)
    valid = [c for c in configs if is_valid(c, problem, capability)] or [configs[-1]]
    busy = [c for c in valid if tiles(c, problem) * c.resident >= multiprocessors]
    config = busy[0] if busy else valid[-1]
    if os.environ.get("LORAKERNELS_PRINT_CONFIGS") == "1":
        print(f"lorakernels: {problem} on {capability}: {config}", file=sys.stderr)
    return config


def rank_step(rank: int) -> int:
    """Columns of s and B that are in shared memory at a time: a power of two, at least one MMA's 16."""
    return max(16, 1 << (rank - 1).bit_length()) if 0 < rank <= PREFETCHED_RANK else RANK_STEP


def tiles(config: KernelConfig, problem: Problem) -> int:
    return -(-problem.m // config.block_m) * -(-problem.n // config.block_n)


def programs(config: KernelConfig, problem: Problem, multiprocessors: int) -> int:
    """How many walk over the tiles."""
    return min(tiles(config, problem), multiprocessors * config.resident)


@lru_cache(4096)
def csrc_tile(
    rows: int, cols: int, how: str, multiprocessors: int
) -> tuple[tuple[int, int], float]:
    """(rows, columns) of the tiles in which csrc's FP8 GEMMs compute an output [rows, cols] soonest; their time.

    Time: rounds over the multiprocessors, weighted by what a tile takes.
    how: of CSRC_TILES: "split" or "fast" sums of the forward, "turned" ones of dgrad, whose W lies across them;
    "blocks": sums of 128, each times its scales.
    """

    def time(tile: tuple[int, int]) -> float:
        rounds = -(-(-(-rows // tile[0]) * -(-cols // tile[1])) // multiprocessors)
        return rounds * CSRC_TILES[how][tile]

    tile = min((tile for tile in CSRC_TILES[how] if tile[0] > LOW or rows <= LOW), key=time)
    if os.environ.get("LORAKERNELS_PRINT_CONFIGS") == "1":
        print(f"lorakernels: csrc, [{rows}, {cols}], {how}: tiles of {tile}", file=sys.stderr)
    return tile, time(tile)
