// SPDX-License-Identifier: Apache-2.0
// One block per multiprocessor walks over the tiles. Its first warpgroup serves the other two: warp 0 has the tensor
// copy engine fill a ring of operand tiles; warps 1 to 3 meanwhile draw the tile's mask and fetch ds and A, so
// that nothing of it is left for the tensor cores to wait for. The other two warpgroups multiply, each half of the
// tile.
#include <algorithm>

#include "fp8_grad_input.h"
#include "launch.h"
#include "pairs.h"
#include "tma.h"
#include "wgmma.h"

namespace lorakernels {
namespace {

constexpr int kConsumers = 2;  // warpgroups
constexpr int kThreads = 128 * (1 + kConsumers);
constexpr int kProducerRegisters = 56, kConsumerRegisters = 224;
constexpr int kHelpers = 96;     // threads of warps 1 to 3
constexpr int kStepDepth = 128;  // bytes of a row of an operand's tile
constexpr int kBlockRows = 64;   // what a warpgroup multiplies and stores at a time
constexpr int kBlockCols = 128;
constexpr int kGroup = 8;  // row tiles that share their column tiles in the L2 cache

using Rows = SwizzledRows<128>;

enum class Shape { kSmall, kTall, kWide };  // 128 × 128, 256 × 128, 128 × 256

template <Shape kShape, int kRankStep>
struct Tiling {
  static constexpr bool kWide = kShape == Shape::kWide;
  static constexpr int kBlocks = kShape == Shape::kSmall ? 1 : 2;  // of a warpgroup: one below or beside the other
  static constexpr int kRows = kShape == Shape::kTall ? 256 : 128, kCols = kWide ? 256 : 128;
  static constexpr int kStages = kBlocks == 1 ? 6 : kRankStep <= 16 ? 4 : 3;
  static constexpr int kBytesDy = kRows * kStepDepth, kStageBytes = kBytesDy + kCols * kStepDepth;
  static constexpr int kMaskBytes = kCols / 8;  // of a row
  static constexpr int kOffsetDs = kStages * kStageBytes;
  static constexpr int kOffsetA = kOffsetDs + kRows * kRankStep * 2;
  static constexpr int kOffsetMask = kOffsetA + kCols * kRankStep * 2;
  static constexpr int kOffsetBarriers = kOffsetMask + kRows * kMaskBytes;  // full and empty ones, then extras'
  static constexpr int kBytes = kOffsetBarriers + (2 * kStages + 2) * 8;
  static_assert(kBytes <= 227 * 1024);

  static __device__ int block_row(int group, int block) {
    return (kWide ? group : group * kBlocks + block) * kBlockRows;
  }
  static __device__ int block_col(int block) { return kWide ? block * kBlockCols : 0; }
};

// The tiles of one block, in its order: of a group of row tiles, all that share their columns follow each other.
template <typename Tile>
struct Tiles {
  int rows, cols, at;

  __device__ Tiles(const Fp8GradInputParams& params)
      : rows(count(params.rows, Tile::kRows)), cols(count(params.cols, Tile::kCols)), at(blockIdx.x) {}

  static __host__ __device__ int count(int64_t size, int of) { return static_cast<int>((size + of - 1) / of); }
  __device__ bool left() const { return at < rows * cols; }
  __device__ void advance() { at += gridDim.x; }
  __device__ int first() const { return at / (kGroup * cols) * kGroup; }
  __device__ int in_group() const { return min(rows - first(), kGroup); }
  __device__ int row() const { return (first() + at % (kGroup * cols) % in_group()) * Tile::kRows; }
  __device__ int col() const { return at % (kGroup * cols) / in_group() * Tile::kCols; }
};

// What the helpers hand to the multiplying warpgroups: ds, A and the mask of a tile. A rank above one step takes
// several fills, and every block of rows its own.
template <typename Tile, int kRankStep>
struct Extras {
  uint32_t full, empty;
  int steps;
  int round = 0;

