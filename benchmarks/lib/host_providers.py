# SPDX-License-Identifier: Apache-2.0
"""What bench_host.py times: linear layers behind each other, decoder layers behind each other, and whole steps.

Each make_… returns a `Made`: the works, ready and warm, and what its row's check says or is computed from. What has to
be closed after the timing, it leaves to `closing`. Nothing is shared between two providers: each has scales, random
states and gradients of its own.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from benchmarks.lib.host_time import Work
from benchmarks.peers import PEERS
from benchmarks.peers.base import (
    Case,
    Peer,
    Unavailable,
    dropout_fault,
    exact,
    fault,
    relative_error,
)
from benchmarks.peers.models import Spec, dtype_of, token_rows
from benchmarks.peers.training import HfPeft, Ours, Training
from lorakernels import DelayedScaling, FrozenFP8Linear

CHAIN = 8  # linear layers behind each other
SHORT, LONG = 1, 4  # decoder layers behind each other
BACKEND: Any = None  # of the graphs; None is CUDA's
SMALL_VOCABULARY = 320  # where neither embedding nor head runs
BATCHES = 16
# Of the norm, from PEFT's. Rounding to FP8 puts y and dx off by 0.1 after LONG layers. A gradient of B under another
# mask is off by 0.4; one that is missing, or twice as large, is off by 1.
TOLERANCES = {"loss": 0.02, "y": 0.25, "dx": 0.25, "dB": 0.75}
WARM_UP = 3  # iterations: delayed scales are those of the data, and graphs are captured
Context = Callable[[], AbstractContextManager[None]]


@dataclass
class Made:
    """`check` is what is wrong with it, "" if nothing. `found` is what a row is compared by with PEFT's."""

    works: list[Work]
    check: str = ""
    error: float = 0.0
    found: dict[str, Tensor] = field(default_factory=dict)


def by_the_ops() -> AbstractContextManager[None]:
    """Everything goes through the ops, as under torch.compile, and nothing is recorded."""
    try:
        routing = importlib.import_module("lorakernels.recorded.routing")
    except ImportError as error:
        raise Unavailable(f"there are no recordings to go without ({error})") from error
    context: AbstractContextManager[None] = routing.without_recordings()
    return context


def chain(
    calls: Sequence[Callable[[Tensor], Any]],
    x: Tensor,
    dy: Tensor,
    trained: Sequence[Tensor],
    after: Callable[[], object],
    within: Context,
) -> Work:
    """Forward and backward through all of `calls`; the gradients of `trained` and x are None before."""

    def clean() -> None:
        for leaf in (x, *trained):
            leaf.grad = None

    def forward() -> Tensor:
        y = x
        for call in calls:
            y = call(y)
            y = y[0] if isinstance(y, tuple) else y
        return y

    return Work(forward, lambda y: y.backward(dy), clean, after, within, len(calls))


# linear layers


class Frozen(Peer):
    """FrozenFP8Linear: ours without LoRA."""

    has_lora = False

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.layer = FrozenFP8Linear.from_linear(case.linear(), DelayedScaling())

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y


def make_linears(
    make: Callable[[Case], Peer], within: Context, case: Case, closing: ExitStack
) -> Made:
    """CHAIN layers of one square weight; the updates of their FP8 scales are not timed."""
    with within():
        plain = make(case.without_dropout())
        wrong, error = fault(plain, exact(case, plain.has_lora))
        if not wrong and plain.has_lora and case.p > 0:
            wrong = dropout_fault(make(case.without_base()))
            wrong = wrong and f"dropout: {wrong}"
    peers = [make(case) for _ in range(CHAIN)]
    layers = [peer.layer for peer in peers if hasattr(peer, "layer")]
    states = [layer.fp8_state for layer in layers if hasattr(layer, "fp8_state")]

    def update() -> None:
        for state in states:
            state.reduce_and_update()

    trained = [adapter for peer in peers for adapter in peer.adapters]
    work = chain([p.forward for p in peers], peers[0].x, case.dy, trained, update, within)
    for _ in range(WARM_UP):
        work.run()
    return Made([work], wrong, error)


LINEARS: dict[str, tuple[Callable[[Case], Peer], Context]] = {
    "peft bf16": (PEERS["peft bf16"], nullcontext),
    "ours": (PEERS["ours fp8"], nullcontext),
    "ours, by the ops": (PEERS["ours fp8"], by_the_ops),
    "ours, frozen, no lora": (Frozen, nullcontext),
    "linear bf16, no lora": (PEERS["linear bf16, no lora"], nullcontext),
}


# decoder layers


