# SPDX-License-Identifier: Apache-2.0
"""A base of which a part is in the host's memory, by one process: the bits of the whole base, and what is refused.

On a CPU the copies into the slots are the same code, and nothing is pinned.
"""

from __future__ import annotations

import gc
import re
from dataclasses import replace

import pytest
import torch
from torch import nn

from lorakernels import BlockScaling, fuse
from lorakernels.parallel import Offload, shard_base
from lorakernels.parallel.base.offload import divide
from lorakernels.parallel.base.pinned import PAGE, Pinned
from lorakernels.train.model.model import reproducible
from tests.distributed.sharded_models import LAYERS, STEPS, Way, batches, compare, loss_of, make
from tests.distributed.test_sharded_graphs import Loop, trained
from tests.fusion.fused_models import an_adapter

CPU = torch.device("cpu")
MUCH = 2**34  # of memory that the tests say is there
DEVICES = [CPU, pytest.param(torch.device("cuda"), marks=pytest.mark.gpu)]
SOME = {"offload": Offload(0.3, MUCH)}
OF_BLOCKS = {"hidden_size": 256, "intermediate_size": 256}  # k and v have 128 rows
WAYS = {
    **{f"fused {save}": Way(save) for save in ("recompute", "fp8", "checkpoint")},
    "unfused": Way(),
    "checkpointed": Way(checkpoint=False),
    "checkpointed reentrantly": Way(checkpoint=True),
    "compiled by layers": Way(compiled=True, poison=True),
    "poisoned": Way("checkpoint", poison=True),
    "two forwards": Way("recompute", step="two forwards"),
    "interrupted poisoned": Way(step="interrupted", poison=True),
    "almost all": Way("recompute", options={"offload": Offload(0.85, MUCH)}),
    "blocks": Way("recompute", recipe=BlockScaling(), sizes=OF_BLOCKS, poison=True),
    "blocks unfused": Way(recipe=BlockScaling(), sizes=OF_BLOCKS),
    "one slot": Way("recompute", options={"slots": 1, "prefetch": 0, **SOME}),
}


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("name", WAYS)
def test_bits_are_those_of_the_whole_base(name: str, device: torch.device) -> None:
    way = WAYS[name]
    with reproducible(True):
        differing, gathers = compare(replace(way, options={**SOME, **way.options}), None, 0, device)
    assert differing == []
    if way.step == "plain" and not way.poison:
        slots = way.options.get("slots", 2) + 1
        assert gathers == [2 * LAYERS - slots, *[2 * (LAYERS - slots)] * (STEPS - 1)]


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("graphs", ["by_layers", "whole"])
@pytest.mark.parametrize("save", ["recompute", "checkpoint"])
def test_bits_under_graphs(save: str, graphs: str, device: torch.device) -> None:
    with reproducible(True):
        expected = trained(make(Way(save), device), device, graphs)
        model = make(Way(save), device)
        base = shard_base(model, offload=Offload(0.3, MUCH))
        base.slots.poison = save == "checkpoint"
        found = trained(model, device, graphs)
    base.unshard()
    assert [name for name, x in expected.items() if not torch.equal(x, found[name])] == []


def test_only_what_is_offloaded_moves() -> None:
    """The weights that stay keep their addresses, and need no slot."""
    model = make(Way("recompute"), CPU)
    layer = model.model.layers[0]
    before = {name: m.weight.data_ptr() for name, m in linears(layer).items()}
    saved = {k: v.clone() for k, v in model.state_dict().items()}
    base = shard_base(model, offload=Offload(0.3, MUCH))
    there = {entry.name for entry in base.shards.blocks[0].entries}
    after = {name: m.weight.data_ptr() for name, m in linears(layer).items()}
    assert {name for name in before if before[name] != after[name]} == there
    bytes_of = {name: m.weight.numel() for name, m in linears(layer).items()}
    assert sum(bytes_of.values()) > sum(bytes_of[n] for n in there) >= 0.3 * sum(bytes_of.values())
    assert base.slots.memory.shape == (3, base.shards.blocks[0].size)
    with base.gathered(3) as found:
        assert found.keys() == bytes_of.keys()
        for name, weight in found.items():
            key = f"model.layers.3.{name}.weight"
            assert torch.equal(weight.view(torch.uint8), saved[key].view(torch.uint8)), name
    now = model.state_dict()
    assert all(torch.equal(bits(x), bits(now[key])) for key, x in saved.items())


