// SPDX-License-Identifier: Apache-2.0
// For lora_grad_a's .cu file only: what its warps keep in shared memory while they go down the rows.
#pragma once

#include "device/draws.h"
#include "device/ptx/cp_async.h"
#include "device/ptx/shared_memory.h"
#include "ops/lora_grad_a/params.h"

namespace lorakernels {
namespace {

using Grid = LoraGradAGrid;

constexpr int kThreads = Grid::kThreads;

// A warp's ring in shared memory. A stage is kRows rows of 8 kBytes bytes, and a lane uses kBytes of a row.
// Neighbouring lanes copy neighbouring 16 bytes, so that a row is read from device memory in one piece. Lane (g, t)
// later reads the g-th part of row t. Therefore a row's 16-byte pieces are permuted, so that the lanes read from
// different banks.
template <int kStages, int kRows, int kBytes>
struct Ring {
  static constexpr int kPieces = kBytes / 2;  // of a row
  static constexpr int kStageBytes = kRows * kPieces * 16;
  static constexpr int kBytesOfBlock = kStages * kStageBytes * (kThreads / 32);
  static constexpr int kCopies = (kRows * kPieces + 31) / 32;  // of a lane
  uint8_t* base;

  __device__ explicit Ring(void* shared)
      : base(static_cast<uint8_t*>(shared) + threadIdx.x / 32 * (kStages * kStageBytes)) {}

  static __device__ uint32_t offset(uint32_t row, uint32_t piece) {
    const uint32_t flip = kBytes == 4    ? 0
                          : kBytes == 8  ? row & 2
                          : kBytes == 16 ? row % 4 * 2
                                         : row % 2 + row % 4 / 2 * 4;
    return (row * kPieces + (piece ^ flip)) * 16;
  }

  static __device__ uint32_t copied_row(int copy) { return (copy * 32 + threadIdx.x % 32) / kPieces; }
  static __device__ uint32_t copied_piece() { return threadIdx.x % kPieces; }
  __device__ void copy(int stage, int copy, const uint8_t* source, bool inside) const {
    if (kRows * kPieces % 32 != 0 && copied_row(copy) >= kRows) return;
    copy_async(shared_address(base + stage * kStageBytes + offset(copied_row(copy), copied_piece())), source, inside);
  }

  __device__ void load(int stage, uint32_t row, uint32_t (&words)[kBytes / 4]) const {
    const uint32_t g = threadIdx.x % 32 / 4;
    const uint8_t* const from = base + stage * kStageBytes;
    if constexpr (kBytes == 4) {
      words[0] = *reinterpret_cast<const uint32_t*>(from + offset(row, g / 4) + g % 4 * 4);
    } else if constexpr (kBytes == 8) {
      const uint2 two = *reinterpret_cast<const uint2*>(from + offset(row, g / 2) + g % 2 * 8);
      words[0] = two.x, words[1] = two.y;
    } else {
#pragma unroll
      for (int i = 0; i < kBytes / 16; ++i) {
        const uint4 four = *reinterpret_cast<const uint4*>(from + offset(row, g * (kBytes / 16) + i));
        words[4 * i] = four.x, words[4 * i + 1] = four.y, words[4 * i + 2] = four.z, words[4 * i + 3] = four.w;
      }
    }
  }
};

// The same for the mask's bits. A stage has the bits of the warp's 64 columns for each row.
template <int kStages, int kRows>
struct RingBits {
  static constexpr int kBytesOfBlock = kStages * kRows * 8 * (kThreads / 32);
  uint32_t* base;

  __device__ explicit RingBits(void* shared)
      : base(static_cast<uint32_t*>(shared) + threadIdx.x / 32 * (kStages * kRows * 2)) {}

  static __device__ uint32_t copied_row() { return threadIdx.x % 32; }
  __device__ void copy(int stage, const uint32_t* source, bool inside) const {
    if (copied_row() >= kRows) return;
    copy_async<8>(shared_address(base + (stage * kRows + copied_row()) * 2), source, inside);
  }

  __device__ uint32_t word(int stage, uint32_t row) const {
    return base[(stage * kRows + row) * 2 + threadIdx.x % 32 / 16];
  }
};

// The same for the rows' scales.
template <int kStages, int kRows>
struct RingScales {
  static constexpr int kBytesOfBlock = kStages * kRows * 4 * (kThreads / 32);
  float* base;

  __device__ explicit RingScales(void* shared)
      : base(static_cast<float*>(shared) + threadIdx.x / 32 * (kStages * kRows)) {}

  static __device__ uint32_t copied_row() { return threadIdx.x % 32; }
  __device__ void copy(int stage, const float* source, bool inside) const {
    if (copied_row() >= kRows) return;
    copy_async<4>(shared_address(base + stage * kRows + copied_row()), source, inside);
  }

  __device__ float scale(int stage, uint32_t row) const { return base[stage * kRows + row]; }
};

// A warp's memory for what draws take from rows alone (device/draws.h). A lane makes it for one of kSteps steps' rows.
template <int kRows, int kSteps>
struct RowsDraws {
  static constexpr int kOfWarp = kRows * kSteps, kBytesOfBlock = kOfWarp * 16 * (kThreads / 32);
  static_assert(kOfWarp <= 32);
  uint4* base;

  __device__ explicit RowsDraws(void* shared) : base(static_cast<uint4*>(shared) + threadIdx.x / 32 * kOfWarp) {}

  // first: the first row of the first of these steps, which are row_step rows apart.
  __device__ void make(const RowsOfTensor& rows, uint32_t first, uint32_t row_step, uint32_t site, uint32_t offset,
                       uint64_t seed) const {
    const uint32_t lane = threadIdx.x % 32;
    const DrawsOfRow draws(rows(first + lane / kRows * row_step + lane % kRows), offset, site, seed);
    if (lane < kOfWarp) base[lane] = {draws.word[0], draws.word[1], draws.word[2], draws.word[3]};
    __syncwarp();
  }

  __device__ const uint4& of(uint32_t step, uint32_t row) const { return base[step % kSteps * kRows + row]; }
};

}  // namespace
}  // namespace lorakernels
