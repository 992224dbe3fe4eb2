# SPDX-License-Identifier: Apache-2.0
"""A plain-Python model of the recipe pins the host form, which pins the PyTorch reference and the CUDA kernel."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lorakernels import _C, ops

INF, NAN = float("inf"), float("nan")
FLT_MAX = torch.finfo(torch.float32).max
MAXIMA = (448.0, 57344.0)
HARD = (0.0, 1e-45, 1e-38, 1e-36, 0.3, 1.0, 447.9, 3e38, INF, NAN)


def states(length: int, n: int) -> list[Tensor]:
    """Both directions, hard amaxes everywhere and scales that no update makes."""
    generator = torch.Generator().manual_seed(length * n)
    made = []
    for _ in range(2):
        pick = torch.randint(len(HARD), (length + 1, n), generator=generator)
        made.append(torch.tensor(HARD)[pick])
        made[-1][-1] = torch.rand(n, generator=generator)
    return made


def hard_row(n: int) -> Tensor:
    return torch.tensor(HARD)[torch.arange(2 * n).mul(7) % len(HARD)]


def currents(backward: Tensor) -> dict[str, tuple[Tensor | None, bool]]:
    """(current, gated) by name."""
    n = backward.shape[1]
    closed, opened, spoiled = (torch.ones(2 * n) for _ in range(3))
    for row in (closed, opened, spoiled):
        row[n:] = 0.0
    opened[-1], spoiled[-1] = 1e-45, NAN
    return {
        "row 0": (None, False),
        "row 0, gated": (None, True),
        "given": (hard_row(n), False),
        "given, gate closed": (closed, True),
        "given, gate open": (opened, True),
        "given, gate opened by a NaN": (spoiled, True),
    }


WAYS = list(currents(torch.empty(2, 1)))


def update_host(
    forward: Tensor,
    backward: Tensor,
    algo: str = "max",
    margin: int = 0,
    current: Tensor | None = None,
    gated: bool = False,
) -> tuple[Tensor, Tensor]:
    out = forward.clone(), backward.clone()
    states = (*out, current, forward.shape[1], forward.shape[0] - 1)
    _C.amax_and_scale_update_host(states, (*MAXIMA, margin, algo), gated)
    return out


def update_one(forward: list[float], algo: str = "max") -> list[float]:
    """One column of `forward` after the update."""
    column = torch.tensor(forward).view(-1, 1)
    return update_host(column, torch.zeros_like(column), algo)[0].flatten().tolist()


def model(
    column: list[float], current: float, fp8_max: float, algo: str, margin: int
) -> list[float]:
    """One column [h0 … h(L-1), scale] after the update, as the recipe's text says it."""
    history, scale = column[:-1], column[-1]
    if current == 0:
        return column
    seen = [h for h in history[1:] if math.isfinite(h)]
    amax = current if algo == "most_recent" else max([current, *seen])
    if math.isfinite(current) and amax > 0:
        ratio = torch.tensor(fp8_max * 2.0**-margin) / torch.tensor(amax)
        scale = min(float(ratio), FLT_MAX)
    rolled = [*history[1:], current]
    rolled[0] = 0.0
    return [*rolled, scale]


def same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("way", ["row 0", "given"])
@pytest.mark.parametrize("margin", [0, 2, -1])
@pytest.mark.parametrize("algo", ["max", "most_recent"])
@pytest.mark.parametrize("length", [1, 2, 3, 8])
def test_host_against_the_recipe(length: int, algo: str, margin: int, way: str) -> None:
    before = states(length, 200)
    current, gated = currents(before[1])[way]
    found = update_host(*before, algo, margin, current, gated)
    rows = torch.cat((before[0][0], before[1][0])) if current is None else current
    for i, fp8_max in enumerate(MAXIMA):
        columns = zip(before[i].t().tolist(), rows.view(2, -1)[i].tolist(), strict=True)
        expected = [model(column, now, fp8_max, algo, margin) for column, now in columns]
        same(found[i], torch.tensor(expected).t())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("algo", ["max", "most_recent"])
@pytest.mark.parametrize("length", [1, 17])
def test_reference_equals_the_host(length: int, algo: str, way: str) -> None:
    before = states(length, 300)
    current, gated = currents(before[1])[way]
    expected = update_host(*before, algo, 1, current, gated)
    found = [state.clone() for state in before]
    most_recent = algo == "most_recent"
    ops.amax_and_scale_update.by_reference(*found, current, gated, *MAXIMA, 1, most_recent)
    for ours, truth in zip(found, expected, strict=True):
        same(ours, truth)


def test_a_tensor_without_a_new_amax_is_left_alone() -> None:
    assert update_one([0.0, 5.0, 6.0, 0.25]) == [0.0, 5.0, 6.0, 0.25]


@pytest.mark.parametrize("odd", [INF, NAN], ids=str)
def test_one_odd_amax_costs_one_update_not_a_history(odd: float) -> None:
    column = update_one([odd, 2.0, 4.0, 0.25])
    assert column[:2] == [0.0, 4.0] and column[3] == 0.25, "the scale is kept"
    assert math.isinf(column[2]) == math.isinf(odd) and math.isnan(column[2]) == math.isnan(odd)
    column[0] = 1.0
    assert update_one(column)[2:] == [1.0, 448.0 / 4.0]


def test_an_overflowing_scale_becomes_flt_max() -> None:
    assert update_one([1e-38, 0.5])[1] == FLT_MAX


def gate_cases() -> list[tuple[str, list[float], bool]]:
    return [
        ("zeros", [0.0, 0.0], False),
        ("negative", [-1.0, 0.0], False),
        ("tiny", [0.0, 1e-45], True),
        ("inf", [INF, 0.0], True),
        ("nan", [0.0, NAN], True),
    ]


