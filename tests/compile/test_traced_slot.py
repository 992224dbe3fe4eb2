# SPDX-License-Identifier: Apache-2.0
"""Slots that a trace draws by an op of ours: eager's, one for each call, and in memory that CUDA graphs can keep."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
import torch._inductor.config
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lorakernels import LoRAConfig, LoRALinear
from lorakernels.state.philox import random_slot

INDUCTOR = pytest.param("inductor", marks=pytest.mark.slow)
LAYER_SLOT = torch.ops.lorakernels.layer_slot.default


@pytest.fixture(autouse=True)
def compiled_anew() -> Iterator[None]:
    """No graph of an earlier run, which was made before a change."""
    torch._dynamo.reset()
    with torch._inductor.config.patch(force_disable_caches=True):
        yield


def layer() -> LoRALinear:
    made = LoRALinear(24, 10, False, LoRAConfig(r=3, lora_dropout=0.5))
    torch.nn.init.normal_(made.lora_B)
    return made


def test_opcheck() -> None:
    torch.library.opcheck(
        LAYER_SLOT,
        (torch.ones(1, dtype=torch.int64),),
        test_utils=("test_schema", "test_faketensor"),
    )


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "aot_eager_decomp_partition", INDUCTOR])
def test_two_calls_of_a_layer_in_one_trace_draw_two_masks_which_are_eager_s(backend: str) -> None:
    """Two equal calls of an op are one in a graph, unless the op is known to draw."""
    module, x = layer(), torch.randn(7, 24)
    twin = copy.deepcopy(module)

    def twice(x: Tensor) -> tuple[Tensor, Tensor]:
        return module(x), module(x)

    torch.manual_seed(3)
    first, second = torch.compile(twice, backend=backend, fullgraph=True)(x)
    assert not torch.equal(first, second)
    (first.sum() + second.sum()).backward()
    torch.manual_seed(3)
    expected = twin(x), twin(x)
    assert torch.equal(first, expected[0]) and torch.equal(second, expected[1])


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager_decomp_partition", INDUCTOR])
def test_a_recomputation_inside_the_trace_draws_its_forward_s_mask(backend: str) -> None:
    module, x = layer(), torch.randn(7, 24, requires_grad=True)

    def checkpointed(x: Tensor) -> Tensor:
        return checkpoint(module, x.sin(), use_reentrant=False)  # type: ignore[no-any-return]

    torch.manual_seed(3)
    found = torch.compile(checkpointed, backend=backend, fullgraph=True)(x)
    found.square().sum().backward()
    grads = x.grad, module.lora_A.grad
    module.zero_grad()
    other = x.detach().clone().requires_grad_()
    module.fp8_state.reset()  # type: ignore[union-attr]
    torch.manual_seed(3)
    module(other.sin()).square().sum().backward()
    for ours, theirs in zip(grads, (other.grad, module.lora_A.grad), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)  # sin of Inductor's own


@pytest.mark.gpu
def test_on_a_gpu_a_slot_is_what_torch_would_draw_on_every_stream() -> None:
    """On a stream that is not the default one it lies in memory of its own, which a graph's pool may hold."""
    handle = torch.ones(1, dtype=torch.int64, device="cuda")
    for stream in (torch.cuda.default_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream), torch.no_grad():
            torch.manual_seed(4)
            found = [LAYER_SLOT(handle) for _ in range(3)]
            torch.manual_seed(4)
            expected = [random_slot(handle.device) for _ in range(3)]
            assert all(map(torch.equal, found, expected))
            own = [t.untyped_storage().nbytes() == 16 for t in found]
            assert own == [stream != torch.cuda.default_stream()] * 3
