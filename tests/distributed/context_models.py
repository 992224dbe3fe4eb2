# SPDX-License-Identifier: Apache-2.0
"""A small model whose rows are cut over ranks, beside one process with whole rows."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from lorakernels import BlockScaling, DelayedScaling, PhiloxState, fuse
from lorakernels.modules.model.logits import change_of_logits
from lorakernels.parallel import ContextParallel, context_parallel, parallelize, shard_base
from lorakernels.parallel.ranks import comm
from lorakernels.train.model.loss import changed
from tests.distributed.tensor_layers import relative
from tests.distributed.tensor_models import gradients_at
from tests.fusion.fused_models import LINEARS, VOCABULARY, adapted, exact, fp8_state
from tests.parallel.test_context_attention import visible

STEPS, ROWS, LENGTH = 4, 2, 16
# where documents begin among the tokens of both rows: of one token, of none, and as long as a chunk
DOCUMENTS = [0, 1, 1, 5, 16, 20, 32]


@dataclass(frozen=True)
class Way:
    """How a model runs and is trained."""

    name: str
    fp8: bool = False
    blocks: bool = False  # BlockScaling, which has no state
    dropout: float = 0.0
    family: str = "Llama"
    fused: bool = False
    save: str = "recompute"
    checkpoint: bool = False
    documents: bool = True
    sharded: bool = False
    vocabulary: bool | None = None  # with tensor parallelism: whether the vocabulary is split, too
    automatic: bool = False  # the layers start the updates of the scales
    dtype: torch.dtype = torch.float32
    model: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name


def make(way: Way, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    fp8 = DelayedScaling(amax_history_len=2) if way.fp8 else BlockScaling() if way.blocks else None
    sizes = {"hidden_size": 256, "intermediate_size": 128} if way.blocks else {}
    model = adapted(
        way.family,
        LINEARS,
        model=sizes | way.model,
        device=device,
        dtype=way.dtype,
        fp8=fp8,
        lora_dropout=way.dropout,
        rng_state=PhiloxState(11, device),
    )
    if way.checkpoint:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def batch(step: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(tokens, labels) [B, S]; some labels do not count."""
    generator = torch.Generator().manual_seed(30 + step)
    tokens = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=generator)
    ignored = torch.rand(ROWS, LENGTH, generator=generator) < 0.2
    return tokens.to(device), tokens.masked_fill(ignored, -100).to(device)


def positions() -> Tensor:
    """int64 [B, S], within documents."""
    starts = torch.tensor(sorted({*DOCUMENTS, *range(0, ROWS * LENGTH, LENGTH)}))
    at = torch.arange(ROWS * LENGTH)
    return (at - starts[torch.searchsorted(starts, at, right=True) - 1]).view(ROWS, LENGTH)


def loss_alone(model: nn.Module, tokens: Tensor, labels: Tensor, way: Way) -> Tensor:
    """The loss in one process, whose documents are apart by a mask."""
    shifted = nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
    starts = DOCUMENTS if way.documents else [*range(0, ROWS * LENGTH + 1, LENGTH)]
    each = visible(starts, ROWS, LENGTH).view(ROWS, LENGTH, ROWS, LENGTH)
    mask = torch.stack([each[row, :, row] for row in range(ROWS)])[:, None]
    where = positions() if way.documents else torch.arange(LENGTH).repeat(ROWS, 1)
    base: Any = model.base_model
    hidden = base(
        input_ids=tokens,
        position_ids=where.to(tokens.device),
        attention_mask=mask.to(tokens.device),
        use_cache=False,
    ).last_hidden_state
    logits = model.get_output_embeddings()(hidden)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    config: Any = model.config
    logits = changed(logits, change_of_logits(config))
    return nn.functional.cross_entropy(logits.flatten(0, 1), shifted.flatten())


