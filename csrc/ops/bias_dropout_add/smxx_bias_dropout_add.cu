// SPDX-License-Identifier: Apache-2.0
#include <initializer_list>
#include <type_traits>

#include "device/overlap.h"
#include "device/pairs.h"
#include "host/launch.h"
#include "ops/bias_dropout_add/params.h"

namespace lorakernels {
namespace {

using Grid = BiasDropoutAddGrid;

constexpr int kLanes = kDropoutLanesPerDraw;  // columns of a thread: those of one draw, 16 bytes of bf16
constexpr int kGradColumns = 32;              // of a block of bias_grad_kernel
constexpr int kGradRows = Grid::kThreads / kGradColumns;

// How many rows a thread loads together: 32 bytes of each tensor, or one row if elements are loaded one by one.
template <typename T, bool kVector>
constexpr int kRowsInFlight = kVector ? 4 / sizeof(T) : 1;

__device__ float to_float(float x) { return x; }
__device__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ float to_float(__half x) { return __half2float(x); }

// Eight neighbouring elements, kept as words. For a struct of T the compiler makes 4-byte accesses.
template <typename T>
struct Group {
  static constexpr int kWords = kLanes * sizeof(T) / sizeof(uint32_t);
  uint32_t word[kWords];

  __device__ void to_floats(float (&value)[kLanes]) const {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      if constexpr (std::is_same_v<T, float>) {
        value[i] = __uint_as_float(word[i]);
      } else {
        const float2 two = unpacked<T>(word[i]);
        value[2 * i] = two.x, value[2 * i + 1] = two.y;
      }
    }
  }

  __device__ void round(const float (&value)[kLanes]) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      if constexpr (std::is_same_v<T, float>) {
        word[i] = __float_as_uint(value[i]);
      } else {
        word[i] = packed<T>(value[2 * i], value[2 * i + 1]);
      }
    }
  }
};

// The eight columns of one draw: local columns first to first + 7, of which those inside [0, cols) exist. With kVector
// all eight exist, at 16-byte aligned addresses.
template <bool kVector>
struct Columns {
  int64_t first;
  int64_t cols;
  uint32_t group;  // of the logical tensor

  __device__ Columns(int64_t index, int64_t cols, uint32_t first_col)
      : first((static_cast<int64_t>(first_col / kLanes) + index) * kLanes - first_col),
        cols(cols),
        group(first_col / kLanes + static_cast<uint32_t>(index)) {}

  __device__ bool inside() const { return first < cols; }
  __device__ bool has(int lane) const { return kVector || (first + lane >= 0 && first + lane < cols); }

  // `source` and `target` are the addresses of a row's element `first`.
  template <typename T>
  __device__ void load(Group<T>& group, const T* source) const {
    if constexpr (kVector) {
#pragma unroll
      for (int i = 0; i < Group<T>::kWords; i += 4) {
        const uint4 four = *reinterpret_cast<const uint4*>(reinterpret_cast<const uint32_t*>(source) + i);
        group.word[i] = four.x, group.word[i + 1] = four.y, group.word[i + 2] = four.z, group.word[i + 3] = four.w;
      }
    } else {
      float value[kLanes];
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) value[lane] = has(lane) ? to_float(source[lane]) : 0.0f;
      group.round(value);
    }
  }

  template <typename T>
  __device__ void store(T* target, const float (&value)[kLanes]) const {
    if constexpr (kVector) {
      Group<T> group;
      group.round(value);
#pragma unroll
      for (int i = 0; i < Group<T>::kWords; i += 4) {
        // nvcc 13.0 makes four stores of 4 bytes of an assignment
        __stwb(reinterpret_cast<uint4*>(reinterpret_cast<uint32_t*>(target) + i),
               make_uint4(group.word[i], group.word[i + 1], group.word[i + 2], group.word[i + 3]));
      }
    } else {
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        if (has(lane)) target[lane] = static_cast<T>(value[lane]);
      }
    }
  }
};

