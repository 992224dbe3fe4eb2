// SPDX-License-Identifier: Apache-2.0
// For .cu files only: philox.h's draws for a thread that walks down the rows of the same columns, and the masks they
// make.
#pragma once

#include "dropout.h"

namespace lorakernels {

// Philox's keys, in uniform registers: there a reduction over the warp leaves its result.
struct RoundKeys {
  uint32_t key[10][2];

  __device__ RoundKeys() {}
  __device__ explicit RoundKeys(uint64_t seed) {
    uint32_t low = static_cast<uint32_t>(seed), high = static_cast<uint32_t>(seed >> 32);
#pragma unroll
    for (uint32_t (&of_round)[2] : key) {
      of_round[0] = __reduce_or_sync(0xFFFFFFFFu, low), of_round[1] = __reduce_or_sync(0xFFFFFFFFu, high);
      low += 0x9E3779B9u, high += 0xBB67AE85u;
    }
  }

  template <int kFirstRound = 0, int kCount>
  __device__ void draw(PhiloxDraw (&draws)[kCount]) const {
#pragma unroll
    for (int round = kFirstRound; round < 10; ++round) {
#pragma unroll
      for (PhiloxDraw& draw : draws) draw = philox_round(draw, key[round][0], key[round][1]);
    }
  }
};

// In the first three rounds row and column meet in one product only; what comes before depends on one of them.
struct DrawsOfRow {
  uint32_t word[4];

  __device__ DrawsOfRow(uint32_t row, uint32_t offset, uint32_t site, uint64_t seed) {
    const uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
    uint32_t low, high, unused, of_offset;
    philox_mul_hi_lo(0xCD9E8D57u, offset, unused, of_offset);
    philox_mul_hi_lo(0xD2511F53u, row, high, low);
    word[0] = low ^ (key1 + 0xBB67AE85u);
    philox_mul_hi_lo(0xCD9E8D57u, philox_xor(high, site, key1), high, low);
    word[1] = low ^ (key0 + 2 * 0x9E3779B9u);
    philox_mul_hi_lo(0xD2511F53u, philox_xor(high, of_offset, key0 + 0x9E3779B9u), high, low);
    word[2] = high ^ (key1 + 2 * 0xBB67AE85u), word[3] = low;
  }
};

struct DrawsOfColumn {
  uint32_t high = 0, low = 0;

  __device__ DrawsOfColumn() {}
  __device__ DrawsOfColumn(uint32_t group, uint32_t offset, uint64_t seed) {
    uint32_t of_offset, unused;
    philox_mul_hi_lo(0xCD9E8D57u, offset, of_offset, unused);
    philox_mul_hi_lo(0xD2511F53u, philox_xor(of_offset, group, static_cast<uint32_t>(seed)), high, low);
  }

  // After three rounds, with the words of a DrawsOfRow.
  __device__ PhiloxDraw after_three(const uint4& row) const {
    uint32_t hi, lo;
    philox_mul_hi_lo(0xCD9E8D57u, high ^ row.x, hi, lo);
    return {{hi ^ row.y, lo, low ^ row.z, row.w}};
  }
};

__device__ __forceinline__ uint32_t permuted(uint32_t a, uint32_t b, uint32_t selector) {
  uint32_t result;  // __byte_perm cannot replicate sign bits
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(selector));
  return result;
}

// Whether a 16-bit lane is dropped, told by the sign bit of its half of a word.
struct Threshold {
  uint32_t two, least, most;
  bool is_fp16;

  // Lanes brought to the threshold's side of 0x8000 stay in their halves when the difference to 0x8000 is added.
  __device__ explicit Threshold(uint32_t threshold)
      : two((threshold < 0x7C00u ? threshold : 0x8000u - threshold) * 0x00010001u),
        least(threshold > 0x8000u ? 0x80008000u : 0),
        most(threshold > 0x8000u ? 0xFFFFFFFFu : 0x80008000u),
        is_fp16(threshold < 0x7C00u) {}

  template <int kCount>
  __device__ void apply(PhiloxDraw (&draws)[kCount]) const {
    if (is_fp16) {
#pragma unroll
      for (PhiloxDraw& draw : draws) {
#pragma unroll
        for (uint32_t& word : draw.word) word = product_with_difference(word);
      }
    } else {
#pragma unroll
      for (PhiloxDraw& draw : draws) {
#pragma unroll
        for (uint32_t& word : draw.word) word = ~(__vmaxu2(__vminu2(word, most), least) + two);
      }
    }
  }

  // As fp16, v (v - threshold) is negative from 0 up to a finite threshold: below 0 both factors are negative, at it
  // the difference is 0, and where v is NaN so is the product, with a sign of 0. Packed fp16 costs the schedulers half
  // of what integers do.
  __device__ uint32_t product_with_difference(uint32_t word) const {
    uint32_t difference, product;
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(difference) : "r"(word), "r"(two));
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(word), "r"(difference));
    return product;
  }
};

// The signs of a draw's lanes, a byte each.
__device__ __forceinline__ uint2 signs_of_lanes(const PhiloxDraw& draw) {
  constexpr uint32_t kOfHalves = 0xFDB9;
  return make_uint2(permuted(draw.word[0], draw.word[1], kOfHalves), permuted(draw.word[2], draw.word[3], kOfHalves));
}

// Hands dropout.h's bits over. Lanes 4 g + t of a warp have 8 columns of some rows, g those of a draw of which a word
// has four; these lanes exchange until each, or every other one, has the word of one row.
struct MaskWriter {
  uint32_t draw = threadIdx.x % 16 / 4;
  uint32_t first = 0x04040101u << draw / 2, second = 0x40401010u << draw / 2;  // bits of the bytes

  // Of 4 or 2 rows, from signs_of_lanes that tell what is dropped. Which one is left to this lane, if any, `row` says.
  template <int kRows>
  __device__ uint32_t word(const uint2 (&signs)[kRows]) const {
    static_assert(kRows == 2 || kRows == 4);
    uint32_t mine[kRows / 2];  // of byte h, or 2 + h: columns h and 4 + h, or 2 + h and 6 + h
#pragma unroll
    for (int i = 0; i < kRows / 2; ++i) {
      const uint2 &a = signs[i], &b = signs[kRows / 2 + i];
      mine[i] = exchanged((a.x & first) | (a.y & second), (b.x & first) | (b.y & second), draw / 2 == 1, 8);
      mine[i] = (permuted(mine[i], 0, 0x4140) | permuted(mine[i], 0, 0x4342)) << draw % 2 * 8;
    }
    if constexpr (kRows == 4) return exchanged(mine[0], mine[1], draw % 2 == 1, 4);
    return mine[0] | __shfl_xor_sync(0xFFFFFFFFu, mine[0], 4);
  }

  template <int kRows>
  __device__ int row() const {
    return kRows == 4 ? draw / 2 * 2 + draw % 2 : draw % 2 == 0 ? draw / 2 : -1;
  }

  // What both lanes have of the first, or in the lane that is second of the second one.
  static __device__ uint32_t exchanged(uint32_t first, uint32_t second, bool is_second, int lanes) {
    return (is_second ? second : first) | __shfl_xor_sync(0xFFFFFFFFu, is_second ? first : second, lanes);
  }
};

}  // namespace lorakernels
