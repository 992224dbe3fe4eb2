// SPDX-License-Identifier: Apache-2.0
#include <cuda_fp8.h>

#include "device/draws.h"
#include "device/overlap.h"
#include "device/pairs.h"
#include "device/ptx/cluster.h"
#include "device/ptx/cp_async.h"
#include "device/ptx/mma_sync.h"
#include "device/ptx/shared_memory.h"
#include "device/slices.h"
#include "host/launch.h"
#include "ops/lora_grad_a/params.h"
#include "ops/lora_grad_a/rings.h"

namespace lorakernels {
namespace {

constexpr int kSumThreads = 256;
constexpr uint32_t kMostBlocks = 2;  // of a cluster

// Selectors for permuted(): the same parts of two words, the first word's first.
constexpr uint32_t kLowHalves = 0x5410, kHighHalves = 0x7632;
constexpr uint32_t kLowBytes = 0x5140, kHighBytes = 0x7362;  // bytes 0 and 1, or 2 and 3, alternating between the words
constexpr uint32_t kSignsInTurn = 0xFBD9;  // the sign bits of the low halves, then of the high ones; a byte each
constexpr uint32_t kLowSigns = 0xDD99,
                   kHighSigns = 0xFFBB;  // the sign bits of the low, or of the high halves; two bytes each

enum class Mask { kNone, kDrawn, kGiven };
enum class Of { kPlain, kFp8, kFp8Blocks };  // x: has ds's dtype; is e4m3 bytes with one scale, or one for each 1 × 128

// A draw whose sign bits say what is dropped, as Threshold::apply leaves it, from 32 columns' bits (device/dropout.h).
__device__ PhiloxDraw signs_of_bits(uint32_t bits, uint32_t draw) {
  const uint32_t mine = bits >> dropped_shift(draw);
  return {{mine << 15, mine << 13, mine << 11, mine << 9}};
}

// Four e4m3 bytes as fp16 in two words, which is exact.
__device__ uint2 halves_of_e4m3(uint32_t bytes) {
#if __CUDA_ARCH__ >= 890  // cuda_fp8.h's conversion needs one more instruction, which moves the upper two down
  uint2 halves;
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\ncvt.rn.f16x2.e4m3x2 %0, low;\n"
      "cvt.rn.f16x2.e4m3x2 %1, high;\n}"
      : "=r"(halves.x), "=r"(halves.y)
      : "r"(bytes));
  return halves;
#else
  const auto low = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(bytes), __NV_E4M3);
  const auto high = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(bytes >> 16), __NV_E4M3);
  return {reinterpret_cast<const uint32_t&>(low), reinterpret_cast<const uint32_t&>(high)};
#endif
}

// Eight columns of two rows in T, with zeros where the signs of `first` and `second` drop them. A word holds both rows'
// element of one column, as an MMA takes them. `scales` are the two rows', of kFp8Blocks.
template <typename T, Of kOf, bool kDropout>
struct Pairs {
  static constexpr bool kFp8 = kOf != Of::kPlain, kBlocks = kOf == Of::kFp8Blocks;
  uint32_t word[8];

  __device__ Pairs(const uint32_t* row, const uint32_t* next, const PhiloxDraw& first, const PhiloxDraw& second,
                   [[maybe_unused]] float2 scales) {
#pragma unroll
    for (int two = 0; two < 4; ++two) {  // columns 2 two, 2 two + 1
      const uint32_t a = first.word[two], b = second.word[two];
      uint32_t &low = word[2 * two], &high = word[2 * two + 1];
      if constexpr (kFp8) {
        uint32_t bytes = permuted(row[two / 2], next[two / 2], two % 2 == 0 ? kLowBytes : kHighBytes);
        if constexpr (kDropout && !kBlocks) bytes &= ~permuted(a, b, kSignsInTurn);
        const uint2 halves = halves_of_e4m3(bytes);
        low = halves.x, high = halves.y;
        if constexpr (kBlocks) {
          const float2 in_low = unpacked<__half>(low), in_high = unpacked<__half>(high);
          low = packed<T>(in_low.x * scales.x, in_low.y * scales.y);
          high = packed<T>(in_high.x * scales.x, in_high.y * scales.y);
        } else if constexpr (!std::is_same_v<T, __half>) {
          const float2 in_low = unpacked<__half>(low), in_high = unpacked<__half>(high);
          low = packed<T>(in_low.x, in_low.y), high = packed<T>(in_high.x, in_high.y);
        }
      } else {
        low = permuted(row[two], next[two], kLowHalves), high = permuted(row[two], next[two], kHighHalves);
      }
      // a scale may be NaN, and what is dropped is 0
      if constexpr (kDropout && (!kFp8 || kBlocks)) {
        low &= ~permuted(a, b, kLowSigns), high &= ~permuted(a, b, kHighSigns);
      }
    }
  }
};

