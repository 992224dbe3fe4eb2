# SPDX-License-Identifier: Apache-2.0
"""Memsets of a captured stream, which are kernels in the graph: what they write, when, and which of them stay."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lorakernels.graphs import CudaBackend
from lorakernels.graphs.device.backend import REPLACED_BYTES
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.memsets import allocate, free, memset, memset_rows

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
BEFORE, CYCLES = 0x5A, 20_000_000  # about 10 ms, much longer than what must wait for it
PATTERNS = {1: 0xC3, 2: 0xA1B2, 4: 0x12345678}
# (bytes of an element, bytes from an address that is a multiple of 256, elements)
CASES = [
    (1, 0, 1),
    (1, 5, 1),
    (1, 15, 2),
    (1, 3, 37),
    (1, 1, 70_001),
    (1, 16, 4096),
    (2, 14, 1),
    (2, 6, 1),
    (2, 2, 2049),
    (2, 30, 40_000),
    (4, 0, 1),
    (4, 12, 2),
    (4, 4, 4097),
    (4, 8, 100_003),
]


class Captures:
    """Graphs of one pool, which are destroyed together."""

    def __init__(self) -> None:
        self.backend = CudaBackend(CUDA)
        self.graphs: list[Any] = []

    def __call__(self, run: Callable[[], None]) -> Any:
        with self.backend.session(), self.backend.capture() as captured:
            run()
        self.graphs.append(captured.graph)
        return captured.graph

    def launch(self, graph: Any) -> None:
        graph.launch(self.backend.stream())
        torch.cuda.synchronize()


@pytest.fixture
def capture() -> Iterator[Captures]:
    captures = Captures()
    yield captures
    for graph in captures.graphs:
        graph.destroy()
    captures.backend.release()


def kernels(graph: Any) -> int:
    """How many stand in a memset's place."""
    return sum(n for name, n in graph.kernels.items() if "memset_kernel" in name)


def memory(nbytes: int) -> Tensor:
    return torch.full((nbytes,), BEFORE, dtype=torch.uint8, device=CUDA)


def written(nbytes: int, size: int, start: int, count: int) -> Tensor:
    """What `memory(nbytes)` holds after a memset from byte `start`."""
    expected = torch.full((nbytes,), BEFORE, dtype=torch.uint8)
    one = torch.tensor([*PATTERNS[size].to_bytes(size, "little")], dtype=torch.uint8)
    expected[start : start + size * count] = one.repeat(count)
    return expected


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[2]} of {c[0]} bytes from {c[1]}")
def test_the_same_bytes_as_a_memset(case: tuple[int, int, int], capture: Captures) -> None:
    """Between two kernels: one writes the memory before, and one reads it afterwards."""
    size, start, count = case
    x = memory(start + size * count + 256)
    eager, seen = x.clone(), torch.zeros_like(x)
    value = PATTERNS[size]
    memset(eager.data_ptr() + start, size, value, count)
    torch.cuda.synchronize()

    def run() -> None:
        x.fill_(BEFORE)
        memset(x.data_ptr() + start, size, value, count)
        torch.bitwise_not(x, out=seen)

    graph = capture(run)
    assert graph.nodes == {"kernel": 3} and kernels(graph) == 1
    for _ in range(2):
        x.zero_()
        capture.launch(graph)
        assert torch.equal(x, eager) and torch.equal(~seen, eager)
    assert torch.equal(eager.cpu(), written(x.numel(), size, start, count))


def test_the_order_over_two_streams(capture: Captures) -> None:
    """A memset on a side stream waits for the main stream, which waits for it."""
    x, side = memory(1000), torch.cuda.Stream()
    seen = torch.zeros_like(x)

    def run() -> None:
        main = torch.cuda.current_stream()
        torch.cuda._sleep(CYCLES)
        x.fill_(BEFORE)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            torch.cuda._sleep(CYCLES)
            memset(x.data_ptr() + 3, 1, PATTERNS[1], 900)
        main.wait_stream(side)
        torch.bitwise_not(x, out=seen)

    graph = capture(run)
    assert graph.nodes == {"kernel": 5} and kernels(graph) == 1
    for _ in range(3):
        seen.zero_()
        capture.launch(graph)
        assert torch.equal((~seen).cpu(), written(1000, 1, 3, 900))


def test_several_edges_on_either_side(capture: Captures) -> None:
    """Two kernels before a memset, another memset next to it, and two kernels that wait for both."""
    a, b = memory(300), memory(300)
    seen = [torch.zeros_like(a) for _ in range(4)]
    side = torch.cuda.Stream()

    def run() -> None:
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            torch.cuda._sleep(CYCLES)
            b.fill_(BEFORE)
        a.fill_(BEFORE)
        main.wait_stream(side)
        memset(a.data_ptr(), 4, PATTERNS[4], 20)  # waits for both kernels
        memset(b.data_ptr() + 2, 2, PATTERNS[2], 70)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            torch.bitwise_not(a, out=seen[0])
            torch.bitwise_not(b, out=seen[1])
        torch.bitwise_not(a, out=seen[2])
        torch.bitwise_not(b, out=seen[3])
        main.wait_stream(side)

    graph = capture(run)
    assert kernels(graph) == 2 and "memset" not in graph.nodes
    for _ in range(2):
        for x in (a, b, *seen):
            x.zero_()
        capture.launch(graph)
        for x in seen[::2]:
            assert torch.equal((~x).cpu(), written(300, 4, 0, 20))
        for x in seen[1::2]:
            assert torch.equal((~x).cpu(), written(300, 2, 2, 70))


