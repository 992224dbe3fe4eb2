# SPDX-License-Identifier: Apache-2.0
"""An overflow of fp16 in dy that passes a frozen FP8 layer stays visible to torch's GradScaler."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lorakernels import DelayedScaling, FrozenFP8Linear, LoRAConfig, LoRALinear, ops
from lorakernels.state.fp8 import FP8State
from lorakernels.values import Scaled, Scaling, Up

E5M2 = torch.float8_e5m2
BAD = pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")], ids=str)


def chain(dtype: torch.dtype, device: torch.device) -> nn.Sequential:
    """An adapter, and above it two frozen FP8 layers; their scales are known."""
    model = nn.Sequential(
        LoRALinear(32, 32, config=LoRAConfig(r=4), dtype=dtype, adapter_dtype=torch.float32),
        FrozenFP8Linear(32, 48, dtype=dtype),
        FrozenFP8Linear(48, 32, dtype=dtype),
    ).to(device)
    nn.init.normal_(model[0].lora_B, std=0.2)
    for _ in range(3):
        backward(model, None)
    return model


def backward(model: nn.Module, bad: float | None) -> list[Tensor]:
    """Gradients of the adapter; `bad` is one element of dy."""
    first = model[0]
    x = torch.randn(6, 32, device=first.lora_A.device, dtype=first.bias.dtype)
    dy = torch.randn_like(x)
    if bad is not None:
        dy[2, 3] = bad
    model.zero_grad()
    model(x).backward(dy)
    return [first.lora_A.grad, first.lora_B.grad]


@BAD
@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
def test_fp16_keeps_an_overflow_for_the_grad_scaler(bad, training, device):
    model = chain(torch.float16, device).train(training)
    assert all(bool(g.isfinite().all()) for g in backward(model, None))
    assert not any(bool(g.isfinite().any()) for g in backward(model, bad))
    assert all(bool(g.isfinite().all()) for g in backward(model, None)), "the next one is clean"


def test_the_grad_scaler_backs_off_and_recovers(device):
    model = chain(torch.float16, device)
    adapter = [model[0].lora_A, model[0].lora_B]
    optimizer = torch.optim.SGD(adapter, lr=0.0)
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**24, growth_interval=1000)
    stepped = []
    optimizer.register_step_post_hook(lambda *_: stepped.append(scaler.get_scale()))
    x = torch.randn(6, 32, device=device, dtype=torch.float16)
    for _ in range(16):
        optimizer.zero_grad()
        scaler.scale(model(x).float().pow(2).mean()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert stepped and stepped[-1] < 2.0**24, "overflows were seen, and then there were none"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_other_dtypes_saturate(dtype, device):
    """bf16's range ends where fp32's does: nothing overflows there by a loss scale."""
    model = chain(dtype, device)
    assert all(bool(g.isfinite().all()) for g in backward(model, float("inf")))


def state(device: torch.device) -> Tensor:
    return FP8State(["a"], DelayedScaling(amax_history_len=2), device).backward


@pytest.mark.parametrize("rank", [0, 8])
def test_the_ops_scale_tells(rank, device):
    """By every implementation; the bytes are those of a saturated dy."""
    dy = torch.randn(64, 128, device=device).half()
    b = torch.randn(128, rank, device=device) if rank else None
    up = None if b is None else Up(b, None, 1.0)
    arguments = (up, Scaling(state(device), 0, False), E5M2)
    clean = ops.quantize_grad(dy, *arguments)[1]
    assert bool(clean.isfinite().all())
    for place in [(0, 0), (63, 127)]:
        broken = dy.clone()
        broken[place] = torch.inf
        dy8, scale_inv, *_ = ops.quantize_grad(broken, *arguments)
        assert bool(scale_inv.isnan().all()) and bool(dy8.view(E5M2).float().isfinite().all())


@pytest.mark.parametrize("keep", [False, True])
def test_swiglus_overflow_tells(keep, device):
    """dact and up are finite, dact · up is not."""
    gate_up = torch.randn(8, 64, device=device).half()
    dact = torch.randn(8, 32, device=device).half()
    arguments = (torch.ones(2, device=device), Scaling(state(device), 0, True), E5M2, keep)
    d, _, scale_inv = ops.swiglu_quantize_grad(dact, Scaled(gate_up), *arguments)
    assert bool(scale_inv.isfinite().all()) and d.numel() == (gate_up.numel() if keep else 0)
    dact[5, 7], gate_up[5, 7], gate_up[5, 39] = 6e4, 4.0, 100.0
    d, _, scale_inv = ops.swiglu_quantize_grad(dact, Scaled(gate_up), *arguments)
    assert bool(scale_inv.isnan().all()) and d.numel() == (gate_up.numel() if keep else 0)
