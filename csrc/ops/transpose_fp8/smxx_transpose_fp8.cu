// SPDX-License-Identifier: Apache-2.0
#include "device/overlap.h"
#include "host/launch.h"
#include "ops/transpose_fp8/params.h"

namespace lorakernels {
namespace {

constexpr int kThreads = 256;
constexpr int kTile = 128;           // rows and columns of a block
constexpr int kChunks = kTile / 16;  // 16-byte pieces of a tile's row
constexpr uint32_t kBand = 32;       // tiles
static_assert(kTile * kChunks == 4 * kThreads, "a thread has one piece of each of four neighbouring rows");

// load and store move 16 bytes. Only the first `count` of them exist: load gives zeros for the rest.
template <bool kVector>
__device__ uint4 load(const uint8_t* from, int64_t count) {
  uint4 chunk{0, 0, 0, 0};
  if constexpr (kVector) {
    if (count > 0) chunk = *reinterpret_cast<const uint4*>(from);
  } else {
    uint32_t word[4] = {};
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      if (i < count) word[i / 4] |= static_cast<uint32_t>(from[i]) << i % 4 * 8;
    }
    chunk = {word[0], word[1], word[2], word[3]};
  }
  return chunk;
}

template <bool kVector>
__device__ void store(uint8_t* to, const uint4& chunk, int64_t count) {
  if constexpr (kVector) {
    if (count > 0) *reinterpret_cast<uint4*>(to) = chunk;
  } else {
    const uint32_t word[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      if (i < count) to[i] = static_cast<uint8_t>(word[i / 4] >> i % 4 * 8);
    }
  }
}

// Turns four words, each of four bytes of a row, into four words of a column each.
__device__ void transpose_4x4(uint32_t (&word)[4]) {
  const uint32_t low01 = __byte_perm(word[0], word[1], 0x5140), high01 = __byte_perm(word[0], word[1], 0x7362);
  const uint32_t low23 = __byte_perm(word[2], word[3], 0x5140), high23 = __byte_perm(word[2], word[3], 0x7362);
  word[0] = __byte_perm(low01, low23, 0x5410), word[1] = __byte_perm(low01, low23, 0x7632);
  word[2] = __byte_perm(high01, high23, 0x5410), word[3] = __byte_perm(high01, high23, 0x7632);
}

// Shared memory holds each column of a tile as 32 words of four bytes. Word w of column c is at w ^ 4 (c / 16). A warp
// stores 4 words of 8 columns that are 16 apart. These 32 stores go to 32 banks, and 16 bytes of a column stay
// together.
template <bool kVector>
__global__ void __launch_bounds__(kThreads) transpose_fp8_kernel(const TransposeFp8Params params) {
  __shared__ __align__(16) uint32_t column[kTile][kTile / 4];
  begin_after_previous_kernel();
  const int chunk = threadIdx.x % kChunks, quad = threadIdx.x / kChunks;
  // Blocks go down a band of kBand tiles, then one tile to the right. Those that run together then read and write long
  // pieces of rows.
  const auto tiles_of_row = static_cast<uint32_t>((params.cols + kTile - 1) / kTile);
  const auto tiles_of_col = static_cast<uint32_t>((params.rows + kTile - 1) / kTile);
  const uint32_t band = blockIdx.x / (tiles_of_row * kBand) * kBand, in_band = blockIdx.x % (tiles_of_row * kBand);
  const uint32_t band_rows = min(tiles_of_col - band, kBand);
  const int64_t first_row = int64_t{kTile} * (band + in_band % band_rows);
  const int64_t first_col = int64_t{kTile} * (in_band / band_rows);

  const int64_t row = first_row + quad * 4, col = first_col + chunk * 16;
  uint4 rows[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    rows[i] = load<kVector>(params.in + (row + i) * params.cols + col, row + i < params.rows ? params.cols - col : 0);
  }
  uint32_t words[4][4] = {{rows[0].x, rows[1].x, rows[2].x, rows[3].x},
                          {rows[0].y, rows[1].y, rows[2].y, rows[3].y},
                          {rows[0].z, rows[1].z, rows[2].z, rows[3].z},
                          {rows[0].w, rows[1].w, rows[2].w, rows[3].w}};
#pragma unroll
  for (int four = 0; four < 4; ++four) {
    transpose_4x4(words[four]);
#pragma unroll
    for (int i = 0; i < 4; ++i) column[chunk * 16 + four * 4 + i][quad ^ 4 * chunk] = words[four][i];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int c = i * (kThreads / kChunks) + quad;
    const uint4 piece = *reinterpret_cast<const uint4*>(&column[c][4 * (chunk ^ c / 16)]);
    const int64_t out_row = first_col + c, out_col = first_row + chunk * 16;
    store<kVector>(params.out + out_row * params.rows + out_col, piece,
                   out_row < params.cols ? params.rows - out_col : 0);
  }
}

}  // namespace

void launch_transpose_fp8(const TransposeFp8Params& params, void* stream, int device) {
  if (params.rows == 0 || params.cols == 0) return;
  const DeviceGuard guard(device);
  const int64_t tiles = (params.rows + kTile - 1) / kTile * ((params.cols + kTile - 1) / kTile);
  const auto addresses = reinterpret_cast<uintptr_t>(params.out) | reinterpret_cast<uintptr_t>(params.in);
  const bool vectors = params.rows % 16 == 0 && params.cols % 16 == 0 && addresses % 16 == 0;
  const auto kernel = vectors ? transpose_fp8_kernel<true> : transpose_fp8_kernel<false>;
  launch_kernel(kernel, static_cast<unsigned>(tiles), kThreads, 0, static_cast<cudaStream_t>(stream), true, params);
}

}  // namespace lorakernels
