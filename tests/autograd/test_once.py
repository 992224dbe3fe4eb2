# SPDX-License-Identifier: Apache-2.0
"""A gradient that is differentiated again raises, also where the incoming one is a constant."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lorakernels import BlockScaling, DelayedScaling, LoRAConfig, LoRALinear, linear_cross_entropy
from lorakernels.autograd.decoder.rms_norm import rms_norm
from lorakernels.modules.linear.dora import DoRALinear


def layer_of(**fields: object) -> Callable[[Tensor], Tensor]:
    config = LoRAConfig(r=4, init_lora_weights=False, **fields)  # type: ignore[arg-type]
    kind = DoRALinear if config.use_dora else LoRALinear
    layer = kind(32, 16, config=config)
    return lambda x: layer(x).sum()


NODES: dict[str, Callable[[], Callable[[Tensor], Tensor]]] = {
    "plain base": lambda: layer_of(fp8=None),
    "FP8 base": lambda: layer_of(fp8=DelayedScaling()),
    "blocks": lambda: layer_of(fp8=BlockScaling()),
    "DoRA": lambda: layer_of(use_dora=True),
    "RMSNorm": lambda: lambda x: rms_norm(x, torch.ones(32), 1e-6).sum(),
    "cross-entropy": lambda: lambda x: linear_cross_entropy(x, W, torch.arange(8) % 5),
}
W = torch.linspace(-1.0, 1.0, 5 * 32).view(5, 32).sin()


@pytest.mark.parametrize("name", NODES)
def test_a_penalty_on_a_gradient_raises(name: str) -> None:
    torch.manual_seed(0)
    loss_of, x = NODES[name](), torch.randn(8, 32, requires_grad=True)
    loss = loss_of(x)
    (dx,) = torch.autograd.grad(loss, x, create_graph=True, retain_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        (loss + dx.square().sum()).backward()
    (again,) = torch.autograd.grad(loss_of(x), x)
    assert torch.equal(dx, again) and not again.requires_grad  # the gradient itself is as ever
