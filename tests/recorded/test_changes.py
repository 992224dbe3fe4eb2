# SPDX-License-Identifier: Apache-2.0
"""Whatever changes at a layer between calls, the next call launches by its recording what the ops launch."""

from __future__ import annotations

import copy
import gc
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lorakernels import BlockScaling, DelayedScaling, FP8State, LoRALinear
from lorakernels.recorded.node import RECORDINGS
from lorakernels.recorded.routing import without_recordings
from tests.dry_cuda import dry_cuda
from tests.recorded.recorded_layers import BF16, FP16, K, M, N, launches, layer, name_tensors
from tests.recorded_calls import Recorded

BYTES = re.compile(r" =[0-9a-f]*")  # where torch runs on a CPU, it writes amaxes
Change = Callable[[LoRALinear], Any]


def _other_weight(module: LoRALinear) -> None:
    weight = module._parameters["weight"]
    weight.data = weight.data.clone()


def _other_state(module: LoRALinear) -> None:
    state = FP8State(["first", "second"], module.fp8_state.recipe)
    module.move_state(state, "second")


def _wider_state(module: LoRALinear) -> None:
    module.fp8_state.register("more")


def _other_scale(module: LoRALinear) -> None:
    module.weight_scale_inv = module.weight_scale_inv.clone()


def _sliced(module: LoRALinear) -> None:
    """With gaps in A."""
    module.lora_A.data = torch.randn(2 * module.r, K)[::2]


def _transposed(module: LoRALinear) -> None:
    module.lora_B.data = torch.randn(module.r, N).t()


CHANGES: dict[str, Change] = {
    "scaling": lambda m: setattr(m, "scaling", 3.0),
    "site": lambda m: setattr(m, "site", 9),
    "row0": lambda m: setattr(m, "row0", 64),
    "chunks": lambda m: setattr(m, "chunks", (1, 2, 8)),
    "p": lambda m: setattr(m, "lora_dropout", 0.4),
    "no dropout": lambda m: setattr(m, "lora_dropout", 0.0),
    "eval": lambda m: m.eval(),
    "disabled": lambda m: setattr(m, "disable_adapters", True),
    "merged": lambda m: m.merge(),
    "merged and unmerged": lambda m: (m.merge(), m.unmerge()),
    "bf16 adapter": lambda m: m.to(BF16),
    "fp16 adapter": lambda m: m.to(FP16),
    "bias trained": lambda m: m.bias.requires_grad_(True),
    "no bias": lambda m: setattr(m, "bias", None),
    "A frozen": lambda m: m.lora_A.requires_grad_(False),
    "another weight": _other_weight,
    "another scale": _other_scale,
    "another state": _other_state,
    "a wider state": _wider_state,
    "A with gaps": _sliced,
    "B transposed": _transposed,
    "A in other memory": lambda m: setattr(m, "lora_A", nn.Parameter(torch.randn(16, K))),
    "loaded": lambda m: m.load_state_dict(m.state_dict(), assign=True),
}


def step(module: nn.Module, x: Tensor, recorded: Recorded) -> Any:
    name_tensors(recorded, module, x)
    recorded.calls.clear()
    torch.manual_seed(0)
    y = module(x)
    y.backward(torch.ones_like(y))
    return y.dtype, y.shape, BYTES.sub("", str(launches(recorded.calls)))


def compare(module: nn.Module, x: Tensor, recorded: Recorded) -> None:
    with without_recordings():
        by_ops = step(module, x, recorded)
    for _ in range(2):
        assert step(module, x, recorded) == by_ops


@pytest.mark.slow
@pytest.mark.parametrize("fp8", [DelayedScaling(), BlockScaling()], ids=["delayed", "blocks"])
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_between_calls_is_seen(name: str, fp8: Any) -> None:
    module = layer(base_bias=True, fp8=fp8)
    if module.fp8_state is None and "state" in name:
        pytest.skip("there is no state")
    x = torch.randn(M, K, dtype=BF16, requires_grad=True)
    with dry_cuda() as recorded:
        compare(module, x, recorded)
        CHANGES[name](module)
        compare(module, x, recorded)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"]
)
def test_a_copy_of_a_layer_that_ran_has_its_own_tensors(copied: Callable[[Any], Any]) -> None:
    module, x = layer(base_bias=True), torch.randn(M, K, dtype=BF16, requires_grad=True)
    with dry_cuda() as recorded:
        compare(module, x, recorded)
    made = copied(module)
    with dry_cuda() as recorded:
        compare(made, x, recorded)
        made.scaling = 5.0
        compare(made, x, recorded)
        compare(module, x, recorded)


INPUTS: dict[str, Callable[[], Tensor]] = {
    "fp16": lambda: torch.randn(M, K, dtype=FP16),
    "fp32": lambda: torch.randn(M, K),
    "transposed": lambda: torch.randn(K, M, dtype=BF16).t(),
    "three dimensions": lambda: torch.randn(3, 32, K, dtype=BF16),
    "one row": lambda: torch.randn(K, dtype=BF16),
    "every other row": lambda: torch.randn(2 * M, K, dtype=BF16)[::2],
    "unaligned": lambda: torch.randn(M * K + 1, dtype=BF16)[1:].view(M, K),
    "expanded": lambda: torch.randn(1, K, dtype=BF16).expand(M, K),
}


@pytest.mark.parametrize("name", INPUTS)
def test_an_input_of_another_form_after_calls_is_seen(name: str) -> None:
    module = layer(base_bias=True)
    with dry_cuda() as recorded:
        compare(module, torch.randn(M, K, dtype=BF16, requires_grad=True), recorded)
        compare(module, INPUTS[name]().requires_grad_(), recorded)


def test_parameters_of_a_functional_call_are_taken() -> None:
    module, x = layer(base_bias=True), torch.randn(M, K, dtype=BF16, requires_grad=True)
    with dry_cuda() as recorded:
        compare(module, x, recorded)
        own = {"lora_A": torch.randn(16, K, requires_grad=True)}
        recorded.name(other_A=own["lora_A"])
        recorded.calls.clear()
        y = torch.func.functional_call(module, own, x)
        assert any("other_A" in str(call.arguments) for call in recorded.calls)
        (found,) = torch.autograd.grad(y, own["lora_A"], torch.ones_like(y))
        assert found.shape == (16, K)


def test_a_recording_that_is_forgotten_before_backward_lives_until_then() -> None:
    """So many other calls may come between that 1,024 recordings are newer."""
    module, x = layer(), torch.randn(M, K, dtype=BF16, requires_grad=True)
    with dry_cuda() as recorded:
        compare(module, x, recorded)
        expected = step(module, x, recorded)
        name_tensors(recorded, module, x)
        recorded.calls.clear()
        torch.manual_seed(0)
        y = module(x)
        RECORDINGS.cache_clear()
        gc.collect()
        runs = recorded.runs
        y.backward(torch.ones_like(y))
        assert recorded.runs == runs + 1
        assert BYTES.sub("", str(launches(recorded.calls))) == expected[2]
        del y
        gc.collect()
        assert step(module, x, recorded) == expected and len(RECORDINGS) == 1
