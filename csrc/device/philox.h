// SPDX-License-Identifier: Apache-2.0
// Philox4x32-10 (Salmon et al., SC'11), and the rule by which dropout uses it.
//
// Element (row, col) of a logical tensor reads the draw with
//   counter = (row, col / 8, low 32 bits of the slot's offset, site)      key = the slot's 64-bit seed
// One 128-bit draw holds eight 16-bit lanes: col uses word (col % 8) / 2, its low half for an even col, its high half
// for an odd one. The element is dropped iff lane < threshold, threshold = floor(65536 p + 0.5) <= 65535, and survivors
// are scaled by 65536 / (65536 - threshold), the inverse of their exact probability. The mask does not depend on how a
// kernel cuts the tensor into tiles.
#pragma once

#include <cstdint>

#include "device/platform.h"

namespace lorakernels {

constexpr uint32_t kDropoutLaneRange = 65536;
constexpr uint32_t kDropoutLanesPerDraw = 8;

struct PhiloxDraw {
  uint32_t word[4];
};

LORAKERNELS_HD void philox_mul_hi_lo(uint32_t a, uint32_t b, uint32_t& hi, uint32_t& lo) {
#ifdef __CUDA_ARCH__  // nvcc 13.0 adds an addition of 0 to the form below
  uint64_t product;
  asm("mul.wide.u32 %0, %1, %2;" : "=l"(product) : "r"(a), "r"(b));
#else
  const uint64_t product = static_cast<uint64_t>(a) * b;
#endif
  hi = static_cast<uint32_t>(product >> 32);
  lo = static_cast<uint32_t>(product);
}

LORAKERNELS_HD uint32_t philox_xor(uint32_t a, uint32_t b, uint32_t c) {
#ifdef __CUDA_ARCH__  // nvcc 13.0 splits a ^ b ^ c of several rounds into more instructions of two operands
  uint32_t result;
  asm("lop3.b32 %0, %1, %2, %3, 0x96;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
  return result;
#else
  return a ^ b ^ c;
#endif
}

LORAKERNELS_HD PhiloxDraw philox_round(const PhiloxDraw& counter, uint32_t key0, uint32_t key1) {
  uint32_t hi0, lo0, hi1, lo1;
  philox_mul_hi_lo(0xD2511F53u, counter.word[0], hi0, lo0);
  philox_mul_hi_lo(0xCD9E8D57u, counter.word[2], hi1, lo1);
  return {{philox_xor(hi1, counter.word[1], key0), lo1, philox_xor(hi0, counter.word[3], key1), lo0}};
}

// Ten rounds over several counters at once, which share the round keys.
template <int kCount>
LORAKERNELS_HD void philox4x32_10(PhiloxDraw (&counter)[kCount], uint32_t key0, uint32_t key1) {
  for (int round = 0; round < 10; ++round) {
    for (int i = 0; i < kCount; ++i) counter[i] = philox_round(counter[i], key0, key1);
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
}

// The draw of elements (row, 8 * group) to (row, 8 * group + 7).
LORAKERNELS_HD PhiloxDraw dropout_draw(uint32_t row, uint32_t group, uint64_t seed, uint64_t offset, uint32_t site) {
  PhiloxDraw draw[1] = {{{row, group, static_cast<uint32_t>(offset), site}}};
  philox4x32_10(draw, static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32));
  return draw[0];
}

// How many draws a row of `cols` elements needs that begins at the logical column `first_col`.
LORAKERNELS_HD int64_t dropout_groups(uint32_t first_col, int64_t cols) {
  return (first_col % kDropoutLanesPerDraw + cols + kDropoutLanesPerDraw - 1) / kDropoutLanesPerDraw;
}

LORAKERNELS_HD bool dropout_keeps(const PhiloxDraw& draw, uint32_t col, uint32_t threshold) {
  const uint32_t word = draw.word[(col % kDropoutLanesPerDraw) / 2];
  const uint32_t lane_on_top = (col % 2 == 0) ? (word << 16) : word;
  return lane_on_top >= threshold << 16;  // the bits below the lane do not change the comparison
}

LORAKERNELS_HD float dropout_survivor_scale(uint32_t threshold) {
  return static_cast<float>(kDropoutLaneRange) / static_cast<float>(kDropoutLaneRange - threshold);
}

}  // namespace lorakernels
