# SPDX-License-Identifier: Apache-2.0
"""ShardPlan: what it chooses, what it refuses, and what its numbers add up to."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from benchmarks.peers.models import ADAPTED, SPECS, empty_model
from lorakernels import BlockScaling, DelayedScaling, LoRAConfig, ShardPlan, apply_lora, fuse
from lorakernels.planner.machine import MACHINES
from lorakernels.planner.memory import Placement, fractions
from lorakernels.planner.plan import candidates, predict
from lorakernels.planner.probe import probe
from lorakernels.planner.size import ModelSize, weights
from lorakernels.planner.time import BatchSize, gemm_seconds

H200 = MACHINES["H200"]
LORA = LoRAConfig(target_modules=list(ADAPTED["qkvo"]))
GB = 10**9
SMALL = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "vocab_size": 40,
}


@pytest.fixture(autouse=True)
def a_host_that_offers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan without `host_memory` would depend on where the tests run."""
    monkeypatch.setattr("lorakernels.planner.plan.host_memory_limit", lambda: None)


@lru_cache
def size_of(model: str) -> ModelSize:
    return ModelSize.of(SPECS[model].config(), LORA)


def plan(memory: int | None, tokens: int, gpus: int = 1, **options: Any) -> ShardPlan:
    return ShardPlan.of(a_70b(), memory, tokens, gpus, **options)


@lru_cache
def a_70b() -> nn.Module:
    """With adapters, so that plans need not build another."""
    model = empty_model(SPECS["70b"].config())
    apply_lora(model, replace(LORA, fp8=None))
    return model


def test_a_small_model_stays_whole_and_keeps_all() -> None:
    found = ShardPlan.of(SPECS["8b"].config(), None, 4096, 2, lora=LORA)
    assert found.placement == Placement(1, 0.0) and set(found.saves) == {"full"}
    assert found.exposed == 0 and found.rate == 2 * 4096 / found.step


def test_blocks_take_longer_and_have_their_scales_beside_the_base() -> None:
    lora = replace(LORA, fp8=BlockScaling())
    size = ModelSize.of(SPECS["70b"].config(), lora)
    one = size_of("70b")
    assert all(layer.blocks and not layer.fp8 for layer in size.layers)
    assert size.base == one.base and size.trained == one.trained
    assert size.outside - one.outside == size.base // 128 // 128 * 4
    batch, saves = BatchSize(1, 8192), ["checkpoint"] * 80
    blocks, delayed = (predict(s, batch, H200, 1, Placement(), saves) for s in (size, one))
    assert 1.06 < blocks.step / delayed.step < 1.4
    turned = 2 * 28672 * 8192  # gate's and up's weight, transposed for their dx
    assert blocks.bytes.total - delayed.bytes.total == size.outside - one.outside + turned


def test_a_model_s_own_adapters_say_whether_its_base_has_blocks() -> None:
    for recipe in (BlockScaling(), DelayedScaling()):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL))
        apply_lora(model, LoRAConfig(r=2, target_modules="all-linear", fp8=recipe), frozen="fp8")
        other = LoRAConfig(fp8=DelayedScaling() if recipe == BlockScaling() else BlockScaling())
        (layer,) = ModelSize.of(model, other).layers
        assert layer.blocks == (recipe == BlockScaling())


def test_two_gpus_share_what_makes_one_recompute() -> None:
    one, two = plan(None, 8192), plan(None, 8192, 2)
    assert "checkpoint" in one.saves and one.placement.ranks == 1
    assert "checkpoint" not in two.saves and two.placement.ranks == 2
    assert two.rate > 2 * one.rate


def test_70b_fits_80_gb_with_a_part_on_the_host() -> None:
    found = plan(80 * GB, 8192, machine="H100-80GB", host_memory=100 * GB)
    assert 0 < found.placement.offload < 1 and found.bytes.total <= 80 * GB
    assert found.bytes.host <= 100 * GB and found.exposed <= 0.02 * found.step
    assert found.rate > 1900  # the issue's


