# SPDX-License-Identifier: Apache-2.0
"""Triton's kernels recorded with stand-ins, and launched by csrc: the same bits as launched by Triton."""

from __future__ import annotations

import itertools
import re
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature
from triton.tools.tensor_descriptor import TensorDescriptor

from lorakernels.kernels.triton import (
    block_diagonal,
    cross_entropy,
    quantize,
    rms_norm,
    rope_qkv,
    swiglu,
)
from lorakernels.kernels.triton import launch as launching
from lorakernels.recorded.stand_in import Recorder
from lorakernels.values import Scaled, Scaling, SideBySide
from tests.kernels.recording import (
    recorded_call,
    recording,
    results,
    run_recorded,
    stand_ins,
    symbolic,
    tensors_of,
)
from tests.ops.contract import STATES

BF16, E5M2 = torch.bfloat16, torch.float8_e5m2
ROWS, K, HEADS, KV_HEADS, DIM = 37, 512, 4, 2, 64
SM90 = GPUTarget("cuda", 90, 32)
BYTES = {"*": 8, "i64": 8, "i32": 4, "fp32": 4}
Case = tuple[Callable[..., Any], tuple[Any, ...]]


def norms(device: torch.device, state: str) -> dict[str, Case]:
    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).to(BF16)

    x, weight, rstd = randn(ROWS, K), randn(K), torch.rand(ROWS, device=device)
    scaling = _scaling(state, device)
    return {
        "rms_norm": (rms_norm.rms_norm_quantize, (x, weight, 1e-5, scaling, True)),
        "rms_norm_backward": (
            rms_norm.rms_norm_backward,
            (
                randn(ROWS, K),
                x,
                weight,
                rstd,
                randn(ROWS, K),
                False,
            ),  # no list records a sum by torch
        ),
        "swiglu": (swiglu.swiglu_quantize, (Scaled(x), scaling, True, BF16)),
        "swiglu_and_pack": (swiglu.swiglu_quantize_and_pack, (x, scaling, True)),
        "swiglu_grad": (
            swiglu.swiglu_quantize_grad,
            (
                randn(ROWS, K // 2),
                Scaled(x),
                torch.rand(2, device=device),
                scaling,
                E5M2,
                True,
            ),
        ),
    }


def others(device: torch.device) -> dict[str, Case]:
    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).to(BF16)

    angles = randn(ROWS, DIM), randn(ROWS, DIM)
    heads = (HEADS, KV_HEADS, KV_HEADS)
    gradients = [randn(2, count, ROWS, DIM) for count in heads]
    labels = torch.arange(ROWS, device=device)
    losses, factor = torch.zeros(ROWS, device=device), torch.rand(1, device=device)
    logits = randn(ROWS, 100)
    side, blocks = SideBySide([ROWS, 16], [8, 8]), [randn(ROWS, 8), randn(16, 8)]
    whole, second = randn(ROWS + 16, 16), randn(ROWS + 16, 16)
    factors = torch.rand(2, 2, device=device)
    plain = randn(ROWS, K)
    return {
        "norm_in_blocks": (rms_norm.rms_norm_quantize, (plain, randn(K), 1e-5, None, True, False)),
        "swiglu_in_blocks": (swiglu.swiglu_quantize, (Scaled(plain), None, True, BF16, True)),
        "swiglu_grad_in_blocks": (
            swiglu.swiglu_quantize_grad,
            (
                randn(ROWS, K // 2),
                Scaled(plain),
                torch.rand(2, device=device),
                None,
                E5M2,
                False,
                False,
            ),
        ),
        "rope_backward_in_blocks": (
            rope_qkv.rope_qkv_backward_quantize,
            (*gradients, *angles, torch.rand(3, device=device), E5M2, True),
        ),
        "rope": (
            rope_qkv.rope_qkv_,
            (randn(2 * ROWS, sum(heads) * DIM), *angles, HEADS, KV_HEADS),
        ),
        "rope_backward": (
            rope_qkv.rope_qkv_backward,
            (*gradients, *angles, torch.rand(3, device=device)),
        ),
        "cross_entropy": (
            cross_entropy.launch,
            (losses, logits, labels, factor, 3, logits, 1024, 4),
        ),
        "cross_entropy_fp8": (
            cross_entropy.launch,
            (losses, logits, labels, None, 3, torch.zeros_like(logits, dtype=torch.uint8), 1024, 4),
        ),
        "block_diagonal": (assemble, (whole, second, blocks, side, factors)),
    }


def assemble(
    whole: Tensor, second: Tensor, blocks: list[Tensor], side: SideBySide, factors: Tensor
) -> None:
    block_diagonal.launch(whole, second, blocks, side, factors, False, split=False)


def _scaling(kind: str, device: torch.device) -> Scaling | None:
    """By column 1 of a state: "kept", a scale that saturates some; "unset", 0; "eval"; "none"."""
    if kind == "none":
        return None
    state = torch.zeros(4, 3, device=device)
    state[-1] = torch.tensor([7.0, 0.0 if kind == "unset" else 211.7, 5.0])
    return Scaling(state, 1, kind != "eval")


CASES = {
    **{name: "none" for name in others(torch.device("cpu"))},
    **{
        f"{name}-{state}": state
        for state, name in itertools.product(STATES, norms(torch.device("cpu"), "none"))
    },
}


def case_of(name: str, device: torch.device) -> Case:
    return (norms(device, CASES[name]) | others(device))[name.split("-")[0]]


def copied(value: Any) -> Any:
    """`value` with tensors of its own."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(copied, value))
    return type(value)(map(copied, value)) if isinstance(value, tuple | list) else value


def as_bytes(value: Any) -> list[Tensor]:
    return [each.contiguous().view(torch.uint8) for each in tensors_of(value)]


@pytest.mark.gpu
@pytest.mark.parametrize("early", [True, False], ids=["early", "in-order"])
@pytest.mark.parametrize("name", CASES)
def test_recorded_kernels_give_the_bits_of_launched_ones(
    name: str, early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not early:
        monkeypatch.setattr(quantize, "overlaps", lambda device: False)
    function, arguments = case_of(name, torch.device("cuda"))
    mine, triton_s = copied(arguments), copied(arguments)
    # recorded first: nothing that a launch by Triton has loaded may be needed
    found = run_recorded(function, mine)
    expected = function(*triton_s)
    pairs = zip(as_bytes((found, mine)), as_bytes((expected, triton_s)), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.gpu
def test_a_thread_that_has_not_called_cuda_yet_runs_a_list() -> None:
    x = torch.randn(ROWS, K, device="cuda").to(BF16)
    arguments = (Scaled(x), None, True, BF16)
    found, launches, memory = recorded_call(swiglu.swiglu_quantize, arguments)
    addresses = tuple(tensor.data_ptr() for tensor in memory)
    torch.cuda.synchronize()
    done: list[bool] = []
    thread = threading.Thread(target=lambda: done.append(launches.run(addresses, (), 0, -1)))
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert done == [True]
    assert torch.equal(results(found, memory)[0], swiglu.swiglu_quantize(*arguments)[0])


def specialized(kernel: Any, *arguments: Any, **options: Any) -> tuple[Any, Any, Any]:
    """What Triton compiles the kernel for: types, constants and the options that are none of its arguments."""
    bind = create_function_from_signature(kernel.signature, kernel.params, make_backend(SM90))
    values, specialization, rest = bind(*arguments, **options)
    signature = dict(zip(kernel.arg_names, (kind for kind, _ in specialization), strict=True))
    constants = {name: values[name] for name, kind in signature.items() if kind == "constexpr"}
    return signature, constants, rest


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What is given to `record_kernel`, of kernels that are not compiled. Triton itself says what they would take."""
    calls: list[dict[str, Any]] = []

    def warmup(kernel: Any, *arguments: Any, grid: tuple[int, ...], **options: Any) -> Any:
        signature, _, rest = specialized(kernel, *arguments, **options)
        return compiled(signature, **rest)

    monkeypatch.setattr(JITFunction, "warmup", warmup)
    monkeypatch.setattr(
        launching, "extension", lambda: SimpleNamespace(record_kernel=lambda **c: calls.append(c))
    )
    return calls


def compiled(signature: dict[str, Any], **changes: Any) -> Any:
    """As much of Triton's CompiledKernel as is read, the same in 3.6 and 3.9."""
    metadata = {"num_warps": 4, "shared": 0, "num_ctas": 1, "launch_pdl": False}
    metadata |= {"global_scratch_size": 0, "profile_scratch_size": 0}
    metadata |= {"launch_cooperative_grid": False}
    return SimpleNamespace(
        _init_handles=lambda: None,
        function=7,
        src=SimpleNamespace(signature=signature),
        metadata=SimpleNamespace(**metadata | changes),
    )


@pytest.mark.parametrize("early", [True, False], ids=["early", "in-order"])
@pytest.mark.parametrize("name", CASES)
def test_every_launcher_takes_stand_ins(
    name: str, early: bool, recorded: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantize, "overlaps", lambda device: early)
    function, arguments = case_of(name, torch.device("cpu"))
    made = Recorder(torch.device("cpu"))
    function(*stand_ins(made, arguments))
    measures = name.endswith(("-kept", "-unset", "-eval")) and "backward" not in name
    assert len(recorded) == 1 + measures
    known = {symbolic(i) for i in range(len(made.memories))}
    given = {symbolic(i) for i, _ in enumerate(tensors_of(arguments))}
    used = set()
    for call in recorded:
        in_order = name.startswith(("cross_entropy", "rope_backward")) or name.endswith("in_blocks")
        starts_early = early and not in_order
        assert call["early"] == starts_early
        assert len(call["grid"]) == 3 and min(call["grid"]) > 0
        *parameters, scratch, more = call["parameters"]
        assert scratch == more == ("*", 0)
        used |= {value for kind, value in parameters if kind == "*"}
    assert given <= used <= known | {0}  # 0 is a tensor without elements


SIGNATURE = {
    "out": "*bf16",
    "n": "i32",
    "one": "constexpr",
    "x": "*u8",
    "eps": "fp32",
    "BLOCK": "constexpr",
}


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("name", ["rms_norm-kept", "block_diagonal", "rope_backward"])
def test_the_code_takes_the_parameters_that_are_recorded(
    name: str, recorded: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many, of these sizes and in this order, for a Hopper GPU."""
    expected = []

    def warmup(kernel: Any, *arguments: Any, grid: tuple[int, ...], **options: Any) -> Any:
        signature, constants, rest = specialized(kernel, *arguments, **options)
        expected.append(sizes_in_ptx(kernel, signature, constants))
        return compiled(signature, **rest)

    monkeypatch.setattr(JITFunction, "warmup", warmup)
    function, arguments = case_of(name, torch.device("cpu"))
    function(*stand_ins(Recorder(torch.device("cpu")), arguments))
    assert expected
    assert [[BYTES[kind] for kind, _ in call["parameters"]] for call in recorded] == expected


def sizes_in_ptx(kernel: Any, signature: dict[str, str], constants: dict[str, Any]) -> list[int]:
    """Bytes of each parameter of the kernel's code."""
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=places)
    ptx = triton.compile(source, target=SM90).asm["ptx"]
    entry = ptx[ptx.index(".entry") :].partition("{")[0]
    return [int(bits) // 8 for bits in re.findall(r"\.param \.[a-z](\d+)", entry)]


class FakeKernel:
    """A kernel whose code takes two pointers, an integer and a float; `one` is known to be 1."""

    __name__ = "fake"

    def __init__(self, **changes: Any) -> None:
        self.result = compiled(changes.pop("signature", SIGNATURE), **changes)
        self.warmed: list[Any] = []
        self.launched: list[Any] = []

    def warmup(self, *arguments: Any, grid: tuple[int, ...], **options: Any) -> Any:
        self.warmed.append((arguments, grid, options))
        return self.result

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments, **options: self.launched.append((grid, arguments, options))


def two_stand_ins() -> tuple[Any, Any]:
    made = Recorder(torch.device("cpu"))
    return made.tensor((8,), BF16), made.tensor((8,), torch.uint8)


def test_what_the_code_takes_is_recorded(recorded: list[dict[str, Any]]) -> None:
    out, x = two_stand_ins()
    kernel = FakeKernel(shared=70000, num_warps=8, launch_pdl=True)
    launching.launch(kernel, (3, 2), out, 5, 1, x, eps=0.5, BLOCK=64, num_warps=8)
    assert kernel.warmed == [((out, 5, 1, x), (3, 2), {"eps": 0.5, "BLOCK": 64, "num_warps": 8})]
    assert not kernel.launched
    numbers = [("*", symbolic(0)), ("i32", 5), ("*", symbolic(1)), ("fp32", 0.5)]
    assert recorded == [
        {
            "function": 7,
            "grid": (3, 2, 1),
            "threads": 256,
            "shared_bytes": 70000,
            "early": True,
            "parameters": [*numbers, ("*", 0), ("*", 0)],
        }
    ]


def test_csrc_takes_what_is_recorded() -> None:
    out, x = two_stand_ins()
    with recording() as launches:
        launching.launch(FakeKernel(), (3,), out, 5, 1, x, 0.5, BLOCK=64)
    launches.place([(0, 0), (1, 256)], [True, True])
    assert launches.calls((4096, 8192), ()) == [("kernel", [4096, 8192 + 256, 0, 0])]


def test_tensors_are_launched_by_triton(recorded: list[dict[str, Any]]) -> None:
    tensor = torch.nn.Parameter(torch.zeros(3))
    view = tensor.detach().as_subclass(type("Subclass", (Tensor,), {}))
    for arguments in ((tensor, 5, None, 0.5), (view, tensor.detach())):
        kernel = FakeKernel()
        launching.launch(kernel, (3,), *arguments, BLOCK=64)
        assert kernel.launched == [((3,), arguments, {"BLOCK": 64})]
    assert not recorded


@pytest.mark.parametrize(
    "changes",
    [
        {"global_scratch_size": 16},
        {"profile_scratch_size": 1},
        {"num_ctas": 2},
        {"launch_cooperative_grid": True},
        {"signature": {"out": "*bf16", "n": "i32", "one": ("i32", "i32")}},
        {"signature": {"out": "*bf16", "n": "tensordesc<bf16[64,64]>"}},
    ],
    ids=["scratch", "profile", "clusters", "cooperative", "tuple", "descriptor-type"],
)
def test_kernels_that_are_not_recorded(
    changes: dict[str, Any], recorded: list[dict[str, Any]]
) -> None:
    out, x = two_stand_ins()
    with pytest.raises(NotImplementedError):
        launching.launch(FakeKernel(**changes), (3,), out, 5, 1, x, 0.5, BLOCK=64)
    assert not recorded


def test_tensor_descriptors_are_not_recorded(recorded: list[dict[str, Any]]) -> None:
    out, _ = two_stand_ins()
    descriptor = TensorDescriptor(out, [8, 16], [16, 1], [8, 16])
    kernel = FakeKernel()
    with pytest.raises(NotImplementedError, match="fake: a tensor descriptor holds an address"):
        launching.launch(kernel, (3,), descriptor, 5, 1, 2, 0.5, BLOCK=64)
    assert not kernel.warmed and not recorded
