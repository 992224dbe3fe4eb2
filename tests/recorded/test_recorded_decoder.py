# SPDX-License-Identifier: Apache-2.0
"""A fused decoder layer by its recordings launches what its ops launch."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModel, GraniteConfig, LlamaConfig, SmolLM3Config
from transformers.models.llama.modeling_llama import LlamaModel

from lorakernels import BlockScaling, LoRAConfig, apply_lora, batch_adapters, fuse
from lorakernels.recorded.routing import without_recordings
from tests.dry_cuda import dry_cuda
from tests.recorded_calls import Call, Recorded

UNNAMED = re.compile(r"m\d+\+\d+ =[0-9a-f]*")
BF16 = torch.bfloat16
QKVO = ["q_proj", "k_proj", "v_proj", "o_proj"]
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 64,
}


def llama(
    save: str = "recompute", targets: Any = QKVO, shared: bool = True, **options: Any
) -> nn.Module:
    return of_config(LlamaConfig(**SIZES), save, targets, shared, **options)


def of_config(
    of: Any,
    save: str = "recompute",
    targets: Any = QKVO,
    shared: bool = True,
    names: tuple[str, ...] = (),
    **options: Any,
) -> nn.Module:
    torch.manual_seed(0)
    model = AutoModel.from_config(of).to(BF16)
    config = {
        "r": 16,
        "lora_alpha": 32,
        "lora_dropout": 0.0 if names else 0.1,
        "target_modules": targets,
    }
    apply_lora(model, LoRAConfig(**config | options))
    if names:
        batch = batch_adapters(model, names)
        for layer in batch.layers.values():
            nn.init.normal_(layer.lora_B, std=0.1)
    fuse(model, save=save, shared_dropout=shared)
    return model.train()


def blocks(save: str = "recompute", **options: Any) -> nn.Module:
    return llama(save, "all-linear", **({"fp8": BlockScaling()} | options))


def name_tensors(recorded: Recorded, model: nn.Module) -> None:
    state = model.layers[0].self_attn.q_proj.fp8_state
    if state is not None:
        recorded.name(state_x=state.forward, state_dy=state.backward)
    for own, tensor in (*model.named_parameters(), *model.named_buffers()):
        recorded.name(**{own.replace(".", "_"): tensor})


MODELS: dict[str, Callable[[], nn.Module]] = {
    "qkvo": llama,
    "no dropout": lambda: llama(lora_dropout=0.0),
    "all linear": lambda: llama(targets="all-linear"),
    "a mask for each": lambda: llama(shared=False),
    "full": lambda: llama("full", "all-linear"),
    "fp8": lambda: llama("fp8", "all-linear"),
    "checkpoint": lambda: llama("checkpoint", "all-linear"),
    "eval": lambda: llama().eval(),
    "two adapters in one batch": lambda: llama(targets="all-linear", names=("fr", "de")),
    "two adapters, full": lambda: llama("full", "all-linear", names=("fr", "de")),
    "blocks": lambda: blocks(),
    "blocks, without dropout": lambda: blocks(lora_dropout=0.0),
    "blocks, full": lambda: blocks("full"),
    "blocks, e5m2 dy": lambda: blocks(fp8=BlockScaling("HYBRID", power_2_scale=True)),
    "a factor of the residual": lambda: of_config(GraniteConfig(**SIZES, residual_multiplier=0.5)),
    "no RoPE in one layer": lambda: of_config(
        SmolLM3Config(**SIZES, no_rope_layers=[1, 0], pad_token_id=0)
    ),
}


# Checkpointed layers run by the ops. With a mask for each of q, k, v, torch joins what they give.
RUNS = {"checkpoint": 0, "a mask for each": 8}


def step(model: nn.Module, h: Tensor) -> None:
    y = model(inputs_embeds=h, use_cache=False).last_hidden_state
    y.backward(torch.ones_like(y))


def tokens(name: str) -> int:
    """csrc multiplies 128 rows of each adapter of a batch."""
    return 128 if name.startswith("two") else 32


def launches(calls: list[Call]) -> list[tuple[str, dict[str, Any]]]:
    """Each call with its addresses in the model's own tensors. Of other memory only that there is an address.

    Triton's kernels get an FP8 state and places in it. A recorded state begins at its column, which the places lack.
    """
    found = []
    for call in calls:
        plain = {k: _plain(v) for k, v in call.arguments.items()}
        if str(plain.get("state")).startswith("state_"):
            begin = plain.pop("state").partition(" =")[0]
            label, offset = begin.split("+")
            places = {k: int(offset) + 4 * plain[k] for k in ("kept_at", "amax_at")}
            plain |= {"state": label, **places}
        found.append((call.name, plain))
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        return UNNAMED.sub("there", value)
    return [_plain(v) for v in value] if isinstance(value, list) else value


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_recordings_launch_what_the_ops_launch(name: str) -> None:
    model = MODELS[name]()
    h = torch.randn(2, tokens(name), SIZES["hidden_size"], dtype=BF16, requires_grad=True)
    step(model, h)  # on the CPU, where the projections' memory is joined
    with dry_cuda() as recorded:
        name_tensors(recorded, model)
        with without_recordings():
            step(model, h)
        by_ops = launches(recorded.calls)
        assert not recorded.runs
        for _ in range(2):
            recorded.calls.clear()
            recorded.runs = 0
            step(model, h)
            assert launches(recorded.calls) == by_ops
            assert recorded.runs == RUNS.get(name, 12)  # 3 nodes, 2 layers, 2 ways


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_the_ops_take_what_a_recorded_forward_kept(name: str) -> None:
    """A profiler may begin between forward and backward, and the gradient of a trained norm is computed by torch."""
    model = MODELS[name]()
    for layer in model.layers:
        layer.input_layernorm.weight.requires_grad_()
    h = torch.randn(2, tokens(name), SIZES["hidden_size"], dtype=BF16, requires_grad=True)
    step(model, h)
    with dry_cuda() as recorded:
        name_tensors(recorded, model)
        with without_recordings():
            step(model, h)
        by_ops = launches(recorded.calls)
        recorded.calls.clear()
        y = model(inputs_embeds=h, use_cache=False).last_hidden_state
        runs = recorded.runs
        with without_recordings():
            y.backward(torch.ones_like(y))
        assert launches(recorded.calls) == by_ops
        assert recorded.runs == runs == RUNS.get(name, 12) // 2


def test_a_written_A_is_seen_where_another_adapter_is_switched_off() -> None:
    """q's and k's A are then copied beside each other, without v's."""
    model = llama(lora_dropout=0.0).eval()
    h = torch.randn(2, 8, SIZES["hidden_size"], dtype=BF16)
    for layer in model.layers:
        layer.self_attn.v_proj.disable_adapters = True
        nn.init.normal_(layer.self_attn.q_proj.lora_B)
    with torch.no_grad():
        before = model(inputs_embeds=h).last_hidden_state
        for layer in model.layers:
            layer.self_attn.q_proj.lora_A.mul_(-3)
        after = model(inputs_embeds=h).last_hidden_state
        for layer in model.layers:
            layer.self_attn.q_proj.lora_A.mul_(-1 / 3)
        again = model(inputs_embeds=h).last_hidden_state
    assert not torch.equal(before, after)
    torch.testing.assert_close(again, before, rtol=0.05, atol=0.05)