def test_whole_groups_of_weights_go_to_the_host() -> None:
    layer = size_of("70b").layers[0]
    groups = (8192 * 10240, 8192 * 8192, 8192 * 57344, 8192 * 28672)
    found = fractions(layer)
    assert len(found) == 15 and found[0] == 0
    assert found[-1] == pytest.approx(1 - min(groups) / sum(groups))
    assert {n / sum(groups) for n in groups} <= set(found)


@pytest.mark.slow
def test_of_equal_steps_the_one_with_less_on_the_host_is_taken() -> None:
    found = plan(80 * GB, 8192, machine="H100-80GB", host_memory=100 * GB)
    others = candidates(found.model, found.batch, found.machine, 1, 100 * GB)
    others = [p for p in others if p.exposed <= 0.02 * p.step]
    fastest = min(p.step for p in others)
    less = [p for p in others if p.bytes.host < found.bytes.host]
    assert found.step <= 1.01 * fastest and less
    assert all(p.step > 1.01 * fastest for p in less)


@pytest.mark.slow
def test_the_host_offers_what_its_control_groups_allow(monkeypatch) -> None:
    with pytest.raises(ValueError, match="with no host memory"):
        plan(75 * GB, 8192)
    monkeypatch.setattr("lorakernels.planner.plan.host_memory_limit", lambda: 100 * GB)
    assert 0 < plan(75 * GB, 8192).bytes.host <= 100 * GB
    with pytest.raises(ValueError, match="with no host memory"):
        plan(75 * GB, 8192, host_memory=0)


def test_the_host_s_memory_is_a_limit_for_all_gpus() -> None:
    plans = candidates(size_of("70b"), BatchSize(1, 8192), H200, 2, 30 * GB)
    offloaded = {(p.placement.ranks, p.placement.offload) for p in plans if p.placement.offload}
    assert max(rho for ranks, rho in offloaded if ranks == 2) * size_of("70b").base <= 30 * GB
    assert max(rho for ranks, rho in offloaded if ranks == 1) * size_of("70b").base * 2 <= 30 * GB
    assert all(p.bytes.total <= H200.memory for p in plans)


def test_the_budget_gives_fuse_the_plan_s_own_choice() -> None:
    from lorakernels.fusion.memory import OFFLOADED, fit

    found = plan(None, 8192)
    assert tuple(fit(found.model.layers, found.memory_budget, 8192, 2)) == found.saves
    assert not found.offload_activations and not found.bytes.waiting
    away = plan(80 * GB, 8192, machine="H100-80GB", host_memory=100 * GB)
    assert away.offload_activations and "offload" in away.saves[-1]
    assert tuple(fit(away.model.layers, away.memory_budget, 8192, 2, OFFLOADED)) == away.saves
    waiting = away.saves.count("fp8-offload") * 8192 * 2 * 28672
    assert away.bytes.waiting == waiting > 0 == away.saves.count("checkpoint-offload")
    base = away.model.base * away.placement.offload
    assert away.bytes.host == pytest.approx(base + waiting)
    assert "GB of activations in host memory" in str(away)


def test_sizes_are_those_of_the_model_and_of_fuse() -> None:
    """Against real modules: bytes of the frozen FP8 weights, trained numbers, and what fuse counts."""
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=160, attn_implementation="sdpa",
    )  # fmt: skip
    lora = LoRAConfig(r=4, target_modules=["q_proj", "down_proj"])
    size = ModelSize.of(config, lora)
    model = transformers.LlamaForCausalLM(config)
    linears = [m for n, m in model.named_modules() if isinstance(m, nn.Linear) and n != "lm_head"]
    assert size.base == sum(m.weight.numel() for m in linears) == 3 * weights(size.layers[0])
    inside = sum(p.numel() for p in model.model.layers.parameters())
    assert size.outside == 2 * (sum(p.numel() for p in model.parameters()) - inside)
    report = apply_lora(model, replace(lora, fp8=DelayedScaling()))
    assert size.trained == report.trainable_parameters
    assert ModelSize.of(model, None).layers == size.layers, "a model keeps its own adapters"
    fused = fuse(model, save="fp8", tokens=128)
    used = predict(size, BatchSize(2, 64), H200, 1, Placement(), ["fp8"] * 3).bytes
    # the small model computes in fp32, which counts 4 bytes a number
    assert fused.saved_bytes == sum(s.saved_bytes("fp8", 128, 4) for s in size.layers)
    assert used.kept == sum(s.saved_bytes("fp8", 128) for s in size.layers)


