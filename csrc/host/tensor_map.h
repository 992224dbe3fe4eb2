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

#include "host/driver.h"

namespace lorakernels {

using EncodeTiled = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                                 const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                                 CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// A row-major matrix without gaps, copied in boxes whose rows are 128 bytes, swizzled as SwizzledRows<128>
// (device/ptx/wgmma.h). T is uint8_t, __nv_bfloat16 or __half; a row has a multiple of 16 bytes. A matrix without
// elements has an empty map.
template <typename T>
CUtensorMap tensor_map(const void* data, int64_t rows, int64_t cols, int box_rows) {
  static const auto encode = driver_function<EncodeTiled>("cuTensorMapEncodeTiled");
  constexpr auto kType = std::is_same_v<T, uint8_t>         ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                         : std::is_same_v<T, __nv_bfloat16> ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                            : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  CUtensorMap map{};
  if (rows == 0 || cols == 0) return map;
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(cols), static_cast<cuuint64_t>(rows)};
  const cuuint64_t pitch[1] = {sizeof(T) * sizes[0]};
  const cuuint32_t box[2] = {static_cast<cuuint32_t>(128 / sizeof(T)), static_cast<cuuint32_t>(box_rows)},
                   steps[2] = {1, 1};
  const CUresult code =
      encode(&map, kType, 2, const_cast<void*>(data), sizes, pitch, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (code != CUDA_SUCCESS) throw std::runtime_error("cuTensorMapEncodeTiled failed: " + std::to_string(code));
  return map;
}

}  // namespace lorakernels
