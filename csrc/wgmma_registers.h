// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_bf16.h>

#include <cstdint>
#include <type_traits>

namespace lorakernels {

#define LK_SUMS_8(i)                                                                                          \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
#define LK_SUMS_16(i) LK_SUMS_8(i), LK_SUMS_8(i + 8)
#define LK_SUMS_32(i) LK_SUMS_8(i), LK_SUMS_8(i + 8), LK_SUMS_8(i + 16), LK_SUMS_8(i + 24)
#define LK_NAMES_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define LK_NAMES_32                                                                                                \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, " \
  "%24, %25, %26, %27, %28, %29, %30, %31"
#define LK_NAMES_64                                                                                        \
  LK_NAMES_32                                                                                              \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, " \
  "%52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define LK_WGMMA_A(n, names, type, a0, a1, a2, a3, name_b, ...)                                                     \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" names "}, {" a0 ", " a1 ", " a2 \
               ", " a3 "}, " name_b ", 1, 1, 1, 0;"                                                                 \
               : __VA_ARGS__                                                                                        \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))

// d += A [64, 16] B [16, N], A in registers as mma.sync takes it, B in shared memory in rows along K.
template <typename T, int kSums>
__device__ __forceinline__ void wgmma_along_k(float (&d)[kSums], const uint32_t (&a)[4], uint64_t b) {
  static_assert(kSums == 16 || kSums == 32 || kSums == 64);
  constexpr bool kBf16 = std::is_same_v<T, __nv_bfloat16>;
  if constexpr (kSums == 16 && kBf16) {
    LK_WGMMA_A(32, LK_NAMES_16, "bf16", "%16", "%17", "%18", "%19", "%20", LK_SUMS_16(0));
  } else if constexpr (kSums == 16) {
    LK_WGMMA_A(32, LK_NAMES_16, "f16", "%16", "%17", "%18", "%19", "%20", LK_SUMS_16(0));
  } else if constexpr (kSums == 32 && kBf16) {
    LK_WGMMA_A(64, LK_NAMES_32, "bf16", "%32", "%33", "%34", "%35", "%36", LK_SUMS_32(0));
  } else if constexpr (kSums == 32) {
    LK_WGMMA_A(64, LK_NAMES_32, "f16", "%32", "%33", "%34", "%35", "%36", LK_SUMS_32(0));
  } else if constexpr (kBf16) {
    LK_WGMMA_A(128, LK_NAMES_64, "bf16", "%64", "%65", "%66", "%67", "%68", LK_SUMS_32(0), LK_SUMS_32(32));
  } else {
    LK_WGMMA_A(128, LK_NAMES_64, "f16", "%64", "%65", "%66", "%67", "%68", LK_SUMS_32(0), LK_SUMS_32(32));
  }
}

#undef LK_WGMMA_A
#undef LK_NAMES_64
#undef LK_NAMES_32
#undef LK_NAMES_16
#undef LK_SUMS_32
#undef LK_SUMS_16
#undef LK_SUMS_8

}  // namespace lorakernels
