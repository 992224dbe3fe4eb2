# SPDX-License-Identifier: Apache-2.0
"""FP8State over several ranks: one start per world runs all scenarios, each test looks at one of them.

A result is {scenario: fp32 [2, L + 1, n], forward and backward}, and what `all_reduce` was called with.
"""

from __future__ import annotations

import math
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from lorakernels import DelayedScaling, FP8State, LoRAConfig, LoRALinear
from tests.processes import on_ranks

pytestmark = pytest.mark.slow

NAMES, STEPS = ("a", "b", "c"), 6
RECIPE = DelayedScaling(amax_history_len=4)


def amaxes(rank, step):
    """fp32 [2, n]; now and then a tensor that this rank does not use."""
    generator = torch.Generator().manual_seed(100 * rank + step)
    rows = torch.rand(2, len(NAMES), generator=generator) * 10.0**rank
    return rows * (torch.rand(rows.shape, generator=generator) > 0.3)


def odd_amaxes(rank, step):
    """Rank 1 sees a NaN of x and an inf of dy in step 3, beside finite values of the others."""
    rows = amaxes(rank, step) + 1e-3
    if (rank, step) == (1, 3):
        rows[0, 0], rows[1, 1] = math.nan, math.inf
    return rows


def run(state, rows_of, group=None):
    for step in range(STEPS):
        rows = rows_of(step)
        if rows is not None:
            state.forward[0], state.backward[0] = rows.to(state.device)
        state.reduce_and_update(group)
    return torch.stack((state.forward, state.backward)).cpu()


def layer_and_batch():
    torch.manual_seed(0)
    layer = LoRALinear(16, 8, config=LoRAConfig(r=2, fp8=RECIPE))
    return layer, torch.randn(STEPS, 8, 16), torch.randn(STEPS, 8, 8)


def train(layer, xs, dys):
    for x, dy in zip(xs, dys, strict=True):
        if len(x):
            layer(x).backward(dy)
        layer.fp8_state.reduce_and_update()
    return torch.stack((layer.fp8_state.forward, layer.fp8_state.backward)).cpu()


def captured(rank, device):
    """`reduce_and_update` replayed from a graph."""
    state = FP8State(NAMES, RECIPE, device)
    start = state.save()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        state.reduce_and_update()  # NCCL connects at its first call
    torch.cuda.current_stream().wait_stream(side)
    state.restore(start)
    torch.cuda.synchronize()
    graph, addresses = torch.cuda.CUDAGraph(), (state.forward.data_ptr(), state.backward.data_ptr())
    # NCCL's watchdog thread asks for events meanwhile
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        state.reduce_and_update()
    for step in range(STEPS):
        state.forward[0], state.backward[0] = amaxes(rank, step).to(device)
        graph.replay()
    torch.cuda.synchronize()
    assert addresses == (state.forward.data_ptr(), state.backward.data_ptr())
    assert state.pinned_by == "a CUDA graph"
    graph.reset()
    return torch.stack((state.forward, state.backward)).cpu()


def scenarios(rank, world, device):
    """Every rank runs all of them in this order."""

    def state(recipe=RECIPE):
        return FP8State(NAMES, recipe, device)

    found = {
        "different data": run(state(), lambda step: amaxes(rank, step)),
        "an idle rank": run(state(), lambda step: amaxes(rank, step) if rank else None),
        "odd values": run(state(), lambda step: odd_amaxes(rank, step)),
    }
    layer, xs, dys = layer_and_batch()
    layer.to(device)
    xs, dys = (t.to(device).chunk(world, dim=1)[rank] for t in (xs, dys))
    found["a layer"] = train(layer, xs, dys)
    layer.fp8_state.reset()
    seen = 0 if rank == 0 else 8
    found["a layer that does not run on rank 0"] = train(layer, xs[:, :seen], dys[:, :seen])
    alone = DelayedScaling(amax_history_len=4, reduce_amax=False)
    found["reduce_amax=False"] = run(state(alone), lambda step: amaxes(rank, step))
    if world == 4:
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        mine, other = groups[rank // 2], groups[1 - rank // 2]
        found["subgroups"] = run(state(), lambda step: amaxes(rank, step), mine)
        kept = state()
        kept.forward[0] = 1.0
        with pytest.raises(ValueError, match=f"rank {rank} is not in `group`"):
            kept.reduce_and_update(other)
        assert kept.in_charge == "auto" and not kept.forward[1:].any()
    solo = [dist.new_group([r]) for r in range(world)][rank]
    found["a group of one"] = run(state(), lambda step: amaxes(rank, step), solo)
    if device.type == "cuda":
        found["captured"] = captured(rank, device)
    return found


def worker(rank, device):
    calls, real = [], dist.all_reduce

    def counted(tensor, *args, **kwargs):
        calls.append((tensor.numel(), str(tensor.dtype)))
        return real(tensor, *args, **kwargs)

    with mock.patch.object(dist, "all_reduce", counted):
        per_scenario = scenarios(rank, dist.get_world_size(), device)
    return {name: t.numpy() for name, t in per_scenario.items()}, calls


WORLDS = [
    pytest.param(("gloo", 2), id="gloo-2"),
    pytest.param(("gloo", 4), id="gloo-4"),
    pytest.param(("nccl", 2), id="nccl-2", marks=pytest.mark.gpu),
]


@pytest.fixture(scope="module", params=WORLDS)
def ranks(request):
    """[({scenario: tensor}, calls of all_reduce)] by rank."""
    backend, world = request.param
    if backend == "nccl" and torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} GPUs, found {torch.cuda.device_count()}")
    collected = on_ranks(worker, world, backend)
    return [({k: torch.tensor(v) for k, v in found.items()}, calls) for found, calls in collected]


