# SPDX-License-Identifier: Apache-2.0
"""`dry_cuda` runs the CUDA paths, two runs record the same, and what goes wrong in a launcher is seen."""

from __future__ import annotations

import sys
from typing import NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor

from lorakernels import _C, DelayedScaling, FP8State, LoRAConfig, LoRALinear, device
from lorakernels.recorded.routing import without_recordings
from lorakernels.values import RankSizes, Scale, Sizes, Where
from tests.dry_cuda import CAPABILITY, STREAM, dry_cuda
from tests.fusion.fused_models import LINEARS, adapted, fused_copy, run, tokens
from tests.kernels.bindings import composed, flat
from tests.recorded_calls import Call, Recorded, differences

OPS = torch.ops.lorakernels


def layer(p: float = 0.1) -> LoRALinear:
    config = LoRAConfig(r=8, lora_dropout=p, fp8=DelayedScaling(amax_history_len=4))
    found = LoRALinear(64, 48, True, config, "cpu", torch.bfloat16, adapter_dtype=torch.float32)
    torch.nn.init.normal_(found.lora_B)
    return found


def forward_and_backward(linear: LoRALinear, x: Tensor) -> Recorded:
    torch.manual_seed(0)
    linear.zero_grad()
    x.grad = None
    with dry_cuda() as recorded:
        recorded.name(x=x, **dict(linear.named_parameters()))
        linear(x).sum().backward()
    return recorded


def names(calls: list[Call]) -> list[str]:
    return [call.name for call in calls]


def test_a_layer_launches_what_it_would_on_hopper() -> None:
    linear, x = layer(), torch.randn(16, 64, dtype=torch.bfloat16, requires_grad=True)
    calls = forward_and_backward(linear, x).calls
    assert names(calls) == [
        *("amax_and_scale_update", "quantize_lora_down", "fp8_linear_lora"),
        *("quantize_grad", "lora_grad_a", "fp8_grad_input"),
    ]
    _, down, _, grad, grad_a, dx = (call.arguments for call in calls)
    assert down["x"].startswith("x+0 =") and down["lora_A"].startswith("lora_A+0 =")
    assert (down["rows"], down["cols"], down["rank"], down["stream"]) == (16, 64, 8, STREAM)
    assert grad["ds"] == grad_a["ds"] == dx["ds"] and grad["dy8"] == dx["dy8"] != grad["ds"]
    assert down["slot"] == grad["slot"] == grad_a["slot"] == dx["slot"] != 0
    assert (
        grad["workspace"].split(" ")[0]
        == grad["partials"].replace("+0 ", f"+{4 * _C.AMAX_PARTIALS} ").split(" ")[0]
    )


def test_runs_at_other_addresses_record_the_same() -> None:
    linear, x = layer(), torch.randn(16, 64, dtype=torch.bfloat16, requires_grad=True)
    first = forward_and_backward(linear, x)
    second = forward_and_backward(linear, x)  # `first` keeps its memory
    assert first.calls == second.calls
    assert set(first.memory.labels) != set(second.memory.labels)


def test_fused_layers_launch_triton_kernels_and_record_the_same() -> None:
    model = adapted(targets=LINEARS, fp8=DelayedScaling(), dtype=torch.bfloat16, lora_dropout=0.1)
    x, runs = tokens(), []
    for _ in range(2):
        torch.manual_seed(0)
        twin, _ = fused_copy(model, save="fp8")
        with dry_cuda() as recorded:
            run(twin, x)
        runs.append(recorded.calls)
    assert runs[0] == runs[1]
    kinds = {(call.kind, call.name) for call in runs[0]}
    assert ("triton", "_swiglu_kernel") in kinds and ("extension", "fp8_linear_lora") in kinds
    assert ("torch", "scaled_dot_product_attention") in kinds
    norm = next(call.arguments for call in runs[0] if call.name == "_rms_norm_quantize_kernel")
    assert norm["grid"] == [24] and norm["M"] == 24 and norm["K"] == 32 and norm["NATIVE"] is True
    assert norm["x"].endswith("bfloat16[24, 32] by [32, 1]") and norm["launch_pdl"] is True


