# SPDX-License-Identifier: Apache-2.0
"""Any order of training, fusing, merging, switching off, copying and loading, beside plain PyTorch in float64."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lorakernels import disable_lora, fuse, merge_lora, unfuse, unmerge_lora
from lorakernels.modules.model.merge import lora_modules
from tests.fusion.fused_models import LINEARS, adapted, model_of, same_within, tokens

# fp32 through two layers, merged or not, after some steps of both
BOUND = 1e-3
RATE = 0.1


class Both:
    """A model, and what it should be: an nn.Linear's model in float64, adapters and biases apart."""

    def __init__(self, targets: tuple[str, ...], bias: str) -> None:
        torch.manual_seed(0)
        self.model = adapted("Qwen2", targets, bias=bias)
        torch.manual_seed(0)
        self.plain = model_of("Qwen2").double()
        self.adapters = {
            name: [layer.lora_A.detach().double(), layer.lora_B.detach().double(), layer.scaling]
            for name, layer in lora_modules(self.model).items()
        }
        self.base = {n: p.detach().clone() for n, p in self.plain.named_parameters()}
        self.now = {n: p.clone() for n, p in self.base.items()}  # with trained biases
        self.fused = self.merged = False

    def expect(self, trained: bool) -> nn.Module:
        with torch.no_grad():
            for name, parameter in self.plain.named_parameters():
                parameter.copy_((self.now if trained else self.base)[name])
                found = self.adapters.get(name.removesuffix(".weight"))
                if trained and found is not None and name.endswith(".weight"):
                    a, b, scaling = found
                    parameter.add_(scaling * b @ a)
        self.plain.zero_grad()
        return self.plain

    def check(self, trained: bool = True) -> None:
        x = tokens()
        with torch.no_grad():
            found = self.model(x, use_cache=False).logits
            same_within({"": found}, {"": self.expect(trained)(x, use_cache=False).logits}, BOUND)

    def step(self) -> None:
        if self.merged:
            return
        x = tokens()
        self.model.zero_grad()
        for model in (self.model, self.expect(True)):
            model(x, labels=x, use_cache=False).loss.backward()
        found: dict[str, Tensor] = {}
        for name, p in self.model.named_parameters():
            if p.grad is not None:
                found[name] = p.grad
        expected = self.gradients({n: p.grad for n, p in self.plain.named_parameters()}, found)
        same_within(found, expected, BOUND)
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                if name in found:
                    p -= RATE * found[name]
        for name, grad in expected.items():
            place, _, leaf = name.rpartition(".")
            kept: Any = self.now[name] if leaf == "bias" else self.adapters[place][leaf == "lora_B"]
            kept -= RATE * grad

    def gradients(self, plain: dict[str, Any], names: dict[str, Tensor]) -> dict[str, Tensor]:
        expected = {}
        for name in names:
            place, _, leaf = name.rpartition(".")
            if leaf == "bias":
                expected[name] = plain[name]
                continue
            a, b, scaling = self.adapters[place]
            dw = scaling * plain[f"{place}.weight"]
            expected[name] = b.T @ dw if leaf == "lora_A" else dw @ a.T
        return expected

    def switch(self) -> None:
        """Fused to not fused, and back."""
        if self.fused:
            unfuse(self.model)
        elif not self.merged:
            fuse(self.model, attention="math")
        self.fused = not self.fused and not self.merged

    def merge(self) -> None:
        (unmerge_lora if self.merged else merge_lora)(self.model)
        self.merged = not self.merged

    def off(self) -> None:
        with disable_lora(self.model):
            self.check(trained=False)

    def copied(self) -> None:
        self.model = copy.deepcopy(self.model)

    def loaded(self) -> None:
        if self.merged:
            return
        state = {name: value.clone() for name, value in self.model.state_dict().items()}
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(1.0)
        self.model.load_state_dict(state, assign=self.fused)

    def mode(self) -> None:
        self.model.train(not self.model.training)


OPERATIONS = ["step", "switch", "merge", "off", "copied", "loaded", "mode"]


@pytest.mark.slow
@given(
    st.sampled_from([LINEARS, ("k_proj", "down_proj")]),
    st.sampled_from(["none", "all"]),
    st.lists(st.sampled_from(OPERATIONS), min_size=3, max_size=8),
)
@example(("k_proj", "down_proj"), "all", ["switch", "step", "off", "switch", "off"])
@settings(max_examples=30, deadline=None)
def test_any_order_of_operations_computes_what_plain_pytorch_does(
    targets: tuple[str, ...], bias: str, operations: list[str]
) -> None:
    both = Both(targets, bias)
    for name in [*operations, "step", "off"]:
        getattr(both, name)()
        both.check()
