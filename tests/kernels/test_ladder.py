# SPDX-License-Identifier: Apache-2.0
"""The ladder names an implementation and a reason for every op on every device."""

from __future__ import annotations

from unittest import mock

import pytest

from lorakernels import device as device_facts
from lorakernels.kernels import ladder


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("capability", [None, (8, 0), (8, 9), (9, 0), (12, 0)], ids=str)
def test_every_op_is_named(device, capability):
    table = ladder.implementations(device, capability)
    assert set(table) == set(ladder.OPS)
    assert all(impl and reason for impl, reason in table.values())


def test_what_the_layer_s_kernels_take():
    ops = ("rms_norm_quantize", "rms_norm_backward", "rope_qkv", "swiglu_quantize")
    old = ladder.implementations("cuda", (7, 5))
    new = ladder.implementations("cuda", (8, 0), fp8=False)
    for op in (*ops, "swiglu_quantize_grad"):
        assert old[op] == ("torch", "compute capability (7, 5) has no bf16")
        assert new[op][0] == "triton"


def test_unknown_device():
    with pytest.raises(ValueError, match="found 'mps'"):
        ladder.implementations("mps")


@pytest.mark.parametrize(
    ("archs", "capability", "runs"),
    [
        ("90a", (9, 0), True),
        ("90a", (10, 0), False),
        ("80", (8, 9), True),
        ("86;90a", (8, 0), False),
        ("80;90a", (9, 0), True),
        ("100f", (10, 0), True),
        ("120", (12, 1), True),
    ],
)
def test_binary_compatibility(archs, capability, runs):
    built = mock.Mock(build_info=lambda: {"cuda": True, "cuda_archs": archs})
    device_facts.why_not_csrc.cache_clear()
    with mock.patch.object(device_facts, "extension", lambda: built):
        assert (device_facts.why_not_csrc(capability) is None) == runs
    device_facts.why_not_csrc.cache_clear()


def test_without_nvcc_the_reason_says_so():
    built = mock.Mock(build_info=lambda: {"cuda": False, "cuda_archs": ""})
    device_facts.why_not_csrc.cache_clear()
    with mock.patch.object(device_facts, "extension", lambda: built):
        assert "without nvcc" in device_facts.why_not_csrc((9, 0))
    device_facts.why_not_csrc.cache_clear()
