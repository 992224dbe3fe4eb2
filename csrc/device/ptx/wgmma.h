// SPDX-License-Identifier: Apache-2.0
// Warpgroup matrix products of 16-bit and FP8 operands in shared memory, for sm_90a (PTX ISA, "wgmma").
//
// D [64, N] += A [64, 16] B [16, N], fp32 in registers: lane l of warp w (of 4) holds, for j in 0 .. N/8 - 1,
//   d[4j], d[4j+1]    D[16 w + l/4    , 8 j + 2 (l%4)], and the column after it
//   d[4j+2], d[4j+3]  D[16 w + l/4 + 8, 8 j + 2 (l%4)], and the column after it
#pragma once

#include <cuda_bf16.h>

#include <cstdint>
#include <type_traits>

namespace lorakernels {

// Rows of kRowBytes, 32, 64 or 128, one behind the other. Their 16-byte chunks are permuted ("swizzled"), so that the
// chunks of a row, and those of a column, lie in different banks. Such a matrix starts at a multiple of 1024 bytes.
template <int kRowBytes>
struct SwizzledRows {
  static_assert(kRowBytes == 32 || kRowBytes == 64 || kRowBytes == 128);
  static constexpr uint64_t kMode = kRowBytes == 128 ? 1 : kRowBytes == 64 ? 2 : 3;

  static __device__ constexpr uint32_t offset(uint32_t row, uint32_t chunk) {
    return row * kRowBytes + ((chunk ^ (row / (128 / kRowBytes) % (kRowBytes / 16))) << 4);
  }

  // The shared memory descriptor of a matrix. `leading`: the bytes to the next kRowBytes of the same rows, for an
  // operand whose rows are longer than kRowBytes and run along M or N.
  static __device__ uint64_t descriptor(uint32_t address, uint32_t leading = 0) {
    const uint64_t stride = 8 * kRowBytes;
    return static_cast<uint64_t>(address >> 4) | static_cast<uint64_t>(leading >> 4) << 16 | (stride >> 4) << 32 |
           kMode << 62;
  }
};

// The descriptor of a matrix that begins `bytes` later.
__device__ __forceinline__ uint64_t moved(uint64_t descriptor, uint32_t bytes) { return descriptor + (bytes >> 4); }

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until all groups but the newest `kPending` are done.
template <int kPending = 0>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

#define LK_NAMES_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define LK_NAMES_16 LK_NAMES_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define LK_NAMES_32 LK_NAMES_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define LK_NAMES_64                                                                                        \
  LK_NAMES_32                                                                                              \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, " \
  "%52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define LK_NAMES_96                                                                                        \
  LK_NAMES_64                                                                                              \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, " \
  "%84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define LK_NAMES_128                                                                                             \
  LK_NAMES_64                                                                                                    \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, "       \
  "%84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, "     \
  "%104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, " \
  "%122, %123, %124, %125, %126, %127"
#define LK_SUMS_8(d, i)                                                                                       \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
#define LK_SUMS_16(d, i) LK_SUMS_8(d, i), LK_SUMS_8(d, i + 8)
#define LK_SUMS_32(d, i) LK_SUMS_16(d, i), LK_SUMS_16(d, i + 16)
#define LK_SUMS_64(d, i) LK_SUMS_32(d, i), LK_SUMS_32(d, i + 32)
#define LK_SUMS_96(d, i) LK_SUMS_64(d, i), LK_SUMS_32(d, i + 64)
#define LK_SUMS_128(d, i) LK_SUMS_64(d, i), LK_SUMS_64(d, i + 64)
#define LK_WGMMA(n, count, type, name_a, name_b, name_add, along_m, along_n)                                   \
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " name_add ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n   \
               "k16.f32." type "." type " {" LK_NAMES_##count "}, " name_a ", " name_b ", add, 1, 1, " along_m \
                                                              ", " along_n ";\n}"                              \
               : LK_SUMS_##count(d, 0)                                                                         \
               : "l"(a), "l"(b), "r"(add), "n"(kAlongM), "n"(kAlongN))
#define LK_WGMMA_OF_REGISTERS(n, count, type, name_a, name_b)                                        \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" LK_NAMES_##count \
               "}, {" name_a "}, " name_b ", 1, 1, 1, 0;"                                            \
               : LK_SUMS_##count(d, 0)                                                               \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
