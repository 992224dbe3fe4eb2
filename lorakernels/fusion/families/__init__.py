# SPDX-License-Identifier: Apache-2.0
"""The families of transformers' decoder layers that `fuse` knows: a LayerSpec each, and one line here."""

from __future__ import annotations

from torch import nn

from lorakernels.fusion.families.gemma import GEMMA2, GEMMA3
from lorakernels.fusion.families.granite import GRANITE
from lorakernels.fusion.families.llama import LLAMA
from lorakernels.fusion.families.mistral import MISTRAL
from lorakernels.fusion.families.olmo2 import OLMO2
from lorakernels.fusion.families.phi3 import PHI3
from lorakernels.fusion.families.qwen2 import QWEN2
from lorakernels.fusion.families.qwen3 import QWEN3
from lorakernels.fusion.families.smollm3 import SMOLLM3
from lorakernels.fusion.families.spec import LayerSpec
from lorakernels.lazy import offer_submodules

FAMILIES: tuple[LayerSpec, ...] = (
    LLAMA,
    MISTRAL,
    QWEN2,
    QWEN3,
    PHI3,
    GRANITE,
    SMOLLM3,
    OLMO2,
    GEMMA2,
    GEMMA3,
)
KNOWN = ", ".join(spec.layer for spec in FAMILIES)  # for messages
_BY_LAYER = {spec.layer: spec for spec in FAMILIES}

offer_submodules(__name__)


def family_of(kind: type) -> LayerSpec | None:
    """The family whose decoder layer's class is `kind` itself; None for any other class, and for a subclass."""
    return _BY_LAYER.get(kind.__name__) if kind.__module__.startswith("transformers.") else None


def spec_of(layer: nn.Module) -> LayerSpec:
    """The family of a decoder layer, fused or not.

    Raises:
        TypeError: `fuse` does not know the layer.
    """
    family = next((spec for kind in type(layer).__mro__ if (spec := family_of(kind))), None)
    if family is None:
        raise TypeError(f"layer must be one of {KNOWN}, found {type(layer).__name__}")
    return family
