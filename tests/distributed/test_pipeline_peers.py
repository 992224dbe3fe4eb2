# SPDX-License-Identifier: Apache-2.0
"""Stages that write into each other's memory train as one process does, to the bit; what is sent is in its place."""

from __future__ import annotations

import contextlib
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from queue import Queue
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import schedules

from lorakernels.parallel import pipeline_parallel
from lorakernels.parallel.pipeline import peers as pipeline_peers
from lorakernels.parallel.pipeline.stages import Sent
from lorakernels.parallel.ranks import comm
from tests.distributed import test_pipeline_graphs
from tests.distributed.pipeline_models import STEPS, Way, batch, compare, make
from tests.distributed.test_pipeline import refused
from tests.fusion.fused_models import FP32
from tests.processes import backend_on_gpus, on_ranks

pytestmark = pytest.mark.slow
WORLDS = {
    2: (
        Way("plain"),
        Way("interleaved, FP8", chunks=2, fp8=True, dropout=0.1),
        Way("uneven", layers=5, chunks=2, fused=True, fp8=True, dropout=0.1),
        Way("two microbatches", microbatches=2, chunks=2),
        Way("first stage without a gradient", chunks=2, lora={"layers_to_transform": [2, 3]}),
        Way("last stage without adapters", chunks=2, lora={"layers_to_transform": [0, 1]}),
    ),
    4: (
        Way("plain"),
        Way("interleaved, fused, FP8", 8, 2, 8, fused=True, fp8=True, dropout=0.1),
    ),
}
REPLAYED = (
    Way("fused, FP8", fused=True, fp8=True),
    Way("interleaved, replayed", chunks=2, fused=True),
)
ON_GPU = (
    Way("fp32", dropout=0.1),
    Way("interleaved, fused, bf16", chunks=2, fused=True, dtype=torch.bfloat16),
)


class FilePost:
    """A Post over files that all processes map: on a CPU what PeerPost is on GPUs."""

    def __init__(self, group: Any, sent: Sent, count: int) -> None:
        self._rank, self._sent = dist.get_rank(group), sent
        folder = Path(comm.agree(group, tempfile.mkdtemp(prefix="post-"))[0])
        each, ranks = torch.Size(sent.shape).numel(), dist.get_world_size(group)

        def mapped(rank: int, name: str, size: int, dtype: torch.dtype) -> Tensor:
            return torch.from_file(str(folder / f"{rank}{name}"), True, size, dtype=dtype)

        self._places = [mapped(r, "", count * each, sent.dtype).split(each) for r in range(ranks)]
        self._signals = [mapped(r, "s", count * ranks, torch.int32) for r in range(ranks)]
        self._count = count
        comm.agree(group, None)  # until all have mapped them

    def place(self, number: int) -> Tensor:
        return self._places[self._rank][number].detach().view(self._sent.shape)

    def begin(self) -> None:
        """Copies are done when `send` returns."""

    def send(self, x: Tensor, rank: int, number: int) -> None:
        signal = self._signals[rank][self._rank * self._count + number]
        assert not signal, "sent twice"
        self._places[rank][number].copy_(x.detach().reshape(-1))
        signal.fill_(1)

    def wait(self, rank: int, number: int) -> None:
        signal, end = self._signals[self._rank][rank * self._count + number], time.monotonic() + 60
        while not signal:
            assert time.monotonic() < end, f"nothing came from rank {rank} as number {number}"
            time.sleep(1e-4)
        signal.zero_()

    def left(self) -> int:
        """How many signals nobody waited for."""
        return int(self._signals[self._rank].sum())


