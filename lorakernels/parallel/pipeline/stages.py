# SPDX-License-Identifier: Apache-2.0
"""One stage of a model: some of its decoder layers, behind the embedding or before the head.

A rank's model keeps all places, so that names stay. Modules of other ranks are `Absent` there. A stage runs the
model's own forward over a view of it, in which other layers hand on what they get. What comes from the stage before
takes the first layer's place, so that whatever the model does to its embedding does not matter.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lorakernels.modules.marks import became, mark
from lorakernels.parallel.tensor.head import IGNORE, sum_of_losses
from lorakernels.state.fp8 import FP8State
from lorakernels.state.philox import PhiloxState, PhiloxStates, skip_slots

ROWS = ("position_ids", "attention_mask")  # inputs that are cut by rows
# of a module: its numbers, and the states that all layers share
_KEPT = (str, int, float, bool, type(None), FP8State, PhiloxState, PhiloxStates)


class Sent(NamedTuple):
    """What stages send each other of a microbatch.

    Attributes:
        shape: [b, S, H].
        dtype, device: of it.
        by: how it goes: the name of a transport of ranks/comm.py's.
    """

    shape: tuple[int, int, int]
    dtype: torch.dtype
    device: torch.device
    by: str


class Absent(nn.Module):
    """In the place of a module that another rank has.

    Attributes:
        skeleton: the module without values: its numbers, and parameters on the meta device. It is no submodule.
    """

    def __init__(self, path: str, rank: int, module: nn.Module) -> None:
        super().__init__()
        self.path, self.rank = path, rank
        self.__dict__["skeleton"] = _skeleton(module)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Raise RuntimeError."""
        raise RuntimeError(
            f"{self.path} is on rank {self.rank} of the pipeline: the model runs by "
            "PipelineParallel.forward_backward and PipelineParallel.loss alone"
        )


def _skeleton(module: nn.Module) -> nn.Module:
    """A module of the same class with the same numbers, and with tensors on the meta device."""
    new: nn.Module = type(module).__new__(type(module))
    nn.Module.__init__(new)
    for name, value in vars(module).items():
        # a config is a value; anything else may hold memory
        if isinstance(value, _KEPT) or type(value).__module__ == "lorakernels.config":
            new.__dict__[name] = value
    record = became(module)
    mark(new, adds_one=record.adds_one, saved=record.saved)
    for name, p in module._parameters.items():
        new._parameters[name] = None if p is None else nn.Parameter(p.to("meta"), p.requires_grad)
    for name, b in module._buffers.items():
        new._buffers[name] = None if b is None else b.to("meta")
    for name, child in module._modules.items():
        new._modules[name] = None if child is None else _skeleton(child)
    return new


class Skipped(nn.Module):
    """In the place of a layer of another stage. `hidden`, if set, is what the layer hands on instead of its input."""

    hidden: Tensor | None = None

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        layer = vars(layer).get("skeleton", layer)
        self.attention_type = getattr(layer, "attention_type", None)  # transformers 4 reads it

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden_states if self.hidden is None else self.hidden


class Microbatch(NamedTuple):
    """Some rows of a step, equally many in each microbatch.

    Attributes:
        tokens: int64 [b, S]. Where ranks share rows, they and what follows are of this rank's tokens.
        labels: int64 [b, S], of each token the next one; IGNORE does not count.
        inputs: what else the model takes. Starts of documents are those of whole rows.
    """

    tokens: Tensor
    labels: Tensor
    inputs: dict[str, Any]


def microbatches_of(
    wanted: Tensor, inputs: dict[str, Any], n: int, ranks: int = 1
) -> list[Microbatch]:
    """`n` of rows: labels `wanted` [B, S], and a pipeline's `inputs`. `ranks` share each row, S of its tokens each."""
    tokens = inputs["input_ids"]
    others: list[dict[str, Any]] = [{} for _ in range(n)]
    for name in ROWS:
        x = inputs.get(name)
        if x is not None:
            parts = [x] * n if len(x) == 1 and len(tokens) > 1 else x.chunk(n)
            for each, part in zip(others, parts, strict=True):
                each[name] = part
    starts = inputs.get("cu_seq_lens_q")
    if starts is not None:
        own = tokens.numel() * ranks // n  # of the whole rows, as starts are
        longest = min(inputs.get("max_length_q") or own, own)
        for i, each in enumerate(others):
            each["cu_seq_lens_q"] = (starts - i * own).clamp(0, own)
            each["max_length_q"] = longest
    return [*map(Microbatch, tokens.chunk(n), wanted.chunk(n), others)]


class Batch(NamedTuple):
    """What all stages read of one step.

    Attributes:
        microbatches: of the step.
        items: fp32 [], by which the losses' sum is divided.
        chunk: number of tokens whose logits exist at the same time.
        begins: called before each forward and backward of a microbatch through a stage; None calls nothing.
    """

    microbatches: Sequence[Microbatch]
    items: Tensor
    chunk: int
    begins: Callable[[], None] | None = None


class Places(NamedTuple):
    """Where a model has what is cut: paths in it.

    Attributes:
        layers: of the decoder layers, in their order.
        base: of the module that runs them.
        embedding, norm, head: of the others. The norm is the last one.
    """

    layers: list[str]
    base: str
    embedding: str
    norm: str
    head: str


