// SPDX-License-Identifier: Apache-2.0
// For .cu files only: philox.h's draws for a thread that walks down the rows of the same columns, and their comparison
// with the threshold.
#pragma once

#include "device/dropout.h"

namespace lorakernels {

// Philox's keys of all rounds. A reduction over the warp leaves its result in a uniform register, so that they cost no
// ordinary ones.
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

// In the first three rounds row and column meet in one product only. The rest of these rounds depends on the row alone
// or on the column alone. The row's part is kept here, and the column's in DrawsOfColumn.
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

  // The draw after three rounds. row: the words of a DrawsOfRow.
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

// Compares lanes with the threshold: apply() leaves a sign bit in the half word of each lane that is dropped.
struct Threshold {
  uint32_t two, least, most;
  bool is_fp16;

  // In the integer form a lane is first clamped to the threshold's side of 0x8000. Then adding the threshold's distance
  // from 0x8000 cannot carry into the other half.
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

  // Taken as fp16, v (v - threshold) is negative for v from 0 up to a finite threshold. For v below 0 both factors are
  // negative, at the threshold the difference is 0, and a NaN's product is a NaN without a sign. Packed fp16 needs half
  // as many issue slots as integers.
  __device__ uint32_t product_with_difference(uint32_t word) const {
    uint32_t difference, product;
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(difference) : "r"(word), "r"(two));
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(word), "r"(difference));
    return product;
  }
};

}  // namespace lorakernels