def test_fuse_may_follow() -> None:
    model, fused = make(Way(), CPU), make(Way(), CPU)
    base = shard_base(model, offload=Offload(0.3, MUCH))
    for each in (model, fused):
        fuse(each, attention="math")
        each.eval()
    ids = next(batches(CPU))
    assert torch.equal(loss_of(model, ids), loss_of(fused, ids))
    base.unshard()
    assert torch.equal(loss_of(model, ids), loss_of(fused, ids))


def test_a_layer_moves_and_loads_as_a_whole_or_not_at_all() -> None:
    """q, k and v, which stay on the GPU, come before what is on the host and refuses."""
    model = make(Way(), CPU)
    shard_base(model, offload=Offload(0.3, MUCH))
    layers = model.model.layers
    before = {n: p.clone() for n, p in layers.named_parameters()}
    zeros = {n: torch.zeros_like(p) for n, p in model.state_dict().items()}
    for change in (lambda: model.to("meta"), lambda: model.load_state_dict(zeros)):
        with pytest.raises(RuntimeError, match="sharded base"):
            change()
        after = dict(layers.named_parameters())
        assert [n for n, x in before.items() if not torch.equal(bits(after[n]), bits(x))] == []


def test_an_unshard_without_memory_can_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    model, whole = make(Way(), CPU), make(Way(), CPU)
    base = shard_base(model, offload=Offload(0.3, MUCH))
    make_memory, calls = torch.empty_like, []

    def fail_second(x: torch.Tensor) -> torch.Tensor:
        calls.append(x)
        return make_memory(x) if len(calls) != 2 else 1 / 0

    monkeypatch.setattr("lorakernels.parallel.base.shard.torch.empty_like", fail_second)
    with pytest.raises(ZeroDivisionError):
        base.unshard()
    monkeypatch.undo()
    ids = next(batches(CPU))
    for again in (base.unshard, lambda: None):
        assert torch.equal(loss_of(model.eval(), ids), loss_of(whole.eval(), ids))
        weights = (
            {n: m.dequantized_weight() for n, m in linears(each).items()} for each in (model, whole)
        )
        ours, theirs = weights
        assert [n for n, x in theirs.items() if not torch.equal(ours[n], x)] == []
        again()
    assert base.shards.memory.numel() == 0  # the host has its memory back


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "found None, which needs offload"),
        ({"offload": 1.0}, "at least 0 and less than 1, found 1.0"),
        ({"offload": -0.1}, "found -0.1"),
        ({"offload": float("nan")}, "found nan"),
        ({"offload": 0.999}, r"offload must be at most 0\.\d+ for this model"),
        ({"offload": Offload(0.3, -1)}, "host_memory must be a number of bytes, found -1"),
        ({"offload": Offload(0.3, 1000)}, "but host_memory is 1,000"),
        ({"offload": 0.3, "transport": "gloo"}, "needs a mesh"),
    ],
    ids=str,
)
def test_refused_before_anything_changes(options: dict[str, object], message: str) -> None:
    model = make(Way(), CPU)
    before = {name: p.data_ptr() for name, p in model.named_parameters()}
    with pytest.raises(ValueError, match=message):
        shard_base(model, **options)
    assert before == {name: p.data_ptr() for name, p in model.named_parameters()}
    assert not model.model.layers[0]._forward_pre_hooks


SHAPES = {"qkv": (10, 8), "o": (8, 8), "gate_up": (56, 8), "down": (28, 8)}


@pytest.mark.parametrize(
    ("fraction", "there"),
    [
        (0.0, []),
        (0.01, ["o"]),
        (0.08, ["qkv"]),
        (0.17, ["qkv", "o"]),
        (0.2, ["down"]),
        (0.5, ["gate_up"]),
        (0.9, ["o", "gate_up", "down"]),
    ],
)
def test_the_fewest_bytes_that_suffice(fraction: float, there: list[str]) -> None:
    groups = [[item] for item in SHAPES.items()]
    stay, go = divide(groups, fraction)
    assert [group[0][0] for group in go] == there
    assert [group[0][0] for group in stay] == [name for name in SHAPES if name not in there]