  __device__ Extras(uint32_t barriers, const Fp8GradInputParams& params)
      : full(barriers), empty(barriers + 8), steps(static_cast<int>((params.rank + kRankStep - 1) / kRankStep)) {}
  __device__ int times() const { return steps > 1 ? Tile::kBlocks : 1; }
  __device__ void advance() { round ^= 1; }
};

// Of the 8 columns that `draw` serves: bit 2 w is set where column 2 w is dropped, bit 16 + 2 w where 2 w + 1 is.
// In lanes of 16 bits: max(lane, threshold) differs from the lane where that is below the threshold.
__device__ uint32_t dropped(const PhiloxDraw& draw, uint32_t two_thresholds) {
  uint32_t bits = 0;
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    bits += __vminu2(draw.word[w] ^ __vmaxu2(draw.word[w], two_thresholds), 0x00010001u) << (2 * w);
  }
  return bits;
}

template <typename T, Shape kShape, int kRankStep>
struct Helper {
  using Tile = Tiling<kShape, kRankStep>;
  using RowsOfDs = SwizzledRows<kRankStep * 2>;
  const Fp8GradInputParams& params;
  uint32_t base;

  __device__ Helper(const Fp8GradInputParams& params, uint32_t base) : params(params), base(base) {}

  static __device__ int thread() { return threadIdx.x - 32; }

  __device__ void fetch_ds(int row0, int rank0) const {
    constexpr int kChunks = kRankStep / 8;
#pragma unroll 1
    for (int i = thread(); i < Tile::kRows * kChunks; i += kHelpers) {
      const int64_t row = row0 + i / kChunks, col = rank0 + i % kChunks * 8;
      const bool exists = row < params.rows && col < params.ds_stride;
      copy_async(base + Tile::kOffsetDs + RowsOfDs::offset(i / kChunks, i % kChunks),
                 static_cast<const T*>(params.ds) + (exists ? row * params.ds_stride + col : 0), exists);
    }
  }

  // [column half][kRankStep] rows of 128 bytes.
  __device__ void fetch_A(int col0, int rank0) const {
    constexpr int kChunks = Tile::kCols / 8;
#pragma unroll 1
    for (int i = thread(); i < kRankStep * kChunks; i += kHelpers) {
      const int row = i / kChunks, chunk = i % kChunks;
      const uint32_t to = base + Tile::kOffsetA + chunk / 8 * (kRankStep * 128) + Rows::offset(row, chunk % 8);
      const bool exists = rank0 + row < params.rank && col0 + chunk * 8 < params.cols;
      const int64_t from = exists ? (rank0 + row) * params.cols + col0 + chunk * 8 : 0;
      if (!params.a_is_fp32) {
        copy_async(to, static_cast<const T*>(params.A) + from, exists);
      } else {
        float4 low{}, high{};
        if (exists) {
          const auto source = reinterpret_cast<const float4*>(static_cast<const float*>(params.A) + from);
          low = source[0], high = source[1];
        }
        store_shared(to, make_uint4(packed<T>(low.x, low.y), packed<T>(low.z, low.w), packed<T>(high.x, high.y),
                                    packed<T>(high.z, high.w)));
      }
    }
  }

  __device__ void fetch_mask(int row0, int col0) const {
    constexpr int kChunks = Tile::kMaskBytes / 16;
    const int64_t words = dropped_words(params.cols);
#pragma unroll 1
    for (int i = thread(); i < Tile::kRows * kChunks; i += kHelpers) {
      const int64_t row = row0 + i / kChunks, word = col0 / 32 + i % kChunks * 4;
      const bool exists = row < params.rows && word < words;
      copy_async(base + Tile::kOffsetMask + i * 16, params.dropped + (exists ? row * words + word : 0), exists);
    }
  }

