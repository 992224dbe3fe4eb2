// SPDX-License-Identifier: Apache-2.0
// Stream capture on the CUDA runtime. Nothing here allocates device memory or waits for the device, except where a call
// of CUDA's does. Streams are cudaStream_t as integers; every failed call throws with the call's and the error's name.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace lorakernels {

enum class CaptureMode { kThreadLocal, kRelaxed };

// Nodes of one kind: type "kernel", "memcpy", "memset", "host", ...; `name` is the kernel's mangled name or the copy's
// direction, empty for the others.
struct NodeCount {
  std::string type;
  std::string name;
  int64_t count = 0;
};

// A captured graph, and its executable form once instantiated. Not copyable; the destructor frees both.
class Graph {
 public:
  Graph() = default;
  explicit Graph(void* graph) : graph_(graph) {}
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  ~Graph() { destroy(); }

  void instantiate();
  void upload(uintptr_t stream);
  void launch(uintptr_t stream) const;
  // Gives the executable graph the parameters (addresses too) of `other`, of the same topology, whose template it takes
  // in exchange for its own. Returns why CUDA would not, empty on success; this graph is instantiated anew then.
  std::string update(Graph& other);
  std::vector<NodeCount> census() const;
  int64_t programmatic_edges() const;  // -1 where the CUDA that this was built with does not tell
  void write_dot(const std::string& path) const;
  void destroy() noexcept;

 private:
  void* graph_ = nullptr;  // cudaGraph_t: what census, programmatic_edges, write_dot and update read
  void* exec_ = nullptr;   // cudaGraphExec_t
};

void begin_capture(uintptr_t stream, CaptureMode mode);
// Throws, with the capture ended and nothing left of it, if anything on the way has invalidated it.
void* end_capture(uintptr_t stream);
// Ends a capture that may be under way or invalid, and clears CUDA's last error. Never throws.
bool abort_capture(uintptr_t stream) noexcept;

}  // namespace lorakernels
