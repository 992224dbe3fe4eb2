# SPDX-License-Identifier: Apache-2.0
"""Weights of fused layers that are written or moved after a capture: what graphs read is what eager layers compute."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lorakernels.graphs import StepGraph
from lorakernels.graphs.replay.derived import renew_derived
from torch import Tensor, nn

from lorakernels import DelayedScaling, fuse, merge_lora, unmerge_lora
from lorakernels.fusion.joined_rows import JoinedRows
from tests.fusion.fused_models import LINEARS, adapted, fp8_state
from tests.graphs.layers import managed, with_options

STATES = ("fp8_scale", "fp8_amax_history", "fp8_max")


@pytest.fixture(autouse=True)
def _says_that_it_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group asks the GPU whether it captures; tests/graphs/fake.py captures by a dispatch mode.

    Otherwise a graph of the CPU would hold the derivation itself, and each replay would repeat it.
    """
    asks = JoinedRows._capturing
    imitated = torch._C._len_torch_dispatch_stack
    monkeypatch.setattr(JoinedRows, "_capturing", lambda rows: asks(rows) or imitated() > 0)


def fused(device: torch.device) -> nn.Module:
    model = adapted(targets=LINEARS, device=device, fp8=DelayedScaling())
    fuse(model, attention="math")
    return model


