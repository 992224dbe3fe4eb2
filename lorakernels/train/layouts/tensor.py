# SPDX-License-Identifier: Apache-2.0
"""`--tp N`: N ranks after each other have a part of each split layer, and train it on the same rows.

They are in one replica. With `--cp`, so many such groups share each row. Each rank steps the optimizer over its parts
of the adapters. Checkpoints hold whole values, as one process has them, so that a run goes on with another N.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lorakernels import TensorParallel, VocabularyHead, change_of_logits, parallelize
from lorakernels.train.errors import CheckpointError, OptionError
from lorakernels.train.files.checkpoint import Checkpoint
from lorakernels.train.layouts.parts import RankPart
from lorakernels.train.model.preflight import build_on_meta, read_config
from lorakernels.train.optimizer.optimizers import numbers
from lorakernels.train.options.options import FinetuneOptions
from lorakernels.train.ranks.ranks import RunRanks


class SplitLayers(RankPart):
    """This rank's parts of the split layers, as a trainer uses them.

    Attributes:
        split: what `parallelize` returned.
    """

    def __init__(
        self, split: TensorParallel, options: FinetuneOptions, ranks: RunRanks, same: Any
    ) -> None:
        others = RunRanks(ranks.rank // ranks.tp, ranks.size // ranks.tp, group=same)
        super().__init__(split.model, ranks, others)
        self.split, self.options = split, options

    def total_norm(self, gradients: list[Tensor]) -> Tensor:
        return self.split.grad_norm()

    def collect(self) -> None:
        self.values = {name: x.cpu() for name, x in self.split.whole_adapters().items()}

    def whole(self) -> AbstractContextManager[None]:
        return self.split.whole(self.values)

    def gathered(
        self, optimizer: torch.optim.Optimizer
    ) -> tuple[dict[str, Tensor], dict[str, Any]]:
        self.collect()
        state = optimizer.state_dict()
        states = self._each_moment(state["state"], self.split.gather)
        return self.values, {**state, "state": states}

    def own_part(self, checkpoint: Checkpoint) -> Checkpoint:
        trained, optimizer = self._trained(), checkpoint.state["optimizer"]
        if sum(len(group["params"]) for group in optimizer["param_groups"]) != len(trained):
            return checkpoint  # it belongs to another run, as the trainer will say
        values = {n: x for n, x in checkpoint.tensors.items() if n in trained}
        try:
            local = self.split.own(values)
            states = self._each_moment(optimizer["state"], self.split.own)
        except ValueError as error:
            raise CheckpointError(f"the checkpoint is of another run: {error}") from error
        state = {**checkpoint.state, "optimizer": {**optimizer, "state": states}}
        return replace(checkpoint, tensors=checkpoint.tensors | local, state=state)

    def _each_moment(
        self,
        states: dict[int, dict[str, Any]],
        change: Callable[[dict[str, Tensor]], dict[str, Tensor]],
    ) -> dict[int, dict[str, Any]]:
        """The optimizer's state with `change({name: moment})` of what has a parameter's elements, on the CPU."""
        changed = {}
        numbered = numbers(self._trained(), self.options)
        for name in sorted(numbered, key=numbered.__getitem__):
            state = dict(states.get(numbered[name], {}))
            for key, value in state.items():
                if isinstance(value, Tensor) and value.dim():
                    state[key] = change({name: value})[name].cpu()
            if numbered[name] in states:
                changed[numbered[name]] = state
        return changed

    def _trained(self) -> dict[str, nn.Parameter]:
        return {n: p for n, p in self.split.model.named_parameters() if p.requires_grad}


def layer_mesh(ranks: RunRanks, device: torch.device) -> DeviceMesh | None:
    """Collective: the mesh of the ranks that have layers together with this one; None without them."""
    if ranks.tp == 1:
        return None
    return ranks.mesh_of("tp", device, ranks.tp)


def splits_vocabulary(directory: Path, options: FinetuneOptions) -> bool:
    """Whether each rank has some rows of the embedding and of the head of the model in `directory`."""
    with torch.random.fork_rng(devices=[]):
        return why_whole_vocabulary(build_on_meta(read_config(directory)), options) is None


def split_layers(
    model: nn.Module,
    options: FinetuneOptions,
    ranks: RunRanks,
    mesh: DeviceMesh | None,
    say: Callable[[str], None],
) -> SplitLayers | None:
    """Collective: keep this rank's parts of the model's layers, and say which.

    Raises:
        OptionError: the model cannot be split.
    """
    if mesh is None:
        return None
    same = ranks.group_of(ranks.size // ranks.tp, apart=ranks.tp)
    whole = why_whole_vocabulary(model, options)
    rows = options.sequence_parallel
    try:
        split = parallelize(model, mesh, sequence_parallel=rows, vocabulary=whole is None)
    except (TypeError, ValueError) as error:
        raise OptionError(f"tp {ranks.tp}: {error}") from error
    where = "split by tokens" if whole is None else f"whole on each rank, as {whole}"
    say(f"tp: {str(split).splitlines()[0]}; embedding and head {where}")
    return SplitLayers(split, options, ranks, same)


def why_whole_vocabulary(model: Any, options: FinetuneOptions) -> str | None:
    """Why each rank keeps the whole embedding and head; None if they are split.

    Args:
        model: with or without weights, or after its rows of both were read.
        options: of the run.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if isinstance(head, VocabularyHead):
        return None
    if options.fp8_head:
        return "fp8_head multiplies by the whole head"
    if type(embedding) is not nn.Embedding or type(head) is not nn.Linear:
        return f"they are a {type(embedding).__name__} and a {type(head).__name__}"
    if change := change_of_logits(model.config.get_text_config()):
        return f"the model changes its logits ({change})"
    if len(head.weight) % options.tp:
        return f"the vocabulary has {len(head.weight)} tokens, no multiple of {options.tp}"
    return None
