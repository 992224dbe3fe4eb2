# SPDX-License-Identifier: Apache-2.0
"""Plans of layers that GPUs hold together: parts beside real ones, exchanges by hand, what is refused, what is said."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from functools import lru_cache, partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.peers.models import ADAPTED, SPECS
from lorakernels import BlockScaling, LoRAConfig, PlanAxes, ShardPlan
from lorakernels.fusion.memory import fit
from lorakernels.parallel import parallelize
from lorakernels.parallel.ranks.exchange import START
from lorakernels.planner.machine import MACHINES
from lorakernels.planner.memory import Placement, bytes_of, kept_of, saves_within
from lorakernels.planner.plan import predict
from lorakernels.planner.size import ELEMENT, ModelSize, split_layer, weights
from lorakernels.planner.tensor import Exchange, crossings, ends, rows_exchanged
from lorakernels.planner.time import (
    KERNEL,
    BatchSize,
    KernelSeconds,
    backward,
    forward,
    head,
    stretched,
)
from tests.fusion.fused_models import ATTENTION, LINEARS, VOCABULARY, fused_in_bf16
from tests.fusion.test_fuse_memory import kept_bytes
from tests.processes import on_ranks

H200 = MACHINES["H200"]
LORA = LoRAConfig(r=16, target_modules=list(ADAPTED["qkvo"]))
GB = 10**9
MIB = 1 << 20
PLAN = Path(__file__).parents[2] / "docs" / "plan.md"


@lru_cache
def size_of(model: str, adapted: str = "qkvo") -> ModelSize:
    return ModelSize.of(SPECS[model].config(), SPECS[model].lora(adapted))


@pytest.mark.parametrize(
    ("model", "adapted", "batch", "gpus", "placement", "save", "step", "rate", "total"),
    [
        ("70b", "qkvo", BatchSize(2, 8192), 2, Placement(2, 0.27), "fp8-offload",
         "0x1.5f0285c824829p+2", "0x1.7569fd1b002bbp+12", 130553661421),
        ("70b", "all", BatchSize(2, 8192, 2), 8, Placement(8, 0.0, True, 8), "checkpoint",
         "0x1.036014673660dp+2", "0x1.f956545ccb27dp+13", 31209846272),
        ("8b", "all", BatchSize(2, 1024), 8, Placement(), "recompute",
         "0x1.6244060c1cb0bp-4", "0x1.71fb6fb5768c7p+17", 20379751936),
        ("8b", "qkvo", BatchSize(2, 8192), 2, Placement(), "full",
         "0x1.8bb366a8f41b2p-1", "0x1.4b3d7c8c82de6p+15", 68731164160),
    ],
)  # fmt: skip
def test_without_tp_a_plan_has_the_bits_that_it_had_before(
    model: str,
    adapted: str,
    batch: BatchSize,
    gpus: int,
    placement: Placement,
    save: str,
    step: str,
    rate: str,
    total: int,
) -> None:
    """Values of the plan that did not know tp, on an H100. Of shared rows: since attention has several calls."""
    lora = LoRAConfig(r=8, target_modules=list(ADAPTED[adapted]))
    size = ModelSize.of(SPECS[model].config(), lora)
    found = predict(size, batch, MACHINES["H100-80GB"], gpus, placement, [save] * len(size.layers))
    assert found.step == float.fromhex(step) and found.rate == float.fromhex(rate)
    assert found.bytes.total == total and found.layer.split == 0.0


def test_a_gpu_has_its_part_of_weights_adapters_and_vocabulary() -> None:
    size = size_of("70b", "all")
    own = size.over(4)
    assert own.base * 4 == size.base and own.vocabulary * 4 == size.vocabulary
    assert sum(own.ends) * 4 == sum(size.ends) and size.over(1) is size
    norms = size.outside - sum(size.ends)
    assert own.outside == norms + sum(own.ends)
    # A of q, k, v, gate, up and B of o, down are whole
    whole = 80 * 16 * (5 * 8192 + 2 * 8192)
    assert own.trained == whole + (size.trained - whole) // 4
    odd = replace(size, vocabulary=32001).over(4)
    assert odd.vocabulary == 32001 and odd.outside == size.outside and not odd.split
    assert replace(size, plain=False).over(4).ends == size.ends


@pytest.mark.parametrize("form", ["full", "recompute", "fp8", "checkpoint"])
@pytest.mark.parametrize("adapted", ["qkvo", "all"])
def test_a_part_does_its_share_of_everything_but_launches(form: str, adapted: str) -> None:
    """Norms by rows, the rest by heads and columns: bytes and attention of four parts are those of the whole."""
    whole = size_of("70b", adapted).layers[0]
    batch = BatchSize(1, 8192)
    for way in (forward, backward):
        one = way(whole, batch, H200, form)
        part = way(split_layer(whole, 4), replace(batch, tp=4), H200, form)
        launches = (4 * part.memory - one.memory) / 3 / KERNEL  # each part has all of them
        assert 4 < launches < 70 and launches == pytest.approx(round(launches), abs=1e-3)
        assert 0 <= 4 * part.attention - one.attention < 30 * KERNEL
        assert 1 <= 4 * part.gemm / one.gemm < 1.05  # rounds of tiles


def test_blocks_scales_are_split_with_their_weights() -> None:
    lora = replace(LORA, fp8=BlockScaling())
    size = ModelSize.of(SPECS["70b"].config(), lora, 4)
    scales = size.base // 128 // 128 * 4
    ends_apart = size.outside - sum(size.ends) - scales
    assert size.over(4).outside == ends_apart + sum(size.ends) // 4 + scales // 4


def parts_of_two(rank: int, device: torch.device, forms: list[str]) -> dict[str, Any]:
    """{form: what a plan counts, and what two real layers have over two ranks}."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    found = {}
    for form, targets in product(forms, (ATTENTION, ["q_proj", "v_proj"], LINEARS)):
        model, layers = fused_in_bf16(targets, form, device)
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        size = ModelSize(layers, VOCABULARY, 0, trained)
        split = parallelize(model, mesh["tp"], vocabulary=True)
        own, batch = size.over(2), BatchSize(2, 64, 1, 2)
        frozen = [m for n, m in model.named_modules() if n in split.cuts and hasattr(m, "stored")]
        rows = torch.randint(VOCABULARY, (2, 64), generator=torch.Generator().manual_seed(0))
        kept_bytes(model, rows)  # matrices of parts are joined in the first forward
        found[f"{form}, {targets}"] = {
            "trained": (own.trained, sum(p.numel() for p in model.parameters() if p.requires_grad)),
            "base": (own.base, sum(m.stored.numel() for m in frozen)),
            "vocabulary": (own.vocabulary, len(model.get_output_embeddings().weight)),
            "kept": (kept_of(size, batch, [form] * len(layers)), kept_bytes(model, rows)),
            # for whole rows: 2 rstd, and s of o and down
            "more": 0
            if form == "checkpoint"
            else sum(64 * (8 + 2 * sum(x.ranks[1::2])) for x in layers),
        }
    return found


