# SPDX-License-Identifier: Apache-2.0
"""fp8_grad_input: what csrc refuses, with the reason, and what it is not given; needs no GPU."""

from __future__ import annotations

import sys
from unittest import mock

import pytest
import torch

from lorakernels.ops.fp8_grad_input import GradInput, by_csrc
from lorakernels.values import Dropout, Scaled, Weight
from tests.kernels.bindings import call

E5M2 = torch.float8_e5m2
BF16, FP16 = torch.bfloat16, torch.float16
SITE = 11
MODULE = sys.modules[by_csrc.__module__]  # the package has the op under this name


def test_without_ds_lora_A_and_the_mask_are_not_looked_at(monkeypatch) -> None:
    ran = mock.Mock()
    monkeypatch.setattr(MODULE, "extension", lambda: ran)
    monkeypatch.setattr(MODULE, "where", lambda _: (0, 0))
    monkeypatch.setattr(MODULE, "multiprocessors_of", lambda _: 132)
    dy, w, one = torch.zeros(4, 16).to(E5M2), torch.zeros(16, 32, dtype=torch.uint8), torch.ones(1)
    lora_A, slot = torch.zeros(4, 32, dtype=FP16), torch.tensor([1, 2])
    operands, dropout = (Scaled(dy, one), E5M2, Weight(w, one)), Dropout(slot, 0.1, SITE)
    by_csrc(GradInput(*operands, None, lora_A, dropout, BF16))
    (_, *factors), _, _, mask, sizes, (_, a_dtype, _), *_ = ran.fp8_grad_input.call_args.args
    assert (factors, mask, sizes.rank, a_dtype) == ([None, None], None, 0, "bfloat16")


VALID = {
    **{"dx": 0, "dy8": 0, "weight": 0},
    **dict.fromkeys(("dy_scale_inv", "weight_scale_inv", "ds", "A"), 0),
    **{"rows": 1, "cols": 16, "depth": 16, "rank": 3},
    **{"slot": 0, "site": 0, "p": 0.0, "row0": 0, "col0": 0, "dropped": 0, "chunks": ()},
    **{"dtype": "bfloat16", "a_dtype": "float32", "format": "e5m2", "splits": True},
    **{"tile_rows": 128, "tile_cols": 128, "multiprocessors": 132, "stream": 0, "device": -1},
    "segment_rows": 0,
    "blocks": [],
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cols": 12}, "cols must be a multiple of 8"),
        ({"depth": 24}, "depth a positive one of 16"),
        ({"depth": 0}, "depth a positive one of 16"),
        (
            {"segment_rows": 64},
            "segment_rows must be 0, or a multiple of 128 that divides rows; got 64 of 1",
        ),
        ({"rows": -1}, "rows must not be negative"),
        ({"rank": -1}, "rank must not be negative"),
        ({"dy8": 8}, "must be 16-byte aligned"),
        ({"col0": 4}, "col0 must be a multiple of 8, got 4"),
        ({"dtype": "float32"}, "dtype must be 'bfloat16' or 'float16'"),
        ({"a_dtype": "float16"}, "a_dtype must be dtype or 'float32'"),
        ({"format": "e3m4"}, "format must be 'e5m2' or 'e4m3fn', got 'e3m4'"),
        ({"p": 0.1}, "slot must be given where p > 0"),
        ({"rows": 2**30, "cols": 2**30}, "tiles of 128 × 128"),
        ({"tile_cols": 256}, "a tile is 128 × 128, or 192 × 128 splitting"),
        ({"tile_rows": 256}, "a tile is .* got 256 × 128"),
        ({"tile_rows": 192, "splits": False}, "128 × 256 otherwise .* got 192 × 128"),
        ({"tile_rows": 64, "splits": False}, "not transposed; got 64 × 128"),
        (
            {"tile_cols": 256, "splits": False},
            "256 × 128 of a weight that is not transposed; got 128 × 256",
        ),
        ({"cols": 8}, "takes cols a multiple of 16, got cols 8"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_refusals(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        call("fp8_grad_input", {**VALID, **change})
