# SPDX-License-Identifier: Apache-2.0
"""Plans of rows that ranks share and of pipeline stages: times by hand, bytes part by part, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.peers.models import ADAPTED, SPECS
from lorakernels import LoRAConfig, PlanAxes, ShardPlan, context_parallel
from lorakernels.autograd.attention.chunk import ChunkCall
from lorakernels.fusion.memory import SAVE, mixes
from lorakernels.parallel import ShardedAdamW
from lorakernels.parallel.context import attention as context_attention
from lorakernels.parallel.context.attention import Chunks
from lorakernels.parallel.optimizer.flat import lay_out
from lorakernels.parallel.optimizer.sharded_adamw import BUCKET_BYTES
from lorakernels.planner.machine import MACHINES
from lorakernels.planner.memory import Placement, bytes_of, kept_of, saves_within
from lorakernels.planner.pipeline import part_of, stage, stages_within, steps
from lorakernels.planner.plan import predict
from lorakernels.planner.size import ELEMENT, ModelSize, weights
from lorakernels.planner.time import (
    EXCHANGE,
    KERNEL,
    MERGE,
    BatchSize,
    backward,
    calls,
    exchanged,
    forward,
    head,
    whole_rows,
)
from tests.fusion.fused_models import ATTENTION, LINEARS, VOCABULARY, fused_in_bf16
from tests.fusion.test_fuse_memory import kept_bytes
from tests.processes import on_ranks

H200 = MACHINES["H200"]
LORA = LoRAConfig(target_modules=list(ADAPTED["qkvo"]))
GB = 10**9


@lru_cache
def size_of(model: str) -> ModelSize:
    return ModelSize.of(SPECS[model].config(), LORA)


def test_rows_that_ranks_share_take_a_part_of_the_work_and_of_the_bytes() -> None:
    """128k tokens over four GPUs: everything but attention's keys and values is a quarter."""
    layer, whole = size_of("70b").layers[0], BatchSize(1, 131072)
    shared = replace(whole, ranks=4)
    assert shared.tokens == 32768
    rows = 2 * ELEMENT * 131072 * 8 * 128  # k and v, 8 heads of 128
    assert whole_rows(layer, shared) == rows and whole_rows(layer, whole) == 0
    for form in ("full", "recompute", "fp8"):
        model = replace(size_of("70b"), layers=(layer,))
        alone, own = kept_of(model, whole, [form]), kept_of(model, shared, [form])
        out = 0 if form == "full" else ELEMENT * 32768 * 64 * 128
        fixed = layer.stacked
        assert own == pytest.approx((alone - fixed) / 4 + fixed + rows + out)
    model = replace(size_of("70b"), layers=(layer,))
    assert kept_of(model, shared, ["checkpoint"]) == kept_of(model, whole, ["checkpoint"]) / 4


def test_keys_and_values_come_once_and_their_gradients_go_in_twice_the_bytes() -> None:
    layer, batch = size_of("70b").layers[0], BatchSize(2, 8192, 4)
    received = 0.75 * 2 * 4 * 8192 * 8 * 128 / H200.peer
    both = 3 * received + 2 * EXCHANGE
    assert exchanged(layer, batch, H200, "full") == pytest.approx(both)
    again = exchanged(layer, batch, H200, "checkpoint")
    assert again == pytest.approx(4 * received + 3 * EXCHANGE)
    assert exchanged(layer, replace(batch, ranks=1), H200, "full") == 0
    size = size_of("70b")
    found = predict(size, batch, H200, 4, Placement(), ["fp8"] * 80)
    free = predict(size, batch, replace(H200, peer=math.inf), 4, Placement(), ["fp8"] * 80)
    gradients = 2 * 4 * size.trained * 0.75 / H200.peer
    assert found.step - free.step == pytest.approx(80 * 3 * received + gradients)
    assert found.layer.rows == pytest.approx(both) and found.rate == 4 * 4096 / found.step


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_attention_of_shared_rows_has_the_calls_of_the_rank_that_has_most(ranks: int) -> None:
    """As autograd/attention/chunk.py makes them. All ranks attend to as many keys."""
    size, most = 16, (0, 0)
    for rank in range(ranks):
        chunks = Chunks(rank, ranks, size)
        others = ChunkCall("torch", chunks.begins, 1.0).others(size)
        queries = [2 * size - first for first, _ in others]
        area = sum(q * (k.stop - k.start) for q, (_, k) in zip(queries, others, strict=True))
        assert 2 * size**2 + area == chunks.length**2 / (2 * ranks)
        most = max(most, (1 + len(others), 2 * size + sum(queries)))
    assert calls(BatchSize(1, 2 * ranks * size, ranks)) == most


