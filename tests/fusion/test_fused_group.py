# SPDX-License-Identifier: Apache-2.0
"""Projections as one matrix: weights that are zero or far apart, settings that change, memory of inference mode."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from lorakernels import BlockScaling, DelayedScaling, FP8State, LoRALinear, fuse, ops, unfuse
from lorakernels.fusion.group import MOST_VARIANTS
from lorakernels.modules.linear.frozen import quantize_weight
from lorakernels.recipes import Recipe
from lorakernels.values import RowChunks
from tests.fusion.fused_models import (
    ATTENTION,
    FP32,
    LINEARS,
    adapted,
    difference,
    exact,
    run,
    tokens,
)


def scale_weights(model: nn.Module, factors: dict[str, float]) -> None:
    for path, module in model.named_modules():
        if (factor := factors.get(path.rpartition(".")[2])) is not None:
            raw, scale_inv = quantize_weight(module.dequantized_weight() * factor)
            module._write_weight(raw, scale_inv)


def both_errors(fused: nn.Module) -> tuple[dict[str, float], dict[str, float]]:
    """Of the fused and of the unfused model's gradients, against float64."""
    unfused = copy.deepcopy(fused)
    unfuse(unfused)
    x, found = tokens(2, 32), []
    truth = run(exact(unfused), x)
    for model in (fused, unfused):
        one = run(model, x)
        found.append({name: difference(one[name], value) for name, value in truth.items()})
    return found[0], found[1]


@pytest.mark.parametrize(
    "factors",
    [{"k_proj": 8, "v_proj": 64}, {"q_proj": 1 / 64, "up_proj": 16}, {"k_proj": 0, "gate_proj": 0}],
    ids=["k and v", "q and up", "zero"],
)
def test_trained_biases_of_weights_that_are_far_apart(factors: dict[str, float]) -> None:
    """dy's segments come multiplied by what the weights' scales differ by; a bias' gradient does not."""
    model = adapted("Qwen2", LINEARS, fp8=DelayedScaling(), bias="all")
    scale_weights(model, factors)
    fuse(model)
    ours, theirs = both_errors(model)
    biases = [name for name in ours if name.endswith("bias")]
    assert len(biases) == 6
    for name in biases:
        assert ours[name] <= 2 * theirs[name] + 2.0**-4, (name, ours[name], theirs[name])


@pytest.mark.parametrize("recipe", [DelayedScaling(), BlockScaling()], ids=["one scale", "blocks"])
def test_scales_written_in_place_are_renewed_where_graphs_read_them(recipe: object) -> None:
    """A capture restores buffers in place, and the next forward renews what was derived from them."""
    widths = {"hidden_size": 256, "intermediate_size": 256}  # heads of 64, in pairs a block
    model = adapted(targets=LINEARS, fp8=recipe, model=widths)
    fuse(model)
    for group in model.model.layers[0].lorakernels.fused.groups:
        before = group.join()
        at = [None if t is None else t.data_ptr() for t in before]
        scale = before.scale_inv.clone()
        for member in group.members:
            member.weight_scale_inv.mul_(2.0)
        after = group.join()
        assert [None if t is None else t.data_ptr() for t in after] == at
        assert torch.equal(after.scale_inv, 2 * scale)


def test_a_group_keeps_few_lengths_of_rows_and_one_tensor_for_all() -> None:
    """Ranks that share rows give adapters other chunks for each length. Captured graphs read what is on the device."""
    model = adapted(targets=LINEARS, fp8=DelayedScaling(), lora_dropout=0.1)
    fuse(model)
    group, factors = model.model.layers[0].lorakernels.fused.qkv, set()
    for size in [*range(1, 3 * MOST_VARIANTS), 1]:
        for member in group.members:
            member.chunks = RowChunks(0, 1, size)
        to, _ = group.call()
        assert to.spec.chunks == (0, 1, size) and to.masks[0].chunks == (0, 1, size)
        factors.add(id(to.factors))
        assert len(group._variants) <= MOST_VARIANTS
    assert len(factors) == 1


