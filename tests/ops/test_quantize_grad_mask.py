# SPDX-License-Identifier: Apache-2.0
"""The mask that quantize_grad draws beside: the reference's bits, and the same dy8, ds, dB as without it."""

from __future__ import annotations

import sys
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from lorakernels import _C, ops
from lorakernels.numerics.dropout import dropout_keep, dropped_bits, dropped_words
from lorakernels.ops import hardware
from lorakernels.ops.quantize_grad import by_csrc, hands_mask_over
from lorakernels.values import Dropout, Scaling, SideBySide, Up, Weight

MODULE = sys.modules["lorakernels.ops.quantize_grad"]  # the package has the op under this name
GRAD_A = sys.modules["lorakernels.ops.lora_grad_a"]
BF16, FP16, FP32, E5M2 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e5m2
SITE, ROW0, COL0 = 3, 5, 24
BESIDE = SideBySide([256, 128, 128], [16, 0, 16])
gpu = pytest.mark.gpu


def inputs(m: int, n: int, rank: int, columns: int, device: str, dtype: torch.dtype) -> tuple:
    """dy, up, scaling, fp8_dtype."""
    shapes = (m, n), (n, rank), (m, columns)
    dy, b, s = (torch.randn(shape, device=device).to(dtype) for shape in shapes)
    return dy, Up(b, s, 0.5), Scaling(torch.full((2, 2), 3.0, device=device), 1, True), E5M2


def mask_of(slot: Tensor, p: float) -> Dropout:
    return Dropout(slot, p, SITE, ROW0, COL0)


def check(arguments: tuple, slot: Tensor, p: float, cols: int, side: SideBySide | None) -> None:
    """The bits, and the other results as without a mask."""
    *found, dropped = ops.quantize_grad_and_mask(*arguments, mask_of(slot, p), cols, side)
    assert all(map(torch.equal, found, ops.quantize_grad(*arguments, side)))
    assert torch.equal(dropped & columns_of(dropped, cols), expected(slot, p, len(dropped), cols))


def check_by_csrc(
    arguments: tuple, slot: Tensor, p: float, cols: int, side: SideBySide | None
) -> None:
    taken = ops.quantize_grad_and_mask.takes(*arguments, mask_of(slot, p), cols, side)
    assert taken.name.startswith("csrc")
    with mock.patch.object(MODULE, "drawn_mask", side_effect=AssertionError("not by csrc")):
        check(arguments, slot, p, cols, side)


def columns_of(dropped: Tensor, cols: int) -> Tensor:
    """The bits that stand for a column."""
    keep = torch.zeros(len(dropped), cols, dtype=torch.bool, device=dropped.device)
    return dropped_bits(keep)


def expected(slot: Tensor, p: float, m: int, cols: int) -> Tensor:
    return dropped_bits(dropout_keep(mask_of(slot, p), m, cols))


@pytest.mark.parametrize("p", [0.3, 1e-6], ids=["drawn", "below 16 bits"])
@pytest.mark.parametrize("side", [None, BESIDE], ids=["one", "side by side"])
def test_on_a_cpu(side: SideBySide | None, p: float) -> None:
    arguments = inputs(33, 512, 16, 32 if side else 16, "cpu", BF16)
    check(arguments, torch.tensor([5, 6]), p, 72, side)


@gpu
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("p", [2**-16, 0.1, 0x7C00 / 65536, 0.9])  # the third: no finite fp16
@pytest.mark.parametrize(
    ("m", "n", "cols", "rank"),
    [
        (1, 8, 16, 1),
        (300, 384, 656, 16),  # few rows a block; words that end inside of a warp's 32
        (77, 8192, 128, 33),  # wide strips
        (2100, 520, 8200, 17),  # more to draw than to read: all warps end up drawing
        (4000, 264, 4096, 64),  # where only some draw
    ],
)
def test_bits_are_the_reference_s(
    m: int, n: int, cols: int, rank: int, p: float, dtype: torch.dtype
) -> None:
    arguments = inputs(m, n, rank, rank, "cuda", dtype)
    slot = torch.tensor([0x7EDC_BA98_7654_3210, -1], device="cuda")
    check_by_csrc(arguments, slot, p, cols, None)


