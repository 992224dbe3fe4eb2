// SPDX-License-Identifier: Apache-2.0
// For functions that the host compiler and nvcc both compile, so that tests on a CPU check the bits of the kernels.
#pragma once

#ifdef __CUDACC__
#define LORAKERNELS_HD __host__ __device__ __forceinline__
#else
#define LORAKERNELS_HD inline
#endif