@pytest.mark.slow
def test_parts_are_those_of_parallelize_and_so_is_what_they_keep() -> None:
    """But for slots and scales, some hundred bytes a layer, and what a plan counts for whole rows."""
    for found in on_ranks(parts_of_two, 2, "gloo", ["full", "recompute", "fp8", "checkpoint"]):
        for form, each in found.items():
            (counted, kept), more = each.pop("kept"), each.pop("more")
            assert all(planned == real for planned, real in each.values()), (form, each)
            assert abs(kept + more - counted) <= 400, (form, kept, more, counted)


def test_exchanges_in_turn_take_three_bytes_of_each_row_and_way() -> None:
    """x8 twice a byte and y twice two bytes forward; dy8 and dx so backward: 6 M H (T − 1) / T each way."""
    layer, batch = size_of("70b").over(4).layers[0], BatchSize(1, 8192, 1, 4)
    rows = 6 * 8192 * 8192 * 3 // 4
    factors = 2 * 3 * 2048 * (48 + 16)  # s forward, ds backward: 16 bits, of the others
    totals = 3 * 4 * 8192 * (48 + 16)  # dA of q, k, v, and dB of o
    with mock.patch.object(Exchange, "is_beside", return_value=False):
        there, back = crossings.__wrapped__(layer, batch, H200, "full")
        again = crossings.__wrapped__(layer, batch, H200, "checkpoint")[1]
        frozen = replace(layer, ranks=(0, 0, 0, 0))
        alone = crossings.__wrapped__(frozen, batch, H200, "full")
    assert there.waits == pytest.approx((rows + factors) / H200.peer + 8 * KERNEL)
    assert back.waits == pytest.approx((rows + factors + totals) / H200.peer + 10 * KERNEL)
    assert alone[0].waits == alone[1].waits == pytest.approx(rows / H200.peer + 8 * KERNEL)
    # what is recomputed ends before down's sum
    less = 2 * 8192 * 8192 * 3 / 4 / H200.peer + 2 * KERNEL
    assert again.waits - back.waits == pytest.approx(there.waits - less)
    assert again.parts.memory > back.parts.memory and there.parts.gemm == back.parts.gemm == 0