def with_swap(name: str, pair: tuple[str, str]) -> mock._patch:
    """What a launcher of `name` does that takes two arguments for each other."""
    original = Recorded.extension

    def swaps(recorder, launched, signature, checks):
        launch = original(recorder, launched, signature, lambda *_, **__: None)

        def run(*args):
            given = signature.bind(*args).arguments
            if launched == name:
                values = flat(name, given)
                values |= {pair[0]: values[pair[1]], pair[1]: values[pair[0]]}
                given = composed(name, values)
            launch(**given)

        return run

    return mock.patch.object(Recorded, "extension", swaps)


SWAPS = [("ds", "A"), ("dy8", "weight"), ("dy_scale_inv", "weight_scale_inv"), ("rows", "cols")]


@pytest.mark.parametrize("pair", SWAPS, ids=["-".join(pair) for pair in SWAPS])
def test_swapped_arguments_are_seen(pair: tuple[str, str]) -> None:
    linear, x = layer(), torch.randn(16, 64, dtype=torch.bfloat16, requires_grad=True)
    right = forward_and_backward(linear, x).calls
    with with_swap("fp8_grad_input", pair):
        wrong = forward_and_backward(linear, x).calls
    assert right[:-1] == wrong[:-1]
    first, second = right[-1].arguments, wrong[-1].arguments
    assert {name for name in first if first[name] != second[name]} == {*pair}


def test_swapped_outputs_are_seen_where_they_are_read() -> None:
    """New memory is numbered by the call that gets it first, which looks the same with two of them swapped."""
    linear, x = layer(), torch.randn(16, 64, dtype=torch.bfloat16, requires_grad=True)
    with without_recordings():  # a recording's memories are parts of one
        right = forward_and_backward(linear, x).calls
        with with_swap("quantize_lora_down", ("x8", "s")):
            wrong = forward_and_backward(linear, x).calls
    assert right[:2] == wrong[:2] and right[2].arguments["x8"] == wrong[2].arguments["s"]
    seen = [line.split(":")[0] for line in differences(right, wrong)]
    assert seen[:2] == ["2 fp8_linear_lora.x8", "2 fp8_linear_lora.s"]


def transposed_twice(count: int, swapped: bool = False, rows: int = 16) -> list[Call]:
    """Two results of a launch each in `count` blocks of memory, and the first one's transpose."""
    w, blocks = torch.ones(rows, 16), [torch.zeros(1024, dtype=torch.uint8) for _ in range(count)]
    with dry_cuda() as recorded:
        recorded.name(w=w)
        a, b = blocks[0].data_ptr() + 64, blocks[-1].data_ptr() + 512
        for out, source in (
            (a, w.data_ptr()),
            (b, w.data_ptr()),
            (w.data_ptr(), b if swapped else a),
        ):
            _C.transpose_fp8(out, source, Sizes(rows, 16), Where(0, 0))
    return recorded.calls


def test_results_in_one_block_are_no_difference() -> None:
    apart, together = transposed_twice(2), transposed_twice(1)
    assert apart != together and differences(apart, together) == []
    assert differences(apart, transposed_twice(1, swapped=True)) == [
        "2 transpose_fp8.in_: m0+64 =00000000 != m0+512 =00000000"
    ]
    assert [line.split(" != ")[1] for line in differences(apart, transposed_twice(1, rows=15))] == [
        "15"
    ] * 3
    assert len(differences(apart, apart[:2])) == 1


def test_two_places_that_became_one_are_a_difference() -> None:
    apart = transposed_twice(2)
    one = [Call(c.kind, c.name, {**c.arguments}) for c in apart]
    one[1].arguments["out"] = one[0].arguments["out"]
    assert len(differences(apart, one)) == len(differences(one, apart)) == 1


def test_a_copy_with_other_values_is_seen() -> None:
    """The same shapes, another operand converted."""
    x, a = torch.randn(8, 64, dtype=torch.bfloat16), torch.randn(8, 64, dtype=torch.float16)
    found = []
    for lora_A in (a, a.flip(0)):
        with dry_cuda() as recorded:
            OPS.quantize_lora_down(x, lora_A, None, 0, False, None, 0.0, 0)
        found.append(recorded.calls[-1].arguments)
    assert {name for name in found[0] if found[0][name] != found[1][name]} == {"lora_A"}


