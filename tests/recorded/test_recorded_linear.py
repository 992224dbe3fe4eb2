# SPDX-License-Identifier: Apache-2.0
"""A linear layer by its recording launches what its ops launch."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import lorakernels
from lorakernels import (
    _C,
    BlockScaling,
    DelayedScaling,
    LoRAConfig,
    LoRALinear,
    apply_lora,
    batch_adapters,
)
from lorakernels.recorded.node import RECORDINGS
from lorakernels.recorded.routing import without_recordings
from tests.dry_cuda import dry_cuda
from tests.recorded.recorded_layers import (
    BACKWARD_BY_OPS,
    BF16,
    LAYERS,
    K,
    M,
    N,
    has_backward,
    input_of,
    launches,
    layer,
    name_tensors,
    outcome,
    step,
)


@pytest.mark.parametrize("needs_dx", [True, False], ids=["dx", "no dx"])
@pytest.mark.parametrize("name", LAYERS)
def test_a_recording_launches_what_the_ops_launch(name: str, needs_dx: bool) -> None:
    torch.manual_seed(0)
    module = LAYERS[name]()
    x = input_of(module, needs_dx)
    with dry_cuda() as recorded:
        name_tensors(recorded, module, x)
        with without_recordings():
            step(module, x)
        by_ops = launches(recorded.calls)
        assert not recorded.runs
        for _ in range(2):  # the second by the recording of the first
            recorded.calls.clear()
            step(module, x)
            assert launches(recorded.calls) == by_ops
            assert len(RECORDINGS) == 1
        directions = 1 if name in BACKWARD_BY_OPS or not has_backward(module, x) else 2
        assert recorded.runs == 2 * directions


@pytest.mark.parametrize("name", LAYERS)
def test_the_ops_take_what_a_recorded_forward_kept(name: str) -> None:
    """A profiler may begin between forward and backward."""
    module = LAYERS[name]()
    x = input_of(module)
    with dry_cuda() as recorded:
        name_tensors(recorded, module, x)
        with without_recordings():
            step(module, x)
        by_ops = launches(recorded.calls)
        recorded.calls.clear()
        y = module(x)
        with without_recordings():
            y.backward(torch.ones_like(y))
        assert launches(recorded.calls) == by_ops
        assert recorded.runs == 1


def test_the_report_says_what_was_recorded_and_why_the_rest_was_not() -> None:
    model = nn.ModuleDict({name: nn.Linear(K, N, dtype=BF16) for name in ("a", "b", "c", "d")})
    config = LoRAConfig(r=16, rank_pattern={"b": 12}, target_modules=["a", "b", "c", "d"])
    report, x = apply_lora(model, config), torch.randn(M, K, dtype=BF16)
    assert report.eager_forwards == "none yet"
    with dry_cuda():
        for name in "ab":
            model[name](x)
        with torch.autograd.graph.save_on_cpu():
            model["c"](x)
        found = "1 recorded, 1 by the ops (no recording holds torch.pad), 1 by the ops (on a CPU, or watched by a mode"
        assert report.eager_forwards.startswith(found)
        assert str(report).splitlines()[1].endswith(f" CUDA graphs: {report.eager_forwards}")
        model["b"].scaling = 3.0  # not called since
        assert report.eager_forwards.startswith("1 recorded, 1 by the ops (on a CPU")


def test_blocks_that_csrc_does_not_take_say_why_they_have_no_recording() -> None:
    model = nn.ModuleDict({"a": nn.Linear(K, N, dtype=BF16), "b": nn.Linear(K, N + 8, dtype=BF16)})
    report = apply_lora(model, LoRAConfig(r=16, target_modules=["a", "b"], fp8=BlockScaling()))
    x = torch.randn(M, K, dtype=BF16, requires_grad=True)
    with dry_cuda() as recorded:
        step(model["a"], x)
        assert recorded.runs == 2
        step(model["b"], x)
        assert recorded.runs == 2
        assert report.eager_forwards.startswith("1 recorded, 1 by the ops (no recording holds ")


def test_named_rows_share_a_recording_for_evaluation_and_train_by_the_ops() -> None:
    """`AdapterBatch.rows` gathers A and B anew for each call, and has hooks of saved tensors where there is a graph."""
    module = layer(lora_dropout=0.0)
    batch = batch_adapters(nn.ModuleDict({"only": module}), ["fr", "de", "it"])
    x = torch.randn(2, 128, K, dtype=BF16)
    with dry_cuda() as recorded:
        name_tensors(recorded, module, x)
        for named in (["de", "fr"], ["it", "__base__"]):
            with torch.no_grad(), batch.rows(named):
                recorded.calls.clear()
                with without_recordings():
                    module(x)
                by_ops = launches(recorded.calls)
                recorded.calls.clear()
                module(x)
                assert by_ops and launches(recorded.calls) == by_ops
        assert recorded.runs == 2 and len(RECORDINGS) == 1
        with batch.rows(["de", "fr"]):
            step(module, x)
        assert recorded.runs == 2


def test_adapters_in_one_batch_over_blocks_say_why_they_have_no_recording() -> None:
    model = nn.ModuleDict({"a": nn.Linear(K, N, dtype=BF16)})
    config = LoRAConfig(r=16, target_modules=["a"], fp8=BlockScaling())
    report = apply_lora(model, config)
    batch_adapters(model, ["fr", "de"])
    with dry_cuda() as recorded:
        step(model["a"], torch.randn(2, 128, K, dtype=BF16, requires_grad=True))
        assert recorded.calls and not recorded.runs
        assert report.eager_forwards == "1 by the ops (no recording holds Tensor.to)"


def test_a_mask_that_csrc_draws_for_torch_has_no_recording() -> None:
    """The rest of `quantize_lora_down` in fp32 is torch's. A launch list cannot hold a real tensor's address."""
    model = nn.ModuleDict({"a": nn.Linear(K, N)})
    config = LoRAConfig(r=16, lora_dropout=0.1, target_modules=["a"], fp8=BlockScaling())
    report = apply_lora(model, config)
    with dry_cuda():
        step(model["a"], torch.randn(M, K, requires_grad=True))
        assert report.eager_forwards == "1 by the ops (no recording holds torch.where)"


def test_two_layers_in_blocks_share_a_recording_and_recipes_do_not() -> None:
    x = torch.randn(M, K, dtype=BF16, requires_grad=True)
    recipes = (BlockScaling(), BlockScaling(), BlockScaling("HYBRID"), DelayedScaling())
    layers = [layer(fp8=recipe) for recipe in recipes]
    with dry_cuda() as recorded:
        for module, count in zip(layers, (1, 1, 2, 3), strict=True):
            module.site = count + 7
            recorded.calls.clear()
            step(module, x)
            sites = {c.arguments["site"] for c in recorded.calls if c.arguments.get("slot")}
            assert len(RECORDINGS) == count and sites == {count + 7}


def test_one_node_takes_x_of_three_dimensions() -> None:
    module, x = layer(), torch.randn(2, M // 2, K, dtype=BF16, requires_grad=True)
    with dry_cuda():
        y = module(x)
    assert y.shape == (2, M // 2, N) and not y._is_view()
    assert y.grad_fn is not None and type(y.grad_fn).__name__ == "ReplayNodeBackward"
    variables = [getattr(node, "variable", None) for node, _ in y.grad_fn.next_functions]
    assert variables[0] is x


def test_with_hooks_of_saved_tensors_the_ops_run() -> None:
    """A hook may keep a tensor with other strides, or on the CPU."""
    module, x = layer(), torch.randn(M, K, dtype=BF16, requires_grad=True)
    with dry_cuda() as recorded, torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        step(module, x)
        assert recorded.calls and not recorded.runs


def test_gradients_with_many_kinds_of_gaps_run_by_one_recording() -> None:
    module, x = layer(), torch.randn(M, K, dtype=BF16, requires_grad=True)
    with dry_cuda() as recorded:
        for more in range(12):
            y = module(x)
            y.backward(torch.ones(M, N + more, dtype=BF16)[:, :N])
        assert recorded.runs == 2 * 12
        (node,) = RECORDINGS.values()
        assert len(node._backwards) <= 8


def test_scratch_lies_in_a_result_that_is_written_later() -> None:
    """A forward asks for y and what it keeps, a backward for three gradients and its scratch."""
    module, x = layer(), torch.randn(M, K, dtype=BF16, requires_grad=True)
    with dry_cuda():
        step(module, x)
        (node,) = RECORDINGS.values()
        (backward,) = node._backwards.values()
    assert len(node.forward.allocations) == 2 and len(backward.allocations) == 4


@pytest.mark.gpu
@pytest.mark.parametrize("needs_dx", [True, False], ids=["dx", "no dx"])
@pytest.mark.parametrize("name", LAYERS)
def test_a_recording_computes_what_the_ops_compute(name: str, needs_dx: bool) -> None:
    torch.manual_seed(0)
    module = LAYERS[name]().to("cuda")
    x = input_of(module, needs_dx, "cuda")
    state = module.fp8_state
    before = None if state is None else state.save()
    with without_recordings():
        by_ops = outcome(module, x)
    after = None if state is None else state.save()
    if state is not None:
        state.restore(before)
    by_recording = outcome(module, x)
    assert len(by_recording) == len(by_ops)
    assert all(map(torch.equal, by_recording, by_ops))
    if state is not None:
        assert torch.equal(state.forward, after.forward)
        assert torch.equal(state.backward, after.backward)


@pytest.mark.gpu
def test_an_address_of_another_shape_stream_and_weight() -> None:
    """csrc remembers tensor maps by address and sizes."""
    memory, side = torch.randn(2 * M * K, dtype=BF16, device="cuda"), torch.cuda.Stream()
    made = [nn.Linear(k, N, bias=False, dtype=BF16, device="cuda") for k in (K, 2 * K, K)]
    layers = [LoRALinear.from_linear(base, LoRAConfig(r=16)).eval() for base in made]
    for module in (*layers, *layers):
        x = memory.view(-1, module.in_features)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            found = module(x)
        torch.cuda.synchronize()
        assert torch.equal(found, module(x.clone()))
    x = memory.view(-1, K)
    layers[0].load_state_dict(layers[2].state_dict(), assign=True)
    assert torch.equal(layers[0](x), layers[2](x))


@pytest.mark.gpu
def test_recordings_in_a_captured_graph() -> None:
    torch.manual_seed(0)
    module = layer(lora_dropout=0.0).to("cuda").eval()
    given = torch.randn(M, K, dtype=BF16, device="cuda")

    def run() -> list[Tensor]:
        x = given.detach().requires_grad_()
        y = module(x)
        return [y, *torch.autograd.grad(y, (x, module.lora_A, module.lora_B), torch.ones_like(y))]

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        expected = [t.detach().clone() for t in run()]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [t.detach() for t in run()]
    for tensor in captured:
        tensor.zero_()
    graph.replay()
    assert all(map(torch.equal, captured, expected))


@pytest.mark.parametrize("op", ["quantize_lora_down", "fp8_linear_lora"])
def test_x_passes_the_files_that_the_architecture_page_names(op: str) -> None:
    """Those on the stack when csrc is called, without what stands between an op's name and its implementation."""
    home = Path(lorakernels.__file__).parent
    page = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text()
    named = page.split("## The way of x")[1].split("In `csrc")[0]
    passed: list[str] = []

    def launch(*arguments: Any) -> None:
        files = [Path(frame.filename) for frame in traceback.extract_stack()]
        inside = [f.relative_to(home).as_posix() for f in files if f.is_relative_to(home)]
        passed.extend(dict.fromkeys(f for f in inside if f != "ops/register.py"))

    module, x = layer(), torch.randn(M, K, dtype=BF16)
    with dry_cuda(), without_recordings(), mock.patch.object(_C, op, launch):
        module(x)
    assert len(passed) == 6 and all(f"`{file}`" in named for file in passed), passed