@lru_cache
def exchange_of(number: int, back: bool, tp: int) -> Exchange:
    from lorakernels.planner import tensor as plan_tensor

    made = plan_tensor._backward if back else plan_tensor._forward
    batch = BatchSize(1, 8192, 1, tp)
    return made(size_of("70b").over(tp).layers[0], batch)[number]


def test_rows_travel_beside_the_products_that_docs_name() -> None:
    """docs/parallel.md: on two GPUs, of 8,192 rows of 70B, all but the gradient of gate and up."""
    size, batch = size_of("70b").over(2).layers[0], BatchSize(1, 8192, 1, 2)
    found = {
        (back, number): exchange_of(number, back, 2).is_beside(size, batch, H200)
        for back, number in product((False, True), range(4))
    }
    assert [key for key, beside in found.items() if not beside] == [(True, 2)]
    few = BatchSize(1, 256, 1, 2)
    assert not any(exchange_of(n, False, 2).is_beside(size, few, H200) for n in range(4))
    in_blocks = replace(size, fp8=False, blocks=True)
    assert not exchange_of(0, False, 2).is_beside(in_blocks, batch, H200)


def test_what_travels_beside_a_product_waits_for_what_takes_longer() -> None:
    """Over links without end launches and signals alone take time; over slow ones all but one piece's travel does."""
    size, batch = size_of("70b").over(4).layers[0], BatchSize(1, 8192, 1, 4)
    fast, slow = replace(H200, peer=math.inf), replace(H200, peer=1e9)
    for back, number in product((False, True), (0, 1)):
        each = exchange_of(number, back, 4)
        assert each.is_beside(size, batch, H200)
        assert each.taken(size, batch, fast).waits == pytest.approx(START)
        took = each.taken(size, batch, slow).waits
        small = 3 * (2 * 2048 * each.rank + each.totals)
        assert took == pytest.approx((each.sent(batch) + small) / slow.peer, rel=0.01)
        assert each.taken(size, batch, H200).parts.gemm > 0  # pieces take more rounds


def test_a_gpu_that_waits_draws_less() -> None:
    """Seconds between kernels at their watts leave power to the kernels."""
    parts = KernelSeconds(gemm=1.0)
    alone = stretched(parts, H200)
    assert alone == pytest.approx(H200.gemm_watts / H200.power)
    waits = 0.5
    found = stretched(parts, H200, waits)
    joules = H200.gemm_watts + waits * H200.memory_watts
    assert found + waits == pytest.approx(joules / H200.power) and 1 < found < alone
    assert stretched(parts, H200, 10.0) == 1.0


def test_a_split_head_sums_hidden_states_and_multiplies_its_columns() -> None:
    size, batch = size_of("70b"), BatchSize(1, 8192, 1, 4)
    own, whole = size.over(4), ELEMENT * 8192 * 8192
    found = ends(own, batch, H200)
    # the last norm's rows are gathered; the embedding's, and their gradient, are all-reduced
    assert found.waits == pytest.approx((0.75 + 2 * 1.5) * whole / H200.peer)
    kept = ends(replace(size, plain=False).over(4), batch, H200)
    assert kept.waits == pytest.approx(0.75 * whole / H200.peer)
    one, part = head(size, BatchSize(1, 8192), H200), head(own, batch, H200)
    assert part.gemm == pytest.approx(one.gemm / 4) and part.memory < one.memory


def test_ranks_exchange_rows_in_memory_of_powers_of_two() -> None:
    """70B, beside products: x8 of all rows and s are more than 64 MiB, y and s more than 128."""
    for tp in (2, 4):
        own = size_of("70b").over(tp)
        found = rows_exchanged(own, BatchSize(1, 8192, 1, tp), H200)
        assert found == (128 + 256) * MIB
    small = size_of("1b").over(2)
    few = rows_exchanged(small, BatchSize(1, 64, 1, 2), H200)
    assert few == 1 * MIB and rows_exchanged(small, BatchSize(1, 64), H200) == 0
    used = bytes_of(size_of("70b"), BatchSize(1, 8192, 1, 2), H200, 2, Placement(), ["full"] * 80)
    assert used.total == used.peak + used.rows + used.context + used.fragments