@pytest.mark.parametrize("zero", ["k_proj", "up_proj"])
def test_a_zero_weight_leaves_fp16_gradients_of_the_others_in_range(zero: str) -> None:
    model = adapted(targets=LINEARS, fp8=DelayedScaling(), dtype=torch.float16)
    scale_weights(model, {zero: 0.0})
    fuse(model)
    parts = model.model.layers[0].lorakernels.fused
    group = parts.qkv if zero == "k_proj" else parts.gate_up
    derived = group.join()
    members = [name.rpartition(".")[2] for name in (m.name for m in group.members)]
    scales = {n: float(m.weight_scale_inv) for n, m in zip(members, group.members, strict=True)}
    assert scales.pop(zero) == 1.0
    largest = max(scales.values())
    assert float(derived.grad_scale_inv) == largest
    expected = [scales.get(name, largest) / largest for name in members]
    assert derived.multiplier.tolist() == pytest.approx(expected)
    ours, theirs = both_errors(model)
    for name, error in ours.items():
        assert error <= 2 * theirs[name] + 2.0**-4, (name, error, theirs[name])


def test_weights_that_are_all_zero() -> None:
    model = adapted(targets=LINEARS, fp8=DelayedScaling())
    scale_weights(model, {"gate_proj": 0.0, "up_proj": -0.0})
    fuse(model)
    derived = model.model.layers[0].lorakernels.fused.gate_up.join()
    assert derived.multiplier.tolist() == [1.0, 1.0] and float(derived.grad_scale_inv) == 1.0
    assert all(value.isfinite().all() for value in run(model, tokens()).values())


def test_only_bytes_without_a_value_count_as_zero() -> None:
    """−0 is zero; the smallest values of either sign are not."""
    model = adapted(targets=LINEARS, fp8=DelayedScaling())
    gate = model.model.layers[0].mlp.gate_proj
    for byte, zero in ((0x80, True), (0x01, False), (0x81, False)):
        raw = torch.zeros_like(gate.stored)
        raw.view(-1)[3] = byte
        gate._write_weight(raw, torch.full_like(gate.weight_scale_inv, 64.0))
        twin = copy.deepcopy(model)
        fuse(twin)
        derived = twin.model.layers[0].lorakernels.fused.gate_up.join()
        assert (float(derived.grad_scale_inv) < 64.0) == zero, byte


@pytest.mark.parametrize("shared", [True, False], ids=["one mask", "a mask each"])
def test_a_dropout_that_changes_after_a_forward(shared: bool) -> None:
    model = adapted(targets=LINEARS)
    fuse(model, shared_dropout=shared)
    x = tokens()
    before = run(model, x)["logits"]
    for p, same in ((0.5, False), (0.0, True)):
        for module in model.modules():
            if isinstance(module, LoRALinear):
                module.lora_dropout = p
        assert torch.equal(run(model, x)["logits"], before) == same


@pytest.mark.parametrize("fp8", [None, DelayedScaling()], ids=["plain", "fp8"])
def test_memory_that_is_joined_in_inference_mode_trains(fp8) -> None:
    model = adapted("Qwen2", fp8=fp8, bias="all")
    fuse(model)
    model = copy.deepcopy(model)  # which moves all memory
    x = tokens()
    with torch.inference_mode():
        model(x, use_cache=False)
    run(model, x)
    q = model.model.layers[0].self_attn.q_proj
    for mode in (True, False):  # derived again, in the same memory
        q._write_weight(q.stored.clone(), None)
        with torch.inference_mode(mode), torch.no_grad():
            model(x, use_cache=False)
        run(model, x)


def test_columns_of_another_state_are_taken_at_the_next_forward() -> None:
    model = adapted(targets=LINEARS, fp8=DelayedScaling())
    fuse(model)
    x = tokens()
    run(model, x)
    frozen = [m for m in model.modules() if isinstance(m, LoRALinear)]
    before = frozen[0].fp8_state
    after = FP8State(["another", *before.names], before.recipe)
    for module in frozen:
        module.fp8_state, module.column = after, module.column + 1
    before.reset()
    run(model, x)
    written = [names[1:] for names in (after.forward[0].tolist(), after.backward[0].tolist())]
    assert after.forward[0, 0] == after.backward[0, 0] == 0 and not before.forward[0].any()
    assert all(any(row) for row in written)


def cast(layers: dict[str, LoRALinear], dtype: torch.dtype, factor: str) -> None:
    for layer in layers.values():
        parameter = getattr(layer, factor)
        parameter.data = parameter.data.to(dtype)


@torch.no_grad()
def step(layers: dict[str, LoRALinear]) -> None:
    for layer in layers.values():
        layer.lora_A.add_(0.05), layer.lora_B.mul_(1.5)


