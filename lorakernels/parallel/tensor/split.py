# SPDX-License-Identifier: Apache-2.0
"""Linear layers of a model become parts: `parallelize` cuts whole ones, `load_quantized(tp=…)` reads the parts alone.

A model of which only the parts were read runs as without sequence parallelism. Its fused layers raise until
`parallelize` has finished the split.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

from torch import Tensor, nn

from lorakernels.modules.linear.frozen import FrozenFP8Linear
from lorakernels.modules.linear.lora import LoRALinear
from lorakernels.modules.linear.spec import FrozenSpec
from lorakernels.modules.marks import became, mark
from lorakernels.modules.model.apply import parents_of, replace_module
from lorakernels.modules.model.trained_parts import hand_over_originals
from lorakernels.parallel.ranks.group import Ranks
from lorakernels.parallel.tensor.layers import KINDS, cut
from lorakernels.parallel.tensor.vocabulary import VocabularyEmbedding, VocabularyHead
from lorakernels.values import Weight


class LayerCut(NamedTuple):
    """One linear layer that was split.

    Attributes:
        by: "column" (its outputs), "row" (its inputs) or "vocabulary" (its tokens).
        whole, part: [N, K] of the whole layer, and of this rank's part.
        adapted: whether it has an adapter.
    """

    by: str
    whole: tuple[int, int]
    part: tuple[int, int]
    adapted: bool


class Waiting:
    """Stands for the ranks in fused layers of loaded parts, until `parallelize`. It is an `Over` of over_ranks.py."""

    spread, flat = 1, False

    def check(self, h: Tensor) -> None:
        raise RuntimeError(
            "this layer was fused over parts that load_quantized(tp=…) read: call parallelize before it runs"
        )

    def together(self) -> AbstractContextManager[None]:
        return nullcontext()


class LoadedParts(NamedTuple):
    """The linear layers of a model that were read in parts.

    Attributes:
        ranks: the group that holds the parts.
        cuts: {path: LayerCut} of the layers of the decoder.
        vocabulary: {path: LayerCut} of embedding and head, if those were read in parts, too.
    """

    ranks: Ranks
    cuts: dict[str, LayerCut]
    vocabulary: dict[str, LayerCut]

    @classmethod
    def of(cls, model: nn.Module) -> LoadedParts | None:
        """The loaded parts of `model`, until `parallelize` has taken them."""
        return became(model).parts_as_loaded

    def leave(self, model: nn.Module) -> None:
        """Record the parts in `model`, for `parallelize`."""
        mark(model, parts_as_loaded=self)
        waiting = Waiting()
        for layer in self.layers(model):
            mark(layer, loaded_part=waiting)

    def take(self, model: nn.Module, ranks: Ranks, flat: bool) -> dict[str, LayerCut]:
        """Let the parts run over `ranks`, as `cut` would. Returns `cuts` and `vocabulary`."""
        mark(model, parts_as_loaded=None)
        for layer in self.layers(model):
            mark(layer, loaded_part=None)
            layer.run_over(ranks, flat, layer.over.scales)
        for path in self.vocabulary:
            vocabulary: Any = model.get_submodule(path)
            vocabulary.ranks = ranks
        return self.cuts | self.vocabulary

    def layers(self, model: nn.Module) -> Iterator[Any]:
        """The layers of `cuts`."""
        return map(model.get_submodule, self.cuts)


def split_linear(
    model: nn.Module, cut_by: tuple[str, str], ranks: Ranks, flat: bool, read: Weight | None = None
) -> LayerCut:
    """Keep this rank's part of a linear layer. `cut_by`: its path, and "column" or "row"; `flat`, `read`: as `cut`."""
    path, by = cut_by
    layer = model.get_submodule(path)
    if isinstance(layer, nn.Linear):
        frozen = FrozenFP8Linear.from_weight(
            Weight(layer.weight.detach()), layer.bias, FrozenSpec(None, name=path)
        )
        if frozen.bias is not None:
            frozen.bias.requires_grad_(layer.bias.requires_grad)
        hand_over_originals(layer, frozen)
        replace_module(parents_of(model), layer, frozen.train(layer.training))
        layer = frozen
    assert isinstance(layer, FrozenFP8Linear)
    whole, adapted = (layer.out_features, layer.in_features), isinstance(layer, LoRALinear)
    cut(layer, KINDS[by, adapted], ranks, flat, read)
    return LayerCut(by, whole, (layer.out_features, layer.in_features), adapted)


def split_vocabulary(
    model: Any, ranks: Ranks, read: Mapping[str, Tensor] | None = None
) -> dict[str, LayerCut]:
    """Keep this rank's rows of the embedding and of the head, and of the head's bias. Tied ones stay so.

    Args:
        model: of transformers, with a plain frozen embedding and head.
        ranks: the group whose other ranks have the other rows.
        read: {path: the rows [V/T, H]} if only these were read; None cuts the whole weights.
    """
    cuts, parts = {}, {}
    for old in (model.get_input_embeddings(), model.get_output_embeddings()):
        path = next(path for path, module in model.named_modules() if module is old)
        whole = old.weight
        if id(whole) not in parts:
            rows = whole.detach()[ranks.share(len(whole))].clone() if read is None else read[path]
            parts[id(whole)] = nn.Parameter(rows, requires_grad=False)
        part, bias = parts[id(whole)], getattr(old, "bias", None)
        if bias is not None:
            rows = bias.detach()[ranks.share(len(bias))].clone()
            bias = nn.Parameter(rows, requires_grad=False)
        head = isinstance(old, nn.Linear)
        new = VocabularyHead(part, bias, ranks) if head else VocabularyEmbedding(part, ranks)
        replace_module(parents_of(model), old, new.train(old.training))
        width = whole.shape[1]
        cuts[path] = LayerCut("vocabulary", (len(whole), width), (len(part), width), False)
    return cuts
