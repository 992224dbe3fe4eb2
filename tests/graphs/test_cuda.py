# SPDX-License-Identifier: Apache-2.0
"""The capture itself, on a GPU: what is in the graphs, what they cost, and torch's own graphs as a reference."""

from __future__ import annotations

import contextlib
import copy
import gc
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lorakernels.graphs import CaptureError, CudaBackend, GraphManager, GraphOptions, ReplayError
from lorakernels.graphs.device.backend import Captured
from lorakernels.graphs.device.pool import Pool
from torch import Tensor, nn

from tests.graphs.layers import Block, batches, managed, run, same, stack, twins, warm

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


class TorchGraph:
    """A torch.cuda.CUDAGraph under our interface."""

    def __init__(self, graph: torch.cuda.CUDAGraph) -> None:
        self.graph, self.nodes, self.kernels = graph, {}, {}

    def launch(self, stream: int) -> None:
        self.graph.replay()

    def destroy(self) -> None:
        self.graph.reset()


class TorchBackend(CudaBackend):
    """The same captures made by torch.cuda.CUDAGraph: the reference."""

    @contextlib.contextmanager
    def capture(self, replaced: TorchGraph | None = None) -> Iterator[Captured]:
        captured, graph = Captured(), torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool.id, capture_error_mode=self.mode)
        try:
            yield captured
        finally:
            graph.capture_end()
        captured.graph = TorchGraph(graph)


def train(layers: Any, manager: GraphManager, data: Tensor) -> list[Tensor]:
    optimizer, found = torch.optim.SGD(layers.parameters(), lr=0.1), []
    for batch in data:
        for x in batch:
            y = run(layers, x)
            y.square().sum().backward()
            found.append(y.detach().clone())
        optimizer.step()
        found += [p.grad.clone() for p in layers.parameters()]
        optimizer.zero_grad()
        manager.end_iteration()
    return found


def test_torchs_graphs_give_the_same_bits() -> None:
    layers = stack(CUDA, 4)
    data = torch.randn(5, 2, 3, 8, device=CUDA)
    results = []
    for make in (lambda: CudaBackend(CUDA), lambda: TorchBackend(CUDA)):
        model = copy.deepcopy(layers)
        manager = managed(model, CUDA, num_microbatches=2, backend=make)
        results.append(train(model, manager, data))
        assert manager.phase == "replaying"
        manager.close()
    assert all(map(torch.equal, *results))


def test_census_of_a_linear_layer(tmp_path) -> None:
    """What the graphs hold: kernels by name, no copy to the host, no host function, no event."""
    layer = nn.Linear(64, 64, device=CUDA)
    manager = GraphManager([layer], warmup_steps=1)
    x = torch.randn(16, 64, device=CUDA, requires_grad=True)
    layer(x).sum().backward()
    manager.end_iteration()
    forward, backward = manager.report().graphs
    for graph in (forward, backward):
        assert set(graph.nodes) <= {"kernel", "memcpy device to device"}, graph.nodes
        assert sum(graph.kernels.values()) == graph.nodes["kernel"] and "?" not in graph.kernels
    assert 1 <= forward.nodes["kernel"] <= 2, "one GEMM, perhaps with a reduction for split-k"
    assert any("multi_tensor" in name for name in backward.kernels), "gradients are added inside"
    files = manager.write_dot(str(tmp_path))
    assert len(files) == 2 and all("digraph" in Path(file).read_text() for file in files)
    assert manager.report().pool_bytes > 0


def test_a_graph_takes_over_addresses_by_an_update() -> None:
    """cudaGraphExecUpdate: the executable graph stays, with the addresses of a second capture."""
    xs = [torch.full((4,), float(i), device=CUDA) for i in (1, 2)]
    out = torch.zeros(4, device=CUDA)
    backend = CudaBackend(CUDA)
    graphs = []
    with backend.session():
        for x in xs:
            with backend.capture() as captured:
                torch.add(x, 1, out=out)
            graphs.append(captured.graph)
        with backend.capture() as captured:
            torch.add(xs[0], 1, out=out).mul_(2)
    # An update leaves the other capture in graphs[1]: the second one undoes the first.
    for expected in (2.0, 3.0):
        graphs[0].launch(backend.stream())
        assert out.tolist() == [expected] * 4
        assert graphs[0].update(graphs[1].graph) == ""
    why_not = graphs[0].update(captured.graph.graph)
    assert "topology" in why_not or "changed" in why_not
    graphs[0].launch(backend.stream())
    assert out.tolist() == [2.0] * 4, "a refused update leaves the graph"
    for graph in (*graphs, captured.graph):
        graph.destroy()
    with pytest.raises(RuntimeError, match="it is not instantiated, or was destroyed"):
        graphs[0].launch(backend.stream())
    backend.release()


def used() -> tuple[int, int]:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()


