# SPDX-License-Identifier: Apache-2.0
"""Which implementation `lorakernels doctor` and the report name."""

from __future__ import annotations

import pytest

from lorakernels.ops.choice import implementations
from lorakernels.ops.hardware import Place

OPS = (
    "block_diagonal",
    "rms_norm_backward",
    "rms_norm_quantize",
    "rope_qkv",
    "swiglu_quantize",
    "swiglu_quantize_grad",
)


@pytest.mark.parametrize("op", OPS)
def test_what_the_layer_s_kernels_take(op):
    old = implementations("cuda", Place((7, 5)))
    new = implementations("cuda", Place((8, 0), fp8=False))
    assert old[op] == ("torch", "compute capability (7, 5) has no bf16")
    assert new[op][0] == "triton"
