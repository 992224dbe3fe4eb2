# SPDX-License-Identifier: Apache-2.0
"""What a provider's process of bench_graphs.py measures, and how."""

from __future__ import annotations

import gc
import statistics
import time
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.lib.graph_providers import (
    PROVIDERS,
    Layer,
    Run,
    Stack,
    be_deterministic,
    make_stack,
)
from benchmarks.lib.rows import Row
from benchmarks.lib.timing import heat, synchronize

# Of the norm: bf16 keeps 2⁻⁸ of a number, and another order of additions passes through up to 32 layers. Other masks
# change a third of what LoRA adds, which is some percent of the output
TOLERANCE, WITH_OTHER_MASKS = 2**-5, 2**-3
ROW_SECONDS = 0.5  # a row of steps is not longer but for one step that is
COLUMNS = (
    "ms",
    "÷ kernels",
    "kernels ms",
    "gaps ms",
    "CPU µs/layer",
    "capture s",
    "MB",
    "driver MB",
)


def step(stack: Stack, run: Run) -> Tensor:
    run.begin()
    y = stack.run(run.layers)
    run.end()
    return y


class FirstStep:
    """The states a step starts from; runs it and gives what it computed."""

    def __init__(self, stack: Stack, run: Run) -> None:
        self.stack, self.rng = stack, torch.get_rng_state() if run.rng is None else run.rng
        self.fp8, self.slot = stack.fp8_state.save(), stack.rng_state.tensor.clone()

    def __call__(self, run: Run) -> dict[str, Tensor]:
        stack = self.stack
        stack.fp8_state.restore(self.fp8)
        stack.rng_state.tensor.copy_(self.slot)
        torch.set_rng_state(self.rng)
        stack.clean()
        y = step(stack, run).detach().clone()
        found = {"output": y, "gradient of x": stack.x.grad}
        found |= {f"gradient {i}": p.grad for i, p in enumerate(stack.trained)}
        return {name: g.detach().clone() for name, g in found.items() if g is not None}

    def eagerly(self) -> dict[str, Tensor]:
        """As if no provider were there."""
        return self(Run([partial(Layer.forward, layer) for layer in self.stack.layers]))


def difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[float, str]:
    """The largest relative norm of a difference, and of what."""
    if found.keys() != expected.keys():
        return float("inf"), f"{sorted(found.keys() ^ expected.keys())[:3]}"
    worst = (0.0, "")
    for name, b in expected.items():
        error = ((found[name].float() - b.float()).norm() / b.float().norm()).item()
        worst = max(worst, (error if error == error else float("inf"), name))
    return worst


def checked(run: Run, first: FirstStep, found: dict[str, Tensor]) -> str:
    """The `check` column of what `run` computed in its first step."""
    expected, again = first.eagerly(), first.eagerly()
    (own, _), (error, where) = difference(again, expected), difference(found, expected)
    if run.notes:  # gradients of the adapters see the masks
        names = ("output", "gradient of x")
        error, where = difference({k: found[k] for k in names}, {k: expected[k] for k in names})
    limit = 4 * own if run.exact else WITH_OTHER_MASKS if run.notes else TOLERANCE
    text = "bit-equal" if error == 0 else f"{error:.1e} of {where}"
    if own and error:
        text += f", eager against itself {own:.1e}"
    if run.notes:
        text += f" ({', '.join(run.notes)})"
    return text if error <= limit else f"WRONG: {text}"


def wall_seconds(stack: Stack, run: Run, repetitions: int, in_a_row: int) -> float:
    samples = []
    device = stack.x.device
    for _ in range(repetitions):
        synchronize(device)
        start = time.perf_counter()
        for _ in range(in_a_row):
            stack.clean()
            step(stack, run)
        synchronize(device)
        samples.append((time.perf_counter() - start) / in_a_row)
    return statistics.median(samples)


class _Clock:
    """The host's time between `start` and `stop`. Every fourth start waits for the device, so that no launch waits for
    room in a queue; what follows such a wait is not counted, as the host wakes up in it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.starts = 0
        self._began: float | None = None
        self._counted: list[float] = []
        self._others: list[float] = []

    def start(self) -> None:
        if self.starts % 4 == 0:
            synchronize(self.device)
        self.starts += 1
        self._began = time.perf_counter()

    def stop(self) -> None:
        now = time.perf_counter()
        if self._began is not None:
            (self._others if self.starts % 4 == 1 else self._counted).append(now - self._began)

    def hook(self, grad: Tensor) -> None:
        self.stop()
        self.start()

    def seconds(self) -> list[float]:
        return self._counted or self._others


def host_seconds(stack: Stack, run: Run, repetitions: int) -> float:
    """Of a layer's forward and backward, medians added."""
    forwards: list[float] = []
    backwards: list[float] = []
    for _ in range(repetitions):
        stack.clean()
        forward, backward = (_Clock(stack.x.device) for _ in range(2))
        run.begin()
        x = stack.x.view_as(stack.x)
        x.register_hook(backward.hook)
        for layer in run.layers:
            forward.start()
            x = layer(x, stack.cos, stack.sin)
            forward.stop()
            x.register_hook(backward.hook)
        x.backward(stack.dy)
        run.end()
        assert backward.starts == len(run.layers) + 1, "a hook for each output, one for the input"
        forwards += forward.seconds()
        backwards += backward.seconds()
    return statistics.median(forwards) + statistics.median(backwards)


