# SPDX-License-Identifier: Apache-2.0
"""What quality.py trains: LoRA over a bf16 base by PEFT, over ours, eager and fused in graphs, over TE's.

One variant of ours has an FP8 head beside that, as `finetune --fp8-head` does.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from lorakernels.graphs import GraphManager
from torch import Tensor, nn

from benchmarks.peers.base import Unavailable
from benchmarks.peers.plain import PlainLora
from benchmarks.peers.te import autocast, frozen_linear, te_or_unavailable
from lorakernels import (
    LoRAConfig,
    LoRAReport,
    PhiloxState,
    apply_lora,
    fuse,
    linear_cross_entropy,
    quantize_head,
)
from lorakernels.modules.model.merge import lora_modules

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
REFERENCE = "hf + peft bf16"
HEAD_ROWS = 16  # a multiple of it is the vocabulary that the FP8 kernels take
NEVER = -1e4  # the logit of a row beyond the vocabulary, whose exponential is 0 in fp32
Context = Callable[[], AbstractContextManager[Any]]
Loss = Callable[[Any, Tensor], Tensor]  # of a model and int64 [rows, length]


@dataclass(frozen=True)
class Plan:
    """A model, its two texts and how long it trains on them; `held` rows of the second are held out."""

    shape: dict[str, int]
    texts: Callable[[int], tuple[Tensor, Tensor]]  # of a length: two int64 [rows, length]
    base_lr: float
    lr: float
    batch: int = 8
    length: int = 256
    held: int = 256
    base_steps: int = 200
    steps: int = 300
    rank: int = 16
    p: float = 0.05
    seeds: int = 2
    seed: int = 0


def _nothing() -> None:
    pass


def loss_of(model: Any, ids: Tensor) -> Tensor:
    logits = model(input_ids=ids).logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())


@dataclass(frozen=True)
class Run:
    """What a variant's steps need besides the model: a context around the forward, something after each step.

    `loss` is what is trained. What is held out has the logits of `loss_of`, which a model has when it is used.
    """

    context: Context = contextlib.nullcontext
    after_step: Callable[[], object] = _nothing
    loss: Loss = loss_of


Variant = Callable[[Any, Plan], Run]


def adapters(model: nn.Module, plan: Plan) -> Iterator[tuple[str, nn.Linear, Tensor, Tensor]]:
    """(path, layer, A, B) of all that is adapted; A is the same for every variant of a seed, B is zero."""
    generator, rank = torch.Generator().manual_seed(2 + plan.seed), plan.rank
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear) and name.rpartition(".")[2] in TARGETS:
            a = torch.randn(rank, layer.in_features, generator=generator)
            a *= layer.in_features**-0.5
            b = torch.zeros(layer.out_features, rank)
            yield name, layer, a.to(layer.weight.device), b.to(layer.weight.device)


def peft(model: Any, plan: Plan) -> Run:
    """PEFT's own layers over the bf16 base."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise Unavailable(f"peft is not installed ({error})") from error
    initial = {name: a for name, _, a, _ in adapters(model, plan)}
    config = LoraConfig(
        r=plan.rank, lora_alpha=2 * plan.rank, lora_dropout=plan.p, target_modules=list(TARGETS)
    )
    inject_adapter_in_model(config, model)
    for name, a in initial.items():
        layer = model.get_submodule(name)
        for factors in (layer.lora_A, layer.lora_B):
            factors.to(torch.float32)
        with torch.no_grad():
            layer.lora_A["default"].weight.copy_(a)
    return Run()


def te(model: Any, plan: Plan) -> Run:
    """LoRA in torch ops over te.Linear."""
    library = te_or_unavailable()
    if next(model.parameters()).device.type != "cuda":
        raise Unavailable("needs a GPU")
    for name, layer, a, b in adapters(model, plan):
        parent = model.get_submodule(name.rpartition(".")[0])
        module = PlainLora(frozen_linear(library, layer), a, b, scaling=2, p=plan.p)
        setattr(parent, name.rpartition(".")[2], module)
    return Run(functools.partial(autocast, library))


def apply_ours(model: Any, plan: Plan, rng_state: PhiloxState | None = None) -> LoRAReport:
    initial = {name: a for name, _, a, _ in adapters(model, plan)}
    config = LoRAConfig(
        r=plan.rank, lora_alpha=2 * plan.rank, lora_dropout=plan.p, target_modules=list(TARGETS)
    )
    report = apply_lora(model, config, rng_state=rng_state)
    with torch.no_grad():
        for name, layer in lora_modules(model).items():
            layer.lora_A.copy_(initial[name])
    return report


def ours(model: Any, plan: Plan) -> Run:
    apply_ours(model, plan)
    return Run()


def ours_fused(model: Any, plan: Plan) -> Run:
    device = next(model.parameters()).device
    if device.type != "cuda":
        raise Unavailable("needs a GPU")
    rng = PhiloxState(3 + plan.seed, device)
    state = apply_ours(model, plan, rng).fp8_state
    assert state is not None
    fuse(model)
    state.reduce_and_update()
    manager = GraphManager(model.model.layers, warmup_steps=2, fp8_state=state, rng_states=[rng])

    def after_step() -> None:
        state.reduce_and_update()
        manager.end_iteration()

    return Run(after_step=after_step)


def ours_fp8_head(model: Any, plan: Plan) -> Run:
    """`ours_fused`, whose head multiplies in FP8 both ways while it trains."""
    run = ours_fused(model, plan)
    return replace(run, loss=fp8_head_loss(model.lm_head.weight))


def fp8_head_loss(weight: Tensor) -> Loss:
    """Of a frozen head's weight [V, K], which is quantized once.

    The kernels take a V that is a multiple of HEAD_ROWS. Others get rows of zeros whose bias makes them impossible.
    """
    more = -len(weight) % HEAD_ROWS
    w8, scale_inv = quantize_head(F.pad(weight.detach(), (0, 0, 0, more)))
    bias = F.pad(weight.new_zeros(len(weight)), (0, more), value=NEVER)

    def loss(model: Any, ids: Tensor) -> Tensor:
        hidden = model.model(input_ids=ids).last_hidden_state
        labels = F.pad(ids[:, 1:], (0, 1), value=-100)
        return linear_cross_entropy(
            hidden, w8, labels, bias=bias, fp8=True, weight_scale_inv=scale_inv
        )

    return loss


VARIANTS: dict[str, Variant] = {
    REFERENCE: peft,
    "ours fp8 + lora": ours,
    "ours, fused + graphs": ours_fused,
    "ours, fused + graphs, FP8 head": ours_fp8_head,
    "te fp8 + lora": te,
}