def test_reset_and_failures_give_back_all_memory() -> None:
    layers = nn.ModuleList([Block(256) for _ in range(4)]).to(CUDA)

    def one() -> None:
        run(layers, torch.randn(512, 256, device=CUDA)).sum().backward()
        for p in layers.parameters():
            p.grad = None

    one()
    manager = GraphManager(layers, warmup_steps=1)
    one()
    manager.end_iteration()  # the first capture also makes cuBLAS workspaces for its stream, which stay
    one()
    manager.reset()
    baseline = used()
    for _ in range(2):
        one()
        manager.end_iteration()
        assert manager.phase == "replaying" and used() > baseline
        one()
        manager.end_iteration()
        manager.reset()
        allocated, reserved = used()
        # A new side stream has a workspace of its own
        assert allocated - baseline[0] <= 2 * 33 << 20 and reserved - baseline[1] <= 2 * 34 << 20
        baseline = (max(allocated, baseline[0]), max(reserved, baseline[1]))


class Noisy(Block):
    draws = True

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return nn.functional.dropout(y, 0.5) if self.draws else y


def test_a_capture_that_failed_in_the_middle_and_then_succeeds() -> None:
    """F29, for real: two captured layers are dropped, generators and pool are as before."""
    ours = nn.ModuleList([Block(), Block(), Noisy(), Block()]).to(CUDA)
    manager = managed(ours, CUDA)
    run(ours, next(batches(CUDA, 1))).sum().backward()
    generators = torch.get_rng_state(), torch.cuda.get_rng_state()
    with pytest.raises(CaptureError, match="torch's CUDA generator") as error:
        manager.end_iteration()
    assert (error.value.layer, error.value.phase) == ("2", "forward")
    assert all(map(torch.equal, generators, (torch.get_rng_state(), torch.cuda.get_rng_state())))
    torch.rand(3, device=CUDA)  # the generator still works
    run(ours, next(batches(CUDA, 1))).sum().backward()
    Noisy.draws = False
    try:
        manager.capture()
        theirs = copy.deepcopy(ours)
        for p in (*ours.parameters(), *theirs.parameters()):
            p.grad = None
        for step in range(3):
            x = next(batches(CUDA, 1))
            run(ours, x).sum().backward(), run(theirs, x).sum().backward()
            same(ours, theirs, step)
            manager.end_iteration()
    finally:
        Noisy.draws = True


@pytest.mark.parametrize("mode", ["relaxed", "thread_local"])
def test_other_threads_may_use_cuda_meanwhile(mode: str) -> None:
    """F25: a data loader's thread that allocates and pins memory all the time."""
    ours, theirs = twins(CUDA, 4)
    manager = GraphManager(ours, warmup_steps=1, options=GraphOptions(mode=mode))
    stop = threading.Event()

    def load() -> None:
        while not stop.is_set():
            torch.ones(1 << 16).pin_memory().to(CUDA, non_blocking=True)

    thread = threading.Thread(target=load)
    thread.start()
    try:
        for step in range(3):
            x = next(batches(CUDA, 1))
            run(ours, x).sum().backward(), run(theirs, x).sum().backward()
            same(ours, theirs, step)
            manager.end_iteration()
    finally:
        stop.set()
        thread.join()
    assert manager.phase == "replaying"


def test_an_iteration_stays_on_one_stream() -> None:
    """F2."""
    layers = stack(CUDA, 2)
    manager = managed(layers, CUDA)
    warm(manager, layers, CUDA)
    x = layers[0](next(batches(CUDA, 1)))
    with (
        torch.cuda.stream(torch.cuda.Stream()),
        pytest.raises(ReplayError, match="layer '1': stream"),
    ):
        layers[1](x)
    manager.discard_iteration()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        run(layers, next(batches(CUDA, 1))).sum().backward()
    manager.end_iteration()


def test_a_living_autograd_graph_of_the_default_stream_does_not_reach_into_the_capture() -> None:
    """F21: the loss of the last eager step is alive, and with it the parameters' nodes."""
    layers = stack(CUDA, 2)
    manager = managed(layers, CUDA)
    loss = run(layers, next(batches(CUDA, 1))).square().sum()
    loss.backward(retain_graph=True)
    manager.end_iteration()
    run(layers, next(batches(CUDA, 1))).sum().backward()


def test_memory_beyond_eager() -> None:
    """The pool holds about what the eager iteration held at its peak, the last layer's temporaries aside."""
    layers = nn.ModuleList([Block(512) for _ in range(8)]).to(CUDA)
    x = torch.randn(4096, 512, device=CUDA)
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run(layers, x).sum().backward()
        peak = torch.cuda.max_memory_allocated() - before
        for p in layers.parameters():
            p.grad = None
    manager = GraphManager(layers, warmup_steps=1)
    run(layers, x).sum().backward()
    for p in layers.parameters():
        p.grad = None
    manager.end_iteration()
    one_layer = 4096 * 512 * 4 * 8  # x, up (twice as wide), tanh, down and the sum
    found = manager.report().pool_bytes
    print(
        f"pool {found / 1e6:.0f} MB, eager peak {peak / 1e6:.0f} MB, a layer {one_layer / 1e6:.0f} MB"
    )
    assert found <= peak + one_layer + (40 << 20)  # segments are rounded up to 20 MiB


def test_pool_needs_a_torch_it_knows(monkeypatch) -> None:
    monkeypatch.setattr("torch.__version__", "2.7.1")
    with pytest.raises(RuntimeError, match=r"needs torch >= 2.8 built for CUDA, found 2.7.1"):
        Pool(0)