def device_intervals(stack: Stack, run: Run) -> list[tuple[int, int]]:
    """(start, end) in ns of every kernel, copy and memset of a step, by start."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    stack.clean()
    synchronize(stack.x.device)
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        step(stack, run)
        synchronize(stack.x.device)
    events = found.profiler.kineto_results.events()
    on_device = [e for e in events if e.device_type() == DeviceType.CUDA and e.duration_ns() > 0]
    return sorted((e.start_ns(), e.start_ns() + e.duration_ns()) for e in on_device)


def busy_and_gaps(intervals: list[tuple[int, int]]) -> tuple[float, float]:
    """Seconds: the sum of the intervals, and how long none of them was, from the first to the last."""
    total = sum(end - start for start, end in intervals)
    gaps, reached = 0, intervals[0][1]
    for start, end in intervals:
        gaps += max(0, start - reached)
        reached = max(reached, end)
    return total / 1e9, gaps / 1e9


class Measurer:
    """What a provider's process answers."""

    def __init__(self, name: str, device: torch.device) -> None:
        self.name, self.device = name, device
        self._stack: tuple[str, Stack] | None = None

    def load(self) -> str:
        """Import, and make the device ready; TE first, as it brings a cuDNN of its own."""
        if self.name.startswith("TE"):
            from benchmarks.peers.te import te_or_unavailable

            te_or_unavailable()
        import lorakernels.graphs  # noqa: F401
        import transformers  # noqa: F401

        if self.device.type == "cuda":
            be_deterministic()
        torch.zeros(1, device=self.device)
        return "ready"

    def release(self) -> str:
        self._stack = None
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return "released"

    def measure(self, size: str, count: int, most: int, repetitions: int) -> Row:
        if self._stack is None or self._stack[0] != size:
            self.release()
            self._stack = size, make_stack(size, most, self.device)
        stack = self._stack[1].first(count)
        stack.clean()
        cuda = self.device.type == "cuda"
        if cuda:
            torch.cuda.empty_cache()  # or cuBLAS's workspace would sit in what the weights' making has left
            heat(self.device, 0.1)
            torch.cuda.empty_cache()
            base = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        with PROVIDERS[self.name](stack) as run:
            for _ in range(3):
                stack.clean()
                step(stack, run)
            synchronize(self.device)
            capture = time.perf_counter() - started
            # While no eager layer has run beside the graphs
            peak = torch.cuda.max_memory_reserved() - base if cuda else 0
            first = FirstStep(stack, run)
            found = first(run)
            row = self._times(stack, run, repetitions)
        run.layers = []  # their graphs' memory, beside which a stack of large layers has no room for an eager step
        gc.collect()
        if cuda:
            torch.cuda.empty_cache()
        check = checked(run, first, found)
        row["capture s"] = "" if self.name == "eager" else round(capture, 2)
        row["MB"] = round(peak / 1e6)
        row["driver MB"] = round(run.driver_bytes / 1e6) or ""
        if check.startswith("WRONG"):
            row = {column: "" for column in COLUMNS}
        return {"check": check, **row}

    def _times(self, stack: Stack, run: Run, repetitions: int) -> Row:
        one = wall_seconds(stack, run, 1, 1)
        in_a_row = max(1, min(8, 64 // len(run.layers), round(ROW_SECONDS / one)))
        wall = wall_seconds(stack, run, repetitions, in_a_row)
        host = host_seconds(stack, run, repetitions)
        kernels = gaps = float("nan")
        if self.device.type == "cuda":
            kernels, gaps = busy_and_gaps(device_intervals(stack, run))
        return {
            "ms": round(wall * 1e3, 4),
            "÷ kernels": round(wall / kernels, 3),
            "kernels ms": round(kernels * 1e3, 4),
            "gaps ms": round(gaps * 1e3, 4),
            "CPU µs/layer": round(host * 1e6, 1),
        }


class _Pair(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def function_pair_us(device: torch.device, repetitions: int = 50) -> float:
    """µs of the host for forward and backward of an autograd.Function that does nothing, measured as a layer is."""
    x = torch.zeros(8, device=device, requires_grad=True)
    nothing = torch.zeros(())
    stack = Stack([], x, nothing, nothing, torch.zeros(8, device=device), None, None)
    run = Run([lambda x, cos, sin: _Pair.apply(x)] * 4)
    return host_seconds(stack, run, repetitions) * 1e6