  // dropout.h's bits.
  __device__ void draw_mask(int row0, int col0) const {
    constexpr int kWords = Tile::kMaskBytes / 4;
    const DropoutParams& dropout = params.dropout;
    const uint64_t seed = dropout.slot[0];
    const auto offset = static_cast<uint32_t>(dropout.slot[1]);
    const uint32_t row = dropout.first_row + row0, group = (dropout.first_col + col0) / kDropoutLanesPerDraw;
    const uint32_t two_thresholds = dropout.threshold * 0x00010001u;
#pragma unroll 1
    for (int i = thread(); i < Tile::kRows * kWords; i += kHelpers) {
      uint32_t bits = 0;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        PhiloxDraw draw[2];
#pragma unroll
        for (int g = 0; g < 2; ++g) {
          draw[g] = {{row + i / kWords, group + i % kWords * 4 + half * 2 + g, offset, dropout.site}};
        }
        philox4x32_10(draw, static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32));
        bits += (dropped(draw[0], two_thresholds) + (dropped(draw[1], two_thresholds) << dropped_shift(1)))
                << dropped_shift(half * 2);
      }
      asm volatile("st.shared.b32 [%0], %1;" ::"r"(base + Tile::kOffsetMask + i * 4), "r"(bits) : "memory");
    }
  }

  __device__ void serve(Extras<Tile, kRankStep> extras) const {
    for (Tiles<Tile> tiles(params); tiles.left(); tiles.advance()) {
      const int row0 = tiles.row(), col0 = tiles.col();
      for (int time = 0; time < extras.times(); ++time) {
        for (int rank0 = 0; rank0 < static_cast<int>(params.rank); rank0 += kRankStep, extras.advance()) {
          wait_for(extras.empty, extras.round ^ 1);
          fetch_ds(row0, rank0);
          fetch_A(col0, rank0);
          if (params.dropout.threshold > 0 && time + rank0 == 0) {
            params.dropped == nullptr ? draw_mask(row0, col0) : fetch_mask(row0, col0);
          }
          wait_for_copies();
          fence_for_wgmma();
          __syncwarp();
          if (threadIdx.x % 32 == 0) arrive(extras.full);
        }
      }
    }
  }
};

template <typename Tile>
__device__ void bring_operands(const Fp8GradInputParams& params, const CUtensorMap& dy, const CUtensorMap& weight,
                               uint32_t base) {
  TileRing<Tile::kStages, Tile::kStageBytes> ring(base, base + Tile::kOffsetBarriers);
  for (Tiles<Tile> tiles(params); tiles.left(); tiles.advance()) {
    const int row = tiles.row(), col = tiles.col();
    for (int at = 0; at < static_cast<int>(params.depth); at += kStepDepth, ring.advance()) {
      wait_for(ring.empty(), ring.round ^ 1);
      arrive_and_expect(ring.full(), Tile::kStageBytes);
      copy_box(ring.tile(), dy, at, row, ring.full());
      copy_box(ring.tile() + Tile::kBytesDy, weight, at, col, ring.full());
    }
  }
}

// word[i] of lane q of four becomes word[q] of lane i.
__device__ void transpose_quad(uint32_t (&word)[4]) {
  const bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const uint32_t other = __shfl_xor_sync(0xFFFFFFFFu, odd ? word[i] : word[i + 1], 1);
    (odd ? word[i] : word[i + 1]) = other;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t other = __shfl_xor_sync(0xFFFFFFFFu, high ? word[i] : word[i + 2], 2);
    (high ? word[i] : word[i + 2]) = other;
  }
}

