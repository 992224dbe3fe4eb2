// SPDX-License-Identifier: Apache-2.0
#include "host/cuda_runtime_info.h"
#include "host/kernel_launch.h"
#include "host/launch_list.h"
#include "host/not_compiled.h"

namespace lorakernels {

void LaunchList::launch(const LaunchValues&, void*, int) const { not_compiled("LaunchList.run"); }
void KernelLaunch::run(const LaunchValues&, void*) const { not_compiled("LaunchList.run"); }

CudaRuntimeInfo cuda_runtime_info() {
  CudaRuntimeInfo info;
  info.error = "lorakernels._C was built without CUDA";
  return info;
}

}  // namespace lorakernels
