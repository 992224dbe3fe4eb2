// SPDX-License-Identifier: Apache-2.0
// For .cu files only: how quantize_grad_kernel's warps make dy8 and amax from tiles in shared memory.
#pragma once

#include <cuda_fp8.h>

#include <type_traits>

#include "device/pairs.h"
#include "device/ptx/global_memory.h"
#include "device/ptx/tma.h"
#include "ops/amax/device.h"
#include "ops/quantize_grad/sm90_tiles.h"

namespace lorakernels {
namespace {

template <__nv_fp8_interpretation_t kFormat>
__device__ uint32_t fp8_of_two(float2 value, float scale) {
  return __nv_cvt_float2_to_fp8x2({value.x * scale, value.y * scale}, __NV_SATFINITE, kFormat);
}

template <typename T, __nv_fp8_interpretation_t kFormat>
__device__ uint2 fp8_of_eight(const uint4& words, float scale) {
  const auto four = [&](uint32_t low, uint32_t high) {
    return fp8_of_two<kFormat>(unpacked<T>(low), scale) | fp8_of_two<kFormat>(unpacked<T>(high), scale) << 16;
  };
  return {four(words.x, words.y), four(words.z, words.w)};
}

// Raises *amax to the warp's largest magnitude. Non-negative floats compare like their bits as integers, and NaN is
// then above inf.
template <typename T>
__device__ void raise_amax(float* amax, uint32_t most) {
  if (threadIdx.x % 32 != 0 || most == 0) return;
  atomicMax(reinterpret_cast<int*>(amax), __float_as_int(unpacked<T>(most).x));
}

// Makes dy8 of this warp's rows of a tile, 16 neighbouring elements of a thread at a time, and raises `most`. A warp
// stores whole rows of the tile, two or four at once. Eight of its threads have a block of 128 columns.
template <typename T, typename Tile, int kWarps, int kMostAtOnce>
struct Quantizer {
  static constexpr int kRowsAtOnce = 8 / Tile::kAcross, kTimes = Tile::kRows / kRowsAtOnce / kWarps;
  static constexpr int kBatch = kTimes < kMostAtOnce ? kTimes : kMostAtOnce;
  static constexpr int kLoops = kMostAtOnce < 4 ? 1 : kTimes / kBatch;  // unrolled; few registers allow only one
  static_assert(kBatch % 2 == 0);
  float scale;
  uint32_t most = 0;
  int row, col;     // of the tile
  uint32_t source;  // of the tile's bytes
  uint64_t policy;

  // thread: of those that quantize
  __device__ Quantizer(float scale, int thread)
      : scale(scale),
        row(thread / 32 * (kTimes * kRowsAtOnce) + thread % 32 / 8 / Tile::kAcross * 2 + thread / 4 % 2),
        col(thread % 32 / 8 % Tile::kAcross * kAtom + thread % 4 * 16),
        source(col / kAtom * Tile::kColBytes + DyRows::offset(row, thread % 4 * 2)),
        policy(evict_first_policy()) {}

  // Those of the block to which these 16 elements belong. All threads of the warp call it.
  __device__ BlockScale of_block(const QuantizeGradParams& params, const uint4& low, const uint4& high) const {
    static_assert(Tile::kAcross % 2 == 0, "bits 0, 1 and 3 of a lane choose 16 columns of a block");
    uint32_t largest = 0;
    for (const uint32_t word : {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w}) {
      largest = max_magnitude(largest, word);
    }
    for (const int bit : {1, 2, 8}) largest = __vmaxu2(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, bit));
    const float amax = unpacked<T>(max(largest & 0xFFFFu, largest >> 16)).x;
    return scale_of_block(amax, params.scale.fp8_max, params.power_of_two);
  }

  // kWide: rows of dy8 begin at multiples of 16 bytes. kBlocks: each 128 columns of a row have a scale. Without a scale
  // nothing is stored.
  template <__nv_fp8_interpretation_t kFormat, bool kWide, bool kBlocks>
  __device__ void tile(const QuantizeGradParams& params, const uint8_t* tile, int first_row, int first_col) {
    const int rows = static_cast<int>(params.rows) - first_row - row;
    const int cols = kBlocks || scale > 0.0f ? static_cast<int>(params.cols) - first_col - col : 0;
    uint8_t* target = params.dy8 + static_cast<int64_t>(first_row + row) * params.cols + first_col + col;
    [[maybe_unused]] float* const inverses =
        params.scale_inv + (first_col + col) / kTileCols * params.rows + first_row + row;
    [[maybe_unused]] const bool leads = kBlocks && (threadIdx.x & 0b1011) == 0;  // of those of a block
    constexpr int kRows = kBlocks ? kBatch / 2 : kBatch;                         // a block's scale takes registers
#pragma unroll(kBlocks ? 1 : kLoops)
    for (int first = 0; first < kTimes; first += kRows) {
      uint4 low[kRows], high[kRows];
#pragma unroll
      for (int i = first; i < first + kRows; ++i) {
        const uint32_t chunk = source ^ i * kRowsAtOnce % 8 << 4, down = i * kRowsAtOnce * 128;
        low[i - first] = *reinterpret_cast<const uint4*>(tile + chunk + down);
        high[i - first] = *reinterpret_cast<const uint4*>(tile + (chunk ^ 16) + down);
      }
#pragma unroll
      for (int i = first; i < first + kRows; ++i) {
        const uint4 &l = low[i - first], &h = high[i - first];
        const bool inside = i * kRowsAtOnce < rows && cols > 0;
        float factor = scale;
        if constexpr (kBlocks) {
          const BlockScale found = of_block(params, l, h);
          factor = found.scale;
          if (leads && inside) inverses[i * kRowsAtOnce] = found.inverse;
        } else {
          for (const uint32_t word : {l.x, l.y, l.z, l.w, h.x, h.y, h.z, h.w}) most = max_magnitude(most, word);
        }
        const uint2 a = fp8_of_eight<T, kFormat>(l, factor), b = fp8_of_eight<T, kFormat>(h, factor);
        if constexpr (kWide) {
          store_if(inside, target, make_uint4(a.x, a.y, b.x, b.y), policy);
        } else {
          store_if(inside, target, a, policy);
          store_if(inside && cols > 8, target + 8, b, policy);
        }
        target += kRowsAtOnce * params.cols;
      }
    }
  }

  // Calls with_form(format, wide, blocks), all of them types, as dy8 is wanted.
  template <typename Call>
  static __device__ void in_form(const QuantizeGradParams& params, const Call& call) {
    using E5M2 = std::integral_constant<__nv_fp8_interpretation_t, __NV_E5M2>;
    using E4M3 = std::integral_constant<__nv_fp8_interpretation_t, __NV_E4M3>;
    constexpr std::true_type yes;
    constexpr std::false_type no;
    const bool wide = params.cols % 16 == 0;
    if (params.in_blocks) {
      params.is_e5m2 ? call(E5M2{}, yes, yes) : call(E4M3{}, yes, yes);
    } else if (params.is_e5m2) {
      wide ? call(E5M2{}, yes, no) : call(E5M2{}, no, no);
    } else {
      wide ? call(E4M3{}, yes, no) : call(E4M3{}, no, no);
    }
  }
};

}  // namespace
}  // namespace lorakernels
