// SPDX-License-Identifier: Apache-2.0
#include "graphs/graph.h"
#include "host/not_compiled.h"

namespace lorakernels {

int64_t Graph::replace_memsets(uint64_t) { not_compiled("Graph.replace_memsets"); }
void Graph::instantiate() { not_compiled("Graph.instantiate"); }
void Graph::upload(uintptr_t) { not_compiled("Graph.upload"); }
void Graph::launch(uintptr_t) const { not_compiled("Graph.launch"); }
std::string Graph::update(Graph&) { not_compiled("Graph.update"); }
std::vector<NodeCount> Graph::census() const { not_compiled("Graph.census"); }
int64_t Graph::programmatic_edges() const { not_compiled("Graph.programmatic_edges"); }
void Graph::write_dot(const std::string&) const { not_compiled("Graph.write_dot"); }
void Graph::destroy() noexcept {}
void begin_capture(uintptr_t, CaptureMode) { not_compiled("graph_begin_capture"); }
void* end_capture(uintptr_t) { not_compiled("graph_end_capture"); }
bool abort_capture(uintptr_t) noexcept { return false; }

}  // namespace lorakernels
