# SPDX-License-Identifier: Apache-2.0
"""A recipe is a value: one class, here in a test, is followed by every path of a linear layer."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from lorakernels import DelayedScaling, LoRAConfig, LoRALinear, fuse
from lorakernels.recipes import CallScaling
from lorakernels.recorded.routing import without_recordings
from tests.dry_cuda import dry_cuda
from tests.fusion.fused_models import LINEARS, adapted, run, tokens
from tests.recorded.recorded_layers import launches, name_tensors

K, N, ROWS = 256, 384, 128


@dataclass(frozen=True)
class CurrentScaling(DelayedScaling):
    """Each tensor has the scale of its own amax, in training as well. Sums of dx are fast ones."""

    def of_call(self, column: int, training: bool) -> CallScaling:
        return {**super().of_call(column, False), "split_dgrad": False}


def layer(recipe: DelayedScaling = CurrentScaling()) -> LoRALinear:
    torch.manual_seed(0)
    config = LoRAConfig(r=16, lora_dropout=0.0, fp8=recipe)
    made = LoRALinear(K, N, bias=False, config=config, dtype=torch.bfloat16)
    nn.init.normal_(made.lora_B, std=0.2)
    return made.train()


def step(module: nn.Module) -> dict[str, Tensor]:
    """y and gradients of a call in training, which is the second one, so that a history would have a scale."""
    torch.manual_seed(1)
    for size in (1.0, 0.01):
        module.zero_grad()
        x = (size * torch.randn(ROWS, K, dtype=torch.bfloat16)).requires_grad_()
        y = module(x)
        y.float().square().sum().backward()
    grads = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    return {"y": y.detach(), "dx": x.grad, **grads}


def eagerly(module: LoRALinear) -> nn.Module:
    return module


def compiled(module: LoRALinear) -> nn.Module:
    torch._dynamo.reset()
    module.compile(backend="aot_eager", fullgraph=True)
    return module


@pytest.mark.parametrize("way", [eagerly, compiled])
def test_a_layer_follows_it(way: Callable[[LoRALinear], nn.Module]) -> None:
    """Its scales are those of evaluation, and its FP8State stays as it was. A history's would be others."""
    module, evaluated = layer(), layer().eval()
    found, expected = step(way(module)), step(evaluated)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    state = module.fp8_state
    assert state is not None and not state.forward[:-1].any() and not state.backward[:-1].any()
    assert not torch.equal(step(layer(DelayedScaling()))["y"], expected["y"])


def test_a_fused_model_follows_it() -> None:
    plain = adapted("Llama", LINEARS, fp8=CurrentScaling())
    fused, x = copy.deepcopy(plain), tokens()
    fuse(fused)
    state = fused.model.layers[0].self_attn.q_proj.fp8_state
    training = [run(fused.train(), x) for _ in range(2)]
    evaluated = run(fused.eval(), x)
    assert all(torch.equal(training[1][name], value) for name, value in evaluated.items())
    assert not state.forward[:-1].any() and not state.backward[:-1].any()


def test_recorded_calls_follow_it() -> None:
    """What a recorded call launches is what the ops launch, and not what DelayedScaling launches."""
    launched = {}
    for recipe in (CurrentScaling(), DelayedScaling()):
        module, x = layer(recipe), torch.randn(ROWS, K, dtype=torch.bfloat16, requires_grad=True)
        with dry_cuda() as recorded:
            name_tensors(recorded, module, x)
            for begin in (without_recordings, nullcontext, nullcontext):
                recorded.calls.clear()
                with begin():
                    module(x).sum().backward()
                launched[recipe, begin] = launches(recorded.calls)
            assert recorded.runs == 4
    by_ops = launched[CurrentScaling(), without_recordings]
    assert launched[CurrentScaling(), nullcontext] == by_ops
    assert launched[DelayedScaling(), without_recordings] != by_ops
