# SPDX-License-Identifier: Apache-2.0
"""A step's kernels in the order in which they run, each beside the least time that its bytes and operations take.

The step runs once under a dispatch mode that notes every op with the tensors it reads and writes. It also runs under
torch's profiler, which says what kernels each op launched. The floor of an op is the longer of

    its bytes       of all tensors it is given and returns, once each, at the copy bandwidth of this run
    its operations  of a product or of attention, at the data sheet's dense peak of their format

A tensor counts as a whole even where an op leaves a part of it alone, as `rope_qkv_` does with v's columns. It counts
as read from memory even where it still lies in L2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.lib.rows import Row

PEAKS = {"fp8": 1978.9e12, "bf16": 989.4e12}  # of an H200 SXM, dense
MARK = "op#"


@dataclass
class Call:
    """One op: its tensors' shapes, the bytes they hold, its operations by format."""

    name: str
    shapes: list[tuple[int, ...]]
    bytes: int
    operations: dict[str, int]
    seconds: float = 0.0
    kernels: list[str] = field(default_factory=list)


Named = dict[str, list[Tensor]]


class Recorder(TorchDispatchMode):
    """Notes each op and names its range in the profile."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with record_function(f"{MARK}{len(self.calls)}"):
            call = Call(str(func).removesuffix(".default"), [], 0, {})
            self.calls.append(call)
            result = func(*args, **(kwargs or {}))
        given, written = named(func, args, kwargs or {})
        made = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        all_given = [t for tensors in given.values() for t in tensors]
        call.shapes = [tuple(t.shape) for t in all_given]
        call.bytes = sum(_bytes(t) for t in {id(t): t for t in (*all_given, *made)}.values())
        call.bytes += sum(_bytes(t) for t in written)
        call.operations = operations(call.name, given)
        return result


def named(func: Any, args: Any, kwargs: Any) -> tuple[Named, list[Tensor]]:
    """(tensors by the name of their argument, those written in place as well).

    An FP8 state is left out: an op reads one scale of it and writes one amax.
    """
    given: Named = {}
    written: list[Tensor] = []
    for index, argument in enumerate(func._schema.arguments):
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        tensors = [t for t in tree_leaves(value) if isinstance(t, Tensor)]
        if not tensors or argument.name.startswith("state"):
            continue
        given[argument.name] = tensors
        if argument.alias_info is not None and argument.alias_info.is_write:
            written += tensors
    return given, written


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _format(t: Tensor) -> str:
    return "fp8" if t.element_size() == 1 else "bf16"


def _rank(given: Named, name: str, dim: int) -> int:
    return sum(t.shape[dim] for t in given.get(name, []))


def _fp8_linear_lora(given: Named) -> dict[str, int]:
    (x,), (w,) = given["x"], given["weight"]
    m, k, n = x.shape[0], x.shape[1], w.shape[0]
    base, lora = 2 * m * n * k, 2 * m * n * _rank(given, "s", 1)
    return {"fp8": base, "bf16": lora} if _format(x) == "fp8" else {"bf16": base + lora}


def _fp8_grad_input(given: Named) -> dict[str, int]:
    (dy,), (w,) = given["dy"], given["weight"]
    m, n, k = dy.shape[0], w.shape[0], w.shape[1]
    base, lora = 2 * m * n * k, 2 * m * k * _rank(given, "ds", 1)
    return {"fp8": base, "bf16": lora} if _format(dy) == "fp8" else {"bf16": base + lora}


def _quantize_lora_down(given: Named) -> dict[str, int]:
    return {"bf16": 2 * given["x"][0].numel() * _rank(given, "lora_A", 0)}


def _quantize_grad(given: Named) -> dict[str, int]:
    return {"bf16": 4 * given["dy"][0].numel() * _rank(given, "lora_B", 1)}


def _lora_grad_a(given: Named) -> dict[str, int]:
    return {"bf16": 2 * given["x"][0].numel() * _rank(given, "ds", 1)}


def _mm(given: Named) -> dict[str, int]:
    a, b = (given[name][0] for name in (("mat1", "mat2") if "mat1" in given else ("self", "mat2")))
    return {_format(a): 2 * a.shape[0] * a.shape[1] * b.shape[1]}


def _attention(products: int) -> Callable[[Named], dict[str, int]]:
    """Causal: half of `products` products of T × T × D for each head of q [B, H, T, D]."""
    return lambda given: {"bf16": products * given["query"][0].numel() * given["query"][0].shape[2]}


OPERATIONS: dict[str, Callable[[Named], dict[str, int]]] = {
    "lorakernels.fp8_linear_lora": _fp8_linear_lora,
    "lorakernels.fp8_grad_input": _fp8_grad_input,
    "lorakernels.quantize_lora_down": _quantize_lora_down,
    "lorakernels.quantize_grad": _quantize_grad,
    "lorakernels.lora_grad_a": _lora_grad_a,
    "aten.mm": _mm,
    "aten.addmm": _mm,
    "aten._scaled_mm": _mm,
    **{
        f"aten._scaled_dot_product_{kind}{direction}": _attention(products)
        for kind in (
            "cudnn_attention",
            "flash_attention",
            "efficient_attention",
            "flash_attention_for_cpu",
        )
        for direction, products in (("", 2), ("_backward", 5))
    },
}


def operations(name: str, given: Named) -> dict[str, int]:
    """Of an op by the formats that they are done in; empty for what is no product."""
    count = OPERATIONS.get(name)
    return {k: v for k, v in count(given).items() if v} if count else {}


def floor(call: Call, bandwidth: float) -> tuple[float, str]:
    """(seconds, what bounds them)."""
    by_bytes = call.bytes / bandwidth
    by_operations = sum(v / PEAKS[kind] for kind, v in call.operations.items())
    return (by_operations, "operations") if by_operations > by_bytes else (by_bytes, "bytes")


def record(
    forward: Callable[[], Any], backward: Callable[[Any], Any], device: torch.device, steps: int = 3
) -> tuple[list[Call], int]:
    """(the calls of a step with the medians of their seconds, how many of them are the forward's).

    On a CPU an op's seconds are its own, and its kernel is the op.
    """
    runs = [_once(forward, backward, device) for _ in range(steps)]
    calls, split = runs[0]
    for index, call in enumerate(calls):
        seconds = sorted(run[index].seconds for run, _ in runs if index < len(run))
        call.seconds = seconds[len(seconds) // 2]
    return calls, split


def _once(
    forward: Callable[[], Any], backward: Callable[[Any], Any], device: torch.device
) -> tuple[list[Call], int]:
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if on_gpu else [])
    recorder = Recorder()
    with profile(activities=activities, acc_events=True) as found, recorder:
        y = forward()
        split = len(recorder.calls)
        backward(y)
        if on_gpu:
            torch.cuda.synchronize(device)
    for index, seconds, kernel in _kernels(found, on_gpu):
        recorder.calls[index].seconds += seconds
        recorder.calls[index].kernels.append(kernel)
    return recorder.calls, split


def _kernels(found: profile, on_gpu: bool) -> Iterator[tuple[int, float, str]]:
    """(number of the call, seconds, name) of every kernel; on a CPU the calls themselves."""
    marks = {event.id: index for event in found.events() if (index := _mark(event)) is not None}
    if not on_gpu:
        for event in found.events():
            if event.name.startswith(MARK):
                yield marks[event.id], event.cpu_time_total / 1e6, "cpu"
        return
    on_device = sorted(
        (e.start_ns(), e.start_ns() + e.duration_ns(), e.linked_correlation_id(), e.name())
        for e in found.profiler.kineto_results.events()  # type: ignore[union-attr]
        if e.device_type() == DeviceType.CUDA
        and e.linked_correlation_id() in marks
        and not e.name().startswith(MARK)
    )
    spans = [(start, end) for start, end, *_ in on_device]
    for nanoseconds, (*_, launched, name) in zip(own_times(spans), on_device, strict=True):
        yield marks[launched], nanoseconds / 1e9, name


def own_times(spans: Iterable[tuple[int, int]]) -> Iterator[int]:
    """What each (start, end) adds to the time in which anything runs; the spans come by their starts.

    A kernel that is launched early begins beside the last blocks of the kernel before it and waits for them. That time
    is the other kernel's.
    """
    until = 0
    for start, end in spans:
        yield max(0, end - max(start, until))
        until = max(until, end)


def _mark(event: Any) -> int | None:
    """The number of the innermost call around an event of the CPU."""
    while event is not None:
        if event.name.startswith(MARK):
            return int(event.name.removeprefix(MARK))
        event = event.cpu_parent
    return None


def rows(calls: list[Call], split: int, bandwidth: float) -> list[Row]:
    """A row for each op that launched something, and the sum."""
    total = sum(call.seconds for call in calls) or math.nan
    result: list[Row] = []
    floors = 0.0
    for index, call in enumerate(calls):
        if not call.kernels:
            continue
        least, bound = floor(call, bandwidth)
        floors += least
        row = {"pass": "forward" if index < split else "backward", "op": call.name}
        shapes = " ".join("x".join(map(str, s)) for s in call.shapes if math.prod(s) > 1024)
        result.append(_row({**row, "of": shapes}, call, least, bound, total))
    sums = Call("sum", [], 0, {}, total, [f"{sum(len(c.kernels) for c in calls)} kernels"])
    return [*result, _row({"pass": "both", "op": "sum", "of": ""}, sums, floors, "", total)]


def _row(head: Row, call: Call, least: float, bound: str, total: float) -> Row:
    kernels = ", ".join(dict.fromkeys(_short(name) for name in call.kernels))
    return {
        **head,
        "kernels": kernels,
        "µs": round(call.seconds * 1e6, 2),
        "floor µs": round(least * 1e6, 2),
        "bound by": bound,
        "÷ floor": round(call.seconds / least, 2) if least > 0 else "",
        "over µs": round((call.seconds - least) * 1e6, 2),
        "% of step": round(100 * call.seconds / total, 1),
    }


def _short(name: str) -> str:
    """A kernel's name without namespaces, template arguments and parameters."""
    name = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    for end in ("<", "("):
        name = name.partition(end)[0]
    return name.rpartition("::")[2][:48]
