# SPDX-License-Identifier: Apache-2.0
"""OLMo 2: Llama's layer with its norms behind attention and the MLP, and norms of all of q and all of k."""

from __future__ import annotations

from dataclasses import replace

from lorakernels.fusion.families.llama import LLAMA

OLMO2 = replace(
    LLAMA,
    family="Olmo2",
    norms=(None, None),
    head_norms=("self_attn.q_norm", "self_attn.k_norm"),
    post_norms=("post_attention_layernorm", "post_feedforward_layernorm"),
    norms_in_fp32=True,
)
