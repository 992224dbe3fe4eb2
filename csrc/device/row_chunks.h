// SPDX-License-Identifier: Apache-2.0
// Which row of the logical tensor a row of an operand is, where ranks share rows of tokens.
//
// The logical tensor has rows of S = 2 n C tokens, one after the other. Of each, rank r of n has chunks r and 2 n - 1 -
// r of C tokens, in this order. So row j of a rank's lies in its chunk q = j / C, and is the logical tensor's row
//   j + r C + q (n - 1) C + (q odd) (n - 1 - 2 r) C      modulo 2^32
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include "device/philox.h"

namespace lorakernels {

// Rank `rank` of `ranks`, with two chunks of `size` tokens of each row; all 0 where rows are not shared.
struct RowChunks {
  uint32_t rank = 0, ranks = 0, size = 0;
};

// Of an operand whose row 0 is row `first` of its rank's. Without chunks, row i is first + i modulo 2^32. With chunks,
// first + i is below 2^31. There a multiplier of 32 bits divides exactly (Granlund and Montgomery, PLDI 1994,
// doi:10.1145/178243.178249).
struct RowsOfTensor {
  uint32_t first = 0;
  uint32_t multiplier = 0, shift = 0;  // 2 j multiplier / 2^(32 + shift) is j / C
  uint32_t added = 0, of_chunk = 0, of_odd = 0;
  uint32_t size = 0;  // C; 0 without chunks

  RowsOfTensor() = default;
  RowsOfTensor(uint32_t first, const RowChunks& chunks) : first(first) {
    const uint32_t rank = chunks.rank, ranks = chunks.ranks;
    size = chunks.size;
    if (rank == 0 && ranks == 0 && size == 0) return;
    constexpr uint32_t kMost = uint32_t{1} << 31;
    if (rank >= ranks || size == 0 || size >= kMost || first >= kMost) {
      throw std::invalid_argument(
          "chunks must be (rank below ranks, ranks, rows from 1 to 2^31 - 1) behind a row0 below 2^31, got (" +
          std::to_string(rank) + ", " + std::to_string(ranks) + ", " + std::to_string(size) + ") and " +
          std::to_string(first));
    }
    while ((uint64_t{1} << shift) < size) ++shift;
    multiplier = static_cast<uint32_t>((uint64_t{1} << (31 + shift)) / size + 1);
    added = rank * size, of_chunk = (ranks - 1) * size, of_odd = (ranks - 1 - 2 * rank) * size;
  }

  LORAKERNELS_HD uint32_t operator()(uint32_t i) const {
    const uint32_t chunk = chunk_of(i);
    return first + i + added + chunk * of_chunk + chunk % 2 * of_odd;
  }

  // Above i: the end of the rows from i on that follow each other in the logical tensor.
  LORAKERNELS_HD uint32_t until(uint32_t i) const { return size == 0 ? 0xFFFFFFFFu : (chunk_of(i) + 1) * size - first; }

 private:
  LORAKERNELS_HD uint32_t chunk_of(uint32_t i) const {
    uint32_t high, low;
    philox_mul_hi_lo(2 * (first + i), multiplier, high, low);
    return high >> shift;
  }
};

}  // namespace lorakernels
