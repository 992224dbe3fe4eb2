# SPDX-License-Identifier: Apache-2.0
"""Which rank of a pipeline has which modules of a model, and taking the others out of it.

`pipeline_parallel` cuts a whole model. `load_quantized(stages=…)` cuts while it reads, so that no rank ever holds the
others' weights: then `pipeline_parallel` finds the `Cut` and goes on with it.
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

# {parameter: the Ranks of its pipeline}. As an attribute it could not be saved, and a Cut would keep the parameter.
_OF_PARAMETERS = WeakIdKeyDictionary()


def ranks_of(parameter: Tensor) -> Ranks | None:
    """Those that have the stages of the model whose parameter it is; None of a model without stages."""
    found: Ranks | None = _OF_PARAMETERS.get(parameter)
    return found


@dataclass(eq=False)
class Cut:
    """How a model is cut, and what of it is elsewhere.

    Attributes:
        ranks: the pipeline's.
        places: where the model has what is cut.
        stages: paths of each stage's decoder layers. Stage i is on rank i modulo the number of ranks.
        names: of the parameters that train, of all ranks, in the model's order.
        absent: (parent, name in it, what stands there) of each module of another rank.
    """

    ranks: Ranks
    places: Places
    stages: list[list[str]]
    names: list[str] = field(default_factory=list)
    absent: list[tuple[nn.Module, str, Absent]] = field(default_factory=list)

    @classmethod
    def of(cls, model: nn.Module) -> Cut | None:
        """Of a model from which other ranks' modules were taken; None of a whole one."""
        return became(model).pipeline_cut

    def mark(self, model: nn.Module) -> None:
        """Let `ranks_of` know the parameters of `model`."""
        for parameter in model.parameters():
            _OF_PARAMETERS[parameter] = self.ranks

    @property
    def chunks(self) -> int:
        """Stages of each rank."""
        return len(self.stages) // self.ranks.size

    def elsewhere(self) -> dict[str, int]:
        """{path: its rank} of the modules that other ranks have."""
        size, last = self.ranks.size, (len(self.stages) - 1) % self.ranks.size
        owners = {path: i % size for i, own in enumerate(self.stages) for path in own}
        owners |= {self.places.embedding: 0, self.places.norm: last, self.places.head: last}
        return {path: rank for path, rank in owners.items() if rank != self.ranks.rank}

    def take_out(self, model: nn.Module) -> None:
        """Put an Absent in the place of what other ranks have. A tied head and embedding stay on both ranks."""
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
        """Inside, the model has all modules by their names, those of other ranks without values (on meta)."""
        for parent, name, absent in self.absent:
            parent._modules[name] = vars(absent)["skeleton"]
        try:
            yield
        finally:
            for parent, name, absent in self.absent:
                parent._modules[name] = absent


def cut(count: int, stages: int) -> list[range]:
    """The layers of each stage, as equal as can be; the first stages have one more.

    Raises:
        ValueError: there are fewer layers than stages.
    """
    if count < stages:
        raise ValueError(f"{count} decoder layers cannot make {stages} stages")
    each, more = divmod(count, stages)
    ends = [each * i + min(i, more) for i in range(stages + 1)]
    return [range(a, b) for a, b in pairwise(ends)]


def stages_of(places: Places, ranks: int, chunks: int) -> list[list[str]]:
    """Paths of each stage's decoder layers.

    Raises:
        ValueError: there are fewer layers than stages.
    """
    parts = cut(len(places.layers), ranks * chunks)
    return [[places.layers[i] for i in part] for part in parts]


def elsewhere(model: nn.Module) -> list[str]:
    """Paths of the modules that other ranks of a pipeline have; none of a whole model."""
    found = Cut.of(model)
    return [] if found is None else [absent.path for _, _, absent in found.absent]


@contextmanager
def own_layers_alone(model: Any) -> Iterator[None]:
    """Inside, a model that was cut runs with this rank's decoder layers alone. A whole model is as it was.

    Other layers hand on what they get, and the last norm of another rank does so, too. An embedding or a head of
    another rank computes some numbers of its kind. So a check of how the model runs sees each layer on its rank.
    """
    found = Cut.of(model)
    if found is None:
        yield
        return
    width = model.config.get_text_config().hidden_size
    frozen = (p for p in model.parameters() if p.is_floating_point() and not p.requires_grad)
    like = next(
        p for p in frozen if p.element_size() > 1
    )  # a norm; adapters may have another dtype
    made: dict[str, nn.Module] = {
        found.places.embedding: _AnyToken(width, like),
        found.places.norm: nn.Identity(),
        found.places.head: nn.Linear(width, 64, bias=False).to(like),
    }
    with torch.random.fork_rng(devices=[]):
        for parent, name, absent in found.absent:
            parent._modules[name] = made.get(absent.path) or Skipped(absent)
        try:
            yield
        finally:
            for parent, name, absent in found.absent:
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