def test_the_largest_fraction_that_is_named_is_taken() -> None:
    groups = [[(str(i), (size, 1))] for i, size in enumerate((3, 3, 1, 5))]
    with pytest.raises(ValueError, match="at most") as raised:
        divide(groups, 0.917)
    largest = float(re.search(r"at most ([0-9.]+)", str(raised.value))[1])
    assert len(divide(groups, largest)[1]) == 3


class Runtime:
    """Pins until `failing`, which is a number of calls."""

    def __init__(self, failing: int) -> None:
        self.failing, self.calls, self.pinned = failing, 0, dict[int, int]()

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.calls += 1
        if self.calls == self.failing:
            return 2
        assert address % PAGE == 0
        self.pinned[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.pinned[address]
        return 0


SPANS = [slice(0, PAGE), slice(PAGE, PAGE), slice(PAGE, 4 * PAGE), slice(4 * PAGE, 5 * PAGE)]
GPU = torch.device("cuda", 0)


def test_a_failed_pin_leaves_nothing_pinned() -> None:
    runtime = Runtime(failing=3)
    with pytest.raises(OSError, match=r"did not pin 4,096 bytes .* after 16,384 of 20,480"):
        Pinned(SPANS, 5 * PAGE, GPU, runtime=runtime)
    assert runtime.calls == 3 and not runtime.pinned


def test_an_interrupted_pin_leaves_nothing_pinned() -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    runtime = Runtime(failing=0)
    with pytest.raises(KeyboardInterrupt):
        Pinned(SPANS, 5 * PAGE, GPU, interrupt, runtime)
    assert runtime.calls == 1 and not runtime.pinned


def test_pinned_memory_ends_with_its_owner() -> None:
    said: list[tuple[int, int]] = []
    runtime = Runtime(failing=0)
    pinned = Pinned(SPANS, 5 * PAGE, GPU, lambda *at: said.append(at), runtime)
    assert sum(runtime.pinned.values()) == len(pinned.memory) == 5 * PAGE
    assert said == [(PAGE, 5 * PAGE), (4 * PAGE, 5 * PAGE), (5 * PAGE, 5 * PAGE)]
    del pinned
    assert not runtime.pinned


def linears(layer: nn.Module) -> dict[str, nn.Module]:
    return {n: m for n, m in layer.named_modules() if getattr(m, "holds_fp8", False)}


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


def held(device: torch.device) -> tuple[int, int, int]:
    """(live tensors, bytes on the GPU, bytes that torch has pinned on the host)."""
    gc.collect()
    tensors = sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())
    if device.type != "cuda":
        return tensors, 0, 0
    pinned = torch.cuda.host_memory_stats()["allocated_bytes.current"]
    return tensors, torch.cuda.memory_allocated(device), pinned


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_many_steps_keep_what_the_first_ones_hold(device: torch.device) -> None:
    """Weights and activations wait on the host; rows have two lengths, each with buffers of its own."""
    model = make(Way(), device)
    base = shard_base(model, offload=Offload(0.3, MUCH))
    fuse(model, save="checkpoint", attention="math", offload_activations=True)
    rows = [ids[:, :n] for ids, n in zip(batches(device), (16, 12, 16), strict=True)]
    state = an_adapter(model).fp8_state

    def train(steps: int) -> tuple[int, int, int]:
        for step in range(steps):
            model.zero_grad()
            loss_of(model, rows[step % len(rows)]).backward()
            state.reduce_and_update()
        return held(device)

    first = train(6)
    addresses = [store.slots.memory.data_ptr() for store in base.stores]
    assert train(45) == first
    assert addresses == [store.slots.memory.data_ptr() for store in base.stores]
    base.unshard()


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_many_replayed_steps_keep_what_the_first_ones_hold(device: torch.device) -> None:
    """On a GPU as many steps as 70B takes in two hours on one of 80 GB."""
    model = make(Way(), device)
    base = shard_base(model, offload=Offload(0.3, MUCH))
    fuse(model, save="checkpoint", attention="math", offload_activations=True)
    rows = list(batches(device))
    run, phase, close = Loop(model, device).by_layers(device)

    def train(steps: int) -> tuple[int, int, int]:
        for step in range(steps):
            run(rows[step % len(rows)])
        return held(device)

    first = train(6)
    assert phase() == "replaying"
    assert train(2_000 if device.type == "cuda" else 45) == first
    close()
    base.unshard()
