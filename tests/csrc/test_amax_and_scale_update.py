# SPDX-License-Identifier: Apache-2.0
"""A plain-Python model of the recipe pins the host form, which pins the PyTorch reference and the CUDA kernel."""

from __future__ import annotations

import math

import pytest
import torch

from lorakernels import _C, reference

INF, NAN = float("inf"), float("nan")
FLT_MAX = torch.finfo(torch.float32).max


def update_host(
    state: torch.Tensor, algo: str, margin: int = 0, gate: torch.Tensor | None = None
) -> torch.Tensor:
    out = state.clone()
    _C.amax_and_scale_update_host(
        out.data_ptr(),
        out.shape[1],
        out.shape[0] - 1,
        448.0,
        margin,
        algo,
        *(() if gate is None else (gate.data_ptr(), gate.numel())),
    )
    return out


def model(column: list[float], algo: str, margin: int) -> list[float]:
    """One column [h0 … h(L-1), scale] after the update, as the recipe's text says it."""
    history, scale = column[:-1], column[-1]
    current = history[0]
    if current == 0:
        return column
    seen = [h for h in history[1:] if math.isfinite(h)]
    amax = current if algo == "most_recent" else max([current, *seen])
    if math.isfinite(current) and amax > 0:
        ratio = torch.tensor(448.0 * 2.0**-margin) / torch.tensor(amax)
        scale = min(float(ratio), FLT_MAX)
    rolled = [*history[1:], current]
    rolled[0] = 0.0
    return [*rolled, scale]


HARD = (0.0, 1e-45, 1e-38, 1e-36, 0.3, 1.0, 447.9, 3e38, INF, NAN)


@pytest.mark.parametrize("margin", [0, 2, -1])
@pytest.mark.parametrize("algo", ["max", "most_recent"])
@pytest.mark.parametrize("length", [1, 2, 3, 8])
def test_host_against_the_recipe(length: int, algo: str, margin: int) -> None:
    generator = torch.Generator().manual_seed(length)
    pick = torch.randint(len(HARD), (length + 1, 200), generator=generator)
    state = torch.tensor(HARD)[pick]
    state[-1] = torch.rand(200, generator=generator)
    result = update_host(state, algo, margin)
    expected = torch.tensor([model(c.tolist(), algo, margin) for c in state.t()]).t()
    torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("algo", ["max", "most_recent"])
@pytest.mark.parametrize("gate", [None, [0.0, 0.0], [0.0, 2.0]], ids=["no-gate", "closed", "open"])
def test_reference_equals_the_host(algo: str, gate: list[float] | None) -> None:
    generator = torch.Generator().manual_seed(7)
    state = torch.tensor(HARD)[torch.randint(len(HARD), (18, 300), generator=generator)]
    state[-1] = torch.rand(300, generator=generator)
    gate_tensor = None if gate is None else torch.tensor(gate)
    expected = update_host(state, algo, 1, gate_tensor)
    result = state.clone()
    reference.amax_and_scale_update(result, gate_tensor, 448.0, 1, algo == "most_recent")
    torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)


def test_a_tensor_without_a_new_amax_is_left_alone() -> None:
    state = torch.tensor([[0.0], [5.0], [6.0], [0.25]])
    assert torch.equal(update_host(state, "max"), state)


def test_one_inf_costs_one_update_not_a_history() -> None:
    state = torch.tensor([[INF], [2.0], [4.0], [0.25]])
    state = update_host(state, "max")
    assert state.flatten().tolist() == [0.0, 4.0, INF, 0.25]
    state[0] = 1.0
    assert update_host(state, "max").flatten().tolist() == [0.0, INF, 1.0, 448.0 / 4.0]


def test_an_overflowing_scale_becomes_flt_max() -> None:
    assert update_host(torch.tensor([[1e-38], [0.5]]), "max")[1].item() == FLT_MAX


@pytest.mark.parametrize(
    "gate", [[], [0.0, 0.0], [NAN], [-1.0]], ids=["empty", "zeros", "nan", "negative"]
)
def test_a_closed_gate_changes_nothing(gate: list[float]) -> None:
    state = torch.tensor([[3.0], [1.0], [0.25]])
    closed = torch.tensor([*gate, 0.0])
    assert torch.equal(update_host(state, "max", gate=closed), state)
    assert not torch.equal(update_host(state, "max", gate=torch.tensor([*gate, 1e-30])), state)


def test_errors_name_the_argument_and_change_nothing() -> None:
    state = torch.ones(3, 4)
    args = (state.data_ptr(), 4, 2, 448.0, 0)
    with pytest.raises(
        ValueError, match="amax_compute_algo must be 'max' or 'most_recent', got 'mean'"
    ):
        _C.amax_and_scale_update_host(*args, "mean")
    with pytest.raises(ValueError, match="gate must not overlap state"):
        _C.amax_and_scale_update_host(*args, "max", state.data_ptr() + 4, 1)
    with pytest.raises(ValueError, match="history_len - 1 must not be negative, got -1"):
        _C.amax_and_scale_update_host(state.data_ptr(), 4, 0, 448.0, 0, "max")
    assert torch.equal(state, torch.ones(3, 4))


def test_without_a_device_the_launch_says_which_call_failed() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a device")
    expected = "cuda" if _C.build_info()["cuda"] else "amax_and_scale_update: .* built without CUDA"
    with pytest.raises(RuntimeError, match=expected):
        _C.amax_and_scale_update(0, 4, 2, 448.0, 0, "max")


@pytest.mark.gpu
@pytest.mark.parametrize("algo", ["max", "most_recent"])
@pytest.mark.parametrize("n", [1, 31, 33, 300])
# around the kernel's 128-row tile, plus the default history length
@pytest.mark.parametrize("length", [1, 2, 16, 128, 129, 130, 1024])
def test_kernel_equals_the_host(length: int, n: int, algo: str) -> None:
    generator = torch.Generator().manual_seed(length * n)
    state = torch.tensor(HARD)[torch.randint(len(HARD), (length + 1, n), generator=generator)]
    state[-1] = torch.rand(n, generator=generator)
    stream = torch.cuda.Stream()
    for gate in (None, torch.zeros(700), torch.cat((torch.zeros(1500), torch.ones(1)))):
        device_state = state.cuda()
        device_gate = None if gate is None else gate.cuda()
        stream.wait_stream(torch.cuda.current_stream())
        _C.amax_and_scale_update(
            device_state.data_ptr(),
            n,
            length,
            448.0,
            1,
            algo,
            gate=0 if device_gate is None else device_gate.data_ptr(),
            n_gate=0 if device_gate is None else device_gate.numel(),
            stream=stream.cuda_stream,
            device=0,
        )
        stream.synchronize()
        expected = update_host(state, algo, 1, gate)
        torch.testing.assert_close(device_state.cpu(), expected, rtol=0, atol=0, equal_nan=True)
