// SPDX-License-Identifier: Apache-2.0
// What lets one header serve the host compiler and nvcc, so that CPU tests pin the bits the kernels produce.
#pragma once

#ifdef __CUDACC__
#define LORAKERNELS_HD __host__ __device__ __forceinline__
#else
#define LORAKERNELS_HD inline
#endif
