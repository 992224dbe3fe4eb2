# SPDX-License-Identifier: Apache-2.0
"""Phi-3, and the later models with its classes: q, k, v in one projection, gate and up in another.

The packed rows are in the order that a fused layer's own matrices have: q, k, v, and gate before up. A packed
projection has one adapter, one mask and one FP8 scale. LongRoPE's factor comes with cos and sin. transformers has no
dropout behind the embedding, whatever `embd_pdrop` says.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lorakernels.fusion.families.llama import LLAMA


def _refuse(layer: Any) -> str | None:
    """RoPE turns whole heads. transformers 4 has the factor in the config itself."""
    config = layer.self_attn.config
    default = getattr(config, "partial_rotary_factor", 1.0)
    factor = (getattr(config, "rope_parameters", None) or {}).get("partial_rotary_factor", default)
    if factor == 1.0:
        return None
    return f"partial_rotary_factor must be 1, found {factor}: a fused layer turns whole heads"


PHI3 = replace(
    LLAMA,
    family="Phi3",
    qkv=("self_attn.qkv_proj",),
    gate_up=("mlp.gate_up_proj",),
    activation="mlp.activation_fn",
    dropouts=("resid_attn_dropout", "resid_mlp_dropout"),
    window="self_attn.config.sliding_window",
    refuse=_refuse,
)
