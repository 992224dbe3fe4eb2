// SPDX-License-Identifier: Apache-2.0
// For quantize_lora_down's .cu files only: what a thread does with its elements, 8 neighbours of a row in four words. T
// is __nv_bfloat16 or __half.
#pragma once

#include <cuda_fp8.h>

#include "device/draws.h"
#include "device/pairs.h"
#include "ops/amax/device.h"
#include "ops/quantize_lora_down/params.h"

namespace lorakernels {
namespace {

constexpr float kE4M3Max = 448.0f;

__device__ __forceinline__ uint32_t fp8_pair(float low, float high) {
  return __nv_cvt_float2_to_fp8x2(float2{low, high}, __NV_SATFINITE, __NV_E4M3);
}

// A predicated store and no branch, which the compiler could not move other instructions across.
__device__ __forceinline__ void store_if(bool condition, void* to, const uint4& words) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %0, 0;\n@p st.global.v4.b32 [%1], {%2, %3, %4, %5};\n}" ::"r"(
                   static_cast<int>(condition)),
               "l"(to), "r"(words.x), "r"(words.y), "r"(words.z), "r"(words.w)
               : "memory");
}
__device__ __forceinline__ void store_if(bool condition, void* to, const uint2& words) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %0, 0;\n@p st.global.v2.b32 [%1], {%2, %3};\n}" ::"r"(
                   static_cast<int>(condition)),
               "l"(to), "r"(words.x), "r"(words.y)
               : "memory");
}

template <typename T>
__device__ __forceinline__ uint2 quantized(const uint4& words, float scale) {
  const float2 a = unpacked<T>(words.x), b = unpacked<T>(words.y), c = unpacked<T>(words.z), d = unpacked<T>(words.w);
  return {fp8_pair(a.x * scale, a.y * scale) | fp8_pair(b.x * scale, b.y * scale) << 16,
          fp8_pair(c.x * scale, c.y * scale) | fp8_pair(d.x * scale, d.y * scale) << 16};
}

// The larger magnitudes of `most` and `word`, half by half. The result's signs mean nothing.
template <typename T>
__device__ __forceinline__ uint32_t larger_magnitudes(uint32_t most, uint32_t word) {
#if __CUDA_ARCH__ >= 860
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    asm("max.NaN.xorsign.abs.bf16x2 %0, %0, %1;" : "+r"(most) : "r"(word));
  } else {
    asm("max.NaN.xorsign.abs.f16x2 %0, %0, %1;" : "+r"(most) : "r"(word));
  }
  return most;
#else
  return max_magnitude(most, word);
#endif
}

// 8 columns of A in their own dtype, or zeros outside of A. Loading and rounding are apart, so that many loads can be
// in flight at once.
struct WordsOfA {
  uint4 low{0, 0, 0, 0}, high{0, 0, 0, 0};  // high: fp32 only

  __device__ WordsOfA() {}
  __device__ WordsOfA(const QuantizeLoraDownParams& params, uint32_t r, uint32_t col) {
    if (r >= params.rank || col >= params.cols) return;
    const bool wide = params.a_dtype == FloatType::kFloat32;
    const int64_t at = (r * params.cols + col) * (wide ? 2 : 1);
    const uint4* const from = reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(params.lora_A) + at);
    low = from[0];
    if (wide) high = from[1];
  }

  template <typename T>
  __device__ uint4 rounded(const QuantizeLoraDownParams& params) const {
    if (params.a_dtype != FloatType::kFloat32) return low;
    const auto two = [](uint32_t a, uint32_t b) { return packed<T>(__uint_as_float(a), __uint_as_float(b)); };
    return {two(low.x, low.y), two(low.z, low.w), two(high.x, high.y), two(high.z, high.w)};
  }
};

// The scales of the blocks of 128 columns to which a thread's 32 elements of two rows belong. Four neighbouring threads
// have a block.
template <typename T>
struct ScalesOfRows {
  float scale[2];

  __device__ explicit ScalesOfRows(float of_both) : scale{of_both, of_both} {}

  // chunks(row, i): the i-th of four times 8 elements. inverse: where that of the first row goes; the second is 8
  // further. All threads of the warp call it.
  template <typename Chunks>
  __device__ void find(const QuantizeLoraDownParams& params, const bool (&exist)[2], float* inverse,
                       const Chunks& chunks) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      uint32_t most = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint4 words = chunks(row, i);
        for (const uint32_t word : {words.x, words.y, words.z, words.w}) most = max_magnitude(most, word);
      }
      for (const int bit : {1, 2}) most = __vmaxu2(most, __shfl_xor_sync(0xFFFFFFFFu, most, bit));
      const float amax = unpacked<T>(max(most & 0xFFFFu, most >> 16)).x;
      const BlockScale found = scale_of_block(amax, kE4M3Max, params.power_of_two);
      scale[row] = found.scale;
      if (threadIdx.x % 4 == 0 && exist[row]) inverse[8 * row] = found.inverse;
    }
  }
};

// Writes x8 and takes the amax. If there is no scale yet, each block leaves its amax in the workspace for
// finish_kernel.
template <typename T>
struct Quantizer {
  bool wanted;  // x8 is to be written
  bool known;   // and there is a scale
  float scale = 0.0f;
  uint32_t most = 0;

