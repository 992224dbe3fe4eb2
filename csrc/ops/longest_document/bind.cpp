// SPDX-License-Identifier: Apache-2.0
#include "bindings/register.h"
#include "bindings/values.h"
#include "host/launch_list.h"
#include "ops/longest_document/params.h"

namespace lorakernels::longest_document {
namespace {

void check_longest_document(Address starts, int64_t documents, int64_t longest, const Where& where) {
  check_sizes("check_longest_document", {{"documents", documents}, {"longest", longest}});
  const LongestDocumentParams params{starts.as<const int32_t>(), documents, longest};
  submit("check_longest_document", params, &launch_longest_document, where.stream, where.device);
}

}  // namespace

void register_in(py::module_& m) {
  m.def("check_longest_document", &check_longest_document, py::arg("starts"), py::arg("documents"), py::arg("longest"),
        py::arg("where"),
        "A device assertion that none of the documents between starts, int32 [documents + 1], is longer than longest");
}

}  // namespace lorakernels::longest_document
