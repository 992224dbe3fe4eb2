# SPDX-License-Identifier: Apache-2.0
"""The rotation is Transformers'; tests/ops/cases/rope_qkv.py has the rest."""

from __future__ import annotations

import pytest
import torch

from lorakernels import ops
from tests.ops.cases.rope_qkv import LLAMA, forward
from tests.ops.contract import FP32, Made


def test_is_transformers_rotation() -> None:
    modeling = pytest.importorskip("transformers.models.llama.modeling_llama")
    qkv, cos, sin, count, kv_heads = forward(LLAMA, FP32, FP32, Made("cpu", 3))
    heads = qkv.clone().view(3, LLAMA.tokens, -1, LLAMA.dim).transpose(1, 2)
    q, k, _ = heads.split((count, kv_heads, kv_heads), 1)
    expected = torch.cat(modeling.apply_rotary_pos_emb(q, k, cos[None], sin[None]), 1)
    ops.rope_qkv_(qkv, cos, sin, count, kv_heads)
    found = qkv.view(3, LLAMA.tokens, -1, LLAMA.dim).transpose(1, 2)[:, : count + kv_heads]
    # sums of two products, each rounded in fp32
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)
