// SPDX-License-Identifier: Apache-2.0
// In one read of x [rows, cols]:
//   x8 = sat(x · scale)      amax = max |x|      s = D(x) Aᵀ,  D(x) = mask ⊙ x / (1 − p)
// x8 is e4m3. Products run on the tensor cores in x's dtype with fp32 accumulation. They are summed in an order that
// depends on QuantizeLoraDownPlan alone. The factor 1 / (1 − p) is applied to the sum, which is rounded once. If there
// is no scale yet, x is read a second time and quantized with the scale that amax gives. Instead of one scale there may
// be one for each 1 × 128 of x, of that block's own amax.
#pragma once

#include <algorithm>
#include <cstdint>

#include "device/dropout.h"
#include "device/float_type.h"
#include "device/platform.h"

namespace lorakernels {

struct QuantizeLoraDownLimits {
  static constexpr int64_t kRank = 256;
  static constexpr int64_t kColsMultiple = 8;  // also of first_col
};

struct QuantizeLoraDownParams {
  uint8_t* x8;         // [rows, cols] e4m3, or null: x is not quantized
  float* scale_inv;    // [1] 1 / scale, or in_blocks [⌈cols / 128⌉, rows]; with x8
  float* amax;         // raised to max |x|, with NaN above inf; or null
  void* s;             // [rows, rank] of dtype, rows s_pitch elements apart; null with rank 0
  float* workspace;    // 16-byte aligned, as large as QuantizeLoraDownPlan says
  const void* x;       // [rows, cols], row-major without gaps, 16-byte aligned
  const void* lora_A;  // [rank, cols] of a_dtype, 16-byte aligned; null with rank 0
  const float* kept;   // the state's scale, taken if it is > 0; null in eval
  int64_t rows;        // elements, below 2^31
  int64_t cols;        // elements, a multiple of 8, above 0, below 2^24
  int64_t rank;        // 0 to 256
  int64_t s_pitch;     // elements
  FloatType dtype;     // kBFloat16 or kFloat16
  FloatType a_dtype;   // dtype, or kFloat32
  bool in_blocks;      // each 1 × 128 has its scale; QuantizeLoraDownPlan says where it may
  bool power_of_two;   // scales of blocks are powers of two
  DropoutParams dropout;
};

// Visits what a LaunchList replaces (host/launch_list.h).
template <typename Visit>
void each_address(QuantizeLoraDownParams& params, const Visit& visit) {
  visit(params.x8, params.scale_inv, params.amax, params.s, params.workspace, params.x, params.lora_A, params.kept);
  each_address(params.dropout, visit);
}

// Which kernel runs, and which part of x each block takes. There are slices · row_blocks blocks, and each sums over its
// slice of the columns.
//   kWarps   A block keeps its slice of A in shared memory. Each warp walks along 16 rows of the slice.
//   kBoxes   TMA copies 16 rows of a slice. The block's warps stand side by side, with their columns of A in registers.
//   kPanels  TMA copies x and A for wgmma. The block's warpgroups stand one below the other, with 64 rows each.
// kBoxes and kPanels need cols to be a multiple of 16. kWarps takes kWarpsRank ranks at a time, and reads x for each of
// these passes.
struct QuantizeLoraDownPlan {
  enum class Form { kWarps, kBoxes, kPanels };
  static constexpr int64_t kWarpsOfBlock = 8, kStepColumns = 64, kBoxRows = 16, kWarpsRank = 128;

  Form form;
  int64_t rank_columns, slice, slices, row_blocks;  // rank_columns: of a pass over x, 0, 16, 32 or a multiple of 64
  int64_t offset_sums, offset_A, floats;            // workspace: blocks' amaxes, sums [slices, rows, rank_columns], A