template <typename T, bool kE5M2, bool kSplits, Shape kShape, int kRankStep>
struct Consumer {
  using Tile = Tiling<kShape, kRankStep>;
  using RowsOfDs = SwizzledRows<kRankStep * 2>;
  static constexpr int kBlocks = Tile::kBlocks, kSums = kBlockRows * kBlockCols / 128;
  const Fp8GradInputParams& params;
  uint32_t base;
  int group = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 128 - 1, 0);
  int lane = threadIdx.x % 32;
  float sum[kBlocks][kSums];
  float part[kSums];  // of 128 along depth; later ds A, and what is stored

  __device__ Consumer(const Fp8GradInputParams& params, uint32_t base) : params(params), base(base) {}

  __device__ void done_with(uint32_t barrier) const {
    __syncwarp();
    if (lane == 0) arrive(barrier);
  }

  static __device__ void clear(float (&sums)[kSums]) {
#pragma unroll
    for (float& each : sums) each = 0.0f;
  }

  // What follows reads the sums after the tensor cores have written them.
  static __device__ void settle(float (&sums)[kSums]) {
#pragma unroll
    for (float& each : sums) asm volatile("" : "+f"(each)::"memory");
  }

  // Of 128 along depth.
  __device__ void multiply(float (&to)[kSums], uint32_t tile, int block, bool add) const {
    const uint64_t a = Rows::descriptor(tile + Tile::block_row(group, block) * kStepDepth);
    const uint64_t b = Rows::descriptor(tile + Tile::kBytesDy + Tile::block_col(block) * kStepDepth);
#pragma unroll
    for (int i = 0; i < kStepDepth / 32; ++i) wgmma_fp8<kE5M2>(to, moved(a, i * 32), moved(b, i * 32), add || i > 0);
  }

  // Of both blocks of a wide tile.
  __device__ void multiply(float (&to)[2][kSums], uint32_t tile, bool add) const {
    const uint64_t a = Rows::descriptor(tile + group * (kBlockRows * kStepDepth));
    const uint64_t b = Rows::descriptor(tile + Tile::kBytesDy);
#pragma unroll
    for (int i = 0; i < kStepDepth / 32; ++i) wgmma_fp8<kE5M2>(to, moved(a, i * 32), moved(b, i * 32), add || i > 0);
  }

  __device__ void sum_in_parts(TileRing<Tile::kStages, Tile::kStageBytes>& ring) {
    clear(part);
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) clear(sum[block]);
    for (int at = 0; at < static_cast<int>(params.depth); at += kStepDepth, ring.advance()) {
      wait_for(ring.full(), ring.round);
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        wgmma_fence();
        multiply(part, ring.tile(), block, false);
        wgmma_commit();
        wgmma_wait();
        settle(part);
        if (block == kBlocks - 1) done_with(ring.empty());
#pragma unroll
        for (int i = 0; i < kSums; ++i) sum[block][i] += part[i];
      }
    }
  }

  __device__ void sum_at_once(TileRing<Tile::kStages, Tile::kStageBytes>& ring) {
    uint32_t before = 0;
    for (int at = 0; at < static_cast<int>(params.depth); at += kStepDepth, ring.advance()) {
      wait_for(ring.full(), ring.round);
      wgmma_fence();
      if constexpr (Tile::kWide) {
        multiply(sum, ring.tile(), at > 0);
      } else {
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) multiply(sum[block], ring.tile(), block, at > 0);
      }
      wgmma_commit();
      wgmma_wait<1>();
      if (at > 0) done_with(before);
      before = ring.empty();
    }
    wgmma_wait();
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) settle(sum[block]);
    done_with(before);
  }

  // part = ds A of a block. With one step, ds and A stay for the tile's other blocks.
  __device__ void multiply_factors(Extras<Tile, kRankStep>& extras, int block) {
    clear(part);
    const uint64_t ds = RowsOfDs::descriptor(base + Tile::kOffsetDs + Tile::block_row(group, block) * (kRankStep * 2));
    const uint64_t A =
        Rows::descriptor(base + Tile::kOffsetA + Tile::block_col(block) * (kRankStep * 2), kRankStep * 128);
    for (int step = 0; step < extras.steps; ++step) {
      if (block == 0 || extras.steps > 1) wait_for(extras.full, extras.round);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < kRankStep / 16; ++i) {
        wgmma<T, 0>(part, moved(ds, i * 32), moved(A, i * (16 * 128)), step > 0 || i > 0);
      }
      wgmma_commit();
      wgmma_wait();
      settle(part);
      const bool stays = extras.steps == 1 || (block == kBlocks - 1 && step == extras.steps - 1);
      if (!stays) done_with(extras.empty), extras.advance();
    }
  }

  // part = scale · sum + factor · keep ⊙ part.
  __device__ void add_sums(int block, float scale, int row) {
#pragma unroll
    for (int high = 0; high < 2; ++high) {
      uint32_t mask[4];
      const uint32_t address =
          base + Tile::kOffsetMask + (row + 8 * high) * Tile::kMaskBytes + Tile::block_col(block) / 8;
      asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(mask[0]), "=r"(mask[1]), "=r"(mask[2]), "=r"(mask[3])
                   : "r"(address));
#pragma unroll
      for (uint32_t& word : mask) word = params.dropout.threshold > 0 ? word >> (lane % 4 * 2) : 0;
#pragma unroll
      for (int i = 0; i < kSums / 2; ++i) {
        const int g = i / 2 % 4, at = i / 2 * 4 + 2 * high + i % 2;
        const float scaled = sum[block][at] * scale;
        const bool drops = mask[i / 8] & (1u << (dropped_shift(g) + i % 2 * 16));
        part[at] = drops ? scaled : scaled + part[at] * params.factor;
      }
    }
  }

  // A lane of four takes 8 neighbouring columns of every fourth group of them.
  __device__ void store(int row, int col) const {
    T* const target = static_cast<T*>(params.dx) + static_cast<int64_t>(row) * params.cols + col + lane % 4 * 8;
    const int cols = static_cast<int>(params.cols) - col - lane % 4 * 8;
#pragma unroll
    for (int high = 0; high < 2; ++high) {
#pragma unroll
      for (int j = 0; j < kSums / 4; j += 4) {
        uint32_t word[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          word[i] = packed<T>(part[4 * (j + i) + 2 * high], part[4 * (j + i) + 2 * high + 1]);
        }
        transpose_quad(word);
        if (row + 8 * high < params.rows && 8 * j < cols) {
          *reinterpret_cast<uint4*>(target + 8 * high * params.cols + 8 * j) =
              make_uint4(word[0], word[1], word[2], word[3]);
        }
      }
    }
  }

  __device__ void work(Extras<Tile, kRankStep> extras) {
    const float scale = *params.dy_scale_inv * *params.weight_scale_inv;
    TileRing<Tile::kStages, Tile::kStageBytes> ring(base, base + Tile::kOffsetBarriers);
    for (Tiles<Tile> tiles(params); tiles.left(); tiles.advance()) {
      const int row0 = tiles.row(), col0 = tiles.col();
      if constexpr (kSplits) {
        sum_in_parts(ring);
      } else {
        sum_at_once(ring);
      }
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        const int row = Tile::block_row(group, block) + threadIdx.x % 128 / 32 * 16 + lane / 4;
        if (params.rank > 0) {
          multiply_factors(extras, block);
          add_sums(block, scale, row);
        } else {
#pragma unroll
          for (int i = 0; i < kSums; ++i) part[i] = sum[block][i] * scale;
        }
        store(row0 + row, col0 + Tile::block_col(block));
      }
      if (params.rank > 0) done_with(extras.empty), extras.advance();
    }
  }
};