def loss_of(model: nn.Module, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Of the layers alone: transformers' model around them waits for the device."""
    for layer in model.model.layers:
        x = layer(x, position_embeddings=angles)
    return x.square().mean()


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


class Graphs:
    """A fused model and its graphs, of layers or of the whole step. A call trains one microbatch, without an update."""

    def __init__(self, device: torch.device, whole: bool, written: Any = None) -> None:
        self.model, self.device = fused(device), device
        state = fp8_state(self.model)
        state.reduce_and_update()
        self.x = torch.randn(2, 12, 32, device=device)
        places = torch.arange(12, device=device)[None]
        self.angles = self.model.model.rotary_emb(self.x, places)
        if written is not None:
            self.evaluate()
            written(self)
        if whole:
            given = {"modules": [self.model], "warmup_steps": 1, "fp8_state": state}
            self.graphs: Any = StepGraph(self.step, **with_options(given, device))
        else:
            self.graphs = managed(self.model.model.layers, device, fp8_state=state)
        self.whole = whole
        for _ in range(3):
            self()
        assert self.graphs.phase == "replaying"

    def step(self, x: Tensor) -> Tensor:
        self.model.zero_grad()
        loss = loss_of(self.model, x, self.angles)
        loss.backward()
        return loss.detach()

    def __call__(self) -> list[Tensor]:
        if self.whole:
            return [self.graphs(self.x), *gradients(self.model)]
        loss = self.step(self.x)
        self.graphs.end_iteration()
        return [loss, *gradients(self.model)]

    def eager(self) -> list[Tensor]:
        """What a copy of the model computes that derives everything anew."""
        twin = copy.deepcopy(self.model)
        twin.zero_grad()
        loss = loss_of(twin, self.x, self.angles)
        loss.backward()
        return [loss.detach(), *gradients(twin)]

    def evaluate(self) -> None:
        self.model.eval()
        with torch.no_grad():
            loss_of(self.model, self.x, self.angles)
        self.model.train()


def merge_and_unmerge(run: Graphs) -> None:
    merge_lora(run.model)
    run.evaluate()
    unmerge_lora(run.model)


def another_base(run: Graphs) -> dict[str, Tensor]:
    state = fused(run.device).state_dict()
    return {k: v for k, v in state.items() if not k.endswith(STATES)}


def load_another_base(run: Graphs) -> None:
    run.model.load_state_dict(another_base(run), strict=False)


def write_a_scale(run: Graphs) -> None:
    with torch.no_grad():
        run.model.model.layers[1].self_attn.k_proj.weight_scale_inv.mul_(2)


def write_a_weight(run: Graphs) -> None:
    """All zero, so that the largest scale of q, k and v is another one."""
    layer = run.model.model.layers[0].self_attn
    largest = max((layer.q_proj, layer.k_proj, layer.v_proj), key=lambda m: m.weight_scale_inv)
    with torch.no_grad():
        largest.stored.zero_()


@pytest.mark.parametrize("whole", [False, True], ids=["layers", "step"])
@pytest.mark.parametrize(
    "write", [merge_and_unmerge, load_another_base, write_a_scale, write_a_weight]
)
def test_a_replay_reads_what_was_written(
    device: torch.device, write: Callable[[Graphs], None], whole: bool
) -> None:
    """Scales by column, multipliers and factors are derived from the weights; no eager forward renews them here."""
    run = Graphs(device, whole)
    for _ in range(2):  # the second write finds what the first has renewed
        write(run)
        before = getattr(run.graphs, "replayed", 0)
        found = run()
        assert whole or run.graphs.replayed == before + 1
        for index, (a, b) in enumerate(zip(found, run.eager(), strict=True)):
            assert torch.equal(a, b), index


@pytest.mark.parametrize("whole", [False, True], ids=["layers", "step"])
@pytest.mark.parametrize("write", [merge_and_unmerge, load_another_base])
def test_what_was_written_before_the_capture_is_replayed(
    device: torch.device, write: Callable[[Graphs], None], whole: bool
) -> None:
    """Where a renewal moves what is watched, every replay is refused."""
    run = Graphs(device, whole, write)
    for _ in range(2):
        for index, (a, b) in enumerate(zip(run(), run.eager(), strict=True)):
            assert torch.equal(a, b), index
    assert run.graphs.phase == "replaying"


def assign(run: Graphs) -> None:
    trained = {name for name, p in run.model.named_parameters() if p.requires_grad}
    state = {k: v.clone() for k, v in another_base(run).items()}
    run.model.load_state_dict(state, strict=False, assign=True)
    for name, p in run.model.named_parameters():
        p.requires_grad_(name in trained)


def convert(run: Graphs) -> None:
    run.model.bfloat16()
    run.model.float()


def move_an_adapter(run: Graphs) -> None:
    lora_A = run.model.model.layers[0].self_attn.q_proj.lora_A
    lora_A.data = lora_A.data.clone()


@pytest.mark.parametrize("whole", [False, True], ids=["layers", "step"])
@pytest.mark.parametrize("move", [assign, convert, move_an_adapter])
def test_recapture_joins_what_was_moved(
    device: torch.device, move: Callable[[Graphs], None], whole: bool
) -> None:
    """No forward runs in between, and a capture moves nothing: graphs/README.md names these calls."""
    run = Graphs(device, whole)
    move(run)
    run.model.zero_grad()
    run.graphs.recapture()
    for _ in range(2):
        for index, (a, b) in enumerate(zip(run(), run.eager(), strict=True)):
            assert torch.equal(a, b), index
    assert run.graphs.phase == "replaying"


def test_a_renewed_layer_asks_the_host_for_nothing(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A whole step is captured without a forward before it, and a capture refuses copies from pageable memory."""
    run = Graphs(device, True)
    convert(run)
    renew_derived(run.model)

    def factors(*_: object) -> None:
        raise AssertionError("made by the forward that a capture records")

    monkeypatch.setattr(JoinedRows, "_new_factors", factors)
    loss_of(run.model, run.x, run.angles)


def test_a_single_projection_derives_nothing() -> None:
    """o and down read their own scales, which a write changes in place: only q, k, v, gate and up are watched."""
    model = fused(torch.device("cpu"))
    layer = model.model.layers[0]
    attention, mlp = layer.self_attn, layer.mlp
    joined = [attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj]
    found = {id(x) for x in layer.renew_derived()}
    assert found == {id(x) for m in joined for x in (m._parameters["weight"], m.weight_scale_inv)}