def test_an_update_takes_over_what_the_kernels_write(capture: Captures) -> None:
    """Other addresses, values and lengths, by cudaGraphExecUpdate of a second capture."""
    xs, side = [memory(200_000) for _ in range(2)], torch.cuda.Stream()

    def run(x: Tensor, size: int, start: int, count: int) -> None:
        main = torch.cuda.current_stream()
        x.fill_(BEFORE)
        memset(x.data_ptr() + start, size, PATTERNS[size], count)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            memset(x.data_ptr() + 150_000, 1, 1, 10)
        memset(x.data_ptr() + 160_000, 1, 2, 10)
        main.wait_stream(side)
        x.bitwise_not_()

    def check(x: Tensor, size: int, start: int, count: int) -> None:
        expected = written(200_000, size, start, count)
        expected[150_000:150_010], expected[160_000:160_010] = 1, 2
        assert torch.equal((~x).cpu(), expected)

    ways = (xs[0], 1, 3, 21), (xs[1], 4, 8, 30_000)
    graph, other = (capture(lambda way=way: run(*way)) for way in ways)
    assert kernels(graph) == kernels(other) == 3 and "memset" not in graph.nodes
    for way, unused in (ways, ways[::-1], ways):
        unused[0].zero_()
        capture.launch(graph)
        check(*way)
        assert not unused[0].any()
        assert graph.update(other.graph) == ""  # which leaves the first capture in `other`


def test_which_memsets_stay(capture: Captures) -> None:
    """Rows with gaps, more bytes than a kernel should write, and memory of the host. Rows without gaps are one."""
    x, large = memory(4096), memory(REPLACED_BYTES + 1)
    host = torch.full((64,), BEFORE, dtype=torch.uint8).pin_memory()

    def run() -> None:
        memset_rows(x.data_ptr() + 1, 48, 7, 20, 5)
        memset_rows(x.data_ptr() + 2048, 48, 8, 48, 5)
        memset(large.data_ptr(), 1, 9, REPLACED_BYTES + 1)
        memset(host.data_ptr() + 1, 1, 10, 5)
        memset(large.data_ptr(), 1, 11, REPLACED_BYTES)

    graph = capture(run)
    assert graph.nodes == {"kernel": 2, "memset": 3} and kernels(graph) == 2
    capture.launch(graph)
    expected = torch.full((4096,), BEFORE, dtype=torch.uint8)
    for row in range(5):
        expected[1 + 48 * row : 21 + 48 * row] = 7
    expected[2048 : 2048 + 5 * 48] = 8
    assert torch.equal(x.cpu(), expected)
    assert large[:-1].eq(11).all() and large[-1] == 9
    assert host.tolist() == [BEFORE, *[10] * 5, *[BEFORE] * 58]


def test_a_graph_that_allocates_keeps_its_memsets(capture: Captures) -> None:
    """CUDA lets nobody take a node out of it."""
    x = memory(64)

    def run() -> None:
        address = allocate(64)
        memset(address, 1, 1, 64)
        memset(x.data_ptr(), 1, PATTERNS[1], 33)
        free(address)

    graph = capture(run)
    assert graph.nodes == {"allocation": 1, "memset": 2, "free": 1}
    capture.launch(graph)
    assert torch.equal(x.cpu(), written(64, 1, 0, 33))


def test_it_is_as_urgent_as_the_kernels_beside_it(capture: Captures, tmp_path: Path) -> None:
    x = memory(64)
    stream = torch.cuda.Stream(priority=-1)

    def run() -> None:
        main = torch.cuda.current_stream()
        stream.wait_stream(main)
        with torch.cuda.stream(stream):
            x.fill_(BEFORE)
            for start in (0, 8, 16):
                memset(x.data_ptr() + start, 1, 1, 4)
            x.bitwise_not_()
        main.wait_stream(stream)

    graph = capture(run)
    assert kernels(graph) == 3 and graph.nodes == {"kernel": 5}
    path = tmp_path / "graph.dot"
    graph.write_dot(str(path))
    found = [int(p) for p in re.findall(r"priority\D*?(-?\d+)", path.read_text())]
    assert len(found) == 5 and set(found) == {-1}


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_kernel_runs_on_the_device_of_the_capture() -> None:
    """It is another device's in a process whose current device is the first."""
    device = torch.device("cuda", 1)
    backend = CudaBackend(device)
    x = torch.zeros(64, dtype=torch.uint8, device=device)
    with backend.session(), backend.capture() as captured:
        x.fill_(BEFORE)
        memset(x.data_ptr() + 1, 1, PATTERNS[1], 21)
    assert kernels(captured.graph) == 1 and "memset" not in captured.graph.nodes
    with torch.cuda.device(device):
        captured.graph.launch(backend.stream())
        torch.cuda.synchronize()
    assert torch.equal(x.cpu(), written(64, 1, 1, 21))
    captured.graph.destroy()
    backend.release()


def test_cudnns_attention_has_no_memset_left(capture: Captures) -> None:
    """It sets memory before its kernel, which a second replay needs as much as the first."""
    q, k, v = (torch.randn(1, 4, 256, 64, device=CUDA, dtype=torch.bfloat16) for _ in range(3))
    out = torch.empty_like(q)

    def run() -> None:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        torch.add(y, 0, out=out)

    run()  # cuDNN's plan is built outside of the capture
    graph = capture(run)
    assert "memset" not in graph.nodes
    for _ in range(3):
        q.copy_(torch.randn_like(q))
        run()
        eager = out.clone()
        out.zero_()
        capture.launch(graph)
        assert torch.equal(out, eager)