template <typename T, bool kE5M2, bool kSplits, Shape kShape, int kRankStep>
__global__ void __launch_bounds__(kThreads, 1)
    fp8_grad_input_kernel(const __grid_constant__ CUtensorMap dy, const __grid_constant__ CUtensorMap weight,
                          const __grid_constant__ Fp8GradInputParams params) {
#if __CUDA_ARCH_FEAT_SM90_ALL
  using Tile = Tiling<kShape, kRankStep>;
  extern __shared__ __align__(1024) uint8_t shared[];
  const uint32_t base = shared_address(shared);
  const uint32_t barriers_of_extras = base + Tile::kOffsetBarriers + 2 * Tile::kStages * 8;
  if (threadIdx.x == 0) {
    TileRing<Tile::kStages, Tile::kStageBytes> ring(base, base + Tile::kOffsetBarriers);
    for (; ring.round == 0; ring.advance()) {
      init_barrier(ring.full(), 1);
      init_barrier(ring.empty(), kConsumers * 4);
    }
    init_barrier(barriers_of_extras, kHelpers / 32);
    init_barrier(barriers_of_extras + 8, kConsumers * 4);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  const Extras<Tile, kRankStep> extras(barriers_of_extras, params);
  if (threadIdx.x < 128) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kProducerRegisters));
    if (threadIdx.x == 0) {
      bring_operands<Tile>(params, dy, weight, base);
    } else if (threadIdx.x >= 32 && params.rank > 0) {
      Helper<T, kShape, kRankStep>(params, base).serve(extras);
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kConsumerRegisters));
    Consumer<T, kE5M2, kSplits, kShape, kRankStep>(params, base).work(extras);
  }