template <Of kOf, int kRank, Mask kMask>
struct Tiling {
  static constexpr bool kFp8 = kOf != Of::kPlain, kBlocks = kOf == Of::kFp8Blocks;
  static constexpr int kRows = !kFp8 && kRank <= 32 ? 2 : 4;  // that a thread has in a step
  static constexpr bool kGiven = kMask == Mask::kGiven, kFullRing = kFp8 && kRank == 64 && kMask != Mask::kNone;
  static constexpr int kStages = (kFp8 || kRows == 2) && !kFullRing ? 4 : 3;
  using RingX = Ring<kStages, 4 * kRows, kFp8 ? 8 : 16>;
  using RingDs = Ring<kStages, 4 * kRows, kRank / 4>;
  using Bits = RingBits<kStages, 4 * kRows>;
  using Scales = RingScales<kStages, 4 * kRows>;
  static constexpr int kStepsDrawn = !kFp8 && kRank == 64 ? 1 : 8 / kRows;  // at once; 1 where the rings leave no room
  using Draws = RowsDraws<4 * kRows, kStepsDrawn>;
  static constexpr int kTiles = kRank / 16;
  using Sums = float[8][kTiles][4];                            // a thread's part of tiles of 16 ranks × 8 columns
  static constexpr int kSumsPitch = Grid::kStripCols / 4 + 1;  // between ranks of a block's sums, in 16 bytes
  static constexpr int kMaskBytes = kGiven ? Bits::kBytesOfBlock : kMask == Mask::kDrawn ? Draws::kBytesOfBlock : 0;
  static constexpr int kRingBytes =
      RingX::kBytesOfBlock + RingDs::kBytesOfBlock + kMaskBytes + (kBlocks ? Scales::kBytesOfBlock : 0);
  static constexpr int kBytes = std::max(kRingBytes, static_cast<int>(kThreads / 2 * sizeof(Sums)));
  static_assert(kRank * kSumsPitch * 16 <= kBytes);
  static_assert(kBytes <= 99 * 1024, "what every GPU from sm_86 on has");
  static_assert(!kBlocks || Grid::kStripCols == 128, "a block's columns share their scales");
};

// sum += dsᵀ D(x) of 4 kRows rows. ds, x, dropped and scale are a thread's numbers of each row, and its draws as signs.
template <typename T, Of kOf, bool kDropout, int kRows, int kTiles, int kWords>
__device__ void add_products(float (&sum)[8][kTiles][4], const uint32_t (&ds)[kRows][kTiles],
                             const uint32_t (&x)[kRows][kWords], const PhiloxDraw (&dropped)[kRows],
                             const float (&scale)[kRows]) {
  constexpr int kLast = kRows - 1;
  const Pairs<T, kOf, kDropout> upper(x[0], x[1], dropped[0], dropped[1], {scale[0], scale[1]});
  const Pairs<T, kOf, kDropout> lower(x[kLast - 1], x[kLast], dropped[kLast - 1], dropped[kLast],
                                      {scale[kLast - 1], scale[kLast]});
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    const uint32_t a0 = permuted(ds[0][tile], ds[1][tile], kLowHalves);
    const uint32_t a1 = permuted(ds[0][tile], ds[1][tile], kHighHalves);
    const uint32_t a2 = permuted(ds[kRows - 2][tile], ds[kRows - 1][tile], kLowHalves);
    const uint32_t a3 = permuted(ds[kRows - 2][tile], ds[kRows - 1][tile], kHighHalves);
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      if constexpr (kRows == 2) {
        mma<T>(sum[c][tile], a0, a1, upper.word[c]);
      } else {
        mma<T>(sum[c][tile], a0, a1, a2, a3, upper.word[c], lower.word[c]);
      }
    }
  }
}

