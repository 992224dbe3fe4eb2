# SPDX-License-Identifier: Apache-2.0
"""Which implementation `lorakernels doctor` and the report name."""

from __future__ import annotations

import pytest

from lorakernels.ops.choice import implementations
from lorakernels.ops.hardware import Place
from lorakernels.ops.register import OPS as REGISTERED

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


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("capability", [(0, 0), (8, 0), (8, 9), (9, 0), (12, 0)], ids=str)
def test_every_op_is_named(device, capability):
    """Each op, or the one that it goes with, has an implementation and a reason."""
    table = implementations(device, Place(capability))
    mains = {name.rstrip("_") for name, op in REGISTERED.items() if op.chosen is not None}
    assert set(table) == mains and len(mains) == 27
    assert all(implementation and reason for implementation, reason in table.values())


def test_unknown_device():
    with pytest.raises(ValueError, match="found 'mps'"):
        implementations("mps")
