# SPDX-License-Identifier: Apache-2.0
"""Granite: Llama's layer with a factor of attention's and the MLP's results, and a factor of q kᵀ from the config.

The embedding's and the logits' factors are outside of the layer, in the model's own forward.
"""

from __future__ import annotations

from dataclasses import replace

from lorakernels.fusion.families.llama import LLAMA

GRANITE = replace(LLAMA, family="Granite", residual_factor="residual_multiplier")