// Adds the sums of the warps that share columns into the first one's. In each round the upper half of the warps gives
// its sums to the lower half.
template <int kTiles>
__device__ void gather(float (&sum)[8][kTiles][4], float4* exchange, uint32_t col_warp, uint32_t row_warp) {
  constexpr int kSums = 8 * kTiles;
#pragma unroll
  for (int half = Grid::kRowWarps / 2; half > 0; half /= 2) {
    float4* const place = exchange + (row_warp % half * Grid::kColWarps + col_warp) * (kSums * 32) + threadIdx.x % 32;
    __syncthreads();
    if (row_warp >= half && row_warp < 2 * half) {
#pragma unroll
      for (int i = 0; i < kSums; ++i) {
        const float (&four)[4] = sum[i / kTiles][i % kTiles];
        place[i * 32] = make_float4(four[0], four[1], four[2], four[3]);
      }
    }
    __syncthreads();
    if (row_warp < half) {
#pragma unroll
      for (int i = 0; i < kSums; ++i) {
        float (&four)[4] = sum[i / kTiles][i % kTiles];
        const float4 other = place[i * 32];
        four[0] += other.x, four[1] += other.y, four[2] += other.z, four[3] += other.w;
      }
    }
  }
}

// What dA's sums are multiplied by.
__device__ float factor_of(const LoraGradAOperands& params) {
  return dropout_survivor_scale(params.dropout.threshold) *
         (params.scale_inv == nullptr || params.in_blocks ? 1.0f : *params.scale_inv);
}

// Writes four neighbours of dA, the i-th.
__device__ void store_dA(const LoraGradAOperands& params, int64_t i, float4 sum, float factor) {
  sum.x *= factor, sum.y *= factor, sum.z *= factor, sum.w *= factor;
  switch (params.out_dtype) {
    case FloatType::kFloat32:
      static_cast<float4*>(params.dA)[i] = sum;
      break;
    case FloatType::kBFloat16:
      static_cast<uint2*>(params.dA)[i] = {packed<__nv_bfloat16>(sum.x, sum.y), packed<__nv_bfloat16>(sum.z, sum.w)};
      break;
    case FloatType::kFloat16:
      static_cast<uint2*>(params.dA)[i] = {packed<__half>(sum.x, sum.y), packed<__half>(sum.z, sum.w)};
  }
}

// Adds up a strip's part of dA from the sums in shared memory of the cluster's blocks, first to last. Each block has a
// slice, and they share the work.
template <int kRank, int kPitch>
__device__ void sum_in_cluster(const LoraGradAOperands& params, uint32_t sums, uint32_t first_rank) {
  constexpr uint32_t kFours = Grid::kStripCols / 4;
  const float factor = factor_of(params);
  const uint32_t slices = gridDim.y;
  __syncwarp();
  arrive_in_cluster();
  wait_for_cluster();
  for (uint32_t i = blockIdx.y * kThreads + threadIdx.x; i < kRank * kFours; i += slices * kThreads) {
    const uint32_t r = first_rank + i / kFours, col = blockIdx.x * Grid::kStripCols + i % kFours * 4;
    if (r >= params.rank || col >= params.cols) continue;
    const uint32_t from = sums + (i / kFours * kPitch + i % kFours) * 16;
    float4 sum{}, each[kMostBlocks];
#pragma unroll
    for (uint32_t slice = 0; slice < kMostBlocks; ++slice) {
      if (slice < slices) each[slice] = load_of_block(from, slice);
    }
#pragma unroll
    for (uint32_t slice = 0; slice < kMostBlocks; ++slice) {
      if (slice < slices) add(sum, each[slice]);
    }
    store_dA(params, (r * params.cols + col) / 4, sum, factor);
  }
  __syncwarp();
  arrive_without_writes();  // no block ends while another one reads its sums
  wait_for_cluster();
}

