# SPDX-License-Identifier: Apache-2.0
"""A small model whose base is sharded, what its training computes, and the ways in which it is trained."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lorakernels import (
    DelayedScaling,
    PhiloxState,
    disable_lora,
    fuse,
    linear_cross_entropy,
    quantize_head,
)
from lorakernels.parallel import ShardedBase, shard_base
from lorakernels.parallel.base.shard import POISON_VARIABLE
from lorakernels.recipes import Recipe
from tests.fusion.fused_models import ATTENTION, LINEARS, VOCABULARY, adapted, an_adapter

LAYERS, STEPS = 5, 3
DELAYED = DelayedScaling(amax_history_len=4)
Found = dict[str, Tensor]


@dataclass(frozen=True)
class Way:
    """How a model is made and trained. `save` None leaves it unfused; `checkpoint` is use_reentrant, or None."""

    save: str | None = None
    checkpoint: bool | None = None
    poison: bool = False
    compiled: bool = False
    apart: bool = False  # the ranks' ways differ, so that none may skip what the others train
    ddp: bool = False  # around the model, with the same data on every rank
    tied: bool = False  # the head has the embedding's weight
    delayed: bool = False
    recipe: Recipe = DELAYED
    family: str = "Llama"
    options: dict[str, Any] = field(default_factory=dict)  # of shard_base
    step: str = "plain"
    sizes: dict[str, int] = field(
        default_factory=lambda: {"hidden_size": 64, "intermediate_size": 96}
    )


def make(way: Way, device: torch.device) -> nn.Module:
    """The same on every rank."""
    torch.manual_seed(0)
    model = adapted(
        way.family,
        LINEARS if way.save is None else ATTENTION,
        model={"num_hidden_layers": LAYERS, "tie_word_embeddings": way.tied, **way.sizes},
        device=device,
        dtype=torch.bfloat16,
        fp8=way.recipe,
        lora_dropout=0.1,
        rng_state=PhiloxState(11, device),
    )
    if way.save is not None:
        fuse(model, save=way.save, attention="math")
    if way.checkpoint is not None:
        model.gradient_checkpointing_enable({"use_reentrant": way.checkpoint})
        model.enable_input_require_grads()
    return model.train()


def compiled(model: nn.Module, way: Way) -> nn.Module:
    for layer in model.model.layers if way.compiled else ():
        layer.compile(backend="aot_eager")
    return model


def batches(device: torch.device) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(3)
    for _ in range(STEPS):
        yield torch.randint(VOCABULARY, (2, 16), generator=generator).to(device)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    found: Tensor = model(x, labels=x, use_cache=False).loss
    return found


def plain(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    loss = loss_of(model, x)
    loss.backward()
    return {"loss": loss.detach()}


def chunked(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """The loss without the logits of all tokens, from the head's weight alone, in 16 bits and in FP8."""
    h, labels = model.model(x, use_cache=False).last_hidden_state[:, :-1], x[:, 1:]
    found = {}
    for fp8 in (False, True):
        loss = linear_cross_entropy(h, model.lm_head.weight, labels, chunk=9, fp8=fp8)
        loss.backward(retain_graph=not fp8)
        found[f"loss, fp8={fp8}"] = loss.detach()
    w8, scale_inv = quantize_head(model.lm_head.weight)
    return {**found, "w8": w8.float(), "scale_inv": scale_inv}


def two_forwards(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Two microbatches in flight: the second runs backward first."""
    first, second = loss_of(model, x), loss_of(model, x.flip(0))
    second.backward()
    first.backward()
    return {"loss": first.detach(), "second": second.detach()}


def interrupted(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Uses out of order, before, between and after forward and backward."""
    layer = model.model.layers[3]
    found, h = {}, torch.ones(1, 4, 64, dtype=torch.bfloat16, device=x.device)
    angles = model.model.rotary_emb(h, torch.arange(4, device=x.device)[None])
    with torch.no_grad():
        found["alone"] = layer(h, position_embeddings=angles)
        found["again"] = layer(h, position_embeddings=angles)
    model.eval()
    with torch.no_grad():
        found["eval"] = loss_of(model, x)
        with disable_lora(model):
            found["without adapters"] = loss_of(model, x)
    model.train()
    loss_of(model, x)  # without a backward
    loss = loss_of(model, x)
    with torch.inference_mode():
        found["between"] = layer(h, position_embeddings=angles)
    loss.backward()
    found["generated"] = model.eval().generate(x[:, :4], max_new_tokens=2, do_sample=False)
    model.train()
    return {**found, "loss": loss.detach()}


HOW: dict[str, Callable[[nn.Module, Tensor], dict[str, Tensor]]] = {
    "plain": plain,
    "chunked": chunked,
    "two forwards": two_forwards,
    "interrupted": interrupted,
}


def train(
    model: nn.Module, way: Way, device: torch.device, base: ShardedBase | None = None
) -> Found:
    """Everything that STEPS steps compute, by name; `gathers` of each step besides, if there is a base."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), lr=1e-2)
    state, found = an_adapter(model).fp8_state, {}
    outer = DistributedDataParallel(model) if way.ddp else model
    for step, x in enumerate(batches(device)):
        before = 0 if base is None else base.gathers
        found |= {f"{step} {name}": value for name, value in HOW[way.step](outer, x).items()}
        found |= {f"{step} grad {n}": p.grad for n, p in trained.items()}
        if base is not None:
            found[f"gathers {step}"] = torch.tensor(base.gathers - before)
        optimizer.step()
        optimizer.zero_grad()
        if state is not None:
            state.reduce_and_update()
            scales = {"x": state.forward, "dy": state.backward}
            found |= {f"{step} fp8 {name}": of.clone() for name, of in scales.items()}
    return found | {f"trained {n}": p.detach() for n, p in trained.items()}


@contextmanager
def late(base: ShardedBase) -> Iterator[None]:
    """Every third use of a layer comes late on this rank."""
    ensure, uses = base.slots.ensure, iter(range(10**6))

    def after_a_while(layer: int, ahead: int) -> None:
        if next(uses) % 3 == 0:
            time.sleep(0.005)
        ensure(layer, ahead)

    base.slots.__dict__["ensure"] = after_a_while
    try:
        yield
    finally:
        del base.slots.__dict__["ensure"]


_expected: dict[
    tuple[str, str], Found
] = {}  # of the whole base, by device and the way it is trained


def compare(way: Way, mesh: Any, rank: int, device: torch.device) -> tuple[list[str], list[int]]:
    """(what differs between the sharded and the whole model, gathers of each step), after training both."""
    whole = replace(way, poison=False, delayed=False, options={})
    key = str(device), repr(whole)
    if key not in _expected:
        _expected[key] = train(compiled(make(whole, device), way), whole, device)
    expected = _expected[key]
    model = make(way, device)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(POISON_VARIABLE, str(int(way.poison)))
        base = shard_base(model, mesh, **way.options)
    compiled(model, way)
    with late(base) if way.delayed and rank == 1 else nullcontext():
        found = train(model, way, device, base)
    gathers = [int(found.pop(f"gathers {step}")) for step in range(STEPS)]
    assert found.keys() == expected.keys()
    base.unshard()
    return [name for name, x in expected.items() if not torch.equal(x, found[name])], gathers