def test_short_rows_take_what_calls_and_exchanges_take_besides() -> None:
    """8B over eight GPUs: of 512 tokens each, a quarter of a layer is neither products nor keys."""
    layer = size_of("8b").layers[0]
    alone, shared = BatchSize(1, 512), BatchSize(1, 4096, 8)
    one, own = (
        forward(layer, batch, H200, "full") + backward(layer, batch, H200, "full")
        for batch in (alone, shared)
    )
    assert own.gemm == one.gemm
    each = 4 * 32 * 128 * (831 / 770e12 + 2.5 * 1253.5 / 712e12)
    keys = 4 * 32 * 128 * (1 / 770e12 + 2.5 / 712e12)
    assert own.attention - one.attention == pytest.approx(
        (5 * 256 - 512) * each + (4096**2 / 16 - 512**2 / 2) * keys + 2 * 2 * 3 * KERNEL
    )
    rows = 4 * 4096 * 8 * 128
    moved = (2 / 8 + 3) * rows + 2 * MERGE * 3 * 256 * 32 * 128
    assert own.memory - one.memory == pytest.approx(moved / H200.bandwidth + (2 + 2 * 2) * KERNEL)


@pytest.mark.slow
def test_a_long_row_is_planned_over_a_shared_base() -> None:
    long = replace(SPECS["70b"], length=131072).config()
    with pytest.raises(ValueError, match="nothing fits"):
        ShardPlan.of(long, None, 131072, 1, lora=LORA, host_memory=0)
    found = ShardPlan.of(long, None, 131072, PlanAxes(4, cp=4), lora=LORA, host_memory=0)
    assert found.placement.ranks == 4 and found.bytes.total <= H200.memory
    shown = str(found)
    assert "1 x 131072 tokens over 4 GPUs" in shown and "keys, values, both ways" in shown
    assert "keys, values exchanged" in shown
    assert found.memory_budget < found.bytes.kept or set(found.saves) == {"checkpoint"}


def test_ranks_lay_down_their_keys_and_then_the_gradients_of_all() -> None:
    """A GPU's keys and values are 128 MiB of 512; their gradients in fp32 are 1 GiB: both are powers of two."""
    size, batch = size_of("70b"), BatchSize(1, 131072, 4)
    saves = ["checkpoint"] * 80
    found = predict(size, batch, H200, 4, Placement(4), saves).bytes
    assert found.exchange == (1 << 27) + (1 << 30)
    assert found.total == found.peak + found.exchange + found.context + found.fragments
    longer = predict(size, replace(batch, length=131080), H200, 4, Placement(4), saves).bytes
    assert longer.exchange == (1 << 28) + (1 << 31)
    short = predict(size_of("1b"), BatchSize(1, 8, 2), H200, 2, Placement(), ["full"] * 16).bytes
    assert short.exchange == 1 << 20  # the least, which is there already
    assert predict(size, BatchSize(1, 8192), H200, 4, Placement(4), saves).bytes.exchange == 0


@pytest.mark.parametrize(
    "batch", [BatchSize(1, 8192, 2), BatchSize(1, 8192)], ids=["shared", "alone"]
)
def test_layers_keep_the_fastest_mix_that_fits_whatever_room_there_is(batch: BatchSize) -> None:
    """What ranks that share rows keep besides depends on the mix: "recompute" keeps as much as "full" there.

    66 and 69 GB were once too little for 70B's layers, where 65 and 67 GB were enough.
    """
    size = size_of("70b")
    names = [tuple(mix) for mix in mixes(size.layers, batch.tokens, ELEMENT)]

    def needed(saves: Sequence[str]) -> int:
        found = bytes_of(size, batch, H200, 2, Placement(), saves)
        return found.kept + found.workspace

    for room in (16 * GB, 40 * GB, 64 * GB, 66 * GB, 67 * GB, 69 * GB):
        saves = saves_within(size, batch, room, SAVE)
        assert saves is not None and needed(saves) <= room
        faster = names[: names.index(tuple(saves))]
        assert all(needed(mix) > room for mix in faster)
    assert saves_within(size, batch, 4 * GB, SAVE) is None