// The rule of device/philox.h for one slot. Without kDropout it keeps everything.
template <bool kDropout>
struct Dropout {
  uint64_t key = 0, offset = 0;
  uint32_t site, threshold;
  RowsOfTensor rows;
  float scale;

  __device__ explicit Dropout(const DropoutParams& params)
      : site(params.site), threshold(params.threshold), rows(params.rows) {
    if constexpr (kDropout) {
      key = static_cast<uint64_t>(params.slot[0]);
      offset = static_cast<uint64_t>(params.slot[1]);
      scale = dropout_survivor_scale(threshold);  // once, here; the compiler would read the parameter for each element
    }
  }

  // The draws of rows `row`, row + step, … of a column group.
  template <int kRows>
  __device__ void draw(PhiloxDraw (&draws)[kRows], uint32_t row, uint32_t step, uint32_t group) const {
    if constexpr (kDropout) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        draws[i] = {{rows(row + i * step), group, static_cast<uint32_t>(offset), site}};
      }
      philox4x32_10(draws, static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32));
    }
  }

  // mask ⊙ value / (1 − p). The product is rounded before anything is added, as in reference_layer.py.
  __device__ void apply(float (&value)[kLanes], const PhiloxDraw& draw) const {
    if constexpr (kDropout) {
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        value[lane] = dropout_keeps(draw, lane, threshold) ? __fmul_rn(value[lane], scale) : 0.0f;
      }
    }
  }
};

template <typename T, bool kVector>
__device__ void read_bias(float (&bias)[kLanes], const void* source, const Columns<kVector>& columns) {
#pragma unroll
  for (int lane = 0; lane < kLanes; ++lane) {
    if (columns.has(lane)) bias[lane] = to_float(static_cast<const T*>(source)[columns.first + lane]);
  }
}

// The rows of a thread: first, first + step, …
struct Rows {
  uint32_t first = blockIdx.y * blockDim.y + threadIdx.y;
  uint32_t step = gridDim.y * blockDim.y;
};

// Threads [x, y]: x counts column groups, y rows. A thread keeps its columns, and their bias, for all its rows.
template <typename T, bool kDropout, bool kResidual, bool kVector>
__global__ void __launch_bounds__(Grid::kThreads, kVector ? 4 : 2)
    bias_dropout_add_kernel(const BiasDropoutAddParams params) {
  const Columns<kVector> columns(static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x, params.cols,
                                 params.dropout.first_col);
  if (!columns.inside()) return;
  const Dropout<kDropout> dropout(params.dropout);
  float bias[kLanes];
#pragma unroll
  for (int lane = 0; lane < kLanes; ++lane) bias[lane] = -0.0f;  // adding it changes no x, not even -0
  if (params.bias != nullptr) {
    params.bias_dtype == params.dtype ? read_bias<T>(bias, params.bias, columns)
                                      : read_bias<float>(bias, params.bias, columns);
  }
  constexpr int kRows = kRowsInFlight<T, kVector>;
  const Rows rows;
  const uint32_t end = static_cast<uint32_t>(params.rows);
  const int64_t row_step = rows.step * params.cols;
  int64_t at = rows.first * params.cols + columns.first;
  for (uint32_t first = rows.first; first < end; first += rows.step * kRows, at += row_step * kRows) {
    Group<T> xs[kRows], residuals[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (first + i * rows.step >= end) continue;
      columns.load(xs[i], static_cast<const T*>(params.x) + at + i * row_step);
      if constexpr (kResidual) columns.load(residuals[i], static_cast<const T*>(params.residual) + at + i * row_step);
    }
    PhiloxDraw draws[kRows];
    dropout.draw(draws, first, rows.step, columns.group);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (first + i * rows.step >= end) continue;
      float value[kLanes], residual[kLanes];
      xs[i].to_floats(value);
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) value[lane] += bias[lane];
      dropout.apply(value, draws[i]);
      if constexpr (kResidual) {
        residuals[i].to_floats(residual);
#pragma unroll
        for (int lane = 0; lane < kLanes; ++lane) value[lane] = __fadd_rn(value[lane], residual[lane]);
      }
      columns.store(static_cast<T*>(params.out) + at + i * row_step, value);
    }
  }
}