@gpu
def test_beside_projections_side_by_side() -> None:
    arguments = inputs(3000, 512, 16, 32, "cuda", BF16)
    slot = torch.tensor([5, 6], device="cuda")
    check_by_csrc(arguments, slot, 0.1, 1024, BESIDE)


@gpu
@pytest.mark.parametrize(
    ("rank", "p", "col0", "n", "by"),
    [
        (65, 0.1, 0, 256, "csrc, mask apart"),
        (16, 0.1, 8, 252, "torch"),
        (16, 1e-6, 0, 256, "csrc, mask apart"),
        (16, 0.1, 4, 256, "csrc, mask apart"),
    ],
    ids=["rank", "N", "p", "col0"],
)
def test_what_is_not_drawn_beside_comes_from_another_kernel(
    rank: int, p: float, col0: int, n: int, by: str
) -> None:
    arguments = inputs(50, n, rank, rank, "cuda", BF16)
    mask = Dropout(torch.tensor([5, 6], device="cuda"), p, SITE, ROW0, col0)
    assert ops.quantize_grad_and_mask.takes(*arguments, mask, 8200).name == by
    *found, dropped = ops.quantize_grad_and_mask(*arguments, mask, 8200)
    assert all(map(torch.equal, found, ops.quantize_grad(*arguments)))
    keep = dropout_keep(mask, 50, 8200)
    assert torch.equal(dropped & columns_of(dropped, 8200), dropped_bits(keep))


@gpu
@pytest.mark.parametrize("rank", [16, 64])
def test_nothing_is_written_beside_the_mask(rank: int) -> None:
    m, cols, guard = 333, 1040, 1024
    arguments = inputs(m, 520, rank, rank, "cuda", BF16)
    slot = torch.tensor([5, 6], device="cuda")
    words = dropped_words(cols)
    room = torch.full((m * words + 2 * guard,), 0x5A5A5A5A, dtype=torch.int32, device="cuda")
    bits = room[guard:-guard].view(m, words)
    by_csrc(*arguments, mask=mask_of(slot, 0.1)._replace(dropped=bits), cols=cols)
    assert torch.equal(bits & columns_of(bits, cols), expected(slot, 0.1, m, cols))
    assert bool((room[:guard] == 0x5A5A5A5A).all() and (room[-guard:] == 0x5A5A5A5A).all())


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
    monkeypatch.setattr(MODULE, "why_not_csrc_kernel", lambda *_: None)
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
        assert not asked(ranks=129) and not asked(col0=4)
        assert asked(ranks=64, side=SideBySide([8, n - 8], [64, 64])) == hands
        assert not asked(ranks=64, side=SideBySide([8, 8, n - 16], [64, 64, 64]))
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
        assert asked(), "a trace does not ask for kernels"
        assert not asked(p=0.0) and not asked(ranks=129) and not asked(scale_inv=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": 65}, "a rank of 1 to 64"),
        ({"threshold": 0}, "a threshold above 0"),
        ({"first_col": 4}, "first_col a multiple of 8"),
        ({"dropped": 8}, "16-byte aligned"),
    ],
    ids=["rank", "threshold", "first_col", "address"],
)
def test_the_binding_refuses(change: dict[str, int], message: str) -> None:
    names = (
        "dy8",
        "scale_inv",
        "amax",
        "ds",
        "dB",
        "workspace",
        "dy",
        "B",
        "s",
        "kept",
        "partials",
    )
    arguments = dict.fromkeys(names, 16) | {"rows": 4, "cols": 8, "rank": 16, "scaling": 1.0}
    arguments |= {"dtype": "bfloat16", "b_dtype": "bfloat16", "format": "e5m2", "fp8_max": 57344.0}
    arguments |= {"dropped": 16, "dropped_cols": 8, "slot": 16, "site": 0, "threshold": 5}
    arguments |= {"first_row": 0, "first_col": 0, "stream": 0, "device": 0} | change
    with pytest.raises(ValueError, match=message):
        _C.quantize_grad(**arguments)
