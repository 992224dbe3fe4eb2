# SPDX-License-Identifier: Apache-2.0
"""A rank's stages of a model: whether they can run a step, what they send, and their run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from lorakernels.parallel.context.share import ContextParallel
from lorakernels.parallel.pipeline.check import (
    check_running,
    dtype_of,
    slots_before,
)
from lorakernels.parallel.pipeline.cut import PipelineCut
from lorakernels.parallel.pipeline.inputs import check_shapes
from lorakernels.parallel.pipeline.stages import Batch, Draws, LayerDraws, Sent, Stage
from lorakernels.parallel.ranks import comm
from lorakernels.state.philox import PhiloxState


class OwnStages:
    """The stages that a rank has.

    Args:
        model: the model that was cut.
        cut: how it was cut.
        slots: how many dropout slots each stage of all ranks draws for a microbatch.

    Attributes:
        stages: this rank's stages, in order.
        layer_draws: where each layer draws, for a GraphManager.
    """

    def __init__(self, model: nn.Module, cut: PipelineCut, slots: list[int]) -> None:
        self._model, self._group, self._slots = model, cut.ranks.group, slots
        count = len(cut.stages)
        self.stages = [
            Stage(model, cut.places, cut.stages[i], i, count)
            for i in range(cut.ranks.rank, count, cut.ranks.size)
        ]
        self.layer_draws = LayerDraws(slots_before(model, slots, self.stages))

    @property
    def has_dropout(self) -> bool:
        """Whether a stage, of whichever rank, has dropout."""
        return any(self._slots)

    @property
    def context(self) -> ContextParallel | None:
        """What `context_parallel` returned, where ranks share the rows of each stage."""
        return ContextParallel.of(self._model)

    @property
    def layers(self) -> dict[str, nn.Module]:
        """{path: decoder layer} of this rank's layers that have a backward."""
        layers: dict[str, nn.Module] = {}
        for stage in self.stages:
            for path in stage.paths:
                layer = self._model.get_submodule(path)
                if layers or not stage.is_first or any(p.requires_grad for p in layer.parameters()):
                    layers[path] = layer
        return layers

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(self._model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the hidden states that stages send."""
        return dtype_of(self._model.get_submodule(self.stages[0].paths[0]))

    @property
    def how(self) -> str:
        """A description of what must be equal on all ranks in a step."""
        return f"{self.dtype} on {self.device.type}, training {self._model.training}"

    def groups(self) -> dict[str, Any]:
        """Collective at its first call: {what its ranks do: a group of gloo} of ranks that must agree on a step."""
        groups = {"have stages": comm.on_host(self._group, self.device)}
        if self.context is not None:
            groups["share rows"] = comm.on_host(self.context.ranks.group, self.device)
        return groups

    def sent(self, shape: tuple[int, int], by: str) -> Sent:
        """Collective: the form of what stages send of a microbatch [b, S], by a transport of ranks/comm.py.

        Raises:
            ValueError: microbatches have different shapes on the ranks.
        """
        weight = None
        if self.stages[0].is_first:
            embedding: Any = self._model.get_input_embeddings()  # type: ignore[operator]
            weight = embedding.weight.dtype
        if self.context is not None:
            with comm.together(self._group):
                check_shapes(comm.agree(self.context.ranks.group, shape), "share rows")
        agreed = comm.agree(self._group, (shape, weight))
        check_shapes([other for other, _ in agreed], "have stages")
        config: Any = self._model.config
        width = config.get_text_config().hidden_size
        return Sent((*shape, width), agreed[0][1], self.device, by)

    def refuse(self, offsets: PhiloxState | None) -> None:
        """Refuse to run layers that were changed since the cut. `offsets` is that of `PipelineParallel`.

        Raises:
            RuntimeError: this is compiled or captured; or as `check_running` does.
        """
        if torch.compiler.is_compiling():
            raise RuntimeError("a pipeline cannot be compiled: run it eagerly")
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("a pipeline cannot be captured in a CUDA graph")
        for path in (path for stage in self.stages for path in stage.paths):
            placed = path in self.layer_draws.placed
            check_running(path, self._model.get_submodule(path), offsets, placed)

    @contextmanager
    def begun(self, batch: Batch, offsets: PhiloxState | None) -> Iterator[list[Stage]]:
        """Inside, `stage(x, microbatch)` runs a microbatch of `batch`, in any order, with the masks of one process."""
        slots = self._slots if self._model.training else []
        indices = [stage.index for stage in self.stages]
        replays = any("forward" in vars(layer) for layer in self.layers.values())
        draws = Draws(slots, indices, len(batch.microbatches), offsets, replays)
        for stage in self.stages:
            stage.begin(batch, draws)
        try:
            with nullcontext() if self.context is None else self.context.looked():
                yield self.stages
        finally:
            for stage in self.stages:
                stage.end()
