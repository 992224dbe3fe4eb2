# SPDX-License-Identifier: Apache-2.0
"""How a region is captured, launched and given memory: on CUDA by csrc/graphs/graph.cu and torch's caching allocator.

The manager knows only the protocol, so its tests run on a CPU with a backend that imitates a pool and its reuse.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from ..compare.signature import TensorSpec, extension
from .pool import Pool

# Memsets of at most so many bytes become kernels in a graph. From 64 KiB on this gains about 0.1 µs
# (docs/facts.md, H37). 4 MiB are about what the blocks that run at once on an H200 write.
REPLACED_BYTES = 4 << 20


class Graph(Protocol):
    """An executable graph; `launch` takes the stream as an integer. `nodes`, `kernels`: counts by kind and name."""

    nodes: dict[str, int]
    kernels: dict[str, int]

    def launch(self, stream: int) -> None: ...
    def destroy(self) -> None: ...
    def write_dot(self, path: str) -> None: ...


@dataclass
class Captured:
    """The result of `Backend.capture`, set when its context ends without an error.

    `made` is "instantiated", "updated", or "instantiated: …" with the reason why no replaced graph was updated.
    """

    graph: Any = None
    made: str = "instantiated"


class Backend(Protocol):
    """One pool of memory, and captures into it."""

    device: torch.device

    def session(self) -> AbstractContextManager[None]:
        """Around a warm-up and all captures of one attempt: work runs on the capture's stream."""

    def aside(self) -> AbstractContextManager[None]:
        """Around eager work on the capture's stream, in order with the caller's stream."""

    def capture(self, replaced: Any = None) -> AbstractContextManager[Captured]:
        """Capture what runs inside. `replaced` is an executable graph that takes over the addresses if it can."""

    def allocate(self, spec: TensorSpec) -> Tensor:
        """An uninitialized tensor in the pool."""

    def alias(self, x: Tensor) -> Tensor:
        """A tensor at the same address that does not keep the memory allocated."""

    def stream(self) -> int:
        """The caller's current stream."""

    def trim(self) -> None:
        """Give cached memory outside of the pool back to the device."""

    def release(self) -> None:
        """Free the pool. No graph may replay any more."""

    def reserved_bytes(self) -> int:
        """Bytes that the pool holds."""

    def free_bytes(self) -> int:
        """Bytes of device memory that are free."""


class CudaGraph:
    """A `_C.Graph`, instantiated, with the census taken. Its template, which updates and `write_dot` read, takes host
    memory only."""

    def __init__(self, graph: Any, stream: int) -> None:
        self.graph = graph
        graph.instantiate()
        graph.upload(stream)
        self.launch = graph.launcher()
        self._take_census()

    def _take_census(self) -> None:
        self.nodes: dict[str, int] = {}
        self.kernels: dict[str, int] = {}
        for kind, name, count in self.graph.census():
            label = kind if kind == "kernel" or not name else f"{kind} {name}"
            self.nodes[label] = self.nodes.get(label, 0) + count
            if kind == "kernel":
                self.kernels[name] = count
        self.programmatic_edges = self.graph.programmatic_edges()

    def update(self, captured: Any) -> str:
        """Take over the addresses in a `_C.Graph` of the same shape; why not, if CUDA would not."""
        why_not: str = self.graph.update(captured)
        if not why_not:
            self._take_census()
        return why_not

    def destroy(self) -> None:
        self.graph.destroy()

    def write_dot(self, path: str) -> None:
        self.graph.write_dot(path)


class _Memory:
    """A piece of device memory as `torch.as_tensor` takes it without a copy, and without keeping it alive."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


@cache
def _side_stream(device: int) -> torch.cuda.Stream:
    """One for all captures: cuBLAS keeps a workspace for each stream it has run on."""
    return torch.cuda.Stream(device)


def check_device(device: torch.device) -> None:
    """ValueError if there are no CUDA graphs on it."""
    if device.type != "cuda":
        raise ValueError(
            f"the modules must be on a CUDA device before their graphs are made, found {device}"
        )


@dataclass
class CudaBackend:
    """Captures on a side stream of its own into one private pool.

    Args:
        device: the GPU.
        mode: "relaxed" lets every thread use CUDA meanwhile, a data loader that pins memory for one;
            "thread_local" forbids this thread what CUDA calls unsafe. The autograd engine's threads work in both.
    """

    device: torch.device
    mode: str = "relaxed"
    _side: Any = field(init=False)
    _pool: Pool = field(init=False)
    _index: int = field(init=False)

    def __post_init__(self) -> None:
        index = self.device.index
        self._index = torch.cuda.current_device() if index is None else index
        self.device = torch.device("cuda", self._index)
        self._side = _side_stream(self._index)
        self._pool = Pool(self._index)

    @contextmanager
    def session(self) -> Iterator[None]:
        """On the side stream, the device idle before and after, no garbage collection in between: it could destroy a
        graph or synchronize inside a capture."""
        gc.collect()
        torch.cuda.synchronize(self.device)
        self.trim()
        collecting = gc.isenabled()
        gc.disable()
        try:
            with torch.cuda.device(self.device), torch.cuda.stream(self._side):
                yield
        finally:
            if collecting:
                gc.enable()
            torch.cuda.synchronize(self.device)

    @contextmanager
    def aside(self) -> Iterator[None]:
        current = torch.cuda.current_stream(self.device)
        self._side.wait_stream(current)
        with torch.cuda.stream(self._side):
            yield
        current.wait_stream(self._side)

    @contextmanager
    def capture(self, replaced: CudaGraph | None = None) -> Iterator[Captured]:
        captured, stream = Captured(), self._side.cuda_stream
        with self._pool.routing():
            extension().graph_begin_capture(stream, self.mode)
            try:
                yield captured
            except BaseException:
                extension().graph_abort_capture(stream)
                raise
            graph = extension().graph_end_capture(stream)
        graph.replace_memsets(REPLACED_BYTES)
        if replaced is not None:
            why_not = replaced.update(graph)
            if not why_not:
                replaced.graph.upload(stream)
                captured.graph, captured.made = replaced, "updated"
                return
            replaced.destroy()
            captured.made = f"instantiated: {why_not}"
        captured.graph = CudaGraph(graph, stream)

    def allocate(self, spec: TensorSpec) -> Tensor:
        with self._pool.routing():
            return torch.empty_strided(
                spec.shape, spec.stride, dtype=spec.dtype, device=spec.device
            )

    def alias(self, x: Tensor) -> Tensor:
        """A tensor at the same place that does not keep the memory: the pool may hand it out again."""
        spec = TensorSpec.of(x)
        if spec.nbytes == 0:
            return torch.empty_strided(
                spec.shape, spec.stride, dtype=spec.dtype, device=spec.device
            )
        memory = torch.as_tensor(_Memory(x.data_ptr(), spec.nbytes), device=self.device)
        return memory.view(spec.dtype).as_strided(spec.shape, spec.stride)

    def stream(self) -> int:
        return torch._C._cuda_getCurrentRawStream(self._index)

    def trim(self) -> None:
        """Give back what eager iterations have freed: the pool cannot use it."""
        torch.cuda.empty_cache()

    def release(self) -> None:
        torch.cuda.synchronize(self.device)
        self._pool.release()
        torch.cuda.empty_cache()

    def reserved_bytes(self) -> int:
        segments = torch.cuda.memory_snapshot()
        return sum(s["total_size"] for s in segments if s["segment_pool_id"] == self._pool.id)

    def free_bytes(self) -> int:
        """Device memory that the driver can still give: graphs take some beside the allocator."""
        return torch.cuda.mem_get_info(self.device)[0]
