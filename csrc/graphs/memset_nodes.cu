// SPDX-License-Identifier: Apache-2.0
// Memset nodes as kernel nodes, because a replayed graph goes on sooner from kernel to kernel (docs/facts.md, H37).
#include <algorithm>
#include <vector>

#include "device/platform.h"
#include "graphs/memset_nodes.h"
#include "graphs/nodes.h"

namespace lorakernels {
namespace {

constexpr int kThreads = 256;
constexpr uint64_t kPiece = 16;  // bytes a thread

struct Memory {
  uint64_t begin;
  uint64_t bytes;
  uint32_t word;  // what is written at addresses that are multiples of 4; elements of 1 and 2 bytes are repeated

  LORAKERNELS_HD uint64_t first_piece() const { return begin / kPiece * kPiece; }
};

// A piece begins at a multiple of its size. The first and the last may hang over the memory, which begins anywhere.
__global__ void __launch_bounds__(kThreads) memset_kernel(Memory memory) {
  const uint64_t end = memory.begin + memory.bytes;
  const uint64_t from = memory.first_piece() + (uint64_t{blockIdx.x} * kThreads + threadIdx.x) * kPiece;
  const uint64_t to = from + kPiece;
  if (from >= memory.begin && to <= end) {
    *reinterpret_cast<uint4*>(from) = make_uint4(memory.word, memory.word, memory.word, memory.word);
    return;
  }
  for (uint64_t at = max(from, memory.begin); at < min(to, end); ++at) {
    *reinterpret_cast<uint8_t*>(at) = static_cast<uint8_t>(memory.word >> (at % 4 * 8));
  }
}

cudaGraphNodeType type_of(cudaGraphNode_t node) {
  cudaGraphNodeType type;
  CHECK(cudaGraphNodeGetType(node, &type));
  return type;
}

struct Edges {
  std::vector<cudaGraphNode_t> nodes;  // at the other ends
  std::vector<cudaGraphEdgeData> data;
};

template <typename Get>
Edges edges(cudaGraphNode_t node, Get get) {
  size_t size = 0;
  CHECK(get(node, nullptr, nullptr, &size));
  Edges found{std::vector<cudaGraphNode_t>(size), std::vector<cudaGraphEdgeData>(size)};
  if (size > 0) CHECK(get(node, found.nodes.data(), found.data.data(), &size));
  return found;
}

#if CUDART_VERSION >= 13000
Edges before(cudaGraphNode_t node) { return edges(node, cudaGraphNodeGetDependencies); }
Edges after(cudaGraphNode_t node) { return edges(node, cudaGraphNodeGetDependentNodes); }
constexpr auto add_dependencies = cudaGraphAddDependencies;
#else
Edges before(cudaGraphNode_t node) { return edges(node, cudaGraphNodeGetDependencies_v2); }
Edges after(cudaGraphNode_t node) { return edges(node, cudaGraphNodeGetDependentNodes_v2); }
constexpr auto add_dependencies = cudaGraphAddDependencies_v2;
#endif

bool on_current_device(const void* address) {
  cudaPointerAttributes attributes{};
  int device = 0;
  CHECK(cudaGetDevice(&device));
  CHECK(cudaPointerGetAttributes(&attributes, address));
  return attributes.type == cudaMemoryTypeDevice && attributes.device == device;
}

// What the node writes; `bytes` is 0 if a kernel cannot stand for it.
Memory written(cudaGraphNode_t node, uint64_t most_bytes) {
  cudaMemsetParams params{};
  CHECK(cudaGraphMemsetNodeGetParams(node, &params));
  const uint64_t row = uint64_t{params.width} * params.elementSize, bytes = row * params.height;
  const auto begin = reinterpret_cast<uint64_t>(params.dst);
  const bool dense = params.height == 1 || params.pitch == row;
  if (!dense || bytes == 0 || bytes > most_bytes || begin % params.elementSize != 0 || !on_current_device(params.dst)) {
    return {begin, 0, 0};
  }
  switch (params.elementSize) {
    case 1:
      return {begin, bytes, (params.value & 0xffu) * 0x01010101u};
    case 2:
      return {begin, bytes, (params.value & 0xffffu) * 0x00010001u};
    default:
      return {begin, bytes, params.value};
  }
}

// A captured kernel has its stream's priority, a memset none. 0 is the least urgent.
int most_urgent(const std::vector<cudaGraphNode_t>& nodes) {
  int most = 0;
  for (const cudaGraphNode_t node : nodes) {
    if (type_of(node) != cudaGraphNodeTypeKernel) continue;
    cudaKernelNodeAttrValue value{};
    CHECK(cudaGraphKernelNodeGetAttribute(node, cudaLaunchAttributePriority, &value));
    most = std::min(most, value.priority);
  }
  return most;
}

void set_priority(cudaGraphNode_t kernel, int priority) {
  cudaKernelNodeAttrValue value{};
  value.priority = priority;
  CHECK(cudaGraphKernelNodeSetAttribute(kernel, cudaLaunchAttributePriority, &value));
}

void replace(cudaGraph_t graph, cudaGraphNode_t node, Memory memory) {
  const uint64_t pieces = (memory.begin + memory.bytes - memory.first_piece() + kPiece - 1) / kPiece;
  void* arguments[] = {&memory};
  cudaKernelNodeParams params{};
  params.func = reinterpret_cast<void*>(&memset_kernel);
  params.gridDim = dim3(static_cast<unsigned>((pieces + kThreads - 1) / kThreads));
  params.blockDim = dim3(kThreads);
  params.kernelParams = arguments;
  cudaGraphNode_t kernel = nullptr;
  CHECK(cudaGraphAddKernelNode(&kernel, graph, nullptr, 0, &params));
  const Edges in = before(node), out = after(node);
  const std::vector<cudaGraphNode_t> here(std::max(in.nodes.size(), out.nodes.size()), kernel);
  // No edge at a memset is programmatic: CUDA has those between kernels alone.
  if (!in.nodes.empty()) {
    CHECK(add_dependencies(graph, in.nodes.data(), here.data(), in.data.data(), in.nodes.size()));
  }
  if (!out.nodes.empty()) {
    CHECK(add_dependencies(graph, here.data(), out.nodes.data(), out.data.data(), out.nodes.size()));
  }
  set_priority(kernel, std::min(most_urgent(in.nodes), most_urgent(out.nodes)));
  CHECK(cudaGraphDestroyNode(node));
}

}  // namespace

int64_t replace_memset_nodes(cudaGraph_t graph, uint64_t most_bytes) {
  std::vector<cudaGraphNode_t> memsets;
  for (const cudaGraphNode_t node : nodes_of(graph)) {
    const cudaGraphNodeType type = type_of(node);
    if (type == cudaGraphNodeTypeMemAlloc || type == cudaGraphNodeTypeMemFree) return 0;
    if (type == cudaGraphNodeTypeMemset) memsets.push_back(node);
  }
  int64_t replaced = 0;
  for (const cudaGraphNode_t node : memsets) {
    const Memory memory = written(node, most_bytes);
    if (memory.bytes == 0) continue;
    replace(graph, node, memory);
    ++replaced;
  }
  return replaced;
}

}  // namespace lorakernels