// Writes the block's sum over its rows to this chunk's row of `partial`. In each round half of the threads add what the
// other half has.
template <bool kVector>
__device__ void write_partial_sums(float* partial, const float (&sum)[kLanes], const Columns<kVector>& columns) {
  __shared__ float block_sum[Grid::kThreads][kLanes];
  float* const mine = block_sum[threadIdx.y * blockDim.x + threadIdx.x];
#pragma unroll
  for (int lane = 0; lane < kLanes; ++lane) mine[lane] = sum[lane];
  for (int half = blockDim.y / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.y >= half) continue;
    const float* const other = block_sum[(threadIdx.y + half) * blockDim.x + threadIdx.x];
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) mine[lane] += other[lane];
  }
  if (threadIdx.y != 0 || !columns.inside()) return;
#pragma unroll
  for (int lane = 0; lane < kLanes; ++lane) {
    if (columns.has(lane)) partial[blockIdx.y * columns.cols + columns.first + lane] = mine[lane];
  }
}

template <typename T, bool kDropout, bool kBias, bool kVector>
__global__ void __launch_bounds__(Grid::kThreads, kVector ? 4 : 2)
    bias_dropout_add_backward_kernel(const BiasDropoutAddBackwardParams params) {
  const Columns<kVector> columns(static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x, params.cols,
                                 params.dropout.first_col);
  if constexpr (kBias) let_next_kernel_start();
  const Dropout<kDropout> dropout(params.dropout);
  float sum[kLanes] = {};
  constexpr int kRows =
      kRowsInFlight<T, kVector> * (kVector && !(kBias && kDropout) ? 2 : 1);  // as many as registers allow
  const Rows rows;
  const uint32_t end = columns.inside() ? static_cast<uint32_t>(params.rows) : 0;
  const int64_t row_step = rows.step * params.cols;
  int64_t at = rows.first * params.cols + columns.first;
  for (uint32_t first = rows.first; first < end; first += rows.step * kRows, at += row_step * kRows) {
    Group<T> gradients[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (first + i * rows.step >= end) continue;
      columns.load(gradients[i], static_cast<const T*>(params.dout) + at + i * row_step);
    }
    PhiloxDraw draws[kRows];
    dropout.draw(draws, first, rows.step, columns.group);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (first + i * rows.step >= end) continue;
      float value[kLanes];
      gradients[i].to_floats(value);
      dropout.apply(value, draws[i]);
      if constexpr (kDropout) columns.store(static_cast<T*>(params.dx) + at + i * row_step, value);
      if constexpr (kBias) {
#pragma unroll
        for (int lane = 0; lane < kLanes; ++lane) sum[lane] += value[lane];
      }
    }
  }
  if constexpr (kBias) write_partial_sums(params.partial, sum, columns);
}

// Adds up dbias from the chunks' partial sums.
template <typename T>
__global__ void __launch_bounds__(Grid::kThreads)
    bias_grad_kernel(T* dbias, const float* partial, int64_t chunks, int64_t cols) {
  __shared__ float row_sum[kGradRows][kGradColumns];
  begin_after_previous_kernel();
  const int64_t col = static_cast<int64_t>(blockIdx.x) * kGradColumns + threadIdx.x;
  float sum = 0.0f;
  for (int64_t chunk = threadIdx.y; col < cols && chunk < chunks; chunk += kGradRows) {
    sum += partial[chunk * cols + col];
  }
  row_sum[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || col >= cols) return;
  for (int row = 1; row < kGradRows; ++row) sum += row_sum[row][threadIdx.x];
  dbias[col] = static_cast<T>(sum);
}