  __device__ explicit Quantizer(const QuantizeLoraDownParams& params) : wanted(params.x8 != nullptr) {
    if (wanted && params.kept != nullptr) scale = *params.kept;
    known = scale > 0.0f || (wanted && params.in_blocks);
  }

  __device__ void see(const uint4& words) {
    for (const uint32_t word : {words.x, words.y, words.z, words.w}) most = larger_magnitudes<T>(most, word);
  }

  // Stores 16 neighbours. `exist`: they do, and the scale is known.
  static __device__ void store(bool exist, uint8_t* to, const uint4& first, const uint4& second, float scale) {
    const uint2 low = quantized<T>(first, scale), high = quantized<T>(second, scale);
    store_if(exist, to, make_uint4(low.x, low.y, high.x, high.y));
  }

  // Writes amax and 1 / scale. All threads of a block call it at the end. of_warp: shared memory, a word for each warp.
  __device__ void leave(const QuantizeLoraDownParams& params, uint32_t* of_warp) const {
    if (!wanted || params.in_blocks) return;
    uint32_t largest = warp_max_magnitude(most & 0x7FFF7FFFu);
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = largest;
    __syncthreads();
    if (threadIdx.x != 0) return;
    for (uint32_t warp = 1; warp < blockDim.x / 32; ++warp) largest = max(largest, of_warp[warp]);
    if (known && blockIdx.x == 0 && blockIdx.y == 0) *params.scale_inv = 1.0f / scale;
    const float amax = unpacked<T>(largest).x;
    if (params.amax != nullptr) atomicMax(reinterpret_cast<int*>(params.amax), __float_as_int(amax));
    if (!known) params.workspace[blockIdx.y * gridDim.x + blockIdx.x] = amax;
  }
};

// A thread's dropout mask. Element (row, col) of x is element (rows(row), first_col + col) of the logical tensor.
struct Dropper {
  RoundKeys keys;
  uint64_t seed;
  RowsOfTensor rows;
  uint32_t offset, site, first_col;
  uint32_t last, minus_last;  // the highest lane that is dropped, and its negative, in both halves of a word

  __device__ Dropper() {}  // without dropout
  __device__ explicit Dropper(const DropoutParams& dropout)
      : seed(static_cast<uint64_t>(dropout.slot[0])),
        rows(dropout.rows),
        offset(static_cast<uint32_t>(dropout.slot[1])),
        site(dropout.site),
        first_col(dropout.first_col),
        last((dropout.threshold - 1) * 0x00010001u),
        minus_last((kDropoutLaneRange + 1 - dropout.threshold) % kDropoutLaneRange * 0x00010001u) {
    keys = RoundKeys(seed);
  }

  __device__ uint4 of_row(uint32_t row) const {
    const DrawsOfRow draws(rows(row), offset, site, seed);
    return {draws.word[0], draws.word[1], draws.word[2], draws.word[3]};
  }
  __device__ DrawsOfColumn of_column(uint32_t col) const {
    return DrawsOfColumn((first_col + col) / kDropoutLanesPerDraw, offset, seed);
  }

  // The draws of two rows and two groups of 8 columns, after their first three rounds.
  static __device__ void begin(PhiloxDraw (&draws)[4], const uint4 (&rows)[2], const DrawsOfColumn (&columns)[2]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) draws[i] = columns[i % 2].after_three(rows[i / 2]);
  }
  template <int kRound>
  __device__ void round(PhiloxDraw (&draws)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) draws[i] = philox_round(draws[i], keys.key[kRound][0], keys.key[kRound][1]);
  }

  __device__ uint4 survivors(const uint4& words, const PhiloxDraw& draw) const {
    return {survivors(words.x, draw.word[0]), survivors(words.y, draw.word[1]), survivors(words.z, draw.word[2]),
            survivors(words.w, draw.word[3])};
  }

 private:
  // Clears the elements that are dropped: max(lane, last) − last is 0 for their lanes, in each half of a word.
  __device__ uint32_t survivors(uint32_t pair, uint32_t lanes) const {
    return pair & __viaddmin_u16x2(__vmaxu2(lanes, last), minus_last, 0x00010001u) * 0xFFFFu;
  }
};

// Makes x8 and amax of two rows of 16 neighbours, and finishes their draws. The two use different units of the
// multiprocessor, so their instructions are interleaved.
template <typename T, bool kDropout>
__device__ __forceinline__ void take(Quantizer<T>& quantizer, [[maybe_unused]] const Dropper& dropper,
                                     const uint4 (&words)[2][2], [[maybe_unused]] PhiloxDraw (&draws)[4],
                                     const bool (&exist)[2], uint8_t* to, uint32_t to_second, const float (&scale)[2]) {
  if constexpr (kDropout) dropper.round<3>(draws);
  quantizer.see(words[0][0]), quantizer.see(words[0][1]);
  if constexpr (kDropout) dropper.round<4>(draws), dropper.round<5>(draws);
  quantizer.store(exist[0], to, words[0][0], words[0][1], scale[0]);
  if constexpr (kDropout) dropper.round<6>(draws), dropper.round<7>(draws);
  quantizer.see(words[1][0]), quantizer.see(words[1][1]);
  if constexpr (kDropout) dropper.round<8>(draws);
  quantizer.store(exist[1], to + to_second, words[1][0], words[1][1], scale[1]);
  if constexpr (kDropout) dropper.round<9>(draws);
}

}  // namespace
}  // namespace lorakernels
