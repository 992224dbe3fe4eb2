// SPDX-License-Identifier: Apache-2.0
// The dtypes that ops compute in. bindings/values.h reads them from torch's names.
#pragma once

namespace lorakernels {

enum class FloatType { kFloat32, kBFloat16, kFloat16 };

}  // namespace lorakernels