@dataclass(frozen=True)
class Recipe:
    """How a model is made and run: `make(spec, adapted, device)`; `replays` says whether its layers are graphs."""

    make: Callable[..., Training]
    within: Context = nullcontext
    replays: bool = False


RECIPES: dict[str, Recipe] = {
    "hf + peft bf16": Recipe(HfPeft),
    "ours, not fused": Recipe(partial(Ours, save=None)),
    "ours, fused": Recipe(Ours),
    "ours, fused, by the ops": Recipe(Ours, by_the_ops),
    "ours, fused, replayed": Recipe(Ours, replays=True),
}


def make_layers(recipe: Recipe, spec: Spec, device: torch.device, closing: ExitStack) -> Made:
    """A chain of SHORT and one of LONG layers, each of a model of its own; what is found is the long one's."""
    if recipe.replays and device.type != "cuda" and BACKEND is None:
        raise Unavailable("needs a GPU")
    works = []
    for count in (SHORT, LONG):
        shape = {**spec.shape, "num_hidden_layers": count, "vocab_size": SMALL_VOCABULARY}
        with recipe.within():
            training = recipe.make(replace(spec, shape=shape), "qkvo", device)
        x, dy = _ends(training)
        after = _after_layers(training, recipe, closing)
        works.append(chain(_calls(training, x), x, dy, training.trained, after, recipe.within))
        for _ in range(WARM_UP):
            works[-1].run()
    return Made(works, found=_found(works[-1], training, x, dy))


def _ends(training: Training) -> tuple[Tensor, Tensor]:
    """(x, dy) [1, T, H]."""
    spec, device = training.spec, training.device
    generator = torch.Generator(device).manual_seed(0)
    shape = (spec.batch, spec.length, spec.shape["hidden_size"])
    x, dy = (torch.randn(shape, generator=generator, device=device) for _ in range(2))
    return x.to(dtype_of(device)).requires_grad_(), dy.to(dtype_of(device))


def _calls(training: Training, x: Tensor) -> list[Callable[[Tensor], Any]]:
    decoder = training.model.model
    positions = torch.arange(training.spec.length, device=x.device)[None]
    embeddings = tuple(t.detach() for t in decoder.rotary_emb(x, positions))
    options = {"attention_mask": None, "position_embeddings": embeddings}
    return [partial(layer, **options) for layer in decoder.layers]


def _after_layers(training: Training, recipe: Recipe, closing: ExitStack) -> Callable[[], object]:
    """What ends an iteration besides its backward."""
    if not isinstance(training, Ours):
        return lambda: None
    state, end = training.state, training.rng.advance
    if recipe.replays:
        from lorakernels.graphs import GraphManager, GraphOptions

        manager = GraphManager(
            training.model.model.layers,
            warmup_steps=1,
            fp8_state=state,
            rng_states=[training.rng],
            options=GraphOptions(backend=BACKEND),
        )
        closing.callback(manager.close)
        end = manager.end_iteration

    def after() -> None:
        state.reduce_and_update()
        end()

    return after


def _found(work: Work, training: Training, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """y − x, dx − dy and the gradients of B. B is 0, so that of these only the last depend on the masks."""
    y = work.run().detach().clone()
    named = sorted(training.model.named_parameters())
    grads = [p.grad for name, p in named if "lora_B" in name]
    if x.grad is None or None in grads:
        raise RuntimeError("a gradient is missing")
    dB = torch.cat([grad.float().flatten() for grad in grads])
    return {"y": y - x.detach(), "dx": x.grad - dy, "dB": dB}


# whole steps


def make_step(recipe: Recipe, spec: Spec, device: torch.device, closing: ExitStack) -> Made:
    """Forward, loss, backward, AdamW, and what ours does besides; what is found is the first loss."""
    options = {"graphs": "layer"} if recipe.replays else {}
    with recipe.within():
        training = recipe.make(spec, "qkvo", device, **options)
    if recipe.replays:
        closing.callback(training.manager.close)  # type: ignore[attr-defined]
    batches = cycle(token_rows(spec.length, BATCHES * spec.batch).to(device).split(spec.batch))
    work = Work(lambda: training.step(next(batches)), None, within=recipe.within, spins=False)
    first = work.run().float().clone()
    for _ in range(WARM_UP):
        work.run()
    return Made([work], found={"loss": first})


def compare(made: Made, with_peft: Made) -> None:
    """Say in `check` and `error` how far `made` is from PEFT's; what other masks change is not in `error`."""
    for name, expected in with_peft.found.items():
        error = relative_error(made.found[name], expected.double())
        if name != "dB":
            made.error = max(made.error, error)
        if not error <= TOLERANCES[name]:
            made.check += f"{', ' * bool(made.check)}{name} {error:.1e}"