#define LK_WGMMA_FP8(n, count, type, name_a, name_b, name_add, ...)                                          \
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " name_add ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n \
               "k32.f32." type ".e4m3 {" LK_NAMES_##count "}, " name_a ", " name_b ", add, 1, 1;\n}"         \
               : __VA_ARGS__                                                                                 \
               : "l"(a), "l"(b), "r"(add))
#define LK_WGMMA_FP8_OF_REGISTERS(n, count, type, name_a, name_b, name_add)                                  \
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " name_add ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n \
               "k32.f32.e4m3." type " {" LK_NAMES_##count "}, {" name_a "}, " name_b ", add, 1, 1;\n}"       \
               : LK_SUMS_##count(d, 0)                                                                       \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add))
#define LK_WGMMA_OF_TYPE(n, count, ...)             \
  if constexpr (std::is_same_v<T, __nv_bfloat16>) { \
    LK_WGMMA(n, count, "bf16", __VA_ARGS__);        \
  } else {                                          \
    LK_WGMMA(n, count, "f16", __VA_ARGS__);         \
  }

// d = A B (+ d if add), by all 128 threads of the warpgroup. A's rows in shared memory run along K, or with kAlongM
// along M; B's run along N, or without kAlongN along K.
template <typename T, int kAlongM, int kAlongN = 1, int kSums>
__device__ __forceinline__ void wgmma(float (&d)[kSums], uint64_t a, uint64_t b, int add) {
  static_assert(kSums == 8 || kSums == 16 || kSums == 32 || kSums == 64 || kSums == 96);
  if constexpr (kSums == 8) {
    LK_WGMMA_OF_TYPE(16, 8, "%8", "%9", "%10", "%11", "%12")
  } else if constexpr (kSums == 16) {
    LK_WGMMA_OF_TYPE(32, 16, "%16", "%17", "%18", "%19", "%20")
  } else if constexpr (kSums == 32) {
    LK_WGMMA_OF_TYPE(64, 32, "%32", "%33", "%34", "%35", "%36")
  } else if constexpr (kSums == 64) {
    LK_WGMMA_OF_TYPE(128, 64, "%64", "%65", "%66", "%67", "%68")
  } else {
    LK_WGMMA_OF_TYPE(192, 96, "%96", "%97", "%98", "%99", "%100")
  }
}

// The same for A [64, 32] of e5m2 or e4m3 and B [32, 128] of e4m3; the rows of both run along K.
template <bool kE5M2>
__device__ __forceinline__ void wgmma_fp8(float (&d)[64], uint64_t a, uint64_t b, int add) {
  if constexpr (kE5M2) {
    LK_WGMMA_FP8(128, 64, "e5m2", "%64", "%65", "%66", LK_SUMS_64(d, 0));
  } else {
    LK_WGMMA_FP8(128, 64, "e4m3", "%64", "%65", "%66", LK_SUMS_64(d, 0));
  }
}

// The same for B [32, 256]. d[0] holds the left half of D, d[1] the right half.
template <bool kE5M2>
__device__ __forceinline__ void wgmma_fp8(float (&d)[2][64], uint64_t a, uint64_t b, int add) {
  if constexpr (kE5M2) {
    LK_WGMMA_FP8(256, 128, "e5m2", "%128", "%129", "%130", LK_SUMS_64(d[0], 0), LK_SUMS_64(d[1], 0));
  } else {
    LK_WGMMA_FP8(256, 128, "e4m3", "%128", "%129", "%130", LK_SUMS_64(d[0], 0), LK_SUMS_64(d[1], 0));
  }
}

