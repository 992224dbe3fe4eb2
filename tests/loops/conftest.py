# SPDX-License-Identifier: Apache-2.0
"""What tests of attached loops share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch.nn.attention import SDPBackend, sdpa_kernel


@pytest.fixture
def math_attention() -> Iterator[None]:
    """The imitated graphs cannot replay the CPU's flash attention, and atomics differ from run to run on a GPU."""
    with sdpa_kernel(SDPBackend.MATH):
        yield