def test_stages_have_what_the_model_has() -> None:
    size = size_of("70b")
    for count in (2, 3, 4):
        parts = part_of(size, count)
        assert sum((part.layers for part in parts), ()) == size.layers
        assert sum(part.outside for part in parts) == size.outside
        assert sum(part.trained for part in parts) == pytest.approx(size.trained, abs=count)
        assert [part.vocabulary for part in parts] == [0] * (count - 1) + [size.vocabulary]
        assert all(not part.outside for part in parts[1:-1])
    tied = part_of(size_of("1b"), 2)
    assert tied[0].outside == tied[1].outside == ELEMENT * 128256 * 2048  # of each rank a copy


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 2), (2, 8), (4, 4), (4, 16)])
def test_equal_stages_wait_as_the_schedule_says(ranks: int, microbatches: int) -> None:
    """Without a head and over links without end: (p − 1) / (m + p − 1) of a step."""
    size = replace(size_of("70b"), vocabulary=0, outside=0)
    machine = replace(H200, peer=math.inf, memory=10**15)
    found = stages_within(size, BatchSize(1, 8192), machine, (ranks, microbatches))
    assert not isinstance(found, int)
    assert found.pipeline.bubble == pytest.approx((ranks - 1) / (microbatches + ranks - 1))
    layer = size.layers[0]
    forms = (f(layer, BatchSize(1, 8192), machine, "full") for f in (forward, backward))
    own = sum(form.seconds for form in forms) * 80 / ranks * found.stages[0].factor
    assert found.step == pytest.approx(
        (microbatches + ranks - 1) * own, rel=1e-3
    )  # and the optimizer


def test_the_slowest_stage_sets_the_pace_and_the_others_fill() -> None:
    """By hand: 2 stages of 3 s and 5 s, 4 microbatches: 4 · 5 + 3 s, and a send of each way at each of 4 times."""
    size, batch = size_of("70b"), BatchSize(1, 8192)
    made = [stage(part, batch, H200, (i, 2, 4), ["full"] * 40) for i, part in enumerate(part_of(size, 2))]  # fmt: skip
    made = [each._replace(seconds=s, update=0.0) for each, s in zip(made, (3.0, 5.0), strict=True)]
    found = steps(size, batch, H200, (2, 4), made)
    sends = 2 * 4 * 2 * 8192 * 8192 / H200.peer
    assert found.step == pytest.approx(23.0 + sends)
    assert found.pipeline.bubble == pytest.approx(1 - 20 / (23 + sends))


def test_a_stage_holds_its_part_and_what_is_in_flight() -> None:
    size, batch = size_of("70b"), BatchSize(1, 8192)
    parts = part_of(size, 4)
    for i, part in enumerate(parts):
        for microbatches in (4, 16):
            found = stage(part, batch, H200, (i, 4, microbatches), ["fp8"] * 20).bytes
            assert found.base == 20 * weights(size.layers[0]) and found.slots == found.host == 0
            one = part.layers[0].saved_bytes("fp8", 8192)
            assert found.kept == (4 - i) * 20 * one
    hidden = ELEMENT * 8192 * 8192
    most, least = (
        [stage(p, batch, H200, (i, 4, m), ["fp8"] * 20).bytes for i, p in enumerate(parts)]
        for m in (16, 4)
    )
    grown = [a.workspace - b.workspace for a, b in zip(most, least, strict=True)]
    assert grown == [12 * hidden, 24 * hidden, 24 * hidden, 12 * hidden]


def test_stages_whose_rows_gpus_share_have_a_part_of_the_tokens_and_exchange_keys_and_values() -> (
    None
):
    """Beside plans of shared rows without stages: the same layers, exchanges and activations."""
    size, batch = size_of("70b"), BatchSize(1, 16384, 2)
    parts = part_of(size, 4)
    for save in ("full", "checkpoint"):
        found = stage(parts[1], batch, H200, (1, 4, 4), [save] * 20)
        layer = size.layers[0]
        own = forward(layer, batch, H200, save) + backward(layer, batch, H200, save)
        rows = 20 * exchanged(layer, batch, H200, save)
        assert rows > 0 and found.seconds == pytest.approx(20 * own.seconds * found.factor + rows)
        alone = bytes_of(parts[1], batch, H200, 1, Placement(), [save] * 20)
        assert found.bytes.kept == 3 * alone.kept and found.bytes.exchange == alone.exchange > 0
        hidden = ELEMENT * 8192 * 8192  # of half a row
        assert found.bytes.workspace == alone.workspace + 2 * 4 * hidden


