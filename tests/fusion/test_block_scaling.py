# SPDX-License-Identifier: Apache-2.0
"""Fused layers under BlockScaling compute what the layers themselves do; what does not fit is refused by name."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lorakernels import (
    BlockScaling,
    FrozenFP8Linear,
    LoRAConfig,
    apply_lora,
    fuse,
    merge_and_unload,
    ops,
    unfuse,
)
from tests.fusion.fused_models import difference

transformers = pytest.importorskip("transformers")
E4M3 = torch.float8_e4m3fn
STEP = 2.0**-3  # from a value of e4m3 to the next, where a last bit turned its rounding
KEPT = 2.0**-4  # a rounding to e4m3, of gate and up that "fp8" keeps
RECIPES = {
    "e4m3": BlockScaling(),
    "e5m2 backward, powers of two": BlockScaling(fp8_format="HYBRID", power_2_scale=True),
}


def model_of(recipe: BlockScaling, kv_heads: int = 2, layers: int = 2, **lora: Any) -> Any:
    """Heads of 64: two make a block of 128 rows. Of the first layer's projections three have no adapter."""
    sizes = {"hidden_size": 256, "intermediate_size": 384, "vocab_size": 40}
    sizes["num_hidden_layers"] = layers
    heads = {"num_attention_heads": 4, "num_key_value_heads": kv_heads}
    torch.manual_seed(0)
    made = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))
    made.config.use_cache = False
    excluded = [
        f"model.layers.0.{name}" for name in ("self_attn.k_proj", "mlp.down_proj", "mlp.up_proj")
    ]
    options = {"r": 4, "target_modules": "all-linear", "exclude_modules": excluded} | lora
    apply_lora(made, LoRAConfig(fp8=recipe, **options), frozen="fp8")
    for name, value in made.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(value, std=0.1)
    return made.train()


def step(model: Any, seed: int = 1) -> dict[str, torch.Tensor]:
    """Logits and gradients."""
    torch.manual_seed(seed)
    ids = torch.randint(0, 40, (2, 24)).to(model.device)
    model.zero_grad()
    logits = model(input_ids=ids).logits
    logits.backward(torch.randn_like(logits))
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits.detach(), **grads}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("save", ["recompute", "full", "checkpoint", "fp8"])
def test_a_fused_model_is_the_model(recipe: str, save: str) -> None:
    """Both quantize the same values, which sums in another order change by fp32's rounding: then by a step of FP8.

    A step is 2⁻³ of e4m3, 2⁻² of e5m2, and of few elements; dA reads x as it was before it was quantized, and "fp8"
    keeps gate and up in e4m3: their gradients differ by those roundings, 2⁻⁴ of each element. Logits follow steps of
    e4m3, of at most one element in sixteen.
    """
    allowed = STEP if RECIPES[recipe].backward_dtype == torch.float8_e4m3fn else 2 * STEP
    allowed += KEPT if save == "fp8" else 0.0
    plain = model_of(RECIPES[recipe])
    fused = copy.deepcopy(plain)
    report = fuse(fused, save=save)
    assert len(report.layers) == 2
    one, other = step(plain), step(fused)
    assert one.keys() == other.keys()
    for name, value in one.items():
        off = (other[name] - value).norm() / value.norm()
        assert off < (STEP / 4 if name == "logits" else allowed), (name, float(off))


