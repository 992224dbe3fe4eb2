# SPDX-License-Identifier: Apache-2.0
"""On which GPUs csrc's kernels run, by what they were compiled for."""

from __future__ import annotations

from unittest import mock

import pytest

from lorakernels import device


@pytest.fixture(autouse=True)
def forgotten():
    """The answer is kept for the process: ask anew in here, and behind."""
    device.why_not_csrc.cache_clear()
    yield
    device.why_not_csrc.cache_clear()


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
    with mock.patch.object(device, "extension", lambda: built):
        assert (device.why_not_csrc(capability) is None) == runs


def test_without_nvcc_the_reason_says_so():
    built = mock.Mock(build_info=lambda: {"cuda": False, "cuda_archs": ""})
    with mock.patch.object(device, "extension", lambda: built):
        assert "without nvcc" in device.why_not_csrc((9, 0))
