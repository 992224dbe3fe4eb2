// SPDX-License-Identifier: Apache-2.0
// For .cu files only: a ring of tiles in shared memory.
#pragma once

#include <cstdint>

namespace lorakernels {

// Where a thread is in the ring: the stage it uses, and how many times it went round, modulo 2. Each stage has a
// barrier that says "full" and one that says "empty".
template <int kStages, int kStageBytes>
struct TileRing {
  uint32_t tiles, barriers;
  int stage = 0, round = 0;

  __device__ TileRing(uint32_t tiles, uint32_t barriers) : tiles(tiles), barriers(barriers) {}
  __device__ uint32_t tile() const { return tiles + stage * kStageBytes; }
  __device__ uint32_t full() const { return barriers + stage * 8; }
  __device__ uint32_t empty() const { return barriers + (kStages + stage) * 8; }
  __device__ void advance() {
    if (++stage == kStages) stage = 0, round ^= 1;
  }
};

}  // namespace lorakernels
