// SPDX-License-Identifier: Apache-2.0
// Stream capture on the CUDA runtime. Nothing here allocates device memory or waits for the device, unless a call of
// CUDA does. Streams are cudaStream_t as integers. A failed call throws an error that names the call and CUDA's error.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace lorakernels {

enum class CaptureMode { kThreadLocal, kRelaxed };

// How many nodes of one kind there are. type: "kernel", "memcpy", "memset", "host", ... `name` is a kernel's mangled
// name or a copy's direction, and empty for other types.
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

  // Puts kernels in the places of memset nodes of at most so many bytes, as of memset_nodes.h. Returns how many.
  int64_t replace_memsets(uint64_t most_bytes);
  void instantiate();
  void upload(uintptr_t stream);
  void launch(uintptr_t stream) const;
  // Gives the executable graph the parameters of `other`, addresses included, and exchanges the two captured graphs.
  // Both have the same topology. Returns an empty string, or why CUDA refused; then this graph was instantiated anew.
  std::string update(Graph& other);
  std::vector<NodeCount> census() const;
  int64_t programmatic_edges() const;  // -1 if built with a CUDA that cannot tell
  void write_dot(const std::string& path) const;
  void destroy() noexcept;

 private:
  void* graph_ = nullptr;  // cudaGraph_t: what census, programmatic_edges, write_dot and update read
  void* exec_ = nullptr;   // cudaGraphExec_t
};

void begin_capture(uintptr_t stream, CaptureMode mode);
// Throws if anything has invalidated the capture, which is ended and freed then.
void* end_capture(uintptr_t stream);
// Ends a capture, if one is under way, valid or not, and clears CUDA's last error. Returns whether there was one. Never
// throws.
bool abort_capture(uintptr_t stream) noexcept;

}  // namespace lorakernels
