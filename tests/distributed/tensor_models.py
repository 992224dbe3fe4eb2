# SPDX-License-Identifier: Apache-2.0
"""A small Llama over ranks beside the whole model on each rank: losses, gradients and adapters of some steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from lorakernels import DelayedScaling, PhiloxState, fuse
from lorakernels.autograd.linear import rows as linear_rows
from lorakernels.parallel import TensorParallel, parallelize
from lorakernels.parallel.ranks import comm
from lorakernels.parallel.ranks import exchange as row_exchange
from lorakernels.parallel.ranks import scales as shared_scales
from lorakernels.parallel.ranks.exchange import CollectiveRows
from lorakernels.parallel.ranks.group import Ranks
from lorakernels.parallel.tensor import projections as tensor_fused
from tests.distributed.tensor_layers import relative
from tests.fusion.fused_models import LINEARS, VOCABULARY, adapted, exact, fp8_state

STEPS = 5


@dataclass(frozen=True)
class Way:
    """How a model is split and trained."""

    name: str
    sequence: bool
    fp8: bool = True
    targets: tuple[str, ...] = LINEARS
    family: str = "Llama"
    dtype: torch.dtype = torch.float32
    dropout: float = 0.1
    checkpoint: bool | None = None  # use_reentrant
    bias: str = "none"
    automatic: bool = False  # the layers start the updates of the scales
    vocabulary: bool = False
    model: dict[str, Any] = field(default_factory=dict)
    save: str | None = None  # of fused layers
    shared_dropout: bool = True  # likewise
    pieces: bool = False  # rows are exchanged beside products of fused layers
    fault: str = ""  # an invariant of fused layers that is broken, in tests of these tests

    def __str__(self) -> str:
        found = f"{self.name}, rows {'split' if self.sequence else 'whole'}"
        return found + (self.fault and f", {self.fault}")


def make(way: Way, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_key_value_heads": 4}
    if way.family == "Qwen3":
        sizes["head_dim"] = 16
    model = adapted(
        way.family,
        way.targets,
        model=sizes | way.model,
        device=device,
        dtype=way.dtype,
        fp8=DelayedScaling(amax_history_len=2) if way.fp8 else None,
        lora_dropout=way.dropout,
        bias=way.bias,
        rng_state=PhiloxState(11, device),
    )
    if way.checkpoint is not None:
        model.gradient_checkpointing_enable({"use_reentrant": way.checkpoint})
        model.enable_input_require_grads()
    if way.save is not None:
        fuse(model, save=way.save, attention="math", shared_dropout=way.shared_dropout)
    return model.train()


def batch(step: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(30 + step)
    return torch.randint(VOCABULARY, (2, 12), generator=generator).to(device)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    found: Tensor = model(tokens, labels=tokens, use_cache=False).loss
    return found


def train(model: nn.Module, way: Way, device: torch.device, split: TensorParallel | None) -> Any:
    """[(state before, {"loss" and gradients, whole})] of each step of plain descent."""
    torch.manual_seed(9)
    found = []
    rng = next(m.rng_state for m in model.modules() if getattr(m, "rng_state", None) is not None)
    for step in range(STEPS):
        model.zero_grad()
        tokens = batch(step, device)
        loss = split.loss(tokens, input_ids=tokens) if split and way.vocabulary else loss_of(model, tokens)  # fmt: skip
        loss.backward()
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


def in_float64(model: nn.Module, values: dict[str, Tensor], tokens: Tensor) -> dict[str, Tensor]:
    """Loss and gradients of the model with adapters `values`, without dropout and over a plain base."""
    return gradients_at(model, values, lambda: loss_of(model, tokens.cpu()))


def gradients_at(
    model: nn.Module, values: dict[str, Tensor], compute: Callable[[], Tensor]
) -> dict[str, Tensor]:
    """The loss that `compute` returns for adapters `values`, and their gradients."""
    model.zero_grad()
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, value in values.items():
            parameters[name].copy_(value)
    loss = compute()
    loss.backward()
    return {"loss": loss.detach(), **{n: parameters[n].grad.clone() for n in values}}


class Pieces:
    """A `Beside` over collectives, with the pieces that ranks have whose exchanges run beside their products."""

    def __init__(self, rows: CollectiveRows) -> None:
        self.rows = rows
        self.rank, self.size = dist.get_rank(rows.group), dist.get_world_size(rows.group)

    def gather(self, product: Any, parts: Sequence[Tensor], totals: Sequence[Tensor] = ()) -> Any:
        each = len(parts[0])
        found = self.rows.gather(*parts, totals=totals)
        own = slice(self.rank * each, (self.rank + 1) * each)
        for rows in (own, slice(0, own.start), slice(own.stop, self.size * each)):
            if rows.start < rows.stop:
                product(rows, [whole[rows] for whole in found[: len(parts)]])
        return found[1:]

    def sum(
        self, product: Any, rows: int, factor: Tensor | None = None, added: Tensor | None = None
    ) -> Any:
        each = rows // self.size
        parts = [product(slice(r * each, (r + 1) * each)) for r in range(self.size)]
        return self.rows.sum(torch.cat(parts), factor, added)

    def sum_with(self, product: Any, rows: int, branch: Any) -> Any:
        _, factor = self.rows.sum(branch.factor.new_zeros(self.size, 1), branch.factor)
        partials = branch.partials(factor)
        flat = torch.cat([p.flatten() for p in partials]) if partials else None
        form = None if flat is None else (flat.shape, flat.dtype)
        assert branch.form == form, "what a rank lays down has the form that it said before"

        def part(at: slice) -> Tensor:
            own = at.start == self.rank * (rows // self.size)
            return product(at, factor if own else None)

        return self.sum(part, rows)[0], self.rows.total(*partials)


@contextmanager
def in_pieces() -> Iterator[None]:
    """Exchange rows beside products, however few they are."""
    with (
        mock.patch.object(CollectiveRows, "beside", lambda rows, gain, slower: Pieces(rows)),
        mock.patch.object(row_exchange, "START", -1.0),
    ):
        yield


@contextmanager
def broken(fault: str) -> Iterator[None]:
    sum_both = tensor_fused.summed

    def own(ranks: Ranks, partial: Tensor) -> Tensor:
        return partial[ranks.share(len(partial))] if ranks.sequence else partial

    def half(
        ranks: Ranks, partial: Tensor, factor: Tensor | None = None, added: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        y = own(ranks, partial) + (0 if added is None else added)
        return y, sum_both(ranks, partial, factor)[1]

    def half_factor(
        ranks: Ranks, partial: Tensor, factor: Tensor | None = None, added: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        y = sum_both(ranks, partial, None, added)[0]
        return y, None if factor is None else own(ranks, factor)

    replaced: dict[str, tuple[Any, str, Any]] = {
        "no sum over the ranks": (tensor_fused, "summed", half),
        "factors not summed": (tensor_fused, "summed", half_factor),
        "rows not summed": (CollectiveRows, "total", lambda rows, *parts: [*parts]),
        "equal masks of pieces": (tensor_fused, "masks_at", lambda to, rows: to),
        "equal masks of gathered pieces": (linear_rows, "masks_at", lambda to, rows: to),
        "equal masks": (tensor_fused.Split, "placed", lambda self, to, rows: to),
        "each rank's own scale": (shared_scales, "reduce_amax", lambda amax, group: None),
    }
    with mock.patch.object(*replaced[fault]) if fault else nullcontext():
        yield


def compare(device: torch.device, way: Way, mesh: Any) -> dict[str, Any]:
    """Differences from the whole model and, where there is no dropout and no FP8, from float64; what is not equal."""
    whole, model = make(way, device), make(way, device)
    double = None if way.fp8 or way.dropout else exact(make(replace(way, save=None), device))
    options = {"sequence_parallel": way.sequence, "vocabulary": way.vocabulary}
    options["overlap"] = way.pieces and device.type == "cuda"
    split = parallelize(model, mesh, **options)
    start = split.whole_adapters()
    initial = {n: p.detach() for n, p in whole.named_parameters() if p.requires_grad}
    unequal = [n for n in initial if not torch.equal(start[n], initial[n])]
    expected = train(whole, way, device, None)
    with broken(way.fault), in_pieces() if way.pieces else nullcontext():
        found = train(model, way, device, split)
    errors: dict[str, float] = {}
    if way.vocabulary:  # the values are equal again
        tokens = batch(STEPS, device)
        with torch.no_grad():
            logits = [m.eval()(tokens, use_cache=False).logits for m in (model, whole)]
        errors["logits"] = relative(*logits)
    for step, ((_, theirs), (values, ours)) in enumerate(zip(expected, found, strict=True)):
        assert theirs.keys() == ours.keys()
        for name, value in ours.items():
            errors[f"{name} in step {step}"] = relative(value, theirs[name])
        if double is not None:
            for name, value in in_float64(double, values, batch(step, device)).items():
                errors[f"{name} in step {step}, float64"] = relative(ours[name].cpu(), value)
    held = {n: p.detach().cpu() for n, p in model.named_parameters() if p.requires_grad}
    whole_values = {n: v.cpu() for n, v in split.whole_adapters().items()}
    every = comm.agree(split.ranks.group, (held, whole_values))
    for rank, (theirs_held, theirs_whole) in enumerate(every):
        unequal += [f"{n} on rank {rank}" for n, v in theirs_whole.items() if not v.equal(every[0][1][n])]  # fmt: skip
        replicated = (n for n, v in held.items() if v.shape == initial[n].shape)
        unequal += [f"{n} held by rank {rank}" for n in replicated if not theirs_held[n].equal(held[n])]  # fmt: skip
    return {"errors": errors, "unequal": unequal, "said": str(split)}


def worker(rank: int, device: torch.device, ways: list[Way], dp: int = 1) -> dict[str, Any]:
    """With `dp` > 1 there are so many groups of ranks, which train on the same data."""
    shape = (dp, dist.get_world_size() // dp)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("dp", "tp"))
    return {str(way): compare(device, way, mesh["tp"]) for way in ways}
