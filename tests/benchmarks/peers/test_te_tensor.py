# SPDX-License-Identifier: Apache-2.0
"""peers/te_tensor.py: its exchanges beside a whole adapter, and Transformer Engine over two GPUs beside PEFT on one."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from tests.processes import on_ranks

TOLERANCE = 0.2  # of FP8 layers, as in peers/layers.py
WIDTH, RANK, ROWS = 24, 4, 8


def beside_whole(rank: int, device: torch.device, ranks: int) -> dict[str, float]:
    """{what: relative difference} of y, dx, dA and dB, by column and by row, of this rank's parts in float64."""
    from benchmarks.peers.te_layers import Adapter
    from benchmarks.peers.te_tensor import gather_rows, sum_gradients, sum_rows

    torch.manual_seed(0)
    group, make = dist.group.WORLD, partial(torch.randn, dtype=torch.float64)
    x, dy = make(ROWS, 1, WIDTH), make(ROWS, 1, WIDTH)
    a, b = make(RANK, WIDTH), make(WIDTH, RANK)
    whole = Adapter(a, b, 0.0, torch.float64)
    right = step(whole, x, dy)

    def own(value: Tensor, dim: int) -> Tensor:
        return value.chunk(ranks, dim)[rank]

    column = Adapter(a, own(b, 0), 0.0, torch.float64, partial(gather_rows, group))
    row = Adapter(own(a, 1), b, 0.0, torch.float64, partial(sum_rows, group))
    found = {}
    for name, adapter, cut, replicated in (
        ("column", column, (2, 0, None, 0), column.lora_A),
        ("row", row, (0, 2, 1, None), row.lora_B),
    ):
        of_y, of_x, of_a, of_b = cut
        results = step(adapter, own(x, of_x), own(dy, of_y))
        sum_gradients([replicated], group)
        results = (*results[:2], adapter.lora_A.grad, adapter.lora_B.grad)
        for what, result, expected, dim in zip(
            ("y", "dx", "dA", "dB"), results, right, (of_y, of_x, of_a, of_b), strict=True
        ):
            expected = expected if dim is None else own(expected, dim)
            found[f"{name} {what}"] = float((result - expected).norm() / expected.norm())
    return found


def step(adapter: Any, x: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
    x = x.clone().requires_grad_()
    y = adapter(x)
    y.backward(dy)
    return y.detach(), x.grad, adapter.lora_A.grad, adapter.lora_B.grad


@pytest.mark.slow
def test_a_split_adapter_is_the_whole_one() -> None:
    for found in on_ranks(beside_whole, 2, "gloo", 2):
        assert len(found) == 8 and max(found.values()) <= 1e-12, found


def beside_peft(rank: int, device: torch.device, overlap: bool) -> dict[str, float]:
    """The same of the loss and of the first layer's adapters, of Transformer Engine over both ranks and PEFT on one."""
    from benchmarks.peers.models import SPECS, token_rows, value
    from benchmarks.peers.te_tensor import TeTensor, sum_gradients
    from benchmarks.peers.training import HfPeft

    shape = {**SPECS["tiny"].shape, "hidden_size": 512, "intermediate_size": 1024}
    shape |= {"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 512}
    spec = replace(SPECS["tiny"], shape=shape, length=256)
    mesh = init_device_mesh("cuda", (2,))
    over = TeTensor(spec, "qkvo", device, mesh, overlap)
    peft = HfPeft(spec, "qkvo", device)
    for model in (over.model, peft.model):
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
    modules = dict(peft.model.named_modules())
    names = ("q_proj", "k_proj", "v_proj", "o_proj")
    linears = {name: modules[f"model.layers.0.self_attn.{name}"] for name in names}
    attention = over.model.layers[0].self_attention
    qkv, o = attention.layernorm_qkv.adapter, attention.proj.adapter
    with torch.no_grad():
        for name, linear in linears.items():
            b = linear.lora_B.default.weight
            b.copy_(value(f"B of {name}", tuple(b.shape), device, b.dtype))
        for name in ("k_proj", "v_proj"):  # q, k and v have one A
            linears[name].lora_A.default.weight.copy_(linears["q_proj"].lora_A.default.weight)
        own = [linears[name].lora_B.default.weight.chunk(2)[rank] for name in names[:3]]
        qkv.lora_B.copy_(torch.cat(own))
        o.lora_B.copy_(linears["o_proj"].lora_B.default.weight)
    ids = token_rows(spec.length, 1).to(device)
    right = peft.loss(ids)
    right.backward()
    for _ in range(over.warmup_steps + 1):
        over.optimizer.zero_grad()
        loss = over.loss(ids)
        loss.backward()
    sum_gradients(over.replicated, over.group)
    over.close()
    grads = {
        name: (linear.lora_A.default.weight.grad, linear.lora_B.default.weight.grad)
        for name, linear in linears.items()
    }
    pairs = {
        "loss": (loss.detach(), right.detach()),
        "qkv A": (qkv.lora_A.grad, sum(grads[name][0] for name in names[:3])),
        "qkv B": (qkv.lora_B.grad, torch.cat([grads[n][1].chunk(2)[rank] for n in names[:3]])),
        "o A": (o.lora_A.grad, grads["o_proj"][0].chunk(2, 1)[rank]),
        "o B": (o.lora_B.grad, grads["o_proj"][1]),
    }
    return {
        name: float((found - right).float().norm() / right.float().norm())
        for name, (found, right) in pairs.items()
    }


@pytest.mark.gpu
@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlap"])
def test_transformer_engine_over_two_gpus_has_the_gradients_of_peft(overlap: bool) -> None:
    pytest.importorskip("transformer_engine")
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 GPUs, found {torch.cuda.device_count()}")
    for found in on_ranks(beside_peft, 2, "nccl", overlap):
        assert max(found.values()) <= TOLERANCE and found["loss"] <= 0.02, found
