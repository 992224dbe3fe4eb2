// SPDX-License-Identifier: Apache-2.0
// For .cu files only: reads an adapter's matrix, of any of the three types and any rank, in pieces of 8 columns.
#pragma once

#include <type_traits>

#include "device/pairs.h"

namespace lorakernels {

// A matrix in device memory: `rows` rows of `rank` numbers, `pitch` numbers apart. A null one reads as zeros.
struct FactorSource {
  const void* data;
  int64_t rows;
  int rank, pitch;
  FloatType dtype;
  bool in_chunks;  // all pieces of 8 numbers are whole and 16-byte aligned

  __device__ FactorSource(const void* data, int64_t rows, int64_t rank, int64_t pitch, FloatType dtype)
      : data(data),
        rows(data == nullptr ? 0 : rows),
        rank(static_cast<int>(rank)),
        pitch(static_cast<int>(pitch)),
        dtype(dtype),
        in_chunks((rank | pitch) % 8 == 0 && reinterpret_cast<uintptr_t>(data) % 16 == 0) {}

  __device__ bool has(int64_t row, int chunk) const { return row < rows && chunk * 8 < rank; }
  __device__ const void* chunk_at(int64_t row, int chunk) const {
    return static_cast<const uint16_t*>(data) + (row * pitch + chunk * 8) * (dtype == FloatType::kFloat32 ? 2 : 1);
  }

  // Columns 8 chunk to 8 chunk + 7, rounded to T, with zeros outside of the matrix.
  template <typename T>
  __device__ uint4 rounded(int64_t row, int chunk) const {
    constexpr FloatType kOwn = std::is_same_v<T, __half> ? FloatType::kFloat16 : FloatType::kBFloat16;
    float value[8] = {};
    if (has(row, chunk)) {
      if (in_chunks && dtype == kOwn) return *static_cast<const uint4*>(chunk_at(row, chunk));
      if (in_chunks && dtype == FloatType::kFloat32) {
        const auto from = static_cast<const float4*>(chunk_at(row, chunk));
        const float4 low = from[0], high = from[1];
        value[0] = low.x, value[1] = low.y, value[2] = low.z, value[3] = low.w;
        value[4] = high.x, value[5] = high.y, value[6] = high.z, value[7] = high.w;
      } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          if (chunk * 8 + i < rank) value[i] = as_float(data, row * pitch + chunk * 8 + i, dtype);
        }
      }
    }
    return make_uint4(packed<T>(value[0], value[1]), packed<T>(value[2], value[3]), packed<T>(value[4], value[5]),
                      packed<T>(value[6], value[7]));
  }
};

}  // namespace lorakernels