def test_memory_that_nobody_saw_is_refused() -> None:
    x = torch.randn(8, 64, dtype=torch.bfloat16)
    with dry_cuda() as recorded:
        assert recorded.plain(x.data_ptr() + 2 * x.numel() - 1).startswith("m0+1023 =")
        with pytest.raises(ValueError, match="out = 0x10000000000 lies in no memory"):
            _C.transpose_fp8(1 << 40, x.data_ptr(), Sizes(8, 64), Where(0, 0))
        with pytest.raises(TypeError, match="missing a required argument: 'where'"):
            _C.transpose_fp8(0, x.data_ptr(), Sizes(8, 64))


@pytest.mark.skipif(bool(_C.cuda_runtime_info()["devices"]), reason="a GPU would run the kernel")
def test_the_extension_checks_what_it_is_given() -> None:
    x = torch.zeros(8, 64, dtype=torch.bfloat16)
    rest = (
        None,
        Scale(0, 0),
        RankSizes(8, 64, 0),
        ("bfloat16", "bfloat16", None),
        None,
        Where(0, 0),
    )
    with dry_cuda() as recorded:
        _C.quantize_lora_down((None,) * 4, x, *rest)
        with pytest.raises(ValueError, match="16-byte aligned"):
            _C.quantize_lora_down((None,) * 4, x.data_ptr() + 2, *rest)
    assert names(recorded.calls) == ["quantize_lora_down"] * 2


def test_what_is_not_taken_goes_to_torch() -> None:
    """N is no multiple of 16: the product is fp32's, without a launch of csrc's GEMM; cuBLASLt's for an fp32 y."""
    x8, scale = torch.ones(8, 64, dtype=torch.uint8), torch.ones(1)
    for n, dtype, expected in ((33, torch.bfloat16, []), (32, torch.float32, ["_scaled_mm"])):
        with dry_cuda() as recorded:
            weight = torch.ones(n, 64, dtype=torch.uint8)
            y = OPS.fp8_linear_lora(x8, scale, weight, scale, None, None, None, 1.0, dtype)
        assert names(recorded.calls) == expected and y.shape == (8, n)


def test_everything_is_as_before_afterwards() -> None:
    linear, x = layer(p=0.0), torch.randn(16, 64, dtype=torch.bfloat16, requires_grad=True)
    state = {name: id(value) for name, value in vars(_C).items()}
    before, patched = linear(x), (torch.empty, torch.cuda.device, dict(vars(Tensor)))
    with pytest.raises(KeyError, match="inside"), dry_cuda():
        assert device.capability_of(torch.device("cuda", 0)) == CAPABILITY
        assert linear(x).abs().sum() == 0, "a kernel ran"
        raise KeyError("inside")
    assert {name: id(value) for name, value in vars(_C).items()} == state
    assert (torch.empty, torch.cuda.device, dict(vars(Tensor))) == patched
    assert device.capability.cache_info().currsize == 0
    assert torch.equal(linear(x), before) and before.abs().sum() > 0
    assert OPS.transpose_fp8(torch.ones(2, 3, dtype=torch.uint8)).sum() == 6


def test_only_lorakernels_sees_a_gpu() -> None:
    state = FP8State(["a"], DelayedScaling(), "cpu")
    with dry_cuda():
        assert state.forward.device.type == "cpu" and not state.forward.is_cuda
        assert state.device == torch.device("cuda", 0)
        assert torch.empty(3, device="cuda").tolist() == [0, 0, 0]
    assert state.device == torch.device("cpu") and "triton" in sys.modules


def test_values_become_what_json_holds() -> None:
    class Place(NamedTuple):
        row: int
        at: int

    x = torch.tensor([1.0, 2.0])
    with dry_cuda() as recorded:
        recorded.name(x=x)
        place = Place(3, x.data_ptr() + 4)
        assert recorded.plain([place, (True, None), torch.float16]) == [
            {"row": 3, "at": "x+4 =00000040"},
            [True, None],
            "torch.float16",
        ]
        assert recorded.plain(x[1:]) == "x+4 =00000040 float32[1] by [1]"
        assert recorded.plain(x[:0]) == "0 float32[0] by [1]"
