// SPDX-License-Identifier: Apache-2.0
// Host code only. The driver's functions are looked up through the runtime, so that nothing links libcuda.
#include <cuda.h>

#include <map>
#include <utility>

#include "graphs/graph.h"
#include "graphs/memset_nodes.h"
#include "graphs/nodes.h"

namespace lorakernels {
namespace {

cudaStream_t as_stream(uintptr_t stream) { return reinterpret_cast<cudaStream_t>(stream); }
cudaGraph_t as_graph(void* graph) { return static_cast<cudaGraph_t>(graph); }
cudaGraphExec_t as_exec(void* exec) { return static_cast<cudaGraphExec_t>(exec); }

template <typename Function>
Function driver_function(const char* name, unsigned int version) {
  void* address = nullptr;
  cudaDriverEntryPointQueryResult found;
  const cudaError_t code = cudaGetDriverEntryPointByVersion(name, &address, version, cudaEnableDefault, &found);
  if (code != cudaSuccess || found != cudaDriverEntryPointSuccess) {
    cudaGetLastError();
    return nullptr;
  }
  return reinterpret_cast<Function>(address);
}

// Asks the driver, because this copy of the runtime does not know kernels that torch's copy registered.
std::string kernel_name(cudaGraphNode_t node) {
  using GetParams = CUresult (*)(CUgraphNode, CUDA_KERNEL_NODE_PARAMS*);
  using GetFunctionName = CUresult (*)(const char**, CUfunction);
  using GetKernelName = CUresult (*)(const char**, CUkernel);
  static const auto get_params = driver_function<GetParams>("cuGraphKernelNodeGetParams", 12000);
  static const auto function_name = driver_function<GetFunctionName>("cuFuncGetName", 12030);
  static const auto kernel_name_of = driver_function<GetKernelName>("cuKernelGetName", 12030);
  CUDA_KERNEL_NODE_PARAMS params{};
  const char* name = nullptr;
  if (get_params == nullptr || get_params(node, &params) != CUDA_SUCCESS) return "?";
  if (params.func != nullptr && function_name != nullptr) function_name(&name, params.func);
  if (params.func == nullptr && params.kern != nullptr && kernel_name_of != nullptr) {
    kernel_name_of(&name, params.kern);
  }
  return name == nullptr ? "?" : name;
}

std::string copy_direction(cudaGraphNode_t node) {
  cudaMemcpy3DParms params{};
  if (cudaGraphMemcpyNodeGetParams(node, &params) != cudaSuccess) {
    cudaGetLastError();
    return "?";
  }
  switch (params.kind) {
    case cudaMemcpyHostToHost:
      return "host to host";
    case cudaMemcpyHostToDevice:
      return "host to device";
    case cudaMemcpyDeviceToHost:
      return "device to host";
    case cudaMemcpyDeviceToDevice:
      return "device to device";
    default:
      return "?";
  }
}

std::pair<std::string, std::string> kind_of(cudaGraphNode_t node) {
  cudaGraphNodeType type;
  CHECK(cudaGraphNodeGetType(node, &type));
  switch (type) {
    case cudaGraphNodeTypeKernel:
      return {"kernel", kernel_name(node)};
    case cudaGraphNodeTypeMemcpy:
      return {"memcpy", copy_direction(node)};
    case cudaGraphNodeTypeMemset:
      return {"memset", ""};
    case cudaGraphNodeTypeHost:
      return {"host", ""};
    case cudaGraphNodeTypeGraph:
      return {"child graph", ""};
    case cudaGraphNodeTypeEmpty:
      return {"empty", ""};
    case cudaGraphNodeTypeWaitEvent:
      return {"event wait", ""};
    case cudaGraphNodeTypeEventRecord:
      return {"event record", ""};
    case cudaGraphNodeTypeMemAlloc:
      return {"allocation", ""};
    case cudaGraphNodeTypeMemFree:
      return {"free", ""};
    default:
      return {"other", ""};
  }
}

const char* update_result(cudaGraphExecUpdateResult result) {
  switch (result) {
    case cudaGraphExecUpdateErrorTopologyChanged:
      return "the topology changed";
    case cudaGraphExecUpdateErrorNodeTypeChanged:
      return "a node's type changed";
    case cudaGraphExecUpdateErrorFunctionChanged:
      return "a kernel changed";
    case cudaGraphExecUpdateErrorUnsupportedFunctionChange:
      return "a kernel changed in a way that cannot be updated";
    case cudaGraphExecUpdateErrorParametersChanged:
      return "parameters changed that cannot be updated";
    case cudaGraphExecUpdateErrorAttributesChanged:
      return "a node's attributes changed";
    case cudaGraphExecUpdateErrorNotSupported:
      return "a node does not support updates";
    default:
      return "an unnamed reason";
  }
}

}  // namespace

int64_t Graph::replace_memsets(uint64_t most_bytes) {
  if (exec_ != nullptr) throw std::runtime_error("Graph.replace_memsets: it is instantiated already");
  if (graph_ == nullptr) throw std::runtime_error("Graph.replace_memsets: there is no captured graph");
  return replace_memset_nodes(as_graph(graph_), most_bytes);
}

void Graph::instantiate() {
  if (exec_ != nullptr) throw std::runtime_error("Graph.instantiate: it is instantiated already");
  if (graph_ == nullptr) throw std::runtime_error("Graph.instantiate: there is no captured graph");
  cudaGraphExec_t exec = nullptr;
  // Nodes keep the priorities they were captured with. A later update needs the same priorities.
  CHECK(cudaGraphInstantiate(&exec, as_graph(graph_), cudaGraphInstantiateFlagUseNodePriority));
  exec_ = exec;
}

void Graph::upload(uintptr_t stream) {
  if (exec_ == nullptr) throw std::runtime_error("Graph.upload: it is not instantiated");
  CHECK(cudaGraphUpload(as_exec(exec_), as_stream(stream)));
}

void Graph::launch(uintptr_t stream) const {
  if (exec_ == nullptr) throw std::runtime_error("Graph.launch: it is not instantiated, or was destroyed");
  CHECK(cudaGraphLaunch(as_exec(exec_), as_stream(stream)));
}

std::string Graph::update(Graph& other) {
  if (exec_ == nullptr) throw std::runtime_error("Graph.update: it is not instantiated");
  if (graph_ == nullptr) throw std::runtime_error("Graph.update: it has no captured graph");
  if (other.graph_ == nullptr) throw std::runtime_error("Graph.update: the other has no captured graph");
  cudaGraphExecUpdateResultInfo info{};
  const cudaError_t code = cudaGraphExecUpdate(as_exec(exec_), as_graph(other.graph_), &info);
  if (code == cudaSuccess) {
    std::swap(graph_, other.graph_);
    return "";
  }
  cudaGetLastError();
  // A refused update may have changed some nodes already. With driver 580 the first kernel had the new addresses.
  CHECK(cudaGraphExecDestroy(as_exec(std::exchange(exec_, nullptr))));
  instantiate();
  if (code != cudaErrorGraphExecUpdateFailure) check_cuda(code, "cudaGraphExecUpdate");
  return update_result(info.result);
}

std::vector<NodeCount> Graph::census() const {
  if (graph_ == nullptr) throw std::runtime_error("Graph.census: it has no captured graph");
  std::map<std::pair<std::string, std::string>, int64_t> counts;
  for (const cudaGraphNode_t node : nodes_of(as_graph(graph_))) ++counts[kind_of(node)];
  std::vector<NodeCount> result;
  for (const auto& [kind, count] : counts) result.push_back({kind.first, kind.second, count});
  return result;
}

int64_t Graph::programmatic_edges() const {
  if (graph_ == nullptr) throw std::runtime_error("Graph.programmatic_edges: it has no captured graph");
#if CUDART_VERSION >= 13000
  size_t size = 0;
  CHECK(cudaGraphGetEdges(as_graph(graph_), nullptr, nullptr, nullptr, &size));
  std::vector<cudaGraphNode_t> from(size), to(size);
  std::vector<cudaGraphEdgeData> data(size);
  if (size > 0) CHECK(cudaGraphGetEdges(as_graph(graph_), from.data(), to.data(), data.data(), &size));
  int64_t count = 0;
  for (const cudaGraphEdgeData& edge : data) count += edge.type == cudaGraphDependencyTypeProgrammatic;
  return count;
#else
  return -1;
#endif
}

void Graph::write_dot(const std::string& path) const {
  if (graph_ == nullptr) throw std::runtime_error("Graph.write_dot: it has no captured graph");
  CHECK(cudaGraphDebugDotPrint(as_graph(graph_), path.c_str(), cudaGraphDebugDotFlagsVerbose));
}

void Graph::destroy() noexcept {
  if (exec_ != nullptr && cudaGraphExecDestroy(as_exec(exec_)) != cudaSuccess) cudaGetLastError();
  if (graph_ != nullptr && cudaGraphDestroy(as_graph(graph_)) != cudaSuccess) cudaGetLastError();
  exec_ = graph_ = nullptr;
}

void begin_capture(uintptr_t stream, CaptureMode mode) {
  const auto cuda_mode =
      mode == CaptureMode::kRelaxed ? cudaStreamCaptureModeRelaxed : cudaStreamCaptureModeThreadLocal;
  CHECK(cudaStreamBeginCapture(as_stream(stream), cuda_mode));
}

void* end_capture(uintptr_t stream) {
  cudaGraph_t graph = nullptr;
  const cudaError_t code = cudaStreamEndCapture(as_stream(stream), &graph);
  if (code != cudaSuccess && graph != nullptr) cudaGraphDestroy(graph);
  check_and_clear(code, "cudaStreamEndCapture");
  return graph;
}

bool abort_capture(uintptr_t stream) noexcept {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  const bool underway =
      cudaStreamIsCapturing(as_stream(stream), &status) != cudaSuccess || status != cudaStreamCaptureStatusNone;
  if (underway) {
    cudaGraph_t graph = nullptr;
    cudaStreamEndCapture(as_stream(stream), &graph);
    if (graph != nullptr) cudaGraphDestroy(graph);
  }
  cudaGetLastError();
  return underway;
}

}  // namespace lorakernels
