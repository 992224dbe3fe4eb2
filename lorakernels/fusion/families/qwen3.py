# SPDX-License-Identifier: Apache-2.0
"""Qwen3: Qwen2's layer without biases, with RMSNorms on q's and k's heads before RoPE."""

from __future__ import annotations

from dataclasses import replace

from lorakernels.fusion.families.qwen2 import QWEN2

QWEN3 = replace(QWEN2, family="Qwen3", head_norms=("self_attn.q_norm", "self_attn.k_norm"))
