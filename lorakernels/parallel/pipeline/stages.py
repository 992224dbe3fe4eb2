# SPDX-License-Identifier: Apache-2.0
"""One stage of a model: some of its decoder layers, behind the embedding or before the head.

A rank's model keeps all places, so that names stay. Modules of other ranks are `Absent` there. A stage runs the
model's own forward over a view of it, in which other layers return their input. What the stage before sent replaces
the output of the first layer, so that it does not matter what the model does to its embeddings.
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
# attributes of a module that a skeleton keeps: its numbers, and the states that all layers share
_KEPT = (str, int, float, bool, type(None), FP8State, PhiloxState, PhiloxStates)


class Sent(NamedTuple):
    """The form of what stages send of a microbatch.

    Attributes:
        shape: [b, S, H].
        dtype, device: of the tensor.
        by: the transport's name in ranks/comm.py.
    """

    shape: tuple[int, int, int]
    dtype: torch.dtype
    device: torch.device
    by: str


class Absent(nn.Module):
    """Stands for a module that another rank has.

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
    """Stands for a layer of another stage. It returns `hidden`, if set, instead of its input."""

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
        tokens: int64 [b, S]. If ranks share rows, all fields hold this rank's tokens only.
        labels: int64 [b, S], for each token the next one; IGNORE does not count.
        inputs: the model's other inputs. Starts of documents are those of whole rows.
    """

    tokens: Tensor
    labels: Tensor
    inputs: dict[str, Any]


def microbatches_of(
    wanted: Tensor, inputs: dict[str, Any], n: int, ranks: int = 1
) -> list[Microbatch]:
    """`n` microbatches of a pipeline's `inputs` and labels `wanted` [B, S]. Each of `ranks` has S tokens of a row."""
    tokens = inputs["input_ids"]
    others: list[dict[str, Any]] = [{} for _ in range(n)]
    for name in ROWS:
        x = inputs.get(name)
        if x is not None:
            parts = [x] * n if len(x) == 1 and len(tokens) > 1 else x.chunk(n)
            for other, part in zip(others, parts, strict=True):
                other[name] = part
    starts = inputs.get("cu_seq_lens_q")
    if starts is not None:
        length = tokens.numel() * ranks // n  # of the whole rows, as starts are
        longest = min(inputs.get("max_length_q") or length, length)
        for i, other in enumerate(others):
            other["cu_seq_lens_q"] = (starts - i * length).clamp(0, length)
            other["max_length_q"] = longest
    return [*map(Microbatch, tokens.chunk(n), wanted.chunk(n), others)]


class Batch(NamedTuple):
    """What all stages read in one step.

    Attributes:
        microbatches: of the step.
        items: fp32 [], divisor of the losses' sum.
        chunk: number of tokens whose logits exist at the same time.
        begins: called before each forward and backward of a microbatch through a stage; None calls nothing.
    """

    microbatches: Sequence[Microbatch]
    items: Tensor
    chunk: int
    begins: Callable[[], None] | None = None


class Places(NamedTuple):
    """Paths of the modules at which a model is cut.

    Attributes:
        layers: the decoder layers, in their order.
        base: the module that runs them.
        embedding, norm, head: the others. The norm is the one after the last layer.
    """

    layers: list[str]
    base: str
    embedding: str
    norm: str
    head: str