// Where it `finishes`, the slices of a strip are a cluster, which writes dA. Otherwise sum_row_slices_kernel does.
// Thread (g, t) = (lane / 4, lane % 4) of a warp holds rows t, t + 4, … of 8 or 16, and 8 neighbouring columns, those
// of one draw. The MMAs contract over the rows, whose order is free if both operands share it, so a thread gives its
// own rows. Column g of an MMA is one of the thread's 8 columns. Rows g and g + 8 of the i-th MMA over the ranks are
// ranks kRank / 8 · g + 2 i and the next one.
template <typename T, Of kOf, int kRank, Mask kMask>
__global__ void __launch_bounds__(kThreads, kRank == 64 ? 1 : 2)
    lora_grad_a_kernel(const LoraGradAOperands params, uint32_t slice_rows, bool finishes, const RowsOfTensor rows) {
  using Tile = Tiling<kOf, kRank, kMask>;
  using RingX = typename Tile::RingX;
  using RingDs = typename Tile::RingDs;
  constexpr int kStages = Tile::kStages, kRows = Tile::kRows, kTiles = Tile::kTiles, kElementBytes = Tile::kFp8 ? 1 : 2;
  constexpr uint32_t kRowStep = Grid::kRowWarps * 4 * kRows;
  extern __shared__ uint4 shared[];
  begin_after_previous_kernel();
  const uint32_t warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const uint32_t col_warp = warp % Grid::kColWarps, row_warp = warp / Grid::kColWarps;
  const uint32_t cols = static_cast<uint32_t>(params.cols), rank = static_cast<uint32_t>(params.rank);
  const uint32_t warp_col = blockIdx.x * Grid::kStripCols + col_warp * 64, block_rank = blockIdx.z * kRank;
  const uint32_t slice_end = min(static_cast<uint32_t>(params.rows), (blockIdx.y + 1) * slice_rows);
  const uint32_t first_row = blockIdx.y * slice_rows + row_warp * (4 * kRows);

  const RingX ring_x(shared);
  const RingDs ring_ds(reinterpret_cast<uint8_t*>(shared) + RingX::kBytesOfBlock);
  const typename Tile::Bits ring_bits(reinterpret_cast<uint8_t*>(shared) + RingX::kBytesOfBlock +
                                      RingDs::kBytesOfBlock);
  const int64_t x_pitch = params.cols * kElementBytes, ds_pitch = params.ds_pitch * 2;
  const uint32_t copied_col = warp_col + RingX::copied_piece() * (16 / kElementBytes);
  const uint32_t copied_rank = block_rank + RingDs::copied_piece() * 8;
  const uint32_t x_end = copied_col < cols ? slice_end : 0, ds_end = copied_rank < rank ? slice_end : 0;
  uint32_t x_ahead = first_row + RingX::copied_row(0), ds_ahead = first_row + RingDs::copied_row(0);
  const uint8_t* x = static_cast<const uint8_t*>(params.x) + x_ahead * x_pitch + int64_t{copied_col} * kElementBytes;
  const uint8_t* ds = static_cast<const uint8_t*>(params.ds) + ds_ahead * ds_pitch + copied_rank * 2;
  const int64_t words = dropped_words(params.cols);
  uint32_t bits_row = first_row + Tile::Bits::copied_row();
  const uint32_t* bits_ahead = params.dropped + bits_row * words + warp_col / 32;
  const typename Tile::Scales ring_scales(reinterpret_cast<uint8_t*>(shared) + Tile::kRingBytes -
                                          Tile::Scales::kBytesOfBlock);
  const auto copy_step = [&](int stage) {
#pragma unroll
    for (int i = 0; i < RingX::kCopies; ++i) {
      constexpr uint32_t kCopyRows = 32 / RingX::kPieces;
      ring_x.copy(stage, i, x + i * kCopyRows * x_pitch, x_ahead + i * kCopyRows < x_end);
    }
#pragma unroll
    for (int i = 0; i < RingDs::kCopies; ++i) {
      constexpr uint32_t kCopyRows = 32 / RingDs::kPieces;
      ring_ds.copy(stage, i, ds + i * kCopyRows * ds_pitch, ds_ahead + i * kCopyRows < ds_end);
    }
    if constexpr (kMask == Mask::kGiven) {
      ring_bits.copy(stage, bits_ahead, bits_row < slice_end);
      bits_ahead += kRowStep * words, bits_row += kRowStep;
    }
    if constexpr (Tile::kBlocks) {
      const uint32_t scale_row = x_ahead - RingX::copied_row(0) + Tile::Scales::copied_row();
      ring_scales.copy(stage, params.scale_inv + blockIdx.x * params.rows + scale_row, scale_row < slice_end);
    }
    commit_copies();
    x_ahead += kRowStep, ds_ahead += kRowStep, x += kRowStep * x_pitch, ds += kRowStep * ds_pitch;
  };
#pragma unroll
  for (int stage = 0; stage < kStages - 1; ++stage) copy_step(stage);

  const Threshold threshold(params.dropout.threshold);
  uint32_t offset = 0;
  uint64_t seed = 0;
  RoundKeys keys;
  DrawsOfColumn column;
  if constexpr (kMask == Mask::kDrawn) {
    seed = static_cast<uint64_t>(params.dropout.slot[0]);
    offset = static_cast<uint32_t>(params.dropout.slot[1]);
    keys = RoundKeys(seed);
    column = DrawsOfColumn((params.dropout.first_col + warp_col) / kDropoutLanesPerDraw + g, offset, seed);
  }
  const typename Tile::Draws rows_draws(reinterpret_cast<uint8_t*>(shared) + RingX::kBytesOfBlock +
                                        RingDs::kBytesOfBlock);
  typename Tile::Sums sum = {};

  int stage = 0;
  for (uint32_t row = first_row; row < slice_end; row += kRowStep) {
    wait_for_copies<kStages - 2>();
    __syncwarp();
    uint32_t of_x[kRows][2 * kElementBytes], of_ds[kRows][kTiles];
#pragma unroll
    for (int i = 0; i < kRows; ++i) ring_x.load(stage, 4 * i + t, of_x[i]), ring_ds.load(stage, 4 * i + t, of_ds[i]);
    [[maybe_unused]] uint32_t bits[kRows];
    if constexpr (kMask == Mask::kGiven) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) bits[i] = ring_bits.word(stage, 4 * i + t);
    }
    copy_step(stage == 0 ? kStages - 1 : stage - 1);
    stage = stage == kStages - 1 ? 0 : stage + 1;

    PhiloxDraw draws[kRows];
    if constexpr (kMask == Mask::kGiven) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) draws[i] = signs_of_bits(bits[i], g % 4);
    }
    if constexpr (kMask == Mask::kDrawn) {
      const uint32_t step = (row - blockIdx.y * slice_rows) / kRowStep;
      if (step % Tile::kStepsDrawn == 0) {
        rows_draws.make(rows, row, kRowStep, params.dropout.site, offset, seed);
      }
#pragma unroll
      for (int i = 0; i < kRows; ++i) draws[i] = column.after_three(rows_draws.of(step, 4 * i + t));
      keys.template draw<3>(draws);
      threshold.apply(draws);
    }
    float scale[kRows]{};  // their stage is written anew in the next step
    if constexpr (Tile::kBlocks) {
      const int before = stage == 0 ? kStages - 1 : stage - 1;
#pragma unroll
      for (int i = 0; i < kRows; ++i) scale[i] = ring_scales.scale(before, 4 * i + t);
    }
    add_products<T, kOf, kMask != Mask::kNone>(sum, of_ds, of_x, draws, scale);
  }

  wait_for_copies<0>();
  gather(sum, reinterpret_cast<float4*>(shared), col_warp, row_warp);
  __syncthreads();
  float4* const sums = finishes ? reinterpret_cast<float4*>(shared) : nullptr;
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t in_part = g * (kRank / 8) + 2 * tile + i / 2, in_strip = col_warp * 64 + (2 * t + i % 2) * 8;
      const uint32_t r = block_rank + in_part, col = blockIdx.x * Grid::kStripCols + in_strip;
      if (row_warp > 0 || r >= rank || col >= cols) continue;
      float4* const target =
          finishes ? sums + in_part * Tile::kSumsPitch + in_strip / 4
                   : reinterpret_cast<float4*>(params.partial + (int64_t{blockIdx.y} * rank + r) * cols + col);
      target[0] = make_float4(sum[0][tile][i], sum[1][tile][i], sum[2][tile][i], sum[3][tile][i]);
      target[1] = make_float4(sum[4][tile][i], sum[5][tile][i], sum[6][tile][i], sum[7][tile][i]);
    }
  }
  if (finishes) sum_in_cluster<kRank, Tile::kSumsPitch>(params, shared_address(shared), block_rank);
}

