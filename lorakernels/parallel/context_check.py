# SPDX-License-Identifier: Apache-2.0
"""What `context_parallel` compares over ranks, and which decoder layers it refuses."""

from __future__ import annotations

from typing import Any

from torch import nn

from lorakernels.fusion.families import spec_of
from lorakernels.fusion.layer import FusedDecoderLayer
from lorakernels.fusion.parts import Parts
from lorakernels.parallel.layers import managed_by_graphs
from lorakernels.parallel.tensor_check import checksum, generators, scales

OF_MODULE = "context_attention"  # the attribute of an attention module, for transformers' function


def fingerprint(model: nn.Module) -> dict[str, Any]:
    """What must be equal on all ranks, by what it is called in a message."""
    trained = {
        f"the values of {n}": checksum(p) for n, p in model.named_parameters() if p.requires_grad
    }
    return trained | scales(model) | generators(model, next(model.parameters()).device)


def objection(layer: nn.Module) -> str:
    """Why a decoder layer's attention cannot begin to run over ranks; "" if it can."""
    if managed_by_graphs(layer):
        return (
            "is managed by attach or lorakernels.graphs, whose replays would have attention of whole rows: call "
            "context_parallel first"
        )
    spec = spec_of(layer)
    if spec.window_of(layer) is not None:
        return f"has a sliding window of {spec.window_of(layer)}, which attention over ranks does not have yet"
    if spec.cap_of(layer) is not None:
        return "has capped scores, which attention over ranks does not have"
    if isinstance(layer, FusedDecoderLayer):
        parts: Parts = layer.__dict__["_fused"]
        if parts.context is not None:
            return "runs over ranks already"
        if parts.attention not in ("auto", "flash", "efficient", "math", "cudnn_graph"):
            return f"has attention={parts.attention!r}, which takes no part of a row: fuse with attention='auto'"
    elif OF_MODULE in vars(layer.get_submodule(spec.attention)):
        return "runs over ranks already"
    return ""
