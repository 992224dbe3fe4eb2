# SPDX-License-Identifier: Apache-2.0
"""Which rank of a pipeline has which modules of a model. Modules of other ranks are taken out of it.

`pipeline_parallel` cuts a whole model. `load_quantized(stages=…)` cuts while it reads, so that no rank ever holds the
weights of another one. `pipeline_parallel` then continues with that `PipelineCut`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from lorakernels.fusion.rewire import let_go
from lorakernels.modules.marks import became, mark
from lorakernels.parallel.pipeline.stages import Absent, Places, Skipped
from lorakernels.parallel.ranks.group import Ranks

# {parameter: the Ranks of its pipeline}. An attribute could not be saved, and a PipelineCut would keep the parameter.
_OF_PARAMETERS = WeakIdKeyDictionary()


def ranks_of(parameter: Tensor) -> Ranks | None:
    """The ranks of the pipeline to whose model `parameter` belongs; None if it is in no pipeline."""
    ranks: Ranks | None = _OF_PARAMETERS.get(parameter)
    return ranks


@dataclass(eq=False)
class PipelineCut:
    """How a model is cut, and which of its modules other ranks have.

    Attributes:
        ranks: the pipeline's.
        places: paths of the modules at which it is cut.
        stages: paths of each stage's decoder layers. Stage i is on rank i modulo the number of ranks.
        names: names of all ranks' parameters that train, in the model's order.
        absent: (parent, name in it, the Absent there) of each module of another rank.
    """

    ranks: Ranks
    places: Places
    stages: list[list[str]]
    names: list[str] = field(default_factory=list)
    absent: list[tuple[nn.Module, str, Absent]] = field(default_factory=list)

    @classmethod
    def of(cls, model: nn.Module) -> PipelineCut | None:
        """The cut of a model from which other ranks' modules were taken; None if the model is whole."""
        return became(model).pipeline_cut

    def mark(self, model: nn.Module) -> None:
        """Record the parameters of `model` for `ranks_of`."""
        for parameter in model.parameters():
            _OF_PARAMETERS[parameter] = self.ranks

    @property
    def chunks(self) -> int:
        """Stages of each rank."""
        return len(self.stages) // self.ranks.size

    def elsewhere(self) -> dict[str, int]:
        """{path: its rank} of the modules that other ranks have."""
        size, last = self.ranks.size, (len(self.stages) - 1) % self.ranks.size
        owners = {path: i % size for i, paths in enumerate(self.stages) for path in paths}
        owners |= {self.places.embedding: 0, self.places.norm: last, self.places.head: last}
        return {path: rank for path, rank in owners.items() if rank != self.ranks.rank}

    def take_out(self, model: nn.Module) -> None:
        """Replace each module of another rank by an Absent. A tied head and embedding stay on both ranks."""
        self.names = [n for n, p in model.named_parameters() if p.requires_grad]
        gone = []
        for path, rank in self.elsewhere().items():
            where, _, name = path.rpartition(".")
            parent = model.get_submodule(where)
            gone.append(parent.get_submodule(name))
            absent = Absent(path, rank, gone[-1])
            parent._modules[name] = absent
            self.absent.append((parent, name, absent))
        let_go(model, gone)
        mark(model, pipeline_cut=self)

    @contextmanager
    def structure(self) -> Iterator[None]:
        """Inside, the model has all modules by their names. Modules of other ranks have no values: they are on meta."""
        for parent, name, absent in self.absent:
            parent._modules[name] = vars(absent)["skeleton"]
        try:
            yield
        finally:
            for parent, name, absent in self.absent:
                parent._modules[name] = absent


def cut(count: int, stages: int) -> list[range]:
    """The layers of each stage. Their numbers differ by one at most; the first stages have more.

    Raises:
        ValueError: there are fewer layers than stages.
    """
    if count < stages:
        raise ValueError(f"{count} decoder layers cannot make {stages} stages")
    fewest, more = divmod(count, stages)
    ends = [fewest * i + min(i, more) for i in range(stages + 1)]
    return [range(a, b) for a, b in pairwise(ends)]


def stages_of(places: Places, ranks: int, chunks: int) -> list[list[str]]:
    """Paths of each stage's decoder layers.

    Raises:
        ValueError: there are fewer layers than stages.
    """
    parts = cut(len(places.layers), ranks * chunks)
    return [[places.layers[i] for i in part] for part in parts]


def elsewhere(model: nn.Module) -> list[str]:
    """Paths of the modules that other ranks of a pipeline have; empty for a whole model."""
    cut = PipelineCut.of(model)
    return [] if cut is None else [absent.path for _, _, absent in cut.absent]


@contextmanager
def own_layers_alone(model: Any) -> Iterator[None]:
    """Inside, a model that was cut runs with this rank's decoder layers alone. A whole model is as it was.

    Layers of other ranks return their input, and so does another rank's last norm. Another rank's embedding or head is
    replaced by one with arbitrary values. So a check that runs the model sees each layer on its rank.
    """
    cut = PipelineCut.of(model)
    if cut is None:
        yield
        return
    width = model.config.get_text_config().hidden_size
    frozen = (p for p in model.parameters() if p.is_floating_point() and not p.requires_grad)
    like = next(
        p for p in frozen if p.element_size() > 1
    )  # a norm's; adapters may have another dtype
    made: dict[str, nn.Module] = {
        cut.places.embedding: _AnyToken(width, like),
        cut.places.norm: nn.Identity(),
        cut.places.head: nn.Linear(width, 64, bias=False).to(like),
    }
    with torch.random.fork_rng(devices=[]):
        for parent, name, absent in cut.absent:
            parent._modules[name] = made.get(absent.path) or Skipped(absent)
        try:
            yield
        finally:
            for parent, name, absent in cut.absent:
                parent._modules[name] = absent


class _AnyToken(nn.Module):
    """int64 [...] → [..., H]: numbers between −1 and 1 that differ from token to token."""

    def __init__(self, width: int, like: Tensor) -> None:
        super().__init__()
        self.register_buffer("turns", torch.linspace(0.1, 7.0, width, device=like.device))
        self.dtype = like.dtype

    def forward(self, tokens: Tensor) -> Tensor:
        turns: Any = self.turns
        return torch.sin((1.0 + tokens[..., None]) * turns).to(self.dtype)
