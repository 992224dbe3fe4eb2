# SPDX-License-Identifier: Apache-2.0
"""Values of all stages of a pipeline: trained parameters, gradients, their norm, and the whole model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lorakernels.parallel.pipeline.cut import PipelineCut
from lorakernels.parallel.ranks import comm

_INITIAL = (".lora_A_init", ".lora_B_init")


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """{name: parameter} of this rank's parameters that train."""
    return {n: p for n, p in model.named_parameters() if p.requires_grad}


def initial(model: nn.Module) -> dict[str, Tensor]:
    """{name: value} of this rank's initial adapters of OLoRA and PiSSA."""
    return {n: b for n, b in model.named_buffers() if n.endswith(_INITIAL)}


def gathered(cut: PipelineCut, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Collective: all ranks' `tensors` by name, on the CPU. Trained parameters come in the model's order."""
    of_all: dict[str, Tensor] = {}
    for part in comm.agree(cut.ranks.group, {n: x.cpu() for n, x in tensors.items()}):
        of_all |= part
    order = {name: i for i, name in enumerate(cut.names)}
    return dict(sorted(of_all.items(), key=lambda pair: order.get(pair[0], len(order))))


@contextmanager
def filled(model: nn.Module, cut: PipelineCut, values: dict[str, Tensor]) -> Iterator[None]:
    """Inside, the model has all modules. Modules of other ranks have `values`, and are on meta otherwise."""
    before: list[tuple[dict[str, Any], str, Tensor]] = []
    with cut.structure():
        for path, value in values.items():
            where, _, name = path.rpartition(".")
            module = model.get_submodule(where)
            is_buffer = name in module._buffers
            held: dict[str, Any] = module._buffers if is_buffer else module._parameters
            if held[name].is_meta:
                before.append((held, name, held[name]))
                held[name] = value if is_buffer else nn.Parameter(value)
        try:
            yield
        finally:
            for held, name, on_meta in before:
                held[name] = on_meta


def clip_grad_norm_(model: nn.Module, group: Any, max_norm: float) -> Tensor:
    """Collective: scale the gradients of all ranks' parts of a model down to `max_norm`; the norm before, fp32 []."""
    grads = [p.grad for p in trained(model).values() if p.grad is not None]
    total = torch.zeros(1, device=next(model.parameters()).device)
    for g in grads:
        total += g.float().square().sum()
    comm.all_reduce(group, total)
    norm = total.sqrt()[0]
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for g in grads:
        g.mul_(factor)
    return norm