class LatePost(FilePost):
    """Copies in a thread of its own, later than `send` returns, as a copy engine does."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._waiting: Queue[tuple[Tensor, int, int]] = Queue()
        threading.Thread(target=self._copy, daemon=True).start()

    def send(self, x: Tensor, rank: int, number: int) -> None:
        self._waiting.put((x.detach(), rank, number))

    def _copy(self) -> None:
        while True:
            job = self._waiting.get()
            time.sleep(0.02)
            super().send(*job)


def by_files(made: list[FilePost]) -> contextlib.ExitStack:
    """Inside, stages on CPUs send by a FilePost."""

    def post(*args: Any) -> FilePost:
        made.append(FilePost(*args))
        return made[-1]

    stack = contextlib.ExitStack()
    stack.enter_context(patch.object(pipeline_peers, "PeerPost", post))
    stack.enter_context(patch.object(comm, "choose", lambda *args: ("peer", "a test")))
    return stack


def worker(rank: int, device: torch.device, ways: list[Way]) -> dict[str, Any]:
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("pp",))
    found = {}
    for way in ways:
        made: list[FilePost] = []
        with by_files(made):
            found[str(way)] = compare(device, way, mesh["pp"])
        found[str(way)] |= {"left": [post.left() for post in made]}
    return found


_ran: dict[int, Any] = {}
CASES = [pytest.param(w, way, id=f"{w} ranks-{way}") for w, ways in WORLDS.items() for way in ways]


@pytest.mark.parametrize(("world", "way"), CASES)
def test_stages_by_peers_train_as_one_process(world: int, way: Way) -> None:
    """Kernels see the same rows and sums have one order, so that bits are equal. Beside float64, fp32 rounds."""
    if world not in _ran:
        _ran[world] = on_ranks(worker, world, "gloo", [*WORLDS[world]])
    for found in _ran[world]:
        found = found[str(way)]
        assert found["unequal"] == [] and found["ranks equal"]
        assert max(found["errors"].values()) <= FP32
        assert found["left"] == [0, 0], "of training and of evaluation"
        assert "they send by peer: a test" in found["said"]


def places(rank: int, device: torch.device) -> tuple[list[bool], bool]:
    """Whether torch's stages read where the Post receives; whether it itself sent nothing."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    way, made = Way("", chunks=2), list[FilePost]()
    labels, inputs = batch(0, way, device)
    with by_files(made):
        cut = pipeline_parallel(make(way, device), mesh["pp"], microbatches=4, chunks=2)
        cut.forward_backward(labels, **inputs)
        whose = [post._places[rank] for post in made]
        own = {part.data_ptr() for parts in whose for part in parts}
        schedule: Any = cut._schedules[True][1]
        infos = [
            info
            for stage in schedule._stages
            for kept in (stage.args_recv_info, stage.grad_recv_info)
            for infos in kept.values()
            for info in infos
            if getattr(info, "buffer", None) is not None
        ]
        inside = [info.buffer.data_ptr() in own for info in infos]
        with patch.object(schedules, "_batch_p2p", side_effect=lambda ops, **_: ops) as asked:
            cut.forward_backward(labels, **inputs)
            none = asked.called and not any(call.args[0] for call in asked.call_args_list)
        return inside, none


def test_torch_reads_what_was_written_and_sends_nothing() -> None:
    for inside, none in on_ranks(places, 2, "gloo"):
        assert len(inside) == 3 * 4 and all(inside)
        assert none


def replayed(rank: int, device: torch.device) -> dict[str, Any]:
    posts = patch.object(pipeline_peers, "PeerPost", LatePost)
    with posts, patch.object(comm, "choose", lambda *args: ("peer", "a test")):
        return test_pipeline_graphs.compare(rank, device, [*REPLAYED])


def test_graphs_write_over_nothing_that_is_still_copied() -> None:
    """What a stage sends is no graph's own memory, so that a later replay may begin before it was copied."""
    for found in on_ranks(replayed, 2, "gloo"):
        for way in REPLAYED:
            assert found[str(way)]["unequal"] == []
            assert found[str(way)]["replayed"] == (STEPS - 1) * way.microbatches