#endif
}

template <typename T, bool kE5M2, bool kSplits, Shape kShape, int kRankStep>
void launch(const Fp8GradInputParams& params, cudaStream_t stream) {
  using Tile = Tiling<kShape, kRankStep>;
  const auto kernel = fp8_grad_input_kernel<T, kE5M2, kSplits, kShape, kRankStep>;
  LORAKERNELS_CHECK_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Tile::kBytes));
  const int64_t tiles =
      static_cast<int64_t>(Tiles<Tile>::count(params.rows, Tile::kRows)) * Tiles<Tile>::count(params.cols, Tile::kCols);
  const auto blocks = static_cast<unsigned>(std::min(tiles, params.multiprocessors));
  const CUtensorMap dy =
      tensor_map(params.dy8, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, params.rows, params.depth, Tile::kRows);
  const CUtensorMap weight =
      tensor_map(params.weight_t, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, params.cols, params.depth, Tile::kCols);
  launch_kernel(kernel, blocks, kThreads, Tile::kBytes, stream, false, dy, weight, params);
}

template <typename T, bool kE5M2, bool kSplits>
void launch_tiled(const Fp8GradInputParams& params, cudaStream_t stream) {
  constexpr Shape kLarge = kSplits ? Shape::kTall : Shape::kWide;
  const bool narrow = params.rank <= 16;
  if (params.large_tiles) {
    narrow ? launch<T, kE5M2, kSplits, kLarge, 16>(params, stream)
           : launch<T, kE5M2, kSplits, kLarge, 64>(params, stream);
  } else {
    launch<T, kE5M2, kSplits, Shape::kSmall, 64>(params, stream);
  }
}

template <typename T>
void launch_of_type(const Fp8GradInputParams& params, cudaStream_t stream) {
  if (params.is_e5m2) {
    params.splits ? launch_tiled<T, true, true>(params, stream) : launch_tiled<T, true, false>(params, stream);
  } else {
    params.splits ? launch_tiled<T, false, true>(params, stream) : launch_tiled<T, false, false>(params, stream);
  }
}

}  // namespace

void launch_fp8_grad_input(const Fp8GradInputParams& params, void* stream, int device) {
  if (params.rows == 0 || params.cols == 0) return;
  const DeviceGuard guard(device);
  if (params.dtype == FloatType::kBFloat16) {
    launch_of_type<__nv_bfloat16>(params, static_cast<cudaStream_t>(stream));
  } else {
    launch_of_type<__half>(params, static_cast<cudaStream_t>(stream));
  }
}

}  // namespace lorakernels
