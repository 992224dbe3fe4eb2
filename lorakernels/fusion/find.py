# SPDX-License-Identifier: Apache-2.0
"""Find the decoder layers of a model. transformers is not imported: classes are compared by name."""

from __future__ import annotations

from torch import nn

from lorakernels.fusion.families import KNOWN, family_of
from lorakernels.fusion.layer import FusedDecoderLayer


def decoder_layers(model: nn.Module, *, fused: bool, advice: str = "") -> dict[str, nn.Module]:
    """{path: layer} of the layers whose family `fuse` knows, in the order of their paths in the model.

    Args:
        model: holds the layers, or is one.
        fused: whether fused layers count as well. If not, a fused layer is refused.
        advice: the end of the message for a model without such a layer.

    Raises:
        ValueError: there is none, one layer is in two places, or one is fused although `fused` is False.
        TypeError: `fused` is False, and all decoder layers are of other classes.
    """
    layers: dict[str, nn.Module] = {}
    unknown: dict[str, str] = {}
    paths: dict[int, str] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        is_fused, kind = isinstance(module, FusedDecoderLayer), type(module).__name__
        if is_fused and not fused:
            raise ValueError(f"{path} is fused already: call unfuse(model) first")
        if is_fused or family_of(type(module)):
            first = paths.setdefault(id(module), path)
            if first != path:
                raise ValueError(
                    f"{path} and {first} are one layer: give each place a layer of its own"
                )
            layers[path] = module
        elif kind.endswith(("DecoderLayer", "Block")):
            unknown[path] = kind
    if unknown and not layers and not fused:
        path, kind = next(iter(unknown.items()))
        raise TypeError(f"{path} is a {kind}: fuse knows {KNOWN} of transformers{advice}")
    if not layers:
        raise ValueError(f"{type(model).__name__} has no decoder layer: fuse knows {KNOWN}{advice}")
    return layers