class Stage(nn.Module):
    """Stage `index` of `count`, as torch's PipelineStage runs it.

    Attributes:
        own: paths of its decoder layers.
        losses: of the microbatches that the last stage ran in this step, each fp32 [1].
    """

    model: nn.Module
    view: Any
    entry: Any

    def __init__(
        self, model: nn.Module, places: Places, own: list[str], index: int, count: int
    ) -> None:
        super().__init__()
        self.__dict__["model"] = model  # not a submodule: the model is the user's
        self.places, self.own, self.index = places, own, index
        self.is_first, self.is_last = index == 0, index == count - 1
        self.losses: list[Tensor] = []

    def begin(self, batch: Batch, draws: Draws) -> None:
        """Before a step: look at the model as it is now."""
        self._batch, self._draws, self.losses = batch, draws, []
        base = self.model.get_submodule(self.places.base)
        view = copy.copy(base)
        view._modules = dict(base._modules)
        name = self.places.layers[0].rpartition(".")[0].rpartition(".")[2]
        layers = [self.model.get_submodule(path) for path in self.places.layers]
        keep = set(self.own)
        shown = [
            layer if path in keep else Skipped(layer)
            for path, layer in zip(self.places.layers, layers, strict=True)
        ]
        view._modules[name] = nn.ModuleList(shown)
        if not self.is_last:
            view._modules[self.places.norm.rpartition(".")[2]] = nn.Identity()
        self.__dict__["view"], self.__dict__["entry"] = view, shown[0]

    def end(self) -> None:
        """After a step: let go of what it needed."""
        for name in ("_batch", "_draws", "view", "entry"):
            self.__dict__.pop(name, None)

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        """What the next stage gets, [b, S, H]; of the last stage the loss, [1].

        Args:
            x: the tokens [b, S] of one microbatch, or [b, S, H] of the stage before.
            at: int64 [1] on the CPU, which microbatch it is.
        """
        index, batch = int(at), self._batch
        own = batch.microbatches[index]
        if batch.begins is not None:
            batch.begins()
        inputs = {"input_ids": x} if self.is_first else {"inputs_embeds": x}
        if not self.is_first:
            self.entry.hidden = x
        try:
            with self._draws.of(self.index, index):
                found = self.view(use_cache=False, **inputs, **own.inputs)
        finally:
            if not self.is_first:
                self.entry.hidden = None
        hidden: Tensor = found.last_hidden_state
        if not self.is_last:
            return _announced(hidden.contiguous(), batch.begins)
        loss = sum_of_losses(self.model, hidden, own.labels, batch.chunk) / batch.items
        self.losses.append(loss.detach().reshape(1))
        # torch detaches it in place, which a view is not
        return _announced(loss[None].clone(), batch.begins)


def _announced(found: Tensor, begins: Callable[[], None] | None) -> Tensor:
    """A stage's output, whose backward calls `begins` first."""
    if begins is not None and found.requires_grad:
        call = begins  # for mypy

        def before(grad: Tensor) -> None:
            call()

        found.register_hook(before)
    return found


class Draws:
    """Where torch's CPU generator stands as each stage begins each microbatch of a step, in one process.

    One process runs all stages of a microbatch before the next one. Each site draws a slot from that generator.

    Args:
        counts: how many slots each stage draws for a microbatch.
        own: the stages of this rank.
        microbatches: of the step.
        state: if given, all microbatches begin with one state of the generator, and each with an offset of this state
            of its own, the next one. Afterwards the offset is as before.
        replays: whether layers may be replayed, which draw nothing from the generator.
    """

    def __init__(
        self,
        counts: list[int],
        own: list[int],
        microbatches: int,
        state: PhiloxState | None = None,
        replays: bool = False,
    ) -> None:
        self._state, self._replays = state, replays
        self._states: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._any = any(counts)
        if not self._any:
            return
        for microbatch in range(microbatches if state is None else 1):
            for stage, count in enumerate(counts):
                before = torch.get_rng_state() if stage in own else None
                skip_slots(count)
                if before is not None:
                    self._states[stage, microbatch] = before, torch.get_rng_state()

    @contextmanager
    def of(self, stage: int, microbatch: int) -> Iterator[None]:
        """Draw inside as one process does.

        Raises:
            RuntimeError: there were more or fewer draws than layers said when the model was cut.
        """
        if not self._any:
            yield
            return
        state, alone = self._state, self._state is None
        before, after = self._states[stage, microbatch if alone else 0]
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(before)
            if state is not None:
                state.advance(microbatch)
            try:
                yield
            finally:
                if state is not None:
                    state.advance(-microbatch)
            found = torch.get_rng_state()
            replayed = self._replays and torch.equal(found, before)
            if not replayed and not torch.equal(found, after):
                raise RuntimeError(
                    f"stage {stage} drew another number of random numbers than its layers did when the model was cut: "
                    "do not change dropout, adapters or the mode of single layers after pipeline_parallel"
                )


class LayerDraws:
    """A random state for the GraphManager of a rank's layers, by which each captured layer draws as its stage does.

    Every microbatch begins with one state of torch's CPU generator, so that a layer's graphs all have the same nonces.
    What differs is the offset, which the pipeline moves on the device around each replay.

    Args:
        before: how many slots a microbatch draws before each of this rank's layers, by path.

    Attributes:
        placed: the layers that were captured so.
    """

    def __init__(self, before: dict[str, int]) -> None:
        self._before, self.placed = before, set[str]()

    def place(self, layer: str) -> None:
        """Move torch's CPU generator from where a microbatch begins to where `layer` draws.

        Raises:
            ValueError: it is none of `before`.
        """
        if layer not in self._before:
            raise ValueError(
                f"layers must be pipeline.layers, whose names are paths in the model, found {layer!r}"
            )
        skip_slots(self._before[layer])
        self.placed.add(layer)

    def advance(self) -> None:
        """Nothing: offsets are the caller's, as in eager steps."""


def shifted(labels: Tensor) -> Tensor:
    """int64 [B, S]: at each token the label of the next one."""
    return nn.functional.pad(labels, (0, 1), value=IGNORE)[:, 1:]