class Stage(nn.Module):
    """Stage `index` of `count`, as torch's PipelineStage runs it.

    Attributes:
        paths: of its decoder layers.
        losses: of the microbatches that the last stage ran in this step, each fp32 [1].
    """

    model: nn.Module
    view: Any
    entry: Any

    def __init__(
        self, model: nn.Module, places: Places, paths: list[str], index: int, count: int
    ) -> None:
        super().__init__()
        self.__dict__["model"] = model  # not a submodule: the model is the user's
        self.places, self.paths, self.index = places, paths, index
        self.is_first, self.is_last = index == 0, index == count - 1
        self.losses: list[Tensor] = []

    def begin(self, batch: Batch, draws: Draws) -> None:
        """Before a step: make a view of the model as it is now."""
        self._batch, self._draws, self.losses = batch, draws, []
        base = self.model.get_submodule(self.places.base)
        view = copy.copy(base)
        view._modules = dict(base._modules)
        name = self.places.layers[0].rpartition(".")[0].rpartition(".")[2]
        layers = [self.model.get_submodule(path) for path in self.places.layers]
        keep = set(self.paths)
        shown = [
            layer if path in keep else Skipped(layer)
            for path, layer in zip(self.places.layers, layers, strict=True)
        ]
        view._modules[name] = nn.ModuleList(shown)
        if not self.is_last:
            view._modules[self.places.norm.rpartition(".")[2]] = nn.Identity()
        self.__dict__["view"], self.__dict__["entry"] = view, shown[0]

    def end(self) -> None:
        """After a step: release what it needed."""
        for name in ("_batch", "_draws", "view", "entry"):
            self.__dict__.pop(name, None)

    def forward(self, x: Tensor, microbatch: Tensor) -> Tensor:
        """The next stage's input [b, S, H]; from the last stage the loss [1].

        Args:
            x: the tokens [b, S] of one microbatch, or the output [b, S, H] of the stage before.
            microbatch: int64 [1] on the CPU, which microbatch it is.
        """
        index, batch = int(microbatch), self._batch
        rows = batch.microbatches[index]
        if batch.begins is not None:
            batch.begins()
        inputs = {"input_ids": x} if self.is_first else {"inputs_embeds": x}
        if not self.is_first:
            self.entry.hidden = x
        try:
            with self._draws.of(self.index, index):
                output = self.view(use_cache=False, **inputs, **rows.inputs)
        finally:
            if not self.is_first:
                self.entry.hidden = None
        hidden: Tensor = output.last_hidden_state
        if not self.is_last:
            return _announced(hidden.contiguous(), batch.begins)
        loss = sum_of_losses(self.model, hidden, rows.labels, batch.chunk) / batch.items
        self.losses.append(loss.detach().reshape(1))
        # torch detaches it in place, which a view is not
        return _announced(loss[None].clone(), batch.begins)


def _announced(output: Tensor, begins: Callable[[], None] | None) -> Tensor:
    """A stage's output, whose backward calls `begins` first."""
    if begins is not None and output.requires_grad:
        call = begins  # for mypy

        def before(grad: Tensor) -> None:
            call()

        output.register_hook(before)
    return output


class Draws:
    """Where torch's CPU generator stands as each stage begins each microbatch of a step, in one process.

    One process runs all stages of a microbatch before the next one. Each site draws a slot from that generator.

    Args:
        counts: how many slots each stage draws for a microbatch.
        stages: the stages of this rank.
        microbatches: of the step.
        state: if set, all microbatches begin with one state of the generator, and microbatch i adds i to the offset of
            this state. The offset is restored afterwards.
        replays: whether layers may be replayed. Replayed layers draw nothing from the generator.
    """

    def __init__(
        self,
        counts: list[int],
        stages: list[int],
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
                before = torch.get_rng_state() if stage in stages else None
                skip_slots(count)
                if before is not None:
                    self._states[stage, microbatch] = before, torch.get_rng_state()

    @contextmanager
    def of(self, stage: int, microbatch: int) -> Iterator[None]:
        """Draw inside as one process does.

        Raises:
            RuntimeError: the number of draws differs from the one that was counted when the model was cut.
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
            now = torch.get_rng_state()
            replayed = self._replays and torch.equal(now, before)
            if not replayed and not torch.equal(now, after):
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
        placed: paths of the layers that were captured with it.
    """

    def __init__(self, before: dict[str, int]) -> None:
        self._before, self.placed = before, set[str]()

    def place(self, layer: str) -> None:
        """Move torch's CPU generator from where a microbatch begins to where `layer` draws.

        Raises:
            ValueError: `layer` is none of `before`.
        """
        if layer not in self._before:
            raise ValueError(
                f"layers must be pipeline.layers, whose names are paths in the model, found {layer!r}"
            )
        skip_slots(self._before[layer])
        self.placed.add(layer)

    def advance(self) -> None:
        """Do nothing: the caller advances offsets, as in eager steps."""


def shifted(labels: Tensor) -> Tensor:
    """int64 [B, S]: for each token the label of the next one."""
    return nn.functional.pad(labels, (0, 1), value=IGNORE)[:, 1:]
