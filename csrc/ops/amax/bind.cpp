// SPDX-License-Identifier: Apache-2.0
#include "bindings/register.h"
#include "ops/amax/params.h"

namespace lorakernels {

void register_amax(py::module_& m) { m.attr("AMAX_PARTIALS") = ScaleSource::kPartials; }

}  // namespace lorakernels