def test_replicas_are_counted_and_average_their_part_of_the_gradients() -> None:
    size, batch, saves = size_of("70b"), BatchSize(1, 8192, 1, 4), ["full"] * 80
    one, two = (predict(size, batch, H200, gpus, Placement(), saves) for gpus in (4, 8))
    assert one.rate == 8192 / one.step and two.rate == 2 * 8192 / two.step
    averaged = 2 * 4 * size.over(4).trained / 2 / H200.peer
    assert two.step - one.step == pytest.approx(averaged)
    assert one.bytes == two.bytes and one.bytes.base * 4 == size.base
    rows = predict(size, BatchSize(1, 8192, 2, 4), H200, 8, Placement(), saves)
    assert rows.rate == 8192 / rows.step and rows.layer.rows > 0 < rows.layer.split


def test_layers_keep_what_fits_in_parts() -> None:
    """`fuse` of whole layers, before they are cut, makes the plan's choice of its budget."""
    plan = partial(ShardPlan.of, SPECS["70b"].config(), tokens=8192, lora=LORA)
    found = plan(75 * GB, gpus=PlanAxes(2, tp=2))
    assert len({*found.saves}) == 2 and found.bytes.total <= 75 * GB
    assert tuple(fit(found.model.layers, found.memory_budget, 8192, 2)) == found.saves
    assert found.placement == Placement() and found.batch == BatchSize(1, 8192, 1, 2)
    batch, size = found.batch, found.model
    most = saves_within(size, batch, 1 << 50, ("full", "recompute"))
    assert most == ["full"] * 80
    whole = kept_of(size, replace(batch, tp=1), ["full"] * 80)
    # but for s, of all rows on each, and the logsumexp's like
    assert kept_of(size, batch, ["full"] * 80) == pytest.approx(whole / 2, rel=0.01)


@pytest.mark.slow
def test_gpus_with_equal_parts_share_a_base_where_that_is_faster() -> None:
    plan = partial(ShardPlan.of, SPECS["70b"].config(), tokens=8192, lora=LORA)
    found = plan(40 * GB, gpus=PlanAxes(8, tp=2))
    assert found.placement == Placement(4) and found.bytes.total <= 40 * GB
    assert found.bytes.base * 8 == found.model.base
    assert found.bytes.slots == 2 * weights(found.model.over(2).layers[0])
    shown = str(found)
    assert "1 x 8192 tokens over 2 GPUs (tp 2)" in shown
    assert "in 2 parts, each sharded over 4 GPUs" in shown and "rows exchanged" in shown
    with pytest.raises(ValueError, match="in 2 parts, each over 4 GPUs, and every layer check"):
        plan(15 * GB, gpus=PlanAxes(8, tp=2))
    both = plan(None, gpus=PlanAxes(8, cp=2, tp=4))
    assert "1 x 8192 tokens over 8 GPUs (tp 4, cp 2)" in str(both)
    assert "in 4 parts, one of each layer on a GPU" in str(both)
    assert re.search(r"waits for rows, both +0\.\d+ ms", str(both))


@pytest.mark.parametrize(
    ("axes", "change", "message"),
    [
        (PlanAxes(4, tp=3), {}, "tp must divide the 4 gpus, found 3"),
        (PlanAxes(4, tp=0), {}, "tp must be a positive whole number, found 0"),
        (PlanAxes(4, cp=4, tp=2), {}, "tp · cp must divide the 4 gpus, found 2 · 4"),
        (PlanAxes(4, pp=2, tp=2), {}, "tp does not go with pp"),
        (PlanAxes(4, tp=2), {"host_memory": 1}, "host_memory does not go with tp 2"),
        (PlanAxes(4, sharded_optimizer=True, tp=2), {}, "sharded_optimizer does not go with tp 2"),
        (PlanAxes(4, cp=2, tp=2), {"tokens": 4098}, "a multiple of tp · cp = 4, found 4098"),
        (PlanAxes(16, tp=16), {}, "num_key_value_heads must be a multiple of the 16 ranks"),
    ],
    ids=["gpus", "none", "cp", "pp", "host", "optimizer", "row", "heads"],
)
def test_what_split_layers_do_not_have_is_refused(
    axes: PlanAxes, change: dict[str, Any], message: str
) -> None:
    given: dict[str, Any] = {"tokens": 4096, **change}
    with pytest.raises(ValueError, match=message):
        ShardPlan.of(SPECS["8b"].cut(2).config(), None, gpus=axes, lora=LORA, **given)