// Adds up dA from the slices' sums, first to last.
__global__ void __launch_bounds__(kSumThreads) sum_row_slices_kernel(const LoraGradAOperands params, uint32_t slices) {
  begin_after_previous_kernel();
  const int64_t fours = params.rank * params.cols / 4;
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kSumThreads + threadIdx.x;
  if (i >= fours) return;
  const float factor = factor_of(params);
  const float4* const from = reinterpret_cast<const float4*>(params.partial) + i;
  const float4 sum = sum_of_slices<float4>(slices, [&](uint32_t slice) { return __ldcg(from + slice * fours); });
  store_dA(params, i, sum, factor);
}

template <typename T, Of kOf, int kRank, Mask kMask>
void launch(const LoraGradAParams& params, const Grid& grid, bool finishes, cudaStream_t stream) {
  const auto kernel = lora_grad_a_kernel<T, kOf, kRank, kMask>;
  constexpr int kBytes = Tiling<kOf, kRank, kMask>::kBytes;
  const auto slice_rows = static_cast<uint32_t>(grid.slice_rows);
  const dim3 blocks(static_cast<unsigned>(grid.strips), static_cast<unsigned>(grid.slices),
                    static_cast<unsigned>(grid.parts));
  LaunchShape shape{blocks, kThreads, kBytes, true};
  if (finishes) shape.cluster = dim3(1, blocks.y);
  const LoraGradAOperands& operands = params;
  launch_kernel(kernel, shape, stream, operands, slice_rows, finishes, params.rows_of_mask);
}