// The same for A [64, 32] of e4m3 in registers and B [32, 64, 128, 192 or 256] of e5m2 or e4m3: lane l of warp w holds,
// 4 elements a word,
//   a[0], a[1]  A[16 w + l/4, 4 (l%4)], and 8 rows further down      a[2], a[3]  the same, 16 columns further on
template <bool kE5M2, int kSums>
__device__ __forceinline__ void wgmma_fp8(float (&d)[kSums], const uint32_t (&a)[4], uint64_t b, int add) {
  static_assert(kSums == 32 || kSums == 64 || kSums == 96 || kSums == 128);
  if constexpr (kSums == 32 && kE5M2) {
    LK_WGMMA_FP8_OF_REGISTERS(64, 32, "e5m2", "%32, %33, %34, %35", "%36", "%37");
  } else if constexpr (kSums == 32) {
    LK_WGMMA_FP8_OF_REGISTERS(64, 32, "e4m3", "%32, %33, %34, %35", "%36", "%37");
  } else if constexpr (kSums == 128 && kE5M2) {
    LK_WGMMA_FP8_OF_REGISTERS(256, 128, "e5m2", "%128, %129, %130, %131", "%132", "%133");
  } else if constexpr (kSums == 128) {
    LK_WGMMA_FP8_OF_REGISTERS(256, 128, "e4m3", "%128, %129, %130, %131", "%132", "%133");
  } else if constexpr (kSums == 64 && kE5M2) {
    LK_WGMMA_FP8_OF_REGISTERS(128, 64, "e5m2", "%64, %65, %66, %67", "%68", "%69");
  } else if constexpr (kSums == 64) {
    LK_WGMMA_FP8_OF_REGISTERS(128, 64, "e4m3", "%64, %65, %66, %67", "%68", "%69");
  } else if constexpr (kE5M2) {
    LK_WGMMA_FP8_OF_REGISTERS(192, 96, "e5m2", "%96, %97, %98, %99", "%100", "%101");
  } else {
    LK_WGMMA_FP8_OF_REGISTERS(192, 96, "e4m3", "%96, %97, %98, %99", "%100", "%101");
  }
}

// d += A [64, 16] B [16, N] of 16-bit operands, A in registers as mma.sync takes it, B in shared memory in rows along
// K.
template <typename T, int kSums>
__device__ __forceinline__ void wgmma_along_k(float (&d)[kSums], const uint32_t (&a)[4], uint64_t b) {
  static_assert(kSums == 16 || kSums == 32 || kSums == 64 || kSums == 96 || kSums == 128);
  constexpr bool kBf16 = std::is_same_v<T, __nv_bfloat16>;
  if constexpr (kSums == 16 && kBf16) {
    LK_WGMMA_OF_REGISTERS(32, 16, "bf16", "%16, %17, %18, %19", "%20");
  } else if constexpr (kSums == 16) {
    LK_WGMMA_OF_REGISTERS(32, 16, "f16", "%16, %17, %18, %19", "%20");
  } else if constexpr (kSums == 32 && kBf16) {
    LK_WGMMA_OF_REGISTERS(64, 32, "bf16", "%32, %33, %34, %35", "%36");
  } else if constexpr (kSums == 32) {
    LK_WGMMA_OF_REGISTERS(64, 32, "f16", "%32, %33, %34, %35", "%36");
  } else if constexpr (kSums == 64 && kBf16) {
    LK_WGMMA_OF_REGISTERS(128, 64, "bf16", "%64, %65, %66, %67", "%68");
  } else if constexpr (kSums == 64) {
    LK_WGMMA_OF_REGISTERS(128, 64, "f16", "%64, %65, %66, %67", "%68");
  } else if constexpr (kSums == 96 && kBf16) {
    LK_WGMMA_OF_REGISTERS(192, 96, "bf16", "%96, %97, %98, %99", "%100");
  } else if constexpr (kSums == 96) {
    LK_WGMMA_OF_REGISTERS(192, 96, "f16", "%96, %97, %98, %99", "%100");
  } else if constexpr (kBf16) {
    LK_WGMMA_OF_REGISTERS(256, 128, "bf16", "%128, %129, %130, %131", "%132");
  } else {
    LK_WGMMA_OF_REGISTERS(256, 128, "f16", "%128, %129, %130, %131", "%132");
  }
}

#undef LK_WGMMA_OF_TYPE
#undef LK_WGMMA_OF_REGISTERS
#undef LK_WGMMA_FP8_OF_REGISTERS
#undef LK_WGMMA_FP8
#undef LK_WGMMA
#undef LK_SUMS_128
#undef LK_SUMS_96
#undef LK_SUMS_64
#undef LK_SUMS_32
#undef LK_SUMS_16
#undef LK_SUMS_8
#undef LK_NAMES_128
#undef LK_NAMES_96
#undef LK_NAMES_64
#undef LK_NAMES_32
#undef LK_NAMES_16
#undef LK_NAMES_8

}  // namespace lorakernels