  // capability: 10 major + minor; has_wgmma: the build has code for sm_90a
  QuantizeLoraDownPlan(int64_t rows, int64_t cols, int64_t rank, int capability, int64_t multiprocessors,
                       bool has_wgmma) {
    rank_columns = rank == 0 ? 0 : 16;
    while (rank_columns < rank && rank_columns < 128) rank_columns *= 2;
    if (rank_columns < rank) rank_columns = (rank + 63) / 64 * 64;
    form = form_for(rows, cols, capability, has_wgmma);
    if (form == Form::kWarps) rank_columns = std::min(rank_columns, kWarpsRank);
    if (form == Form::kWarps) plan_warps(rows, cols, multiprocessors);
    if (form == Form::kBoxes) plan_boxes(rows, cols, multiprocessors);
    if (form == Form::kPanels) plan_panels(rows, cols, multiprocessors);
    offset_sums = rounded_up(slices * row_blocks);
    offset_A = offset_sums + rounded_up(slices * rows * rank_columns);
    floats = offset_A + (form == Form::kPanels ? rank_columns * arranged_columns(cols) / 2 : 0);
  }

  // Whether a warp has whole blocks of 128 columns at once, and can find their scales. In panels they take two steps: a
  // branch for the first of two makes ptxas serialize wgmma (C7515).
  bool has_whole_blocks() const { return form == Form::kBoxes && columns_of_boxes(rank_columns) == 1024; }

  static LORAKERNELS_HD constexpr int64_t arranged_columns(int64_t cols) {
    return (cols + kStepColumns - 1) / kStepColumns * kStepColumns;
  }
  static constexpr int64_t rows_of_panel(int64_t rank_columns) {
    return rank_columns == 128 || rank_columns == 192 ? 192 : 128;
  }
  static constexpr int64_t columns_of_boxes(int64_t rank_columns) { return rank_columns > 16 ? 512 : 1024; }

 private:
  // Panels need one more launch, which does not pay for few elements at 32 ranks. Boxes take ranks up to 32.
  Form form_for(int64_t rows, int64_t cols, int capability, bool has_wgmma) const {
    const bool has_room = capability / 10 == 9 || capability / 10 == 10;  // 227 KiB of shared memory, not 99
    if (!has_room || cols % 16 != 0) return Form::kWarps;
    const bool has_panels = capability == 90 && has_wgmma;
    if (rank_columns <= 16) return Form::kBoxes;
    if (rank_columns == 32 && (!has_panels || rows * cols < int64_t{1} << 23)) return Form::kBoxes;
    return has_panels ? Form::kPanels : Form::kWarps;
  }

  static int64_t rounded_up(int64_t floats) { return (floats + 31) / 32 * 32; }
  static int64_t parts(int64_t size, int64_t of) { return std::max<int64_t>(1, (size + of - 1) / of); }

  // Slices are as wide as shared memory allows, but narrow enough that every warp has work.
  void plan_warps(int64_t rows, int64_t cols, int64_t multiprocessors) {
    const int64_t blocks = multiprocessors * (rank_columns > 32 ? 1 : 2), tiles = parts(rows, kBoxRows);
    slice = rank_columns == 32 || rank_columns == 128 ? 512 : 1024;
    while (slice > 256 && tiles * parts(cols, slice) < kWarpsOfBlock * blocks) slice /= 2;
    slices = parts(cols, slice);
    row_blocks = std::max<int64_t>(1, std::min(parts(tiles, kWarpsOfBlock), blocks / slices));
  }

  void plan_boxes(int64_t rows, int64_t cols, int64_t multiprocessors) {
    slice = columns_of_boxes(rank_columns);
    slices = parts(cols, slice);
    row_blocks = std::max<int64_t>(1, std::min(parts(rows, kBoxRows), 2 * multiprocessors / slices));
  }

  void plan_panels(int64_t rows, int64_t cols, int64_t multiprocessors) {
    const int64_t blocks = multiprocessors * (rank_columns > 64 ? 1 : 2);
    row_blocks = parts(rows, rows_of_panel(rank_columns));
    slices = std::max<int64_t>(1, std::min(cols / (4 * kStepColumns), blocks / row_blocks));
    slice =
        0;  // not one width: slices have whole steps of kStepColumns, and their numbers of steps differ by at most one
  }
};

// device: CUDA ordinal, or -1 for the current one.
QuantizeLoraDownPlan quantize_lora_down_plan(int64_t rows, int64_t cols, int64_t rank, int device);

// stream: a cudaStream_t.
void launch_quantize_lora_down(const QuantizeLoraDownParams& params, void* stream, int device);

}  // namespace lorakernels
