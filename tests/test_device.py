# SPDX-License-Identifier: Apache-2.0
"""On which GPUs csrc's kernels run, by what they were compiled for."""

from __future__ import annotations

import re
from unittest import mock

import pytest
import torch

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
        ("100a", (10, 0), True),
        ("100f", (10, 0), True),
        ("120a", (12, 1), False),
        ("120", (12, 1), True),
    ],
)
def test_binary_compatibility(archs, capability, runs):
    built = mock.Mock(build_info=lambda: {"cuda": True, "cuda_archs": archs})
    with mock.patch.object(device, "extension", lambda: built):
        assert (device.why_not_csrc(capability) is None) == runs


@pytest.mark.parametrize(
    ("own", "wanted", "expected"),
    [
        ((9, 0), "", (9, 0)),
        ((9, 0), "9.0", (9, 0)),
        ((9, 0), "8.0", (8, 0)),
        ((9, 0), "10.0", (10, 0)),
        ((9, 0), "12.0", (12, 0)),
        ((9, 0), "sm_80", "like 8.0 or 12.0, found 'sm_80'"),
        ((9, 0), "8", "like 8.0 or 12.0, found '8'"),
        ((9, 0), "9.1", "like 8.0 or 12.0, found '9.1'"),
        ((8, 0), "8.0", (8, 0)),
        ((8, 0), "8.9", "up to this GPU's 8.0, like 8.0, found '8.9'"),
        ((8, 9), "10.0", "up to this GPU's 8.9, like 8.0, found '10.0'"),
        ((10, 0), "8.9", (8, 9)),
        ((10, 0), "12.0", (12, 0)),
        ((10, 0), "9.0", "but not Hopper's own 9.0, which 10.0 cannot run, found '9.0'"),
        ((12, 0), "9.0", "but not Hopper's own 9.0, which 12.0 cannot run, found '9.0'"),
    ],
)
def test_the_capability_that_ops_choose_by(own, wanted, expected, monkeypatch):
    """csrc's wgmma kernels are empty on a newer GPU: 9.0 there would leave results unwritten."""
    monkeypatch.setenv(device.AS_ON, wanted)
    found = device.capability.__wrapped__
    with mock.patch.object(torch.cuda, "get_device_capability", return_value=own):
        if isinstance(expected, tuple):
            assert found(0) == expected
        else:
            with pytest.raises(ValueError, match=re.escape(expected)):
                found(0)


def test_without_nvcc_the_reason_says_so():
    built = mock.Mock(build_info=lambda: {"cuda": False, "cuda_archs": ""})
    with mock.patch.object(device, "extension", lambda: built):
        assert "without nvcc" in device.why_not_csrc((9, 0))
