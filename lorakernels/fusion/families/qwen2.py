# SPDX-License-Identifier: Apache-2.0
"""Qwen2: Llama's layer with biases on q, k and v, and a sliding window in some layers."""

from __future__ import annotations

from dataclasses import replace

from lorakernels.fusion.families.llama import LLAMA

QWEN2 = replace(LLAMA, family="Qwen2", window="self_attn.sliding_window")