@pytest.mark.parametrize(("amaxes", "opens"), [c[1:] for c in gate_cases()], ids=lambda v: str(v))
@pytest.mark.parametrize("given", [False, True], ids=["row 0", "given"])
def test_backward_gates_both_directions(amaxes: list[float], opens: bool, given: bool) -> None:
    forward, backward = torch.full((3, 2), 3.0), torch.full((3, 2), 5.0)
    backward[0] = torch.zeros(2) if given else torch.tensor(amaxes)
    current = torch.tensor([3.0, 3.0, *amaxes]) if given else None
    found = update_host(forward, backward, current=current, gated=True)
    assert torch.equal(found[0], forward) is not opens
    assert torch.equal(found[1], backward) is not opens


def test_errors_name_the_argument_and_change_nothing() -> None:
    forward, backward, current = torch.ones(3, 4), torch.ones(3, 4), torch.ones(8)
    f, b, c = (t.data_ptr() for t in (forward, backward, current))

    def update(*states: int, algo: str = "max") -> None:
        _C.amax_and_scale_update_host(states, (*MAXIMA, 0, algo), False)

    with pytest.raises(
        ValueError, match="amax_compute_algo must be 'max' or 'most_recent', got 'mean'"
    ):
        update(f, b, c, 4, 2, algo="mean")
    with pytest.raises(ValueError, match="current must not overlap forward"):
        update(f, b, f + 4, 4, 2)
    with pytest.raises(ValueError, match="current must not overlap backward"):
        update(f, b, b - 4, 4, 2)
    with pytest.raises(ValueError, match="forward must not overlap backward"):
        update(f, f + 4, c, 4, 2)
    with pytest.raises(ValueError, match="history_len - 1 must not be negative, got -1"):
        update(f, b, c, 4, 0)
    with pytest.raises(ValueError, match="gated needs current"):
        _C.amax_and_scale_update((f, b, None, 4, 2), (*MAXIMA, 0, "max"), True, (0, -1))
    for tensor in (forward, backward, current):
        assert torch.equal(tensor, torch.ones_like(tensor))


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda f, b, c: (f[:1], b, c), r"forward must be float32 .* found torch.float32 \(1, 4\)"),
        (lambda f, b, c: (f, b.double(), c), "backward must be float32 .* found torch.float64"),
        (lambda f, b, c: (f, b[:2], c), r"one shape, found \(3, 4\) and \(2, 4\)"),
        (
            lambda f, b, c: (f, b, c[:4]),
            r"current must be float32 \(8,\), .* found torch.float32 \(4,\)",
        ),
        (lambda f, b, c: (f, b, c.int()), "current must be float32 .* found torch.int32"),
        (lambda f, b, c: (f, b.t().contiguous().t(), c), r"backward must be contiguous.*\(1, 3\)"),
        (lambda f, b, c: (f, b, c.to("meta")), "current is on meta, forward on"),
    ],
    ids=["no history", "dtype", "lengths", "short row", "row dtype", "strides", "device"],
)
def test_what_does_not_fit_is_named(make, expected, device) -> None:  # type: ignore[no-untyped-def]
    tensors = [torch.ones(s, device=device) for s in ((3, 4), (3, 4), 8)]
    arguments = make(*tensors)
    op = ops.amax_and_scale_update
    update = op.by_reference if "meta" in expected else op
    with pytest.raises(ValueError, match=expected):
        update(*arguments, False, *MAXIMA, 0, False)
    assert all((t == 1).all() for t in tensors)


def test_without_a_device_the_launch_says_which_call_failed() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a device")
    expected = "cuda" if _C.build_info()["cuda"] else "amax_and_scale_update: .* built without CUDA"
    with pytest.raises(RuntimeError, match=expected):
        _C.amax_and_scale_update((0, 1 << 12, 0, 4, 2), (*MAXIMA, 0, "max"), False, (0, -1))


@pytest.mark.gpu
@pytest.mark.parametrize("algo", ["max", "most_recent"])
@pytest.mark.parametrize(
    "n", [1, 31, 33, 300, 1500]
)  # below and above a block's 32 columns and 1024 threads
# around the kernel's 512-row tile, plus the default history length
@pytest.mark.parametrize("length", [1, 2, 16, 512, 513, 514, 1024])
def test_kernel_equals_the_host(length: int, n: int, algo: str) -> None:
    before = states(length, n)
    stream = torch.cuda.Stream()
    for way, (current, gated) in currents(before[1]).items():
        if gated and current is None:  # the op takes a copy of the row for the kernel
            continue
        found = [state.cuda() for state in before]
        row = None if current is None else current.cuda()
        stream.wait_stream(torch.cuda.current_stream())
        _C.amax_and_scale_update(
            (*found, row, n, length), (*MAXIMA, 1, algo), gated, (stream.cuda_stream, 0)
        )
        stream.synchronize()
        expected = update_host(*before, algo, 1, current, gated)
        for ours, truth in zip(found, expected, strict=True):
            torch.testing.assert_close(ours.cpu(), truth, rtol=0, atol=0, equal_nan=True, msg=way)


@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS)
def test_op_on_the_gpu_equals_the_host(way: str) -> None:
    """n of many blocks: a row 0 that one block rolls while another still asks it for the gate would show."""
    before = states(31, 6000)
    before[1][0] = 0.0
    before[1][0, -1] = 2.0
    current, gated = currents(before[1])[way]
    found = [state.cuda() for state in before]
    row = None if current is None else current.cuda()
    ops.amax_and_scale_update(*found, row, gated, *MAXIMA, 0, False)
    expected = update_host(*before, "max", 0, current, gated)
    for ours, truth in zip(found, expected, strict=True):
        same(ours.cpu(), truth)