template <typename T, Of kOf, Mask kMask>
void launch_rank(const LoraGradAParams& params, const Grid& grid, bool finishes, cudaStream_t stream) {
  switch (grid.padded_rank) {
    case 16:
      return launch<T, kOf, 16, kMask>(params, grid, finishes, stream);
    case 32:
      return launch<T, kOf, 32, kMask>(params, grid, finishes, stream);
    default:
      return launch<T, kOf, 64, kMask>(params, grid, finishes, stream);
  }
}

template <typename T, Of kOf>
void launch_masked(const LoraGradAParams& params, const Grid& grid, bool finishes, cudaStream_t stream) {
  if (params.dropout.threshold == 0) return launch_rank<T, kOf, Mask::kNone>(params, grid, finishes, stream);
  params.dropped == nullptr ? launch_rank<T, kOf, Mask::kDrawn>(params, grid, finishes, stream)
                            : launch_rank<T, kOf, Mask::kGiven>(params, grid, finishes, stream);
}

template <typename T>
void launch_typed(const LoraGradAParams& params, const Grid& grid, bool finishes, cudaStream_t stream) {
  if (params.in_blocks) return launch_masked<T, Of::kFp8Blocks>(params, grid, finishes, stream);
  params.scale_inv != nullptr ? launch_masked<T, Of::kFp8>(params, grid, finishes, stream)
                              : launch_masked<T, Of::kPlain>(params, grid, finishes, stream);
}

// Whether the slices of a strip are one block, or a cluster of two that have a multiprocessor each. Of four blocks, two
// a multiprocessor, an H100 has room for 62 clusters and not 66. There 8192 × 8192 took 41 µs instead of 36.
bool in_one_cluster(const Grid& grid) {
  return grid.slices == 1 || (grid.slices == kMostBlocks && grid.padded_rank == 64);
}

}  // namespace

void launch_lora_grad_a(const LoraGradAParams& params, void* stream, int device) {
  if (params.rank == 0 || params.cols == 0) return;
  const DeviceGuard guard(device);
  const Device found = current_device();
  const Grid grid(params.rows, params.cols, params.rank, found.multiprocessors);
  const bool finishes = found.capability_major == 9 && in_one_cluster(grid);
  const auto on = static_cast<cudaStream_t>(stream);
  if (grid.slices > 0) {
    params.dtype == FloatType::kBFloat16 ? launch_typed<__nv_bfloat16>(params, grid, finishes, on)
                                         : launch_typed<__half>(params, grid, finishes, on);
  }
  if (finishes) return;
  const int64_t fours = params.rank * params.cols / 4;
  const dim3 blocks(static_cast<unsigned>((fours + kSumThreads - 1) / kSumThreads));
  const LoraGradAOperands& operands = params;
  launch_kernel(sum_row_slices_kernel, blocks, kSumThreads, 0, on, grid.slices > 0, operands,
                static_cast<uint32_t>(grid.slices));
}

}  // namespace lorakernels
