# SPDX-License-Identifier: Apache-2.0
"""The sizes of a model that a plan needs, from its config alone: it is built on the meta device, without memory."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from lorakernels.config import LoRAConfig
from lorakernels.fusion.check import check_blocks
from lorakernels.fusion.describe import LayerDescription, describe_layers
from lorakernels.fusion.find import decoder_layers
from lorakernels.fusion.memory import LayerSize
from lorakernels.modules import LoRALinear, apply_lora
from lorakernels.modules.model.logits import change_of_logits
from lorakernels.numerics.blocks import blocks_of
from lorakernels.parallel.tensor.check import check_split
from lorakernels.recipes import BlockScaling

ELEMENT = 2  # bytes of a number that is not FP8: bf16


@dataclass(frozen=True)
class ModelSize:
    """`layers` of a decoder; `vocabulary` rows of its head; `outside` bytes of embedding, head and norms in bf16, and
    of the scales of blocks, which no GPU shares; `trained` parameters of the adapters; `ends` bytes of the frozen
    embedding and head, one number if they are tied; `plain` whether logits are the head's own.
    With `split`, vocabulary and `ends` are one GPU's part of them.
    """

    layers: tuple[LayerSize, ...]
    vocabulary: int
    outside: int
    trained: int
    ends: tuple[int, ...] = ()
    plain: bool = True
    split: bool = False

    @property
    def base(self) -> int:
        """Bytes of the layers' frozen FP8 weights."""
        return sum(map(weights, self.layers))

    def splits_vocabulary(self, tp: int) -> bool:
        """Whether each of `tp` GPUs has some tokens of the embedding and of the head, as with `finetune --tp`."""
        return tp > 1 and self.plain and self.vocabulary % tp == 0

    def over(self, tp: int) -> ModelSize:
        """The part of one of `tp` GPUs that hold each layer together, as `parallelize` cuts it.

        Each GPU has the whole A of column projections and the whole B of row projections: Σ R · hidden per layer.
        """
        if tp == 1:
            return self
        layers = tuple(split_layer(size, tp) for size in self.layers)
        held = sum(size.hidden * sum(size.ranks) for size in self.layers)
        share = replace(
            self,
            layers=layers,
            outside=self.outside - sum(map(scales, self.layers)) + sum(map(scales, layers)),
            trained=held + math.ceil((self.trained - held) / tp),
        )
        if not self.splits_vocabulary(tp):
            return share
        ends = tuple(end // tp for end in self.ends)
        outside = share.outside - sum(self.ends) + sum(ends)
        vocabulary = self.vocabulary // tp
        return replace(share, ends=ends, outside=outside, vocabulary=vocabulary, split=True)

    @classmethod
    def of(cls, model: Any, lora: LoRAConfig | None, tp: int = 1) -> ModelSize:
        """Sizes of a transformers model, or of what a transformers config describes. The given one stays as it is.

        Args:
            model: a config or a model. A model that has adapters keeps its own.
            lora: adapters of a config or of a model without any; None is r = 16 on all linear layers. The base has
                blocks where the adapters' recipe is `BlockScaling`, else one scale for each tensor.
            tp: GPUs that are to hold each layer together. The sizes still describe the whole model.

        Raises:
            TypeError: `model` is neither.
            ValueError: `lora` does not fit the model, `fuse` does not know or take its layers, or `parallelize` does
                not split them over `tp`.
        """
        recipe = None if lora is None else lora.fp8
        built = isinstance(model, nn.Module)
        if not built or not any(isinstance(m, LoRALinear) for m in model.modules()):
            model = _on_meta(model.config if built else model)
            _check(model)
            chosen = lora or LoRAConfig(target_modules="all-linear")
            apply_lora(model, replace(chosen, fp8=None))
        else:
            recipe = next(m.recipe for m in model.modules() if isinstance(m, LoRALinear))
        layers = describe_layers(decoder_layers(model, fused=True))
        blocks = isinstance(recipe, BlockScaling)
        if tp > 1:
            check_split(model, tp, blocks)
        sizes = tuple(LayerSize.of(layer, not blocks, blocks=blocks) for layer in layers)
        if blocks:
            _check_blocks(layers)
        inside = {id(p) for layer in layers for p in layer.module.parameters()}
        others = {id(p): p.numel() for p in model.parameters() if id(p) not in inside}
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        head = model.get_output_embeddings()
        frozen = {
            id(m.weight): ELEMENT * m.weight.numel()
            for m in (model.get_input_embeddings(), head)
            if not m.weight.requires_grad
        }
        return cls(
            sizes,
            head.weight.shape[0],
            ELEMENT * sum(others.values()) + sum(map(scales, sizes)),
            trained,
            tuple(frozen.values()),
            change_of_logits(model.config.get_text_config()) is None,
        )


def split_layer(size: LayerSize, tp: int) -> LayerSize:
    """The part of a layer on one of `tp` GPUs: some heads, and some columns between gate, up and down."""
    return replace(
        size,
        ffn=size.ffn // tp,
        heads=size.heads // tp,
        kv_heads=size.kv_heads // tp,
        stacked=size.stacked // tp,
    )


def projections(size: LayerSize) -> tuple[tuple[int, int, int], ...]:
    """(N, K, ΣR) of the joined products q k v, o, gate up, down."""
    wide = size.heads * size.head_dim
    narrow = size.kv_heads * size.head_dim
    shapes = (
        (wide + 2 * narrow, size.hidden),
        (size.hidden, wide),
        (2 * size.ffn, size.hidden),
        (size.hidden, size.ffn),
    )
    return tuple((n, k, r) for (n, k), r in zip(shapes, size.ranks, strict=True))


def weights(size: LayerSize) -> int:
    """Bytes of a layer's frozen FP8 weights."""
    return sum(n * k for n, k, _ in projections(size))


def scales(size: LayerSize) -> int:
    """Bytes of the scales of a layer's blocks; 0 without blocks."""
    if not size.blocks:
        return 0
    return sum(4 * blocks_of(n) * blocks_of(k) for n, k, _ in projections(size))


def _check_blocks(layers: Sequence[LayerDescription]) -> None:
    for layer in layers:
        for group in layer.groups:
            check_blocks({p.full_path: p.linear for p in group})


def _check(model: nn.Module) -> None:
    for layer in describe_layers(decoder_layers(model, fused=True)):
        if objection := next(layer.spec.objections(layer.module), None):
            raise ValueError(
                f"a plan is of fused layers, and {layer.path} cannot be fused: {objection}"
            )


def _on_meta(config: Any) -> Any:
    try:
        import transformers
    except ImportError as error:
        raise TypeError(f"a plan needs transformers, which cannot be imported: {error}") from error
    if not isinstance(config, transformers.PretrainedConfig):
        raise TypeError(
            f"model must be a transformers model or config, found {type(config).__name__}"
        )
    config = copy.deepcopy(config.get_text_config())
    config.__dict__.pop("quantization_config", None)
    try:
        with torch.device("meta"):
            return transformers.AutoModelForCausalLM.from_config(config)
    except ValueError as error:  # no causal LM of that kind
        kind = getattr(config, "model_type", type(config).__name__)
        raise TypeError(f"model: {kind} has no causal LM in transformers: {error}") from error
