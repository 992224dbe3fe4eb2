# SPDX-License-Identifier: Apache-2.0
"""SmolLM3: Llama's layer, without RoPE in some layers, and with a sliding window in some."""

from __future__ import annotations

from dataclasses import replace

from lorakernels.fusion.families.llama import LLAMA

SMOLLM3 = replace(
    LLAMA, family="SmolLM3", rope="self_attn.use_rope", window="self_attn.sliding_window"
)