class Asked(TorchDispatchMode):
    """By op and argument, what ops are asked for that write blocks, or read them."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[tuple[str, str], set[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = func._schema.arguments
        passed = {a.name: a.default_value for a in known}  # torch drops what is the default
        passed |= dict(zip(passed, args, strict=False)) | (kwargs or {})
        scales = passed.get("weight_scale_inv")
        reads = scales is not None and scales.dim() == 2
        if passed.get("power_of_two") is not None or reads:
            for name in {"power_of_two", "fp8_dtype"} & passed.keys():
                self.found.setdefault((func.__name__, name), set()).add(passed[name])
        return func(*args, **(kwargs or {}))


@pytest.mark.slow
@pytest.mark.parametrize("power", [False, True], ids=["any scale", "powers of two"])
@pytest.mark.parametrize("dy", ["E4M3", "HYBRID"])
@pytest.mark.parametrize("save", [None, "recompute", "full", "fp8"])
def test_every_op_is_asked_for_the_recipes_scales_and_formats(
    save: str | None, dy: str, power: bool
) -> None:
    """In forward and backward, fused or not, with adapters, without, and where masks are drawn."""
    recipe, found = BlockScaling(fp8_format=dy, power_2_scale=power), {}
    for options in ({}, {"lora_dropout": 0.2}, {"target_modules": ["o_proj"]}):
        model = model_of(recipe, **options)
        if save is not None:
            fuse(model, save=save)
        with Asked() as asked:
            step(model)
        for key, values in asked.found.items():
            found[key] = found.get(key, set()) | values
    assert len(found) > 3
    for (op, name), values in found.items():
        expected = {power} if name == "power_of_two" else {recipe.backward_dtype}
        if op.startswith("quantize_blocks") and name == "fp8_dtype":
            expected |= {E4M3}  # x is in it
        assert values <= expected, (op, name)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("offload", [False, True], ids=["", "offloaded"])
def test_recomputed_layers_have_the_bits_of_kept_ones(
    offload: bool, recipe: str, device: torch.device
) -> None:
    """Masks are drawn again, and blocks have the scales that they had: there is no history."""
    kept = model_of(RECIPES[recipe], lora_dropout=0.3).to(device)
    recomputed = copy.deepcopy(kept)
    how = {"attention": "math"}  # the same sums every time, on a GPU too
    fuse(kept, save="recompute", **how)
    report = fuse(recomputed, save="checkpoint", offload_activations=offload, **how)
    assert {layer.save for layer in report.layers} == {"checkpoint" + "-offload" * offload}
    one, other = step(kept), step(recomputed)
    assert one.keys() == other.keys()
    assert all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("save", ["recompute", "full", "fp8"])
def test_scales_written_in_the_pass_are_those_of_a_pass_of_their_own(
    recipe: str, save: str
) -> None:
    """To the bit: bytes and scales that norms, SwiGLU and RoPE leave, and `quantize_blocks` of what they compute.

    By the ops, as on a CPU: a recorded call on a GPU would not run them again. The contract compares the kernels' bits.
    """
    model = model_of(RECIPES[recipe], lora_dropout=0.3).bfloat16()
    fuse(model, save=save, attention="math")
    apart = copy.deepcopy(model)
    found = step(model)
    with quantized_apart() as passes:
        expected = step(apart)
    assert passes["rms_norm_quantize"] >= 4 and passes["swiglu_quantize_grad"] == 2
    assert passes["rope_qkv_backward_quantize"] == 2 and passes["quantize_grad"] >= 2
    assert passes["quantize_lora_down"] == 2, "o's x"
    assert found.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


@contextmanager
def quantized_apart() -> Iterator[Counter[str]]:
    """The ops that write scales leave them to `quantize_blocks`. How often each was asked for blocks, by name."""
    counts: Counter[str] = Counter()

    def norm(x: Any, weight: Any, eps: float, scaling: Any, keep: bool, power: Any = None) -> Any:
        normed, x8, scale_inv, rstd = ours["rms_norm_quantize"](x, weight, eps, scaling, True)
        if power is not None:
            counts["rms_norm_quantize"] += 1
            x8, scale_inv = ops.quantize_blocks(normed, E4M3, power)
        return normed if keep else normed[:0], x8, scale_inv, rstd

    def swiglu(gate_up: Any, scaling: Any, keep: bool, dtype: Any = None, power: Any = None) -> Any:
        act, a8, scale_inv = ours["swiglu_quantize"](gate_up, scaling, True, dtype)
        if power is not None:
            counts["swiglu_quantize"] += 1
            a8, scale_inv = ops.quantize_blocks(act, E4M3, power)
        return act if keep else act[:0], a8, scale_inv

    def pack(gate_up: Any, scaling: Any, keep: bool, power: Any = None) -> Any:
        act, _, _, *bytes_ = ours["swiglu_quantize_and_pack"](gate_up, scaling, True)
        return act if keep else act[:0], *ops.quantize_blocks(act, E4M3, power), *bytes_

    def grad(
        dact: Any, gate_up: Any, m: Any, scaling: Any, fp8: Any, keep: bool, power: Any
    ) -> Any:
        counts["swiglu_quantize_grad"] += 1
        d, *_ = ours["swiglu_quantize_grad"](dact, gate_up, m, scaling, fp8, True)
        return d if keep else d[:0], *ops.quantize_blocks(d, fp8, power)

    def rope(dq: Any, dk: Any, dv: Any, cos: Any, sin: Any, m: Any, fp8: Any, power: Any) -> Any:
        counts["rope_qkv_backward_quantize"] += 1
        dqkv = ops.rope_qkv_backward(dq, dk, dv, cos, sin, m)
        return dqkv, *ops.quantize_blocks(dqkv, fp8, power)

    def grad_of_linear(
        dy: Any, up: Any, scaling: Any, fp8: Any, side: Any, power: Any, *mask: Any
    ) -> Any:
        dy8, scale_inv, *factors = ours["quantize_grad"](dy, up, scaling, fp8, side, None, *mask)
        if power is not None:
            counts["quantize_grad"] += 1
            dy8, scale_inv = ops.quantize_blocks(dy, fp8, power)
        return dy8, scale_inv, *factors

    def down(x: Any, A: Any, scaling: Any, mask: Any, power: Any = None) -> Any:
        x8, scale_inv, s = ours["quantize_lora_down"](x, A, scaling, mask)
        if power is not None:
            counts["quantize_lora_down"] += 1
            x8, scale_inv = ops.quantize_blocks(x, E4M3, power)
        return x8, scale_inv, s

    names = {
        "rms_norm_quantize": norm,
        "swiglu_quantize": swiglu,
        "swiglu_quantize_and_pack": pack,
        "swiglu_quantize_grad": grad,
        "rope_qkv_backward_quantize": rope,
        "quantize_grad": grad_of_linear,
        "quantize_lora_down": down,
    }
    ours = {name: getattr(ops, name) for name in names}
    with mock.patch.multiple(ops, **names):
        yield counts


def test_what_writes_scales_is_followed_by_no_pass_that_quantizes() -> None:
    """Of a layer's eight operands, the gradient of down's y alone has a pass of its own, where down has no adapter."""
    model = model_of(BlockScaling(), layers=1)
    fuse(model, save="full", attention="math")
    layer = model.model.layers[0]
    h = torch.randn(2, 16, 256, requires_grad=True)
    angles = model.model.rotary_emb(h, torch.arange(16)[None])
    counts: Counter[str] = Counter()

    class Counted(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            counts[func.__name__.split(".")[0]] += 1
            return func(*args, **(kwargs or {}))

    with Counted():
        out = layer(h, position_embeddings=angles)
        forward = counts["quantize_blocks"]
        out.backward(out.detach())
    assert (forward, counts["quantize_blocks"] - forward) == (0, 1)


def test_a_memory_budget_mixes_forms() -> None:
    """Each layer computes what it does with its form."""
    plain = model_of(BlockScaling(), layers=3)
    count = 2 * 24
    bytes_of = {}
    for save in ("fp8", "checkpoint"):
        report = fuse(copy.deepcopy(plain), save=save, tokens=count)
        bytes_of[save] = report.layers[-1].bytes
    budget = bytes_of["fp8"] + 2 * bytes_of["checkpoint"]
    mixed = copy.deepcopy(plain)
    report = fuse(mixed, memory_budget=budget, tokens=count)
    assert [layer.save for layer in report.layers] == ["checkpoint", "checkpoint", "fp8"]
    assert report.saved_bytes == budget
    away = copy.deepcopy(plain)
    report = fuse(away, memory_budget=budget, tokens=count, offload_activations=True)
    assert "fp8-offload" in {layer.save for layer in report.layers}
    assert report.saved_bytes <= budget
    expected, of_mixed, of_away = step(plain), step(mixed), step(away)
    for name, value in expected.items():
        for found in (of_mixed[name], of_away[name]):
            off = difference(found, value)
            assert off < (STEP / 4 if name == "logits" else STEP + KEPT), (name, off)
    with pytest.raises(ValueError, match="is too little for 3 layers of 48 tokens"):
        fuse(plain, memory_budget=3 * bytes_of["checkpoint"] - 1, tokens=count)


def test_frozen_projections_become_blocks_and_come_back() -> None:
    plain = model_of(BlockScaling(), target_modules=["q_proj", "down_proj"], exclude_modules=None)
    layer = plain.model.layers[0]
    fuse(plain)
    assert type(layer.mlp.up_proj) is FrozenFP8Linear
    assert layer.mlp.up_proj.block_scaling == BlockScaling()
    before = step(plain)
    unfuse(plain)
    after = step(plain)
    for name, value in before.items():
        assert difference(after[name], value) < STEP, name


def test_a_fused_model_merges() -> None:
    plain = model_of(BlockScaling())
    fused = copy.deepcopy(plain)
    fuse(fused)
    ids = torch.randint(0, 40, (1, 8))
    found = [merge_and_unload(m).eval()(input_ids=ids).logits for m in (plain, fused)]
    assert torch.equal(*found)


def test_heads_that_end_inside_of_a_block_are_refused() -> None:
    model = model_of(BlockScaling(), kv_heads=1)
    before = copy.deepcopy(model.state_dict())
    message = r"layers.0.*k_proj has 64 rows, which must be a multiple of 128 under BlockScaling"
    with pytest.raises(ValueError, match=message):
        fuse(model)
    after = model.state_dict()
    assert all(torch.equal(value, after[key]) for key, value in before.items())


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "replayed"])
def test_a_fused_model_trains_as_the_model(graphs: bool) -> None:
    """bf16 on a GPU: losses of a few steps within bf16's rounding of those of the layers themselves."""
    from lorakernels import attach

    losses = []
    for fuses in (False, True):
        model = model_of(BlockScaling()).cuda().bfloat16()
        if fuses:
            fuse(model)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=0.01)
        attached = attach(model, optimizer, graphs=graphs and fuses)
        torch.manual_seed(1)
        found = []
        for _ in range(8):
            ids = torch.randint(0, 40, (2, 64), device="cuda")
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(float(loss.detach()))
        assert not (graphs and fuses) or attached.replaying, str(attached)
        attached.detach()
        losses.append(found)
    torch.testing.assert_close(*map(torch.tensor, losses), rtol=0.02, atol=0)
