// SPDX-License-Identifier: Apache-2.0
// For .cu files only: what the tensor copy engine is told of a matrix.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "host/cuda_check.h"
#include "host/driver.h"

namespace lorakernels {

using EncodeTiled = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                                 const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                                 CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

struct Matrix {
  const void* data;
  int64_t rows, cols;
  int box_rows;

  bool operator==(const Matrix& other) const {
    return data == other.data && rows == other.rows && cols == other.cols && box_rows == other.box_rows;
  }
  size_t hash() const {
    const uint64_t mixed = reinterpret_cast<uint64_t>(data) + static_cast<uint64_t>(rows) * 0x9E3779B97F4A7C15 +
                           static_cast<uint64_t>(cols) * 0xC2B2AE3D27D4EB4F + static_cast<uint64_t>(box_rows);
    return mixed * 0xD6E8FEB86659FD93 >> 32;
  }
};

template <typename T>
CUtensorMap encode_tensor_map(const Matrix& matrix) {
  static const auto encode = driver_function<EncodeTiled>("cuTensorMapEncodeTiled");
  bind_context();
  constexpr auto kType = std::is_same_v<T, uint8_t>         ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                         : std::is_same_v<T, __nv_bfloat16> ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                            : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  CUtensorMap map{};
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(matrix.cols), static_cast<cuuint64_t>(matrix.rows)};
  const cuuint64_t pitch[1] = {sizeof(T) * sizes[0]};
  const cuuint32_t box[2] = {static_cast<cuuint32_t>(128 / sizeof(T)), static_cast<cuuint32_t>(matrix.box_rows)},
                   steps[2] = {1, 1};
  const CUresult code =
      encode(&map, kType, 2, const_cast<void*>(matrix.data), sizes, pitch, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (code != CUDA_SUCCESS) throw std::runtime_error("cuTensorMapEncodeTiled failed: " + std::to_string(code));
  return map;
}

// A row-major matrix without gaps, copied in boxes whose rows are 128 bytes, swizzled as SwizzledRows<128>
// (device/ptx/wgmma.h). T is uint8_t, __nv_bfloat16 or __half; a row has a multiple of 16 bytes. A matrix without
// elements has an empty map.
//
// Each thread remembers the last map in each of its places. A map is of an address and sizes, whatever memory is there,
// so that it is never out of date.
template <typename T>
CUtensorMap tensor_map(const void* data, int64_t rows, int64_t cols, int box_rows) {
  struct Known {
    Matrix matrix{};
    CUtensorMap map{};
  };
  constexpr size_t kPlaces = 1024;  // a model of 112 layers has some 1,000 maps, of two types, in two threads
  if (rows == 0 || cols == 0) return CUtensorMap{};
  thread_local std::vector<Known> places(kPlaces);
  const Matrix matrix{data, rows, cols, box_rows};
  Known& known = places[matrix.hash() % kPlaces];
  if (!(known.matrix == matrix)) known = {matrix, encode_tensor_map<T>(matrix)};
  return known.map;
}

}  // namespace lorakernels