def test_parts_of_the_base_go_where_the_placement_says() -> None:
    size, batch, saves = size_of("70b"), BatchSize(1, 8192), ["checkpoint"] * 80

    def used(ranks: int, offload: float) -> Any:
        return predict(size, batch, H200, max(ranks, 2), Placement(ranks, offload), saves)

    whole, half, tail = used(1, 0.0), used(2, 0.0), used(2, 0.5)
    assert (whole.bytes.base, whole.bytes.slots) == (size.base, 0)
    assert half.bytes.base * 2 == size.base and half.bytes.slots == 2 * weights(size.layers[0])
    assert tail.bytes.base * 4 == size.base and tail.bytes.host * 2 == size.base
    assert tail.bytes.slots * 2 == (2 + 3) * weights(size.layers[0])
    assert whole.layer.gather == 0 < half.layer.gather and half.layer.copy == 0 < tail.layer.copy
    assert whole.step < half.step <= tail.step


def test_embedding_and_head_are_split_where_nothing_fits_without() -> None:
    """8B on two small GPUs, on which a layer's backward takes more than a chunk's logits."""
    size, batch, saves = size_of("8b"), BatchSize(1, 4096), ["checkpoint"] * 32
    end = 2 * 128_256 * 4096
    assert size.ends == (end, end)
    without, split = (
        predict(size, batch, H200, 2, Placement(2, 0.0, embeddings), saves)
        for embeddings in (False, True)
    )
    assert split.bytes.outside == without.bytes.outside - end
    logits = 2 * 2048 * 128_256
    hidden = 3 * 2 * 4096 * 4096
    assert split.bytes.workspace == hidden + logits + end
    assert hidden + logits <= without.bytes.workspace < split.bytes.workspace
    assert split.bytes.total < without.bytes.total
    assert split.exposed == pytest.approx(without.exposed + 2 * end / 2 / H200.peer)
    assert split.step == pytest.approx(without.step + 2 * end / 2 / H200.peer)
    between = (split.bytes.total + without.bytes.total) // 2
    memory = (between - without.bytes.fragments) * 100 // 96  # fragments are 4 % of it
    found = ShardPlan.of(SPECS["8b"].config(), memory, 4096, 2, lora=LORA)
    assert found.placement == Placement(2, 0.0, True) and found.bytes.total <= memory
    assert "sharded over 2 GPUs, embedding and head too" in str(found)
    more = ShardPlan.of(SPECS["8b"].config(), memory + end, 4096, 2, lora=LORA)
    assert not more.placement.embeddings


def test_tied_and_trained_ends() -> None:
    import transformers

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "vocab_size": 160}
    end, saved = 2 * 160 * 64, LoRAConfig(target_modules="all-linear", modules_to_save=["lm_head"])
    for tied, lora, ends in ((True, None, 1), (False, None, 2), (False, saved, 1)):
        made = transformers.LlamaConfig(**sizes, num_attention_heads=4, tie_word_embeddings=tied)
        assert ModelSize.of(made, lora).ends == (end,) * ends


def test_what_is_not_hidden_is_in_the_step() -> None:
    size, saves = size_of("70b"), ["full"] * 80
    plans = [predict(size, BatchSize(1, 256), H200, 1, Placement(1, r), saves) for r in (0.0, 0.5)]
    layer = plans[1].layer
    waits = max(0, layer.copy - layer.forward) + max(0, layer.copy - layer.backward)
    assert plans[1].exposed == pytest.approx(78 * waits) and waits > 0
    assert plans[1].step > plans[0].step + plans[1].exposed