@pytest.mark.slow
def test_plans_of_stages_and_shared_rows_fit_and_are_said() -> None:
    config = SPECS["70b"].config()
    axes = PlanAxes(8, cp=2, pp=2, microbatches=8)
    found = ShardPlan.of(config, 80 * GB, 16384, axes, lora=LORA, machine="H100-80GB")
    assert found.bytes.total <= 80 * GB and found.pipeline is not None
    assert found.rate == pytest.approx(2 * 8 * 16384 / found.step)  # two replicas
    shown = str(found)
    assert "8 microbatches of 1 x 16384 tokens over 2 GPUs a stage" in shown
    assert "in 2 stages of 40 + 40 layers" in shown and "keys, values, both ways" in shown
    longer = partial(ShardPlan.of, config, 80 * GB, 32768, lora=LORA, machine="H100-80GB")
    with pytest.raises(ValueError, match=r"stage 0 of 2 does not fit 80\.0 GB"):
        longer(PlanAxes(2, pp=2, microbatches=8))
    assert longer(replace(axes, gpus=4)).bytes.total <= 80 * GB


def test_the_head_is_the_last_stage_s_alone() -> None:
    size, batch = size_of("8b"), BatchSize(1, 4096)
    parts = enumerate(part_of(size, 2))
    first, last = (stage(part, batch, H200, (i, 2, 2), ["full"] * 16) for i, part in parts)
    extra = head(size, batch, H200).seconds
    assert 0.8 * extra < last.seconds - first.seconds < 1.3 * extra  # the power stretches both


def test_plans_of_stages_fit_and_are_said() -> None:
    config = SPECS["70b"].config()
    axes = PlanAxes(4, pp=2, microbatches=8)
    found = ShardPlan.of(config, 80 * GB, 8192, axes, lora=LORA, machine="H100-80GB")
    assert found.bytes.total <= 80 * GB and len(found.saves) == 80 and found.pipeline is not None
    assert found.pipeline.layers == (40, 40)
    assert found.rate == 2 * 8 * 8192 / found.step  # two replicas
    shown = str(found)
    assert (
        "8 microbatches of 1 x 8192 tokens" in shown
        and f"of stage {found.pipeline.fullest}, which" in shown
    )
    assert f"{found.pipeline.bubble:.1%}" in shown and "in 2 stages of 40 + 40 layers" in shown
    with pytest.raises(ValueError, match=r"stage 0 of 2 does not fit 40\.0 GB .* 2 microbatches"):
        ShardPlan.of(config, 40 * GB, 16384, PlanAxes(2, pp=2), lora=LORA)


@pytest.mark.parametrize(
    ("axes", "change", "message"),
    [
        (PlanAxes(4, cp=3), {}, "cp must divide the 4 gpus, found 3"),
        (PlanAxes(4, pp=3), {}, "pp must divide the 4 gpus, found 3"),
        (PlanAxes(4, cp=0), {}, "cp must be a positive whole number, found 0"),
        (PlanAxes(4, cp=2, pp=4), {}, "cp · pp must divide the 4 gpus, found 2 · 4"),
        (PlanAxes(4, cp=4), {"tokens": 4092}, "a multiple of 2 cp = 8, found 4092"),
        (PlanAxes(4, microbatches=4), {}, "microbatches are of pipeline stages, found 4 with pp 1"),
        (PlanAxes(4, pp=4, microbatches=3), {}, "microbatches must be at least pp, 4, found 3"),
        (PlanAxes(4, pp=2), {"host_memory": 1}, "host_memory does not go with pp 2"),
        (PlanAxes(4, pp=4), {"layers": 3}, "3 decoder layers cannot make 4 stages"),
    ],
    ids=["cp", "pp", "none", "both", "row", "no stages", "few", "host", "layers"],
)
def test_axes_that_do_not_fit_are_refused(
    axes: PlanAxes, change: dict[str, Any], message: str
) -> None:
    layers = change.pop("layers", 32)
    given: dict[str, Any] = {"tokens": 4096, "host_memory": 0, **change}
    with pytest.raises(ValueError, match=message):
        ShardPlan.of(SPECS["8b"].cut(layers).config(), None, gpus=axes, lora=LORA, **given)


