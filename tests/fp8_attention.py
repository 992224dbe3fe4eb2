# SPDX-License-Identifier: Apache-2.0
"""cuDNN's part of FP8 attention by the plain formulas, on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from lorakernels.kernels.cudnn import attention as kernel
from lorakernels.kernels.cudnn import form as described
from lorakernels.numerics import fp8_attention as plain


def emulate(monkeypatch: pytest.MonkeyPatch) -> list[described.Form]:
    """Returns the forms that it will be handed."""
    forms: list[described.Form] = []

    def forward(form: Any, data: Tensor, factors: Tensor) -> tuple[Tensor, Tensor]:
        forms.append(form)
        return plain.attention_fp8(data, factors, form.heads, form.scale)

    def backward(form: Any, kept: Any, dout: Tensor, offsets: None) -> tuple[Tensor, ...]:
        assert dout.is_contiguous() and offsets is None
        forms.append(form)
        q, k, v, out, stats = kept
        for x, strides in zip((q, k, v), form.strides, strict=True):
            assert x.stride() == (*strides, 1)
        given = [x.float() for x in (q, k, v, out.transpose(1, 2), stats, dout.transpose(1, 2))]
        found = plain.attention_backward(*given, form.scale)
        return tuple(x.transpose(1, 2).to(form.dtype) for x in found)

    monkeypatch.setattr(kernel, "forward_fp8", forward)
    monkeypatch.setattr(kernel, "backward", backward)
    return forms
    return forms
