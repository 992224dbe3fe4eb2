# SPDX-License-Identifier: Apache-2.0
"""The CUDA paths of lorakernels without a GPU: what Python would hand to kernels is written down, and no kernel runs.

Inside `dry_cuda()` code of lorakernels sees CPU tensors as tensors of one Hopper GPU: their `device` is "cuda:0" and
their `is_cuda` True. The ops run their CUDA implementations. A launch of the extension, a Triton launch and those
functions of torch that a CPU does not have become `Call`s. Only torch and `lorakernels._C` are patched, so that names
inside lorakernels may change. Memory is filled with zeros, as no kernel writes it.

Two runs record equal calls. An address is recorded as the memory that it lies in and what its first bytes hold, as in
"x+64 =0000803f": 64 bytes into `x`, then 1.0 of fp32. Memory has the name given to it (`Recorded.name`); other memory
is numbered when a call first names it. What was seen stays alive while calls are recorded, so that no address comes
back as that of other memory.

Where there is no GPU, the extension checks the arguments of each launch itself and then finds that there is none.

The harness knows nothing of streams, of the device's own thread, or of what a kernel computes.
"""

from __future__ import annotations

import ast
import ctypes
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._C._dynamo import guards
from triton.runtime.jit import JITFunction

import lorakernels
from lorakernels import _C
from tests.recorded_calls import Recorded, data_ptr

CAPABILITY, MULTIPROCESSORS, STREAM = (9, 0), 132, 0x5EED
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
STUB = Path(lorakernels.__file__).with_name("_C.pyi")
# for these the extension asks the GPU
WORKSPACE, FINDS_BLOCKS = "quantize_lora_down_workspace", "quantize_lora_down_finds_blocks"
FACTORIES = (
    *(
        "empty",
        "zeros",
        "ones",
        "full",
        "rand",
        "randn",
        "randint",
        "tensor",
        "as_tensor",
        "arange",
    ),
    *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like"),
    "empty_strided",
)
METHODS = ("to", "new_empty", "new_zeros", "new_ones", "new_full", "new_tensor")


_mm = torch.mm
_real = {name: getattr(torch._C.TensorBase, name).__get__ for name in ("device", "is_cuda")}


@contextmanager
def dry_cuda() -> Iterator[Recorded]:
    """Record what lorakernels hands to a GPU's kernels instead of running them.

    Raises:
        RuntimeError: an op was registered meanwhile, whose CUDA implementation would not have run.
    """
    recorded, ops = Recorded(), _ops()
    with ExitStack() as stack:
        for owner, name, value in (*_of_torch(recorded), *_of_tensors(recorded)):
            stack.enter_context(mock.patch.object(owner, name, value, create=True))
        for name, value in _of_extension(recorded):
            stack.enter_context(mock.patch.object(_C, name, value))
        stack.enter_context(_cuda_for_cpu(ops))
        stack.callback(_forget_answers)
        _forget_answers()
        yield recorded
        if late := _ops() - ops:
            raise RuntimeError(f"registered inside dry_cuda(): {sorted(late)}; import them before")


class Generator:
    """Stands in for torch's generator of the GPU. Each draw has a new seed, which the CPU's generator gives."""

    def initial_seed(self) -> int:
        return int(torch.empty((), dtype=torch.int64).random_())

    def get_offset(self) -> int:
        return 0

    def set_offset(self, offset: int) -> None:
        """A draw at another offset would have another seed."""


def _ops() -> set[str]:
    names = torch._C._dispatch_get_all_op_names()
    return {name for name in names if name.startswith("lorakernels::")}


@contextmanager
def _cuda_for_cpu(ops: set[str]) -> Iterator[None]:
    """Have the dispatcher run the CUDA implementations of `ops` for CPU tensors."""
    library = torch.library.Library("lorakernels", "IMPL")
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*operators may also be overridden.*")
        for full_name in sorted(ops):
            name = full_name.removeprefix("lorakernels::")
            op = getattr(torch.ops.lorakernels, name).default

            def run(*args: Any, _op: Any = op, **kwargs: Any) -> Any:
                return _op.redispatch(keys, *args, **kwargs)

            library.impl(name, run, "CPU", allow_override=True)
    try:
        yield
    finally:
        library._destroy()


def _forget_answers() -> None:
    """Empty lorakernels' caches, which hold answers about this machine or about the GPU that is not there."""
    for name, module in sorted(sys.modules.items()):
        if name.split(".")[0] == "lorakernels":
            for value in list(vars(module).values()):
                if not isinstance(value, type) and callable(getattr(value, "cache_clear", None)):
                    value.cache_clear()


def _of_extension(recorded: Recorded) -> Iterator[tuple[str, Any]]:
    """What returns nothing and is not for the host is a launch. Sizes and the like are the extension's own."""
    for node in ast.parse(STUB.read_text()).body:
        if isinstance(node, ast.FunctionDef) and _is_launch(node):
            checks = _checks(getattr(_C, node.name))
            yield node.name, recorded.extension(node.name, _signature(node), checks)
    yield WORKSPACE, lambda rows, cols, rank, device: 4096 + rows * max(rank, 16)
    yield FINDS_BLOCKS, lambda rows, cols, rank, device: cols % 16 == 0 and rank <= 16
    yield "LaunchList", recorded.launch_list()
    yield "record_kernel", recorded.record_kernel
    yield "build_info", _constant(_C.build_info() | {"cuda": True, "cuda_archs": "90a"})