def other_transports(rank: int, device: torch.device) -> tuple[list[str], bool]:
    """What ranks say of transports that they cannot have, and whether the model is as before."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    model = make(Way(""), device)
    before = [name for name, _ in model.named_parameters()]
    said = []
    for transport in ("peer", "post", ("auto", "gloo")[rank]):
        call = partial(pipeline_parallel, model, mesh["pp"], microbatches=4, transport=transport)
        said.append(refused(call))
    return said, before == [name for name, _ in model.named_parameters()]


def test_a_transport_that_ranks_cannot_have_is_refused_on_all() -> None:
    for said, as_before in on_ranks(other_transports, 2, "gloo"):
        no_gpu, unknown, differs = said
        assert no_gpu == "ValueError: transport 'peer' needs GPUs, found a model on cpu"
        assert unknown.startswith("ValueError: transport must be one of ['auto', 'peer'")
        assert differs.startswith("ValueError") and "transport" in differs
        assert as_before


def half_a_step(rank: int, device: torch.device) -> tuple[list[str], bool]:
    """What a step says that ends on rank 1 before it reads what rank 0 sent; whether the next step is as the first."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    way, said, losses = Way(""), list[str](), list[Tensor]()
    labels, inputs = batch(0, way, device)
    with by_files([]):
        model = make(way, device)
        cut = pipeline_parallel(model, mesh["pp"], microbatches=4)
        losses.append(cut.forward_backward(labels, **inputs))
        real, calls = pipeline_peers.PeerStage.forward_one_chunk, []

        def ends(stage: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append(stage)
            if len(calls) == 2 - rank:  # rank 0's second microbatch: the first one has been sent
                raise RuntimeError(f"rank {rank} ends")
            return real(stage, *args, **kwargs)

        with patch.object(pipeline_peers.PeerStage, "forward_one_chunk", ends):
            others, rows = batch(1, way, device)  # which the next step must not read
            said.append(refused(lambda: cut.forward_backward(others, **rows)))
        losses.append(cut.forward_backward(labels, **inputs))
    return said, torch.equal(*losses)


def test_what_was_sent_in_a_step_that_ended_is_not_of_the_next_one() -> None:
    for rank, (said, equal) in enumerate(on_ranks(half_a_step, 2, "gloo")):
        assert said == [f"RuntimeError: rank {rank} ends"]
        assert equal


def full(rank: int, device: torch.device) -> str:
    """What ranks say if rank 1 has no memory for what it receives."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    sent = Sent(FORM, torch.float16, device, "peer")

    def memory(size: int, device: torch.device) -> Tensor:
        if rank == 1:
            raise torch.OutOfMemoryError("full")
        return torch.zeros(size, dtype=torch.uint8)

    waits = AssertionError("waits for the rank that has raised")
    with (
        patch.object(comm, "peer_memory", memory),
        patch("torch.distributed._symmetric_memory.rendezvous", side_effect=waits),
    ):
        return refused(lambda: pipeline_peers.PeerPost(mesh.get_group(), sent, 12))


def test_a_rank_without_memory_to_receive_in_is_told_to_all() -> None:
    found = on_ranks(full, 2, "gloo")
    assert found == ["ValueError: rank 1: full", "OutOfMemoryError: full"]


FORM = (2, 3, 5)  # of what is sent: 60 bytes, less than what is aligned


def exchange(rank: int, device: torch.device) -> list[str]:
    """What did not arrive as it was sent, in three steps of twelve tensors each way, over three allocations."""
    mesh = init_device_mesh(device.type, (2,), mesh_dim_names=("pp",))
    sent = Sent(FORM, torch.float16, device, "peer")
    with patch.object(pipeline_peers, "SIGNALS", 2 * 5):
        post = pipeline_peers.PeerPost(mesh.get_group(), sent, 12)
    wrong: list[str] = []
    for step in range(3):
        for number in torch.randperm(12, generator=torch.Generator().manual_seed(step)).tolist():
            there = torch.full(FORM, 100.0 * step + number + 0.5 * rank, device=device).half()
            post.send(there, 1 - rank, number)
        for number in range(12):
            post.wait(1 - rank, number)
            found = post.place(number)
            if not (found == 100.0 * step + number + 0.5 * (1 - rank)).all():
                wrong.append(f"{number} in step {step}: {found.flatten()[0]}")
        torch.cuda.synchronize(device)
        comm.all_reduce(mesh.get_group(), torch.zeros(1, device=device))
    return wrong


@pytest.mark.gpu
def test_what_is_sent_arrives_in_its_place() -> None:
    for wrong in on_ranks(exchange, 2, backend_on_gpus(2)):
        assert wrong == []


def on_gpus(rank: int, device: torch.device, ways: list[Way]) -> dict[str, Any]:
    mesh = init_device_mesh(device.type, (2,), mesh_dim_names=("pp",))
    return {str(way): compare(device, way, mesh["pp"]) for way in ways}


@pytest.mark.gpu
def test_stages_by_peers_on_two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds are those of test_pipeline's stages on two GPUs: sums by atomics have no order, and bf16 rounds."""
    backend = backend_on_gpus(2, "torch's stages get to know each other by it")
    monkeypatch.setenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    for found in on_ranks(on_gpus, 2, backend, [*ON_GPU]):
        for way in ON_GPU:
            bound = 2.0**-4 if way.dtype == torch.bfloat16 else 2 * FP32
            errors, alone = found[str(way)]["errors"], found[str(way)]["errors of one process"]
            assert "they send by peer" in found[str(way)]["said"]
            over = {n: e - max(bound, 1.5 * alone.get(n, 0.0)) for n, e in errors.items()}
            worst = max(over, key=over.__getitem__)
            assert over[worst] <= 0, (worst, errors[worst])