@torch.no_grad()
def without_values(layers: dict[str, LoRALinear]) -> None:
    layers["v_proj"]._parameters["weight"].zero_()


# By name; each finds the layer as those before have left it.
CHANGES: dict[str, Callable[[dict[str, LoRALinear]], Any]] = {
    "nothing": lambda layers: None,
    "k switched off": lambda layers: setattr(layers["k_proj"], "disable_adapters", True),
    "k on again": lambda layers: setattr(layers["k_proj"], "disable_adapters", False),
    "k merged": lambda layers: layers["k_proj"].merge(),
    "a step beside it": step,
    "q switched off": lambda layers: setattr(layers["q_proj"], "disable_adapters", True),
    "another step": step,
    "k unmerged": lambda layers: layers["k_proj"].unmerge(),
    "q on again": lambda layers: setattr(layers["q_proj"], "disable_adapters", False),
    "A in bf16": lambda layers: cast(layers, torch.bfloat16, "lora_A"),
    "B in bf16": lambda layers: cast(layers, torch.bfloat16, "lora_B"),
    "v without values": without_values,
    "k frozen": lambda layers: layers["k_proj"].lora_A.requires_grad_(False),
    "a step again": step,
    "all merged": lambda layers: [layer.merge() for layer in layers.values()],
    "all unmerged": lambda layers: [layer.unmerge() for layer in layers.values()],
}


@pytest.mark.slow
@pytest.mark.parametrize("fp8", [None, DelayedScaling()], ids=["plain", "FP8"])
def test_a_call_is_that_of_a_model_that_has_not_run_whatever_changes_in_between(
    fp8: Recipe | None,
) -> None:
    """One change after the other. A copy has joined nothing and prepared nothing yet."""
    model, x = adapted(targets=ATTENTION[:3], fp8=fp8), tokens()
    fuse(model)
    attention = model.model.layers[0].self_attn
    layers = {name: getattr(attention, name) for name in ATTENTION[:3]}
    for name, change in CHANGES.items():
        change(layers)
        for _ in range(2):
            twin = copy.deepcopy(model)
            found, expected = run(model, x), run(twin, x)
            assert found.keys() == expected.keys(), name
            assert [n for n in found if not found[n].equal(expected[n])] == [], name


@pytest.mark.parametrize("apart", [0, 32], ids=["adjacent", "apart"])
def test_weights_that_lie_one_behind_the_other_are_joined_where_they_are(apart: int) -> None:
    model = adapted(targets=LINEARS, fp8=DelayedScaling())
    fuse(model)
    group = model.model.layers[0].lorakernels.fused.gate_up
    weights = [m._parameters["weight"] for m in group.members]
    expected = torch.cat([w.data for w in weights])
    block = torch.empty(expected.numel() + apart, dtype=torch.uint8)
    places = block[: weights[0].numel()], block[apart + weights[0].numel() :]
    for weight, place in zip(weights, places, strict=True):
        place.copy_(weight.data.view(torch.uint8).view(-1))
        weight.data = place.view(weight.shape).view(weight.dtype)
    joined = group.call()[0]
    assert weights[0].data_ptr() == joined.weight.data_ptr()
    assert (joined.weight.data_ptr() == block.data_ptr()) == (apart == 0)
    assert torch.equal(joined.weight, expected.view(torch.uint8))


@pytest.mark.parametrize(("rank", "ranks"), [(64, [192]), (86, [86] * 3)], ids=["192", "258"])
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_one_mask_is_one_projection_down_while_the_ranks_fit(
    rank: int, ranks: list[int], p: float
) -> None:
    """`quantize_lora_down` takes a ΣR of 256. Beyond, each of q, k and v reads x, under the same mask."""
    model = adapted(targets=ATTENTION[:3], r=rank, lora_dropout=p)
    unfused = copy.deepcopy(model)
    for module in unfused.modules():
        if isinstance(module, LoRALinear):
            module.lora_dropout = 0.0
    truth, found = run(exact(unfused), x := tokens()), []
    fuse(model)

    def down(x, lora_A, *others, _op=ops.quantize_lora_down):
        found.append(lora_A.shape[0])
        return _op(x, lora_A, *others)

    with mock.patch.object(ops, "quantize_lora_down", down):
        ours = run(model, x)
    assert found == 2 * ranks, "of two layers"
    if p == 0:
        assert max(difference(ours[name], value) for name, value in truth.items()) <= FP32
