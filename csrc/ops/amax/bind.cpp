// SPDX-License-Identifier: Apache-2.0
#include "bindings/register.h"
#include "ops/amax/params.h"

namespace lorakernels::amax {

void register_in(py::module_& m) { m.attr("AMAX_PARTIALS") = ScaleSource::kPartials; }

}  // namespace lorakernels::amax
