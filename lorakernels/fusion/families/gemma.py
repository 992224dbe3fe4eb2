# SPDX-License-Identifier: Apache-2.0
"""Gemma 2 and 3: four norms in a layer, which multiply by 1 + w, GELU in the MLP, and a sliding window in some layers.

Gemma 2 caps attention's scores. Gemma 3 norms the heads of q and k instead. The embedding's factor and Gemma 2's cap of
the logits are outside of the layer, in the model's own forward.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

from lorakernels.fusion.families.llama import LLAMA


def _refuse(layer: Any) -> str | None:
    """Before transformers 5, layers return a tuple, and Gemma 3's get two pairs of angles."""
    parameters = inspect.signature(inspect.unwrap(type(layer).forward)).parameters
    if "output_attentions" not in parameters and "position_embeddings" in parameters:
        return None
    return "a fused layer takes and returns what it does in transformers 5: found an older one"


GEMMA2 = replace(
    LLAMA,
    family="Gemma2",
    norms=("input_layernorm", "pre_feedforward_layernorm"),
    post_norms=("post_attention_layernorm", "post_feedforward_layernorm"),
    norms_add_one=True,
    norms_in_fp32=True,
    act="gelu_tanh",
    cap="self_attn.attn_logit_softcapping",
    window="self_attn.sliding_window",
    refuse=_refuse,
)
GEMMA3 = replace(
    GEMMA2, family="Gemma3", head_norms=("self_attn.q_norm", "self_attn.k_norm"), cap=None
)
