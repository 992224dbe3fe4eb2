# SPDX-License-Identifier: Apache-2.0
"""The checks of `context_parallel`: models are equal on all ranks, and layers and modules are supported."""

from __future__ import annotations

from typing import Any

from torch import nn

from lorakernels.fusion.families import spec_of
from lorakernels.fusion.find import decoder_layers
from lorakernels.fusion.layer import FusedDecoderLayer, parts_of
from lorakernels.modules.linear.lora import LoRALinear
from lorakernels.modules.marks import SplitModule
from lorakernels.modules.order import refuse
from lorakernels.parallel.ranks import comm
from lorakernels.parallel.ranks.agree import check_equal, fingerprint, trained
from lorakernels.parallel.ranks.group import Ranks


def objection(layer: nn.Module) -> str:
    """Why a decoder layer's attention cannot begin to run over ranks; "" if it can."""
    spec = spec_of(layer)
    if spec.window_of(layer) is not None:
        return f"has a sliding window of {spec.window_of(layer)}, which attention over ranks does not support yet"
    if spec.cap_of(layer) is not None:
        return "has capped scores, which attention over ranks does not support"
    if isinstance(layer, FusedDecoderLayer):
        parts = parts_of(layer)
        if parts.attention not in ("auto", "flash", "efficient", "math", "cudnn_graph"):
            return f"has attention={parts.attention!r}, which cannot take a part of a row: fuse with attention='auto'"
    return ""


def check(model: nn.Module, ranks: Ranks, stages: Ranks | None) -> dict[str, nn.Module]:
    """Collective: the model's decoder layers; only this rank's, if it was cut into `stages`.

    It raises as `context_parallel` does.
    """
    with comm.together(ranks.group):
        config = getattr(model, "config", None)
        if config is None or not hasattr(config, "get_text_config"):
            raise TypeError(f"model must be one of transformers, found {type(model).__name__}")
        if hasattr(model, "get_base_model"):
            raise TypeError(
                f"model must be one of transformers, found {type(model).__name__} around it: give its get_base_model()"
            )
        if stages is not None and stages.group is ranks.group and ranks.size > 1:
            raise ValueError(
                "the model has stages on these ranks already: rows over ranks need a dimension of their own"
            )
        refuse(model, "context_parallel")
        layers = decoder_layers(model, fused=True)
        for path, layer in layers.items():
            if why := objection(layer):
                raise ValueError(f"{path} {why}")
        refuse_masks(model, ranks.group)
        mine = fingerprint(model, trained(model))
    check_equal(comm.agree(ranks.group, mine))
    return layers


def refuse_masks(model: nn.Module, group: Any) -> None:
    """Raise ValueError for a module that cannot draw dropout masks, or share FP8 scales, over `group`."""
    for name, module in model.named_modules():
        if why := _cannot_draw(module, group):
            raise ValueError(f"{name} {why}")


def _cannot_draw(module: nn.Module, group: Any) -> str:
    """Why a module cannot draw dropout masks, or share FP8 scales, for rows over ranks; "" if it can."""
    if isinstance(module, SplitModule) and module.ranks.group is group:
        return "is split over these ranks already: tensor parallelism needs a dimension of its own"
    if isinstance(module, nn.Dropout) and module.p:
        return f"is {module}, which would draw equal masks on all ranks: set lora_dropout of our layers, or p = 0"
    if isinstance(module, LoRALinear) and module.lora_dropout and module.has_magnitude:
        return (
            f"is a {type(module).__name__} with dropout, whose masks cannot be drawn over ranks yet"
        )
    return ""
