# SPDX-License-Identifier: Apache-2.0
"""What the fixture in conftest.py does to new memory, in every test."""

from __future__ import annotations

import pytest
import torch

from tests.poison import AVAILABLE


@pytest.fixture(autouse=True)
def _with_poison(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("unpoisoned") or not AVAILABLE:
        pytest.skip("memory is left as it is: --unpoisoned, or torch 2.8")


DTYPES = (
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8, torch.int32, torch.int64),
)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_new_memory_is_poisoned(dtype: torch.dtype, device: torch.device) -> None:
    ones = torch.ones(7, 3, device=device, dtype=torch.float32)
    for new in (
        torch.empty(7, 3, dtype=dtype, device=device),
        torch.empty_like(ones, dtype=dtype),
        ones.new_empty(7, 3, dtype=dtype),
        torch.empty_strided((7, 3), (1, 7), dtype=dtype, device=device),
    ):
        assert new.device.type == device.type and new.dtype == dtype
        if dtype.is_floating_point:
            assert new.float().isnan().all()
        else:
            assert (new == (255 if dtype == torch.uint8 else -1)).all()


@pytest.mark.gpu
def test_what_recorded_calls_allocate_is_poisoned() -> None:
    new = torch._C._dynamo.guards._empty_strided_cuda((7, 3), (3, 1), torch.bfloat16)
    assert new.isnan().all()


def test_an_element_that_nobody_writes_shows(device: torch.device) -> None:
    out = torch.empty(5, 64, device=device)
    out[:, :63] = 1.0
    assert out.isnan().nonzero().tolist() == [[row, 63] for row in range(5)]


def test_autograd_and_tracing_do_not_see_the_fill() -> None:
    new = torch.empty(3, requires_grad=True)
    assert new.is_leaf and new._version == 0
    assert torch.empty(3, device="meta").is_meta

    def filled(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x).copy_(x)

    traced = torch.fx.experimental.proxy_tensor.make_fx(filled)(torch.ones(3))
    called = [str(node.target) for node in traced.graph.nodes if node.op == "call_function"]
    assert called == ["aten.empty_like.default", "aten.copy_.default"]
