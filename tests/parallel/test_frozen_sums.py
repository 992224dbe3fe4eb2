# SPDX-License-Identifier: Apache-2.0
"""The sums by which ranks compare frozen tensors."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lorakernels.parallel.base.layers import sums_of_frozen


@pytest.mark.parametrize("begin", [1, 3, 4], ids="element {}".format)
def test_a_view_that_begins_between_words_has_the_sum_of_its_copy(begin: int) -> None:
    whole = torch.randn(61).bfloat16()
    view = nn.ParameterDict({"w": nn.Parameter(whole[begin:], requires_grad=False)})
    copied = nn.ParameterDict({"w": nn.Parameter(whole[begin:].clone(), requires_grad=False)})
    device = torch.device("cpu")
    assert sums_of_frozen(view, device) == sums_of_frozen(copied, device)
    copied["w"].data[5] += 1
    assert sums_of_frozen(view, device) != sums_of_frozen(copied, device)