template <typename T>
struct Type {
  using type = T;
};

template <typename Launch>
void with_type(FloatType dtype, Launch&& launch) {
  switch (dtype) {
    case FloatType::kFloat32:
      return launch(Type<float>{});
    case FloatType::kBFloat16:
      return launch(Type<__nv_bfloat16>{});
    case FloatType::kFloat16:
      return launch(Type<__half>{});
  }
}

template <typename Launch>
void with_flag(bool flag, Launch&& launch) {
  flag ? launch(std::true_type{}) : launch(std::false_type{});
}

// Whether every column group is whole and 16-byte aligned. Absent tensors have a null address.
bool takes_vectors(int64_t cols, const DropoutParams& dropout, std::initializer_list<const void*> addresses) {
  uintptr_t bits = 0;
  for (const void* address : addresses) bits |= reinterpret_cast<uintptr_t>(address);
  return cols % kLanes == 0 && dropout.first_col % kLanes == 0 && bits % 16 == 0;
}

dim3 block_of(const Grid& grid) { return dim3(grid.block_x, grid.block_y); }
dim3 grid_of(const Grid& grid) { return dim3(static_cast<unsigned>(grid.grid_x), static_cast<unsigned>(grid.grid_y)); }

}  // namespace

void launch_bias_dropout_add(const BiasDropoutAddParams& params, void* stream, int device) {
  if (params.rows == 0 || params.cols == 0) return;
  const DeviceGuard guard(device);
  const Grid grid(params.rows, params.cols, params.dropout.first_col, false, current_device().multiprocessors);
  const bool vectors = takes_vectors(params.cols, params.dropout, {params.out, params.x, params.residual});
  with_type(params.dtype, [&](auto type) {
    with_flag(params.dropout.threshold > 0, [&](auto drops) {
      with_flag(params.residual != nullptr, [&](auto residual) {
        with_flag(vectors, [&](auto vector) {
          using T = typename decltype(type)::type;
          bias_dropout_add_kernel<T, drops.value, residual.value, vector.value>
              <<<grid_of(grid), block_of(grid), 0, static_cast<cudaStream_t>(stream)>>>(params);
        });
      });
    });
  });
  LORAKERNELS_CHECK_LAUNCH("bias_dropout_add");
}

void launch_bias_dropout_add_backward(const BiasDropoutAddBackwardParams& params, void* stream, int device) {
  if (params.cols == 0) return;
  const DeviceGuard guard(device);
  const auto on = static_cast<cudaStream_t>(stream);
  const Grid grid(params.rows, params.cols, params.dropout.first_col, params.dbias != nullptr,
                  current_device().multiprocessors);
  const bool vectors = takes_vectors(params.cols, params.dropout, {params.dx, params.dout});
  with_type(params.dtype, [&](auto type) {
    with_flag(params.dropout.threshold > 0, [&](auto drops) {
      with_flag(params.dbias != nullptr, [&](auto bias) {
        with_flag(vectors, [&](auto vector) {
          using T = typename decltype(type)::type;
          bias_dropout_add_backward_kernel<T, drops.value, bias.value, vector.value>
              <<<grid_of(grid), block_of(grid), 0, on>>>(params);
        });
      });
    });
  });
  LORAKERNELS_CHECK_LAUNCH("bias_dropout_add_backward");
  if (params.dbias == nullptr) return;
  with_type(params.bias_dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const dim3 blocks(static_cast<unsigned>((params.cols + kGradColumns - 1) / kGradColumns));
    launch_kernel(bias_grad_kernel<T>, blocks, dim3(kGradColumns, kGradRows), 0, on, true,
                  static_cast<T*>(params.dbias), static_cast<const float*>(params.partial), grid.grid_y, params.cols);
  });
}

}  // namespace lorakernels