def test_models_and_recipes_that_parallelize_refuses_have_no_plan() -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4}
    sizes |= {"num_hidden_layers": 1, "vocab_size": 64, "num_key_value_heads": 4}
    axes = PlanAxes(2, tp=2)
    lora = LoRAConfig(target_modules="all-linear")
    plan = partial(ShardPlan.of, memory=None, tokens=64, gpus=axes, lora=lora)
    packed = transformers.Phi3Config(**sizes, pad_token_id=0)
    with pytest.raises(ValueError, match="packs projections into one"):
        plan(packed)
    with pytest.raises(ValueError, match="norms behind its projections"):
        plan(transformers.Olmo2Config(**sizes))
    llama = transformers.LlamaConfig(**sizes)
    with pytest.raises(ValueError, match="must be a multiple of 2 ranks · 128"):
        plan(llama, lora=replace(lora, fp8=BlockScaling()))
    saved = LoRAConfig(target_modules="all-linear", modules_to_save=["lm_head"])
    with pytest.raises(ValueError, match="outside of the split layers cannot train"):
        plan(llama, lora=saved)
    assert plan(llama).model.splits_vocabulary(2)


def test_the_limit_of_the_host_offers_split_layers_nothing(monkeypatch: Any) -> None:
    monkeypatch.setattr("lorakernels.planner.plan.host_memory_limit", lambda: 400 * GB)
    found = ShardPlan.of(SPECS["70b"].config(), 46 * GB, 8192, PlanAxes(2, tp=2), lora=LORA)
    assert not found.bytes.host and not found.offload_activations


class Row:
    """A line of docs/plan.md: what is predicted of a layout, beside what was measured."""

    FORM = re.compile(
        r"\| (?P<cut>8 layers of )?(?P<model>Llama-[^,|]+), (?:tp (?P<tp>\d))?(?: × )?(?:cp (?P<cp>\d))?, "
        r"(?P<gpus>\d) (?P<machine>\S+) "
        r"\| (?P<rate>[\d,]+) \| (?P<took>[\d,]+) \| (?P<off>[+-][\d.]+%) "
        r"\| (?P<gib>[\d.]+) \| (?P<held>[\d.]+) \| (?P<more>[+-][\d.]+%) \|"
    )

    def __init__(self, found: re.Match[str]) -> None:
        self.line, self.found = found[0], found
        self.key = {"Llama-2-70B": "70b", "Llama-3.1-8B": "8b"}[found["model"]]

    def of_plan(self) -> str:
        size, spec, found = size_of(self.key), SPECS[self.key], self.found
        if found["cut"]:
            size = replace(size, layers=size.layers[:8], trained=size.trained // 10)
        batch = BatchSize(1, spec.length, int(found["cp"] or 1), int(found["tp"] or 1))
        saves, machine = ["full"] * len(size.layers), MACHINES[found["machine"]]
        plan = predict(size, batch, machine, int(found["gpus"]), Placement(), saves)
        took, held = float(found["took"].replace(",", "")), float(found["held"])
        rate, gib = plan.rate, plan.bytes.peak / 2**30
        start = self.line.partition(" | ")[0]
        return (
            f"{start} | {rate:,.0f} | {found['took']} | {rate / took - 1:+.1%} "
            f"| {gib:.2f} | {found['held']} | {gib / held - 1:+.1%} |"
        )


def test_docs_have_what_the_plan_says_of_split_layers_and_shared_rows() -> None:
    """And 70B's widths are within a tenth of what was measured."""
    text = PLAN.read_text(encoding="utf-8")
    rows = [Row(found) for found in Row.FORM.finditer(text)]
    assert len(rows) >= 18 and any(not row.found["tp"] for row in rows)
    for row in rows:
        assert row.of_plan() == row.line
        if row.key == "70b":
            assert abs(float(row.found["off"].rstrip("%"))) <= 10, row.line