def one_process(rows_of, members):
    """The state of one process that sees what all `members` see: torch's maximum keeps NaN."""

    def rows(step):
        seen = [rows_of(rank, step) for rank in members]
        return torch.stack(seen).amax(0)

    return run(FP8State(NAMES, RECIPE), rows)


def check(ranks, scenario, expected):
    for found, _ in ranks:
        torch.testing.assert_close(found[scenario], expected, rtol=0, atol=0, equal_nan=True)


def test_ranks_with_different_data_end_as_one_process_that_sees_all(ranks):
    expected = one_process(amaxes, range(len(ranks)))
    assert (expected[:, -1] > 0).all() and expected[:, 1:-1].count_nonzero() > 12
    check(ranks, "different data", expected)


def test_a_rank_that_contributes_nothing_hurts_nobody(ranks):
    expected = one_process(amaxes, range(1, len(ranks)))
    assert (expected[:, -1] > 0).all()
    check(ranks, "an idle rank", expected)


def test_nan_and_inf_of_one_rank_reach_all(ranks):
    expected = one_process(odd_amaxes, range(len(ranks)))
    assert expected[0, :-1, 0].isnan().any() and expected[1, :-1, 1].isinf().any()
    assert expected[:, -1].isfinite().all()
    check(ranks, "odd values", expected)


def test_layers_over_shards_of_a_batch(ranks):
    """Row sharding leaves each element's own amax as it is, so the maximum over ranks is the whole batch's."""
    layer, xs, dys = layer_and_batch()
    expected = train(layer, xs, dys)
    assert (expected[:, -1] > 0).all()
    check(ranks, "a layer", expected)


def test_a_rank_whose_layers_never_ran_gets_the_scales(ranks):
    first = ranks[0][0]["a layer that does not run on rank 0"]
    assert (first[:, -1] > 0).all() and first[:, 2:-1].all()
    check(ranks, "a layer that does not run on rank 0", first)
    layer, xs, dys = layer_and_batch()
    rest = len(xs[0]) // len(ranks)
    check(
        ranks,
        "a layer that does not run on rank 0",
        train(layer, xs[:, rest:], dys[:, rest:]),
    )


def test_subgroups_reduce_only_themselves(ranks):
    if len(ranks) < 4:
        pytest.skip(f"two groups of 2 need 4 ranks, this world has {len(ranks)}")
    halves = [one_process(amaxes, members) for members in ((0, 1), (2, 3))]
    assert not torch.equal(*halves)
    for half, expected in enumerate(halves):
        check(ranks[2 * half : 2 * half + 2], "subgroups", expected)


@pytest.mark.parametrize("scenario", ["reduce_amax=False", "a group of one"])
def test_who_is_alone_keeps_its_own_scales(ranks, scenario):
    for rank in range(len(ranks)):
        check(ranks[rank : rank + 1], scenario, one_process(amaxes, [rank]))


def test_one_all_reduce_of_one_row_per_update(ranks):
    """6 updates per scenario that communicates; the captured one warms up, is captured, and then replays."""
    for found, calls in ranks:
        alone = {"reduce_amax=False", "a group of one", "captured"}
        three, one = (6, "torch.int32"), (2, "torch.int32")
        layers = [name for name in found if name.startswith("a layer")]
        rows = [name for name in found if name not in alone and name not in layers]
        assert calls.count(one) == STEPS * len(layers)
        assert calls.count(three) == STEPS * len(rows) + 2 * ("captured" in found)
        assert len(calls) == calls.count(one) + calls.count(three)


@pytest.mark.gpu
def test_a_captured_reduction_is_the_eager_one(ranks):
    if "captured" not in ranks[0][0]:
        pytest.skip("this world runs on the CPU")
    check(ranks, "captured", one_process(amaxes, range(len(ranks))))