def _checks(launch: Callable[..., None]) -> Callable[..., None]:
    """`launch` as far as it goes without a GPU: its checks of the arguments. With a GPU, nothing."""

    def run(*args: Any, **kwargs: Any) -> None:
        try:
            launch(*args, **kwargs)
        except RuntimeError as error:
            if "CUDA" not in str(error):
                raise

    return _constant(None) if _C.cuda_runtime_info()["devices"] else run


def _is_launch(node: ast.FunctionDef) -> bool:
    host = node.name.endswith("_host") or node.name in ("fp8_encode", "fp8_decode")
    return isinstance(node.returns, ast.Constant) and node.returns.value is None and not host


def _signature(node: ast.FunctionDef) -> inspect.Signature:
    a = node.args
    assert not a.posonlyargs and not a.vararg and not a.kwarg, node.name
    empty = inspect.Parameter.empty
    defaults = [empty] * (len(a.args) - len(a.defaults)) + [*map(ast.literal_eval, a.defaults)]
    either, keyword = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    found = [
        inspect.Parameter(p.arg, either, default=d) for p, d in zip(a.args, defaults, strict=True)
    ]
    for p, d in zip(a.kwonlyargs, a.kw_defaults, strict=True):
        default = empty if d is None else ast.literal_eval(d)
        found.append(inspect.Parameter(p.arg, keyword, default=default))
    return inspect.Signature(found)


def _of_torch(recorded: Recorded) -> Iterator[tuple[Any, str, Any]]:
    stream = SimpleNamespace(cuda_stream=STREAM, device=GPU)
    gpu = SimpleNamespace(multi_processor_count=MULTIPROCESSORS, total_memory=80 << 30)
    for name, value in {
        "get_device_capability": CAPABILITY,
        "get_device_properties": gpu,
        "current_device": 0,
        "current_stream": stream,
        "is_current_stream_capturing": False,
        "device": nullcontext(),
        "device_of": nullcontext(),
    }.items():
        yield torch.cuda, name, _constant(value)
    yield torch.cuda, "default_generators", (Generator(),)
    for name in ("flash", "efficient", "cudnn"):
        yield torch.backends.cuda, f"can_use_{name}_attention", _constant(True)
    yield torch.cuda.amp.common, "amp_definitely_not_available", _constant(False)
    yield torch._C, "_cuda_getCurrentRawStream", _constant(STREAM)
    yield torch._C, "_cuda_getDevice", _constant(0)
    yield guards, "_empty_strided_cuda", _on_cpu(guards._empty_strided_cpu, clears=True)
    yield torch, "_scaled_mm", recorded.scaled_mm
    yield torch, "mm", _product
    yield torch.nn.functional, "scaled_dot_product_attention", recorded.attention
    yield (
        JITFunction,
        "run",
        lambda kernel, *args, **options: recorded.triton(kernel, *args, **options),
    )
    for name in FACTORIES:
        yield torch, name, _on_cpu(getattr(torch, name), clears=name.startswith("empty"))


def _of_tensors(recorded: Recorded) -> Iterator[tuple[Any, str, Any]]:
    def seen(tensor: Tensor) -> int:
        address = data_ptr(tensor)
        if address:
            recorded.memory.see(tensor)
        return address

    def device(tensor: Tensor) -> torch.device:
        found = _real["device"](tensor)
        return GPU if found == CPU and _asked_by_lorakernels() else found

    def get_device(tensor: Tensor) -> int:
        is_cpu = _real["device"](tensor) == CPU
        return 0 if is_cpu and _asked_by_lorakernels() else torch._C.TensorBase.get_device(tensor)

    def is_cuda(tensor: Tensor) -> bool:
        return _real["device"](tensor) == CPU and _asked_by_lorakernels()

    yield Tensor, "data_ptr", seen
    yield Tensor, "get_device", get_device
    yield Tensor, "device", property(device)
    yield Tensor, "is_cuda", property(is_cuda)
    for name in METHODS:
        yield Tensor, name, _on_cpu(getattr(Tensor, name), clears="empty" in name)


def _asked_by_lorakernels() -> bool:
    return sys._getframe(2).f_globals.get("__name__", "").split(".")[0] == "lorakernels"


def _constant(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


def _on_cpu(function: Callable[..., Any], *, clears: bool) -> Callable[..., Any]:
    """`function` with the CPU for the GPU among its arguments; `clears`: what it returns is filled with zeros."""

    def run(*args: Any, **kwargs: Any) -> Any:
        out = function(*map(_place, args), **{k: _place(v) for k, v in kwargs.items()})
        if clears and type(out) is Tensor and _real["device"](out) == CPU and data_ptr(out):
            ctypes.memset(data_ptr(out), 0, out.untyped_storage().nbytes())
        return out

    return run


def _place(value: Any) -> Any:
    is_gpu = isinstance(value, torch.device | str) and str(value).split(":")[0] == "cuda"
    return CPU if is_gpu else value


def _product(a: Tensor, b: Tensor, *, out_dtype: torch.dtype | None = None, **out: Any) -> Tensor:
    """torch.mm; a CPU has none with `out_dtype`."""
    return _mm(a, b, **out) if out_dtype is None else _mm(a.to(out_dtype), b.to(out_dtype), **out)
