# SPDX-License-Identifier: Apache-2.0
"""A small model cut into stages, beside one process that accumulates over the same microbatches."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from lorakernels import DelayedScaling, PhiloxState, fuse
from lorakernels.modules.model.logits import change_of_logits
from lorakernels.parallel import ContextParallel, PipelineParallel, pipeline_parallel
from lorakernels.parallel.ranks import comm
from lorakernels.parallel.tensor.head import sum_of_losses
from lorakernels.train.model.loss import changed
from tests.distributed.tensor_layers import relative
from tests.distributed.tensor_models import gradients_at
from tests.fusion.fused_models import LINEARS, VOCABULARY, adapted, exact, fp8_state

STEPS, LENGTH = 5, 12
Steps = list[tuple[dict[str, Tensor], dict[str, Tensor]]]  # of `train`


@dataclass(frozen=True)
class Way:
    """How a model runs and is trained."""

    name: str
    layers: int = 4
    chunks: int = 1
    microbatches: int = 4
    fp8: bool = False
    dropout: float = 0.0
    family: str = "Llama"
    fused: bool = False
    save: str = "recompute"
    shared_dropout: bool = True
    checkpoint: bool = False
    padded: bool = False
    packed: bool = False
    one_state: bool = False  # every microbatch begins with one state of the generator, and has an offset of its own
    dtype: torch.dtype = torch.float32
    model: dict[str, Any] = field(default_factory=dict)
    lora: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name


def make(way: Way, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    model = adapted(
        way.family,
        LINEARS,
        model={"num_hidden_layers": way.layers, **way.model},
        device=device,
        dtype=way.dtype,
        fp8=DelayedScaling(amax_history_len=2) if way.fp8 else None,
        lora_dropout=way.dropout,
        rng_state=PhiloxState(11, device),
        **way.lora,
    )
    if way.checkpoint:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if way.fused:
        fuse(model, save=way.save, shared_dropout=way.shared_dropout)
    if way.fp8:
        fp8_state(model).in_charge = "explicit"  # as a loop that updates once a step
    return model.train()


def batch(step: int, way: Way, device: torch.device) -> tuple[Tensor, dict[str, Any]]:
    """(labels [B, S], what the model takes); some labels do not count, as many as are not in every microbatch."""
    generator = torch.Generator().manual_seed(30 + step)
    rows = way.microbatches * 2
    tokens = torch.randint(VOCABULARY, (rows, LENGTH), generator=generator)
    ignored = torch.rand(rows, LENGTH, generator=generator) < torch.linspace(0, 0.6, rows)[:, None]
    labels, inputs = tokens.masked_fill(ignored, -100), {"input_ids": tokens}
    if way.padded:
        mask = torch.ones_like(tokens)
        mask[1, 7:] = mask[4, 3:] = 0
        inputs["attention_mask"], labels = mask, labels.masked_fill(mask == 0, -100)
    if way.packed:  # two documents a row
        ends = [end for row in range(rows) for end in (row * LENGTH + 5, (row + 1) * LENGTH)]
        inputs["cu_seq_lens_q"] = torch.tensor([0, *ends], dtype=torch.int32)
        inputs["position_ids"] = torch.tensor([*range(5), *range(LENGTH - 5)])[None]
    inputs = {name: x.to(device) for name, x in inputs.items()}
    if way.packed:
        inputs["max_length_q"] = LENGTH - 5
    return labels.to(device), inputs


def parts_of(inputs: dict[str, Any], way: Way) -> list[dict[str, Any]]:
    """Of each microbatch."""
    found = []
    for i in range(way.microbatches):
        rows = slice(2 * i, 2 * i + 2)
        part = {n: x[rows] for n, x in inputs.items() if n in ("input_ids", "attention_mask")}
        if way.packed:
            ends = torch.tensor([0, 5, LENGTH, LENGTH + 5, 2 * LENGTH], dtype=torch.int32)
            part |= {"cu_seq_lens_q": ends.to(part["input_ids"].device)}
            part |= {n: inputs[n] for n in ("max_length_q", "position_ids")}
        found.append(part)
    return found


def step_alone(model: Any, labels: Tensor, inputs: dict[str, Any], way: Way) -> Tensor:
    """The loss without stages: of one process, or of ranks that share rows. It accumulates over microbatches."""
    context, trains = ContextParallel.of(model), model.training
    start, rng = torch.get_rng_state(), state_of(model)
    wanted = nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
    count = (wanted != -100).sum().float()
    total = torch.zeros((), device=labels.device)
    for part, own in zip(parts_of(inputs, way), wanted.chunk(way.microbatches), strict=True):
        if way.one_state and trains:
            torch.set_rng_state(start)
        if context is not None:
            part, own = context.own_inputs(own, part), context.shard(own)
        hidden = model.base_model(use_cache=False, **part).last_hidden_state
        loss = sum_of_losses(model, hidden, own) / count
        if trains:
            loss.backward()
        if way.one_state and trains:
            rng.advance()
        total += loss.detach()
    if context is not None:
        comm.all_reduce(context.ranks.group, total)
    return total


def state_of(model: nn.Module) -> PhiloxState:
    return next(m.rng_state for m in model.modules() if getattr(m, "rng_state", None) is not None)


def loss_in_double(model: Any, labels: Tensor, inputs: dict[str, Any], way: Way) -> Tensor:
    """Of all rows at once, from whole logits."""
    inputs = {
        n: x for n, x in inputs.items() if n in ("input_ids", "attention_mask", "position_ids")
    }
    if way.packed:
        at = torch.arange(LENGTH)
        same = (at[:, None] < 5) == (at[None] < 5)
        inputs["attention_mask"] = (same & (at[:, None] >= at[None]))[None, None]
    hidden = model.base_model(use_cache=False, **inputs).last_hidden_state
    logits = changed(model.get_output_embeddings()(hidden), change_of_logits(model.config))
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def train(
    model: nn.Module,
    way: Way,
    device: torch.device,
    cut: PipelineParallel | None,
    after_step: Callable[[], object] = lambda: None,
) -> Steps:
    """[(values before, {"loss" and gradients, FP8 state})] of each step of plain descent."""
    torch.manual_seed(9)
    found, start = [], torch.get_rng_state()
    rng, context = state_of(model), ContextParallel.of(model)
    if cut is not None and way.one_state:
        cut.offsets = rng
    for step in range(STEPS):
        model.zero_grad()
        labels, inputs = batch(step, way, device)
        loss = (
            step_alone(model, labels, inputs, way)
            if cut is None
            else cut.forward_backward(labels, **inputs)
        )
        if context is not None:
            context.reduce_gradients()
        trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        values = {n: p.detach().cpu().clone() for n, p in trained.items()}
        grads = {n: p.grad.cpu().clone() for n, p in trained.items() if p.grad is not None}
        if cut is not None:
            values, grads = cut.whole_adapters(), cut.whole_gradients()
        with torch.no_grad():
            for p in trained.values():
                p -= 0.05 * p.grad
        if way.one_state:
            torch.set_rng_state(start)
        numbers = {"loss": loss.cpu(), "generator": torch.get_rng_state(), **grads}
        if way.fp8:
            state = fp8_state(model)
            state.reduce_and_update(None if cut is None else cut.ranks.group)
            numbers |= {"scales of x": state.forward.cpu().clone()}
            numbers |= {"scales of dy": state.backward.cpu().clone()}
        rng.advance(way.microbatches if way.one_state and cut is not None else 1 - way.one_state)
        after_step()
        found.append((values, numbers))
    model.eval()
    labels, inputs = batch(STEPS, way, device)
    if cut is None:
        with torch.no_grad():
            evaluated = step_alone(model, labels, inputs, way)
    else:
        evaluated = cut.loss(labels, **inputs)
    found.append(({}, {"evaluated": evaluated.cpu(), "generator": torch.get_rng_state()}))
    return found


def differences(expected: Steps, found: Steps, way: Way, double: Any) -> dict[str, Any]:
    """What is not equal to the bit, and errors beside `expected` and beside `double` in float64, None if there is none.

    expected, found: what `train` returned for one model's way and another's.
    """
    unequal, errors, alones = [], {}, {}
    for step, ((_, theirs), (values, ours)) in enumerate(zip(expected, found, strict=True)):
        assert theirs.keys() == ours.keys(), theirs.keys() ^ ours.keys()
        unequal += [f"{n} in step {step}" for n in ours if not torch.equal(ours[n], theirs[n])]
        errors |= {
            f"{n} in step {step}": relative(ours[n], theirs[n])
            for n in ours
            if n != "generator" and theirs[n].is_floating_point()
        }
        if double is not None and values:
            loss = partial(loss_in_double, double, *batch(step, way, torch.device("cpu")), way)
            for name, value in gradients_at(double, values, loss).items():
                errors[f"{name} in step {step}, float64"] = relative(ours[name].cpu(), value)
                alones[f"{name} in step {step}, float64"] = relative(theirs[name].cpu(), value)
    return {"unequal": unequal, "errors": errors, "errors of one process": alones}


def compare(device: torch.device, way: Way, mesh: Any) -> dict[str, Any]:
    """What is not equal to one process, to the bit; differences from float64 without dropout and FP8."""
    whole, model = make(way, device), make(way, device)
    double = None
    if not (way.fp8 or way.dropout or way.fused):
        double = exact(copy.deepcopy(whole))
    elif way.fused and not (way.fp8 or way.dropout):
        plain = Way("", way.layers, family=way.family, model=way.model, lora=way.lora)
        double = exact(make(plain, torch.device("cpu")))
    cut = pipeline_parallel(model, mesh, microbatches=way.microbatches, chunks=way.chunks)
    expected = train(whole, way, device, None)
    found = train(model, way, device, cut)
    cut.check()
    apart = differences(expected, found, way, double)
    alone = comm.agree(cut.ranks.group, {n: float(x.sum()) for n, x in found[-1][1].items()})
    own = [n for n, _ in model.named_parameters()]
    return {
        **apart,
        "ranks equal": all(other == alone[0] for other in alone),
        "own": own,
        "said": str(cut),
    }


def worker(rank: int, device: torch.device, ways: list[Way]) -> dict[str, Any]:
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("pp",))
    return {str(way): compare(device, way, mesh["pp"]) for way in ways}
