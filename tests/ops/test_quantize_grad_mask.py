# SPDX-License-Identifier: Apache-2.0
"""When quantize_grad draws the mask beside, and hands it over; tests/ops/cases/quantize_grad.py has the bits."""

from __future__ import annotations

import sys
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lorakernels import ops
from lorakernels.ops import hardware
from lorakernels.ops.quantize_grad import hands_mask_over
from lorakernels.values import Dropout, SideBySide, Up, Weight
from tests.dry_cuda import dry_cuda
from tests.kernels.bindings import call, names_of
from tests.ops.cases import CONTRACTS

MODULE = sys.modules["lorakernels.ops.quantize_grad"]  # the package has the op under this name
GRAD_A = sys.modules["lorakernels.ops.lora_grad_a"]
BF16 = torch.bfloat16
SITE = 3


@pytest.mark.parametrize(
    ("case", "by"),
    [
        ("fp8", "csrc"),
        ("side by side", "csrc"),
        ("rank", "csrc, mask apart"),
        ("p", "csrc, mask apart"),
        ("col0", "csrc, mask apart"),
        ("base only", "csrc, mask apart"),
        ("several", "csrc, triton"),
        ("N % 8", "torch"),
    ],
)
def test_what_is_not_drawn_beside_comes_from_another_kernel(case: str, by: str) -> None:
    arguments = CONTRACTS["quantize_grad"].cases[f"mask, {case}"].arguments("cpu")
    with dry_cuda():
        assert ops.quantize_grad.takes(*arguments).name == by


@pytest.mark.parametrize(
    ("n", "k", "archs", "hands"),
    [(32, 64, "90a", True), (32, 72, "90a", False), (40, 64, "90a", False), (32, 64, "90", False)],
    ids=["all are kernels", "K", "N", "no wgmma"],
)
def test_a_mask_is_handed_over_only_to_kernels_that_read_it(
    n: int, k: int, archs: str, hands: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elsewhere it would be drawn, packed and thrown away."""
    built = mock.Mock(build_info=lambda: {"cuda_archs": archs})
    for module in (hardware, GRAD_A):
        monkeypatch.setattr(module, "why_not_csrc", lambda _: None)
    monkeypatch.setattr(hardware, "extension", lambda: built)
    monkeypatch.setattr(MODULE, "why_not_csrc_operands", lambda *_: None)
    monkeypatch.setattr(MODULE, "capability_of", lambda _: (9, 0))

    def asked(
        p: float = 0.1,
        ranks: int = 4,
        dtype: torch.dtype = BF16,
        col0: int = 0,
        scale_inv: bool = True,
        side: SideBySide | None = None,
    ) -> bool:
        dy = torch.empty(8, n, device="cuda", dtype=dtype)
        up = Up(torch.empty(n, ranks, device="cuda"), None, 1.0)
        slot = torch.empty(2, dtype=torch.int64, device="cuda")
        data = torch.empty(n, k, dtype=torch.uint8, device="cuda")
        weight = Weight(data, torch.empty(1, device="cuda") if scale_inv else None)
        assert not hands_mask_over(dy, up, None, weight, side)
        return hands_mask_over(dy, up, Dropout(slot, p, SITE, 0, col0), weight, side)

    with FakeTensorMode():
        assert asked() == hands
        assert not asked(p=0.0) and not asked(dtype=torch.float32) and not asked(scale_inv=False)
        assert not asked(ranks=257) and not asked(col0=4)
        assert asked(ranks=64, side=SideBySide([8, n - 8], [64, 64])) == hands
        assert asked(ranks=64, side=SideBySide([8, 8, n - 16], [64, 64, 64])) == hands
        assert not asked(ranks=64, side=SideBySide([4, 4, 8, 8, n - 24], [64] * 5))
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
        assert asked(), "a trace does not ask for kernels"
        assert not asked(p=0.0) and not asked(ranks=257) and not asked(scale_inv=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": 65}, "a rank of 1 to 64"),
        ({"p": 0.0}, "a p above 0"),
        ({"col0": 4}, "col0 a multiple of 8"),
        ({"dropped": 8}, "16-byte aligned"),
    ],
    ids=["rank", "p", "col0", "address"],
)
def test_the_binding_refuses(change: dict[str, int], message: str) -> None:
    arguments = dict.fromkeys(names_of("quantize_grad"), 16)
    arguments |= {"rows": 4, "cols": 8, "rank": 16, "scaling": 1.0, "projections": ()}
    arguments |= {"dtype": "bfloat16", "b_dtype": "bfloat16", "format": "e5m2", "fp8_max": 57344.0}
    arguments["power_of_two"] = None
    arguments |= {"dropped": 16, "dropped_cols": 8, "slot": 16, "site": 0, "p": 0.1}
    arguments |= {"row0": 0, "col0": 0, "chunks": (), "stream": 0, "device": 0} | change
    with pytest.raises(ValueError, match=message):
        call("quantize_grad", arguments)
