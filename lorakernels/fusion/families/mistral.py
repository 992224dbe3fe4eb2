# SPDX-License-Identifier: Apache-2.0
"""Mistral: Llama's layer with a sliding window, which attention reads from the config at each call."""

from __future__ import annotations

from dataclasses import replace

from lorakernels.fusion.families.llama import LLAMA

MISTRAL = replace(LLAMA, family="Mistral", window="self_attn.config.sliding_window")