@pytest.mark.parametrize(
    ("rank", "said"), [(16, "8 recorded"), (4, "8 by the ops (no recording holds torch.pad)")]
)
def test_fuse_s_report_says_what_was_recorded(rank: int, said: str) -> None:
    torch.manual_seed(0)
    model = LlamaModel(LlamaConfig(**SIZES)).to(BF16)
    apply_lora(model, LoRAConfig(r=rank, target_modules="all-linear"))
    report = fuse(model)
    h = torch.randn(1, 8, SIZES["hidden_size"], dtype=BF16)
    assert report.eager_forwards == "none yet"
    model(inputs_embeds=h)
    assert report.eager_forwards.startswith("8 by the ops (on a CPU")
    with dry_cuda():
        model(inputs_embeds=h)
        line = f"forward passes of projections without CUDA graphs: {said}"
        assert line in str(report).splitlines()


def test_a_factor_of_another_dtype_is_seen() -> None:
    model = llama(lora_dropout=0.0)
    h = torch.randn(2, 32, SIZES["hidden_size"], dtype=BF16)
    step(model, h)
    with dry_cuda() as recorded:
        step(model, h)
        for layer in model.layers:
            o = layer.self_attn.o_proj
            o.lora_A.data, o.lora_B.data = o.lora_A.data.to(BF16), o.lora_B.data.to(BF16)
        recorded.calls.clear()
        step(model, h)
        found = {c.arguments[k] for c in recorded.calls for k in c.arguments if k == "b_dtype"}
        assert found == {"bfloat16", "float32"}  # o's, and the stacked one of q, k and v


def outcome(model: nn.Module, h: Tensor) -> list[Tensor]:
    """The output and all gradients of two steps from one random state."""
    torch.manual_seed(1)
    found: list[Tensor] = []
    for _ in range(2):
        model.zero_grad()
        x = h.detach().requires_grad_()
        y = model(inputs_embeds=x, use_cache=False).last_hidden_state
        y.backward(torch.cos(torch.arange(y.numel(), device=y.device)).view_as(y).to(y.dtype))
        found += [y.detach(), *(p.grad for p in (x, *model.parameters()) if p.grad is not None)]
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
def test_recordings_compute_what_the_ops_compute(name: str) -> None:
    model = MODELS[name]().to("cuda")
    h = torch.randn(2, tokens(name), SIZES["hidden_size"], dtype=BF16, device="cuda")
    state = model.layers[0].self_attn.q_proj.fp8_state
    before = None if state is None else state.save()
    with without_recordings():
        by_ops = outcome(model, h)
    after = None if state is None else (state.forward.clone(), state.backward.clone())
    if state is not None:
        state.restore(before)
    by_recording = outcome(model, h)
    assert len(by_recording) == len(by_ops) and all(map(torch.equal, by_recording, by_ops))
    if state is not None:
        assert torch.equal(state.forward, after[0]) and torch.equal(state.backward, after[1])
