// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

namespace lorakernels {

// Whether csrc's .cu files were compiled for `arch`, "90a" or the like.
bool built_for(const std::string& arch);

}  // namespace lorakernels
