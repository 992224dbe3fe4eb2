# SPDX-License-Identifier: Apache-2.0
"""LayerDescription: a decoder layer's family, projections and norms. `fuse` makes one a layer, checks it, and rewires
the layer by it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from torch import Tensor, nn

from lorakernels.fusion.families import spec_of
from lorakernels.fusion.families.spec import Heads, LayerSpec
from lorakernels.modules.linear.projections import projection

Pair = tuple[nn.Module | None, nn.Module | None]


class Projection(NamedTuple):
    """A linear layer inside a decoder layer, as `parent.name`.

    Attributes:
        path: in the decoder layer.
        full_path: in the model, for messages and for the FP8 state.
        linear: the module that a fused layer runs for it, or the nn.Linear that is to become such a module.
    """

    path: str
    full_path: str
    parent: nn.Module
    name: str
    linear: Any

    @property
    def is_plain(self) -> bool:
        return type(self.linear) is nn.Linear

    @property
    def in_model(self) -> nn.Module:
        """The module that the model has there now."""
        module = self.parent._modules[self.name]
        assert module is not None
        return module


@dataclass(frozen=True, eq=False)
class LayerDescription:
    """A decoder layer, fused or not, with all modules of its spec. Rewiring the layer does not change it.

    Attributes:
        path: in the model.
        module: the decoder layer itself.
        groups: the projections that share an input, group by group, in the order in which they run.
        norms: of attention's and of the MLP's input, or None where it is not normed.
        head_norms: of q and of k, or None twice.
        post_norms: of attention's and of the MLP's result, or None twice.
    """

    path: str
    module: nn.Module
    spec: LayerSpec
    groups: tuple[tuple[Projection, ...], ...]
    norms: Pair
    head_norms: Pair
    post_norms: Pair

    @property
    def projections(self) -> list[Projection]:
        """All projections, in the order in which they run."""
        return [p for group in self.groups for p in group]

    @property
    def first_norm(self) -> nn.Module:
        norms = (*self.norms, *self.head_norms, *self.post_norms)
        return next(norm for norm in norms if norm is not None)

    @property
    def norm_weight(self) -> Tensor:
        """The weight of the first norm, whose dtype and device are those of the layer's activations."""
        return self.first_norm.get_parameter("weight")

    @cached_property
    def heads(self) -> Heads:
        return self.spec.heads(self.module)

    def where(self, name: str) -> str:
        """The path in the model of what is at `name` in the layer."""
        return ".".join(filter(None, (self.path, name)))


def describe_layers(layers: Mapping[str, nn.Module]) -> list[LayerDescription]:
    """A description of each decoder layer.

    Raises:
        TypeError: `fuse` does not know a layer's family, or the layer has other modules than its family's.
    """
    return [describe_layer(path, layer) for path, layer in layers.items()]


def describe_layer(path: str, layer: nn.Module) -> LayerDescription:
    """As `describe_layers`, of the layer at `path`."""
    spec = spec_of(layer)
    _check_children(path, layer, spec)
    prefix = f"{path}." if path else ""
    groups = tuple(
        tuple(_projection(prefix, layer, place) for place in group) for group in spec.groups
    )
    pairs = (_pair(layer, places) for places in (spec.norms, spec.head_norms, spec.post_norms))
    return LayerDescription(path, layer, spec, groups, *pairs)


def _check_children(path: str, layer: nn.Module, spec: LayerSpec) -> None:
    for owner, names in spec.children().items():
        children = set(layer.get_submodule(owner)._modules)
        function = {spec.activation.rpartition(".")[2]}  # which need not be a module
        if children - names or not names <= children | function:
            raise TypeError(
                f"{path}{'.' + owner if owner else ''} must have the modules {sorted(names)}, "
                f"found {sorted(children)}"
            )


def _projection(prefix: str, layer: nn.Module, place: str) -> Projection:
    owner, _, name = place.rpartition(".")
    linear = projection(layer.get_submodule(place))
    return Projection(place, prefix + place, layer.get_submodule(owner), name, linear)


def _pair(layer: nn.Module, places: Sequence[str | None]) -> Pair:
    first, second = (
        None if place is None else layer.get_submodule(place) for place in places or (None, None)
    )
    return first, second
