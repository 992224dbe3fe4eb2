// SPDX-License-Identifier: Apache-2.0
#include "ops/amax/params.h"
#include "register.h"

namespace lorakernels {

void register_amax(py::module_& m) { m.attr("AMAX_PARTIALS") = ScaleSource::kPartials; }

}  // namespace lorakernels