def loss_over_ranks(context: ContextParallel, tokens: Tensor, labels: Tensor, way: Way) -> Tensor:
    inputs: dict[str, Any] = {"input_ids": tokens}
    if way.documents:
        starts = torch.tensor(DOCUMENTS, dtype=torch.int32, device=tokens.device)
        inputs |= {"position_ids": positions().to(tokens.device)}
        inputs |= {"cu_seq_lens_q": starts, "max_length_q": 12}
    return context.loss(labels, **inputs)


def train(model: nn.Module, way: Way, device: torch.device, context: Any, split: Any = None) -> Any:
    """[(values before, {"loss" and gradients})] of each step of plain descent."""
    torch.manual_seed(9)
    found = []
    rng = next(m.rng_state for m in model.modules() if getattr(m, "rng_state", None) is not None)
    for step in range(STEPS):
        model.zero_grad()
        tokens, labels = batch(step, device)
        if context is None:
            loss = loss_alone(model, tokens, labels, way)
        else:
            loss = loss_over_ranks(context, tokens, labels, way)
        loss.backward()
        if context is not None:
            context.reduce_gradients()
        trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        gradients = {n: p.grad.clone() for n, p in trained.items()}
        values = {n: p.detach().clone() for n, p in trained.items()}
        if split is not None:
            gradients, values = split.whole_gradients(), split.whole_adapters()
        found.append((values, {"loss": loss.detach(), **gradients}))
        with torch.no_grad():
            for p in trained.values():
                p -= 0.05 * p.grad
        if way.fp8 and not way.automatic:
            fp8_state(model).reduce_and_update()
        rng.advance()
    return found


def compare(device: torch.device, way: Way, mesh: Any) -> dict[str, Any]:
    """Differences from one process and, without dropout and FP8, from float64; what is not equal on all ranks."""
    whole, model = make(way, device), make(way, device)
    double = None if way.fp8 or way.blocks or way.dropout else exact(copy.deepcopy(whole))
    if way.fused:
        for each, how in ((whole, "math"), (model, "auto")):
            fuse(each, save=way.save, attention=how if device.type == "cuda" else "auto")
    base = shard_base(model, mesh["cp"], embeddings=True) if way.sharded else None
    split = None
    if way.vocabulary is not None:
        split = parallelize(model, mesh["tp"], vocabulary=way.vocabulary)
    context = context_parallel(model, mesh["cp"])
    expected = train(whole, way, device, None)
    found = train(model, way, device, context, split)
    context.check()
    errors: dict[str, float] = {}
    for step, ((_, theirs), (values, ours)) in enumerate(zip(expected, found, strict=True)):
        assert theirs.keys() == ours.keys()
        for name, value in ours.items():
            errors[f"{name} in step {step}"] = relative(value, theirs[name])
        if double is not None:
            loss = partial(loss_alone, double, *batch(step, torch.device("cpu")), way)
            for name, value in gradients_at(double, values, loss).items():
                errors[f"{name} in step {step}, float64"] = relative(ours[name].cpu(), value)
    held = {n: p.detach().cpu() for n, p in model.named_parameters() if p.requires_grad}
    if way.fp8:
        held |= {f"state {i}": t.cpu().clone() for i, t in enumerate(_states(model))}
    unequal = [
        f"{name} of rank {rank}"
        for rank, other in enumerate(comm.agree(context.ranks.group, held))
        for name, value in other.items()
        if not value.equal(held[name])
    ]
    if base is not None:
        base.unshard()
    return {"errors": errors, "unequal": unequal}


def _states(model: nn.Module) -> tuple[Tensor, Tensor]:
    state = fp8_state(model)
    return state.forward[-1], state.backward[-1]


def worker(rank: int, device: torch.device, ways: list[Way]) -> dict[str, Any]:
    world = dist.get_world_size()
    found = {}
    for tp in (1, 2):
        mesh = init_device_mesh(device.type, (world // tp, tp), mesh_dim_names=("cp", "tp"))
        some = [way for way in ways if (way.vocabulary is not None) == (tp == 2)]
        found |= {str(way): compare(device, way, mesh) for way in some}
    return found
