# SPDX-License-Identifier: Apache-2.0
"""Two small attention layers whose q, k and v are grouped, and how often their ops run."""

from __future__ import annotations

from contextlib import ExitStack
from unittest import mock

import torch
from torch import nn

from lorakernels import BlockScaling, DelayedScaling, LoRAConfig, apply_lora, group_projections, ops
from lorakernels.modules import lora_modules

NAMES = ("q_proj", "k_proj", "v_proj")
OPS = (
    "quantize_lora_down",
    "fp8_linear_lora",
    "quantize_grad",
    "lora_grad_a",
    "quantize_blocks",
)
BLOCKS = BlockScaling("HYBRID")
MODES = [(0.0, False), (0.3, False), (0.3, True)]
MODE_IDS = ["no dropout", "masks apart", "one mask"]


class Attention(nn.Module):
    """A layer as models write it; `how` is what goes around it or its projections."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(32, 32), nn.Linear(32, 16, bias=False)
        self.v_proj, self.o_proj = nn.Linear(32, 16), nn.Linear(32, 32)

    def forward(self, x):
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        return x + self.o_proj(torch.tanh(q) * torch.cat((k, v), -1))


def model(p=0.0, fp8=DelayedScaling(), layers=2, rng_state=None):  # noqa: B008  (frozen)
    m = nn.Sequential(*(Attention() for _ in range(layers)))
    rank = {"k_proj": 3}
    targets = [*NAMES, "o_proj"]
    config = LoRAConfig(r=4, lora_dropout=p, target_modules=targets, rank_pattern=rank, fp8=fp8)
    report = apply_lora(m, config, rng_state=rng_state)
    for layer in lora_modules(m).values():
        nn.init.normal_(layer.lora_B, std=0.2)
    return m, report


def grouped(mode, **options):
    m, report = model(mode[0], **options)
    return m, group_projections(m, [NAMES], shared_dropout=mode[1]), report


def one_group(mode=(0.0, False), **options):
    m, (group,), _ = grouped(mode, layers=1, **options)
    return m[0], group


class Counted:
    """How often each op runs; reads of x that quantize it count apart. Under BlockScaling dy must be e5m2 for that."""

    def __init__(self):
        self.calls = {}
        self.stack = ExitStack()

    def __enter__(self):
        for name in OPS:
            op = getattr(ops, name)

            def run(*args, _op=op, _name=name):
                quantizes = _name == "quantize_lora_down" and args[2] is not None
                quantizes |= _name == "quantize_blocks" and args[1] == torch.float8_e4m3fn
                key = "quantize" if quantizes else _name
                self.calls[key] = self.calls.get(key, 0) + 1
                return _op(*args)

            self.stack.enter_context(mock.patch.object(ops, name, run))
        return self.calls

    def __exit__(self, *error):
        self.stack.close()


def quantizations(*calls):
    with Counted() as counted:
        for call in calls:
            call()
    return counted.get("quantize", 0)


def gradients(m, x, steps=2):
    torch.manual_seed(5)
    m.zero_grad()
    x.grad = None
    for _ in range(steps):
        m(x).pow(2).sum().backward()
    found = {n: p.grad for n, p in m.named_parameters() if p.requires_grad} | {"x": x.grad}
    state = m[0].q_proj.fp8_state
    if state is not None:
        found |= {"forward": state.forward.clone(), "backward": state.backward.clone()}
    return found
