# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs and their memory pool, imitated on the CPU.

A capture writes down every aten op with the addresses it read and wrote; a launch runs them again on the same
addresses. New tensors come from an arena whose blocks are reused, last freed first, as soon as the tensor that had one
is gone. So whatever goes wrong on a GPU when graphs share memory (a replay out of order, an output read too late, an
alias that outlived its block) computes the same kind of wrong numbers here.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lorakernels.graphs.compare.signature import TensorSpec
from lorakernels.graphs.device.backend import Captured
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

SYNC = (torch.ops.aten._local_scalar_dense.default,)


def at(address: int, nbytes: int) -> Tensor:
    """uint8 [nbytes] at an address, owning nothing."""
    return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)


def view_of(raw: Tensor, spec: TensorSpec) -> Tensor:
    return raw.view(spec.dtype).as_strided(spec.shape, spec.stride)


class Arena:
    """Blocks of memory; a freed one is the first to be taken again."""

    def __init__(self) -> None:
        self.memory: list[Any] = []
        self.free: dict[int, list[int]] = {}
        self.live = self.total = 0

    def empty(self, spec: TensorSpec) -> Tensor:
        nbytes = -(-max(spec.nbytes, 1) // 512) * 512
        free = self.free.setdefault(nbytes, [])
        if not free:
            self.memory.append((ctypes.c_uint8 * nbytes)())
            free.append(ctypes.addressof(self.memory[-1]))
            self.total += nbytes
        address = free.pop()
        buffer = (ctypes.c_uint8 * nbytes).from_address(address)
        self.live += nbytes
        weakref.finalize(buffer, self._give_back, nbytes, address)
        raw = torch.frombuffer(buffer, dtype=torch.uint8)[: spec.nbytes]
        return view_of(raw, spec)

    def _give_back(self, nbytes: int, address: int) -> None:
        self.live -= nbytes
        self.free[nbytes].append(address)

    def owns(self, x: Tensor) -> bool:
        return any(
            ctypes.addressof(m) <= x.data_ptr() < ctypes.addressof(m) + len(m) for m in self.memory
        )


class FakeGraph:
    def __init__(self, ops: list[Any]) -> None:
        self.ops, self.alive = ops, True
        self.kernels: dict[str, int] = {}
        for func, *_ in ops:
            self.kernels[str(func)] = self.kernels.get(str(func), 0) + 1
        self.nodes = {"kernel": len(ops)}
        self.launches = 0

    @torch.no_grad()
    def launch(self, stream: int) -> None:
        assert self.alive, "launch of a destroyed graph"
        self.launches += 1
        for func, args, kwargs, outputs in self.ops:
            leaves = tree_leaves(func(*args, **kwargs))
            for x in leaves:
                if hasattr(x, "wait"):  # a collective's, which gloo runs in the background
                    x.wait()
            found = [x for x in leaves if isinstance(x, Tensor)]
            for target, value in zip(outputs, found, strict=True):
                if target is not None:
                    target.copy_(value)

    def update(self, other: FakeGraph) -> str:
        if [op[0] for op in self.ops] != [op[0] for op in other.ops]:
            return "the topology changed"
        self.ops = other.ops
        return ""

    def forget(self) -> None:
        """Its memory is given back: only an update makes it fit to launch."""
        self.ops = [op[:1] for op in self.ops]

    def destroy(self) -> None:
        self.alive = False

    def write_dot(self, path: str) -> None:
        with open(path, "w") as file:
            file.write("digraph {}\n")


class Recorder(TorchDispatchMode):
    """Writes down ops; undoes at the end what they did to memory outside of the arena, as a capture runs nothing."""

    def __init__(self, arena: Arena) -> None:
        super().__init__()
        self.arena = arena
        self.ops: list[Any] = []
        self.before: dict[int, tuple[Tensor, Tensor]] = {}
        self.host: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        hosts = {h.data_ptr() for h in self.host}
        if func in SYNC and not any(x.data_ptr() in hosts for x in given):
            raise RuntimeError("cudaErrorStreamCaptureUnsupported (imitated): .item()")
        seeded = torch.Tag.nondeterministic_seeded in func.tags
        if (
            seeded and "scaled_dot_product" not in str(func)
        ) or func in SYNC:  # that without dropout
            found = func(*args, **kwargs)
            if isinstance(found, Tensor):
                if found.numel() > 1:  # a single number is the host's: PhiloxState's nonce
                    raise RuntimeError(
                        "Attempt to increase offset for a CUDA generator not in capture mode (imitated)"
                    )
                self.host.append(found)
            return found
        self._keep(func, args, kwargs)
        memory = {x.untyped_storage().data_ptr() for x in given}
        found = func(*args, **kwargs)
        outputs: list[Tensor | None] = []

        def place(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            if x.untyped_storage().data_ptr() in memory or x.numel() == 0:
                outputs.append(None)
                return x
            new = self.arena.empty(TensorSpec.of(x))
            new.copy_(x)
            outputs.append(self._weak(new))
            return new

        result = tree_map(place, found)
        weak = tree_map(self._weak, (args, kwargs))
        self.ops.append((func, *weak, outputs))
        return result

    def _weak(self, x: Any) -> Any:
        if not isinstance(x, Tensor) or not self.arena.owns(x) or x.numel() == 0:
            return x.detach() if isinstance(x, Tensor) else x
        spec = TensorSpec.of(x)
        return view_of(at(x.data_ptr(), spec.nbytes), spec)

    def _keep(self, func: Any, args: Any, kwargs: Any) -> None:
        named = zip(func._schema.arguments, args, strict=False)
        written = [value for a, value in named if a.alias_info and a.alias_info.is_write]
        written += [
            kwargs[a.name]
            for a in func._schema.arguments
            if a.alias_info and a.alias_info.is_write and a.name in kwargs
        ]
        for x in tree_leaves(written):
            if isinstance(x, Tensor) and not self.arena.owns(x):
                self.before.setdefault(x.data_ptr(), (x.detach(), x.detach().clone()))

    def undo(self) -> None:
        for x, value in self.before.values():
            x.copy_(value)


class FakeBackend:
    """`Backend` on the CPU. `fail_at`: the number of the capture that breaks, for tests of the rollback."""

    device = torch.device("cpu")

    def __init__(self, fail_at: int | None = None) -> None:
        self.arena, self.fail_at, self.captures = Arena(), fail_at, 0
        self.graphs: list[weakref.ref[FakeGraph]] = []
        self.released = False
        self.current = 7

    @contextmanager
    def session(self) -> Iterator[None]:
        yield

    @contextmanager
    def aside(self) -> Iterator[None]:
        yield

    @contextmanager
    def capture(self, replaced: FakeGraph | None = None) -> Iterator[Captured]:
        captured = Captured()
        recorder = Recorder(self.arena)
        try:
            with recorder:
                yield captured
        finally:
            recorder.undo()
        self.captures += 1
        if self.captures - 1 == self.fail_at:
            raise RuntimeError("cudaStreamEndCapture failed: cudaErrorStreamCaptureInvalidated")
        captured.graph = FakeGraph(recorder.ops)
        if replaced is not None:
            why_not = replaced.update(captured.graph)
            captured.made = f"instantiated: {why_not}" if why_not else "updated"
            if why_not:
                replaced.destroy()
            else:
                captured.graph = replaced
        self.graphs.append(weakref.ref(captured.graph))

    def allocate(self, spec: TensorSpec) -> Tensor:
        return self.arena.empty(spec)

    def alias(self, x: Tensor) -> Tensor:
        spec = TensorSpec.of(x)
        if spec.nbytes == 0:
            return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype)
        return view_of(at(x.data_ptr(), spec.nbytes), spec)

    def stream(self) -> int:
        return self.current

    def trim(self) -> None:
        pass

    def release(self) -> None:
        self.released = True
        for ref in self.graphs:
            if (graph := ref()) is not None:
                graph.forget()

    def reserved_bytes(self) -> int:
        return self.arena.total

    def free_bytes(self) -> int:
        return 1 << 30
