# SPDX-License-Identifier: Apache-2.0
"""Llama: the layer that most families began with. Their files say what they have instead."""

from __future__ import annotations

from lorakernels.fusion.families.spec import LayerSpec

LLAMA = LayerSpec(
    family="Llama",
    attention="self_attn",
    mlp="mlp",
    norms=("input_layernorm", "post_attention_layernorm"),
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    output="self_attn.o_proj",
    gate_up=("mlp.gate_proj", "mlp.up_proj"),
    down="mlp.down_proj",
    activation="mlp.act_fn",
    last_norm="norm",
)
