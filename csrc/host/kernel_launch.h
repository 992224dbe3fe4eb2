// SPDX-License-Identifier: Apache-2.0
// The launch of a kernel that another compiler made and loaded, in a LaunchList.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "host/launch_list.h"

namespace lorakernels {

struct KernelParameter {
  bool is_address;
  uint64_t bits;  // an address, or a number in the lowest bytes
};

class KernelLaunch final : public Launch {
 public:
  static constexpr size_t kMostParameters = 64;

  void* function;  // a CUfunction, which may take shared_bytes already
  std::array<uint32_t, 3> grid;
  uint32_t threads;
  uint32_t shared_bytes;  // dynamic
  bool early;             // as of launch_kernel() in host/launch.h; the GPU must be of Hopper or later
  std::vector<KernelParameter> parameters;

  std::string name() const override { return "kernel"; }
  void rewrite(Rewriting& rewriting) override {
    for (KernelParameter& each : parameters) {
      if (each.is_address) each.bits = rewriting.address(each.bits);
    }
  }
  void run(const LaunchValues& values, void* stream) const override;
};

}  // namespace lorakernels
