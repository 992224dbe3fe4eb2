# SPDX-License-Identifier: Apache-2.0
"""fp8_grad_input: what csrc refuses, with the reason, and what it is not given; needs no GPU."""

from __future__ import annotations

import sys
from unittest import mock

import pytest
import torch

from lorakernels.device import extension
from lorakernels.ops.fp8_grad_input import by_csrc
from lorakernels.values import Dropout, Scaled, Weight

E5M2 = torch.float8_e5m2
BF16, FP16 = torch.bfloat16, torch.float16
SITE = 11
MODULE = sys.modules[by_csrc.__module__]  # the package has the op under this name


def test_without_ds_lora_A_and_the_mask_are_not_looked_at(monkeypatch) -> None:
    ran = mock.Mock()
    monkeypatch.setattr(MODULE, "extension", lambda: ran)
    monkeypatch.setattr(MODULE, "stream", lambda _: 0)
    monkeypatch.setattr(MODULE, "multiprocessors_of", lambda _: 132)
    dy, w, one = torch.zeros(4, 16).to(E5M2), torch.zeros(16, 32, dtype=torch.uint8), torch.ones(1)
    lora_A, slot = torch.zeros(4, 32, dtype=FP16), torch.tensor([1, 2])
    weight = Weight(w, one, w.t().contiguous())
    by_csrc(Scaled(dy, one), E5M2, weight, None, lora_A, Dropout(slot, 0.1, SITE), BF16)
    call = dict(zip(VALID, ran.fp8_grad_input.call_args.args, strict=True))
    assert (call["A"], call["rank"], call["threshold"], call["a_dtype"]) == (0, 0, 0, "bfloat16")


VALID = {
    **{"dx": 0, "dy8": 0, "weight": 0, "transposed": True},
    **dict.fromkeys(("dy_scale_inv", "weight_scale_inv", "ds", "A"), 0),
    **{"rows": 1, "cols": 8, "depth": 16, "rank": 3, "stride": 8, "factor": 1.0},
    **{"slot": 0, "site": 0, "threshold": 0, "first_row": 0, "first_col": 0, "dropped": 0},
    **{"dtype": "bfloat16", "a_dtype": "float32", "format": "e5m2", "splits": True},
    **{"tile": (128, 128), "multiprocessors": 132, "stream": 0, "device": -1},
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cols": 12}, "cols must be a multiple of 8"),
        ({"depth": 24}, "depth a positive one of 16"),
        ({"depth": 0}, "depth a positive one of 16"),
        ({"rows": -1}, "rows must not be negative"),
        ({"stride": 2}, "stride must be a multiple of 8 and at least rank 3, got 2"),
        ({"dy8": 8}, "must be 16-byte aligned"),
        ({"first_col": 4}, "first_col must be a multiple of 8, got 4"),
        ({"dtype": "float32"}, "dtype must be 'bfloat16' or 'float16'"),
        ({"a_dtype": "float16"}, "a_dtype must be dtype or 'float32'"),
        ({"format": "e3m4"}, "format must be 'e5m2' or 'e4m3fn', got 'e3m4'"),
        ({"threshold": 9}, "slot must be given where threshold > 0"),
        ({"rows": 2**30, "cols": 2**30}, "tiles of 128 × 128"),
        ({"tile": (128, 256)}, "a tile is 128 × 128, 192 × 128 or 256 × 128 splitting"),
        ({"tile": (192, 128), "splits": False}, "128 × 256 otherwise; got 192 × 128"),
        ({"tile": (256, 128), "transposed": False, "cols": 16}, "a tile is .* got 256 × 128"),
        ({"transposed": False}, "takes splits and cols a multiple of 16, got cols 8"),
        ({"transposed": False, "cols": 16, "splits": False}, "got cols 16 without splits"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_refusals(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        extension().fp8_grad_input(**{**VALID, **change})