def test_activations_come_back_by_the_way_of_the_weights() -> None:
    size, batch, slow = size_of("70b"), BatchSize(1, 8192), replace(H200, host=25e9)
    pairs = [(0.0, "fp8-offload"), (0.5, "fp8"), (0.5, "fp8-offload")]
    found = [predict(size, batch, slow, 1, Placement(1, r), [s] * 80).layer for r, s in pairs]
    alone, weights_alone, both = found
    assert alone.send == both.send > 0 and weights_alone.copy == both.copy > 0
    # forward they go opposite ways, so the longer one counts; backward both come
    waits = max(both.send, both.copy) - both.forward, both.send + both.copy - both.backward
    assert both.exposed == pytest.approx(sum(waits)) and min(waits) > 0
    assert both.exposed > alone.exposed + weights_alone.exposed


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [1024, 4096, 16384])
def test_more_memory_is_never_slower(tokens: int) -> None:
    steps = []
    for memory in (85 * GB, 140 * GB, 400 * GB):
        options = {"host_memory": 200 * GB, "allow_exposed": True}
        steps.append(plan(memory, tokens, **options).step)
    # plans that differ by 1 % count as equal
    assert steps[0] * 1.01 >= steps[1] and steps[1] * 1.01 >= steps[2] and steps[0] > steps[2]


def test_a_product_takes_whole_rounds_of_tiles() -> None:
    full, more = gemm_seconds((4096, 4224, 4096), 1e15, 132), gemm_seconds((4224, 4224, 4096), 1e15, 132)  # fmt: skip
    assert full == pytest.approx(2 * 4096 * 4224 * 4096 / 1e15, rel=0.05) and more >= full


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": 0}, "tokens must be a positive whole number, found 0"),
        ({"tokens": (2, 1.5)}, "tokens must be a positive whole number, found 1.5"),
        ({"gpus": 0}, "gpus must be a positive whole number, found 0"),
        ({"memory": -1}, "memory must be a positive whole number, found -1"),
        ({"host_memory": -1}, "host_memory must not be negative, found -1"),
        ({"machine": "B200"}, "machine must be probe or one of H200, H100-80GB, found 'B200'"),
        ({"memory": GB}, "memory: nothing fits 1.0 GB. With the base whole"),
        ({"lora": LoRAConfig(target_modules=["x_proj"])}, "x_proj"),
    ],
    ids=["tokens", "length", "gpus", "memory", "host", "machine", "fits", "lora"],
)  # fmt: skip
def test_bad_values_are_named(change: dict[str, Any], message: str) -> None:
    given = {"model": SPECS["8b"].config(), "memory": None, "tokens": 64, "gpus": 1} | change
    with pytest.raises(ValueError, match=message):
        ShardPlan.of(**given)


def test_a_model_must_be_transformers_and_fusable() -> None:
    import transformers

    with pytest.raises(TypeError, match="model must be a transformers model or config, found str"):
        ShardPlan.of("llama", None, 64)
    with pytest.raises(ValueError, match="GPT2LMHeadModel has no decoder layer"):
        ShardPlan.of(transformers.GPT2Config(n_layer=1), None, 64)
    gelu = transformers.LlamaConfig(num_hidden_layers=1, hidden_act="gelu")
    with pytest.raises(ValueError, match=r"layers\.0 cannot be fused: the activation must be SiLU"):
        ShardPlan.of(gelu, None, 64)


@pytest.mark.gpu
def test_a_probe_finds_this_gpu_s_rates() -> None:
    found = probe(torch.device("cuda"))
    assert 0.2e15 < found.fp8_forward < 3e15 and 5e11 < found.bandwidth < 1e13
    assert 1e9 < found.host < 1e12 and found.memory == torch.cuda.mem_get_info()[1]