class Flash(torch.autograd.Function):
    """Keeps what FlashAttention keeps: q, k, v and out as they lie, and a fp32 number a query and head."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.zeros_like(q.transpose(1, 2)).transpose(1, 2)
        ctx.save_for_backward(q, k, v, out, q.new_zeros(q.shape[:3], dtype=torch.float32))
        return out


def kept_by_two(rank: int, device: torch.device, forms: list[str]) -> dict[str, tuple[int, int]]:
    """{form: (bytes that two fused layers keep of a rank's tokens, those that a plan counts)}."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    found = {}
    for form, targets in product(forms, (ATTENTION, ["q_proj", "v_proj"], LINEARS)):
        model, layers = fused_in_bf16(targets, form, device)
        context_parallel(model, mesh["cp"])
        own = torch.randint(VOCABULARY, (2, 32), generator=torch.Generator().manual_seed(rank))
        size = ModelSize(layers, VOCABULARY, 0, 0)
        by_flash = {
            "attend_segments": lambda name, q, k, v, *_: Flash.apply(q, k, v),
            "CHUNKS": frozenset(),  # as packed documents run, which keep most
        }
        with patch.multiple(context_attention, **by_flash):
            kept = kept_bytes(model, own)
        found[f"{form}, {targets}"] = kept, kept_of(size, BatchSize(2, 64, 2), [form] * len(layers))
    return found


@pytest.mark.slow
def test_what_layers_keep_of_shared_rows_is_what_the_plan_counts() -> None:
    """But for slots and scales, some hundred bytes a layer."""
    for found in on_ranks(kept_by_two, 2, "gloo", ["full", "recompute", "fp8", "checkpoint"]):
        for form, (kept, counted) in found.items():
            assert abs(kept - counted) <= 0.02 * counted + 400, (form, kept, counted)


def state_of(rank: int, device: torch.device, count: int) -> int:
    """Bytes of all tensors that a ShardedAdamW makes for one parameter of `count` numbers."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    parameter = torch.nn.Parameter(torch.zeros(count))
    optimizer = ShardedAdamW([parameter], mesh["dp"])
    parameter.grad = torch.ones(count)
    optimizer.step()
    (bucket,) = optimizer._buckets
    held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in (
        bucket.whole, bucket.grad, bucket.param, *bucket.moments.values(),
    )}  # fmt: skip
    return sum(held.values())


def test_a_sharded_optimizer_takes_what_shardedadamw_holds() -> None:
    count = lay_out([1000], 2).size  # so that nothing is padded
    one = replace(size_of("1b"), trained=count)
    saves = ["full"] * len(one.layers)
    found = bytes_of(one, BatchSize(1, 64), H200, 2, Placement(optimizer=2), saves)
    assert on_ranks(state_of, 2, "gloo", count) == [found.optimizer] * 2
    many = replace(one, trained=BUCKET_BYTES)  # numbers of 4 bytes: the buffer has a bucket of them
    part = bytes_of(many, BatchSize(1, 64), H200, 8, Placement(optimizer=8), saves).optimizer
    assert part == 16 * many.trained // 8 + BUCKET_BYTES


@pytest.mark.slow
def test_405b_with_adapters_of_rank_64_keeps_more_if_its_optimizer_is_split() -> None:
    """S003's form: 2.5 G trained parameters, whose moments take 20 GB where each GPU has all of them."""
    lora = LoRAConfig(r=64, target_modules=list(ADAPTED["all"]))
    config = SPECS["405b"].config()
    whole, split = (
        ShardPlan.of(config, None, (4, 1024), PlanAxes(8, sharded_optimizer=many), lora=lora, host_memory=0)
        for many in (False, True)
    )  # fmt: skip
    trained = 126 * 64 * (2 * 16384 + 2 * 17408 + 2 * 16384 + 3 * 69632)
    assert whole.model.trained == split.model.trained == trained
    assert whole.bytes.optimizer == 8 * trained > 19 * GB
    assert split.bytes.optimizer == 2 * trained + BUCKET_BYTES
    assert split.saves.count("checkpoint") < whole.saves.count("checkpoint")
    assert split.rate > whole.rate and "optimizer sharded over 8 GPUs" in str(split)
    assert split.bytes.total <= H200.memory


@pytest.mark.parametrize(
    "axes", [PlanAxes(1, sharded_optimizer=True), PlanAxes(8, 1, 2, None, True)]
)
def test_a_sharded_optimizer_needs_several_gpus_with_the_same_layers(axes: PlanAxes) -> None:
    with pytest.raises(ValueError, match="sharded_optimizer needs several GPUs"):
        ShardPlan.of(SPECS["1b"].config(), None, 64, axes, lora=LORA, host_memory=0)
