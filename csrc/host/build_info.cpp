// SPDX-License-Identifier: Apache-2.0
// setup.py defines the LORAKERNELS_BUILD_* macros for this file only, so that a change of them compiles no other file
// again.
#include "host/build_info.h"

#include "bindings/register.h"
#include "host/cuda_runtime_info.h"

namespace lorakernels {
namespace {

std::string compiler_version() {
#if defined(__clang__)
  return std::string("clang ") + __clang_version__;
#else
  return std::string("gcc ") + __VERSION__;
#endif
}

py::dict build_info() {
  py::dict info;
  info["version"] = LORAKERNELS_BUILD_VERSION;
  info["cuda"] = static_cast<bool>(LORAKERNELS_BUILD_CUDA);
  info["cuda_archs"] = std::string(LORAKERNELS_BUILD_CUDA_ARCHS);
  info["nvcc"] = std::string(LORAKERNELS_BUILD_NVCC);
  info["why_no_cuda"] = std::string(LORAKERNELS_BUILD_WHY_NO_CUDA);
  info["compiler"] = compiler_version();
  return info;
}

py::dict runtime_info() {
  const CudaRuntimeInfo runtime = cuda_runtime_info();
  py::list devices;
  for (const CudaDeviceInfo& device : runtime.devices) {
    py::dict entry;
    entry["name"] = device.name;
    entry["capability"] = py::make_tuple(device.capability_major, device.capability_minor);
    entry["multiprocessors"] = device.multiprocessors;
    entry["memory_bytes"] = device.memory_bytes;
    devices.append(entry);
  }
  py::dict info;
  info["compiled"] = runtime.compiled;
  info["runtime_version"] = runtime.runtime_version;
  info["driver_version"] = runtime.driver_version;
  info["devices"] = devices;
  info["error"] = runtime.error;
  return info;
}

}  // namespace

bool built_for(const std::string& arch) {
  return (";" + std::string(LORAKERNELS_BUILD_CUDA_ARCHS) + ";").find(";" + arch + ";") != std::string::npos;
}

void register_build_info(py::module_& m) {
  m.def("build_info", &build_info, "What this extension was built with; asks no driver");
  m.def("cuda_runtime_info", &runtime_info,
        "What the CUDA runtime finds now; a missing driver is an answer, not an error");
}

}  // namespace lorakernels
