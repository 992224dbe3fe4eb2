// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "bindings/register.h"

namespace lorakernels {

void register_graph_call(py::module_& m);

}  // namespace lorakernels
