# SPDX-License-Identifier: Apache-2.0
"""Replaying decoder layers: eager, GraphManager, torch.cuda.make_graphed_callables, TE's, and torch.compile.

    python benchmarks/bench_graphs.py --output DIR [--quick] [--sizes small …] [--layers 4 …] [--providers …]

A step is the forward and the backward of a stack of Llama decoder layers (transformers' own), with LoRA on q, k, v, o
over an FP8 base and dropout 0.1; gradients are None before it. Each provider has a process of its own (workers.py), so
that no library's state, and nothing that broke, reaches another's rows. Columns:

    check          of the first replayed step against an eager one from the same random and FP8 states: "bit-equal",
                   or the largest difference's norm ÷ the tensor's norm. ours must be as equal to eager as eager is to
                   itself (attention's backward may add with atomics), peers within TOLERANCE; a row that is not is
                   WRONG and not timed
    ms             wall time of a step, of a row of them with the device idle before the first and after the last
    ÷ kernels      ms ÷ kernels ms: 1 is a device without a gap
    kernels ms     sum of the durations of kernels and copies in a step of the same provider, by torch's profiler
    gaps ms        time within that step in which none of them ran
    CPU µs/layer   of the host for forward + backward of a layer, the device idle before each of both, so that no launch
                   waits for room in a queue; medians. Compare with "a pair of Functions"
    capture s      warm-up and capture, compilation included
    MB, driver MB  the allocator's peak above the weights; what the driver took besides, where it could be told
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent))
import common
from workers import Local, Worker, WorkerError, reason_of, serve

SIZES = {  # hidden, ffn, heads, key-value heads, tokens; how many layers by default
    "small": (2048, 8192, 32, 8, 1024, (4, 16, 32)),
    "medium": (4096, 14336, 32, 8, 2048, (4, 16, 32)),
    "large": (8192, 28672, 64, 8, 8192, (4,)),
    "tiny": (64, 128, 4, 2, 32, (2,)),
}
OURS = ("GraphManager", "GraphManager, grads by autograd")
# Of the norm: bf16 keeps 2⁻⁸ of a number, and another order of additions passes through up to 32 layers. Other masks
# change a third of what LoRA adds, which is some percent of the output
TOLERANCE, WITH_OTHER_MASKS = 2**-5, 2**-3
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


class Layer(nn.Module):
    """A decoder layer with tensors as its only arguments, which some peers need."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y = self.inner(x, attention_mask=None, position_embeddings=(cos, sin))
        return y[0] if isinstance(y, tuple) else y


@dataclass
class Stack:
    layers: list[nn.Module]
    x: Tensor
    cos: Tensor
    sin: Tensor
    dy: Tensor
    fp8_state: Any
    rng_state: Any

    @property
    def trained(self) -> list[nn.Parameter]:
        return [p for layer in self.layers for p in layer.parameters() if p.requires_grad]

    def first(self, count: int) -> Stack:
        return Stack(self.layers[:count], *list(vars(self).values())[1:])

    def forward(self, layers: list[Any]) -> Tensor:
        x = self.x
        for layer in layers:
            x = layer(x, self.cos, self.sin)
        return x

    def run(self, layers: list[Any]) -> Tensor:
        y = self.forward(layers)
        y.backward(self.dy)
        return y

    def clean(self) -> None:
        for parameter in (*self.trained, self.x):
            parameter.grad = None


@dataclass
class Run:
    """What a provider gives: callables for the layers, and what goes around a step. `rng`: state of the CPU generator
    that a replay draws from, None where that is the present one."""

    layers: list[Any]
    begin: Callable[[], object] = lambda: None
    end: Callable[[], object] = lambda: None
    rng: Tensor | None = None
    driver_bytes: int = 0
    exact: bool = False
    notes: list[str] = field(default_factory=list)


def make_stack(size: str, count: int, device: torch.device) -> Stack:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

    from lorakernels import DelayedScaling, LoRAConfig, LoRALinear, PhiloxState, apply_lora

    hidden, ffn, heads, kv_heads, tokens, _ = SIZES[size]
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=ffn,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        num_hidden_layers=count,
        attn_implementation="sdpa",
        use_cache=False,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = nn.ModuleList()
        for index in range(count):
            model.append(Layer(LlamaDecoderLayer(config, index).to(torch.bfloat16)))
        x = torch.randn(1, tokens, hidden, dtype=torch.bfloat16, requires_grad=True)
        cos, sin = LlamaRotaryEmbedding(config)(x, torch.arange(tokens)[None])
        dy = torch.randn(1, tokens, hidden, dtype=torch.bfloat16)
        rng_state = PhiloxState(1, device)
    lora = LoRAConfig(
        r=16,
        lora_alpha=32,
        lora_dropout=0.1,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        fp8=DelayedScaling(amax_history_len=4),
    )
    state = apply_lora(model, lora, adapter_dtype=torch.bfloat16, rng_state=rng_state).fp8_state
    for module in model.modules():
        if isinstance(module, LoRALinear):
            nn.init.normal_(module.lora_B, std=0.02)
    state.reduce_and_update()
    return Stack(list(model.train()), x, cos.detach(), sin.detach(), dy, state, rng_state)


# providers


@contextmanager
def eager(stack: Stack) -> Iterator[Run]:
    yield Run(list(stack.layers), exact=True)


@contextmanager
def graph_manager(stack: Stack, grads: str = "add", backend: Any = None) -> Iterator[Run]:
    from lorakernels.graphs import GraphManager

    manager = GraphManager(
        stack.layers,
        warmup_steps=1,
        fp8_state=stack.fp8_state,
        rng_states=[stack.rng_state],
        grads=grads,
        backend=backend,
    )
    try:
        stack.run(stack.layers)
        manager.end_iteration()
        rng, driver = manager.cpu_rng_at_capture, manager.report().driver_bytes
        yield Run(list(stack.layers), lambda: None, manager.end_iteration, rng, driver, True)
    finally:
        manager.close()


@contextmanager
def through_autograd(stack: Stack) -> Iterator[Run]:
    with graph_manager(stack, "autograd") as run:
        yield run


@contextmanager
def rng_at_first_capture() -> Iterator[list[Tensor]]:
    """States of torch's CPU generator at each capture that begins inside."""
    found: list[Tensor] = []
    original = torch.cuda.CUDAGraph.capture_begin

    def noted(self: Any, *args: Any, **kwargs: Any) -> None:
        found.append(torch.get_rng_state())
        original(self, *args, **kwargs)

    torch.cuda.CUDAGraph.capture_begin = noted  # type: ignore[method-assign]
    try:
        yield found
    finally:
        torch.cuda.CUDAGraph.capture_begin = original  # type: ignore[method-assign]


@contextmanager
def graphed_by(make: Callable[..., Any], stack: Stack) -> Iterator[Run]:
    state, slot = stack.fp8_state.save(), stack.rng_state.tensor.clone()
    samples = tuple(
        (stack.x.detach().clone().requires_grad_(), stack.cos, stack.sin) for _ in stack.layers
    )
    forwards = [layer.forward for layer in stack.layers]
    try:
        with rng_at_first_capture() as rng:
            graphed = make(tuple(stack.layers), samples)
        stack.fp8_state.restore(state)
        stack.rng_state.tensor.copy_(slot)
        yield Run(list(graphed), rng=rng[0] if rng else None)
    finally:
        for layer, forward in zip(stack.layers, forwards, strict=True):
            layer.forward = forward


@contextmanager
def make_graphed_callables(stack: Stack) -> Iterator[Run]:
    with graphed_by(torch.cuda.make_graphed_callables, stack) as run:
        yield run


@contextmanager
def te_make_graphed_callables(stack: Stack) -> Iterator[Run]:
    from peers.te import te_or_unavailable

    with graphed_by(te_or_unavailable().make_graphed_callables, stack) as run:
        yield run


@contextmanager
def reduce_overhead(stack: Stack) -> Iterator[Run]:
    import torch._dynamo.config as config

    for name in ("recompile_limit", "cache_size_limit"):  # before torch 2.7 the second
        if hasattr(config, name):
            setattr(config, name, 4 * len(stack.layers) + 16)
    torch.compiler.reset()
    compiled = [
        torch.compile(layer, mode="reduce-overhead", dynamic=False) for layer in stack.layers
    ]
    try:
        # Where its masks come from is the compiler's business: they may be others than eager's
        yield Run(compiled, torch.compiler.cudagraph_mark_step_begin, notes=["other masks"])
    finally:
        torch.compiler.reset()


PROVIDERS: dict[str, Callable[[Stack], Any]] = {
    "eager": eager,
    "GraphManager": graph_manager,
    "GraphManager, grads by autograd": through_autograd,
    "torch make_graphed_callables": make_graphed_callables,
    "TE make_graphed_callables": te_make_graphed_callables,
    "torch.compile reduce-overhead": reduce_overhead,
}


# measurements


def step(stack: Stack, run: Run) -> Tensor:
    run.begin()
    y = stack.run(run.layers)
    run.end()
    return y


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


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


def checked(stack: Stack, run: Run, first: FirstStep) -> str:
    """The `check` column."""
    found = first(run)
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


def host_seconds(stack: Stack, run: Run, repetitions: int) -> float:
    """Of a layer's forward and backward, medians added. Hooks between the layers wait for the device, which is then
    idle, and take the time before they wait and after."""
    device, count = stack.x.device, len(run.layers)
    forwards: list[float] = []
    backwards: list[float] = []
    for _ in range(repetitions):
        stack.clean()
        ends: list[float] = []
        begins: list[float] = []

        def between(grad: Tensor, ends: list[float] = ends, begins: list[float] = begins) -> None:
            ends.append(time.perf_counter())
            synchronize(device)
            begins.append(time.perf_counter())

        run.begin()
        x = stack.x.view_as(stack.x)
        x.register_hook(between)
        for layer in run.layers:
            synchronize(device)
            start = time.perf_counter()
            x = layer(x, stack.cos, stack.sin)
            forwards.append(time.perf_counter() - start)
            x.register_hook(between)
        x.backward(stack.dy)
        run.end()
        assert len(begins) == count + 1, "a hook for each layer's output, and one for the input"
        backwards += [end - begin for begin, end in zip(begins, ends[1:], strict=False)]
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
            from peers.te import te_or_unavailable

            te_or_unavailable()
        import lorakernels.graphs  # noqa: F401
        import transformers  # noqa: F401

        torch.zeros(1, device=self.device)
        return "ready"

    def release(self) -> str:
        self._stack = None
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return "released"

    def measure(self, size: str, count: int, most: int, repetitions: int) -> common.Row:
        if self._stack is None or self._stack[0] != size:
            self.release()
            self._stack = size, make_stack(size, most, self.device)
        stack = self._stack[1].first(count)
        stack.clean()
        cuda = self.device.type == "cuda"
        if cuda:
            common.heat(self.device, 0.1)
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
            row = self._timed(stack, run, repetitions)
        row["capture s"] = "" if self.name == "eager" else round(capture, 2)
        row["MB"] = round(peak / 1e6)
        row["driver MB"] = round(run.driver_bytes / 1e6) or ""
        return row

    def _timed(self, stack: Stack, run: Run, repetitions: int) -> common.Row:
        row: common.Row = {"check": checked(stack, run, FirstStep(stack, run))}
        if str(row["check"]).startswith("WRONG"):
            return row | {column: "" for column in COLUMNS}
        in_a_row = max(1, min(8, 64 // len(run.layers)))
        wall = wall_seconds(stack, run, repetitions, in_a_row)
        host = host_seconds(stack, run, repetitions)
        kernels = gaps = float("nan")
        if self.device.type == "cuda":
            kernels, gaps = busy_and_gaps(device_intervals(stack, run))
        return row | {
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


# the parent


def rows_of(
    size: str, name: str, worker: Worker | Local, args: argparse.Namespace, until: float
) -> Iterator[common.Row]:
    counts = args.layers or SIZES[size][-1]
    for count in counts:
        row: common.Row = {"size": size, "layers": count, "provider": name}
        left = until - time.monotonic()
        try:
            if left < 1:
                raise WorkerError("not run: --budget-s was spent")
            options = {"count": count, "most": max(counts), "repetitions": args.repetitions}
            longest = left if compiles(name) else min(left, args.timeout_s)
            row |= worker.ask("measure", longest, size=size, **options)
        except WorkerError as error:
            row |= {"check": f"raised: {error}", **{column: "" for column in COLUMNS}}
        yield row
    with contextlib.suppress(WorkerError):
        worker.ask("release", 60)


def compiles(name: str) -> bool:
    return "compile" in name


def start(name: str, args: argparse.Namespace, device: torch.device) -> Worker | Local:
    """A process that imports while others do; on a CPU, this one."""
    if device.type == "cpu":
        worker: Worker | Local = Local(handlers(name, device))
    else:
        command = [sys.executable, __file__, "--worker", name, "--device", args.device]
        folder = args.output or Path(tempfile.gettempdir(), "bench_graphs")
        worker = Worker(command, folder / "logs" / f"{name.replace(' ', '_')}.log")
    worker.send("load")
    return worker


def bench(args: argparse.Namespace, device: torch.device) -> list[common.Row]:
    """One process after the other has the device; what compiles comes last, and takes the time that is left."""
    until = time.monotonic() + args.budget_s
    workers = {name: start(name, args, device) for name in args.providers}
    for worker in workers.values():
        with contextlib.suppress(WorkerError):  # its rows will say so
            worker.receive(max(1.0, until - time.monotonic()))
    rows: list[common.Row] = []
    jobs = [(size, name) for size in args.sizes for name in workers]
    for size, name in sorted(jobs, key=lambda job: compiles(job[1])):
        began = time.monotonic()
        rows += rows_of(size, name, workers[name], args, until)
        print(f"{size}, {name}: {time.monotonic() - began:.1f} s", flush=True)
    for worker in workers.values():
        worker.close()
    by_ms = {(r["size"], r["layers"], r["provider"]): r["ms"] for r in rows}
    for row in rows:
        own = by_ms.get((row["size"], row["layers"], "GraphManager"), "")
        row["÷ GraphManager"] = common.ratio(row["ms"], own)
    place = [*args.providers].index
    order = [*args.sizes].index
    return sorted(
        rows,
        key=lambda r: (order(r["size"]), int(str(r["layers"])), place(r["provider"])),
    )


def handlers(name: str, device: torch.device) -> dict[str, Callable[..., Any]]:
    measurer = Measurer(name, device)
    return {"load": measurer.load, "measure": measurer.measure, "release": measurer.release}


def main() -> int:
    options = common.parser(__doc__ or "")
    options.add_argument("--sizes", nargs="+", choices=SIZES, default=["small", "medium", "large"])
    options.add_argument("--layers", nargs="+", type=int, help="default: 4 16 32, large only 4")
    options.add_argument("--providers", nargs="+", choices=PROVIDERS, default=list(PROVIDERS))
    options.add_argument("--quick", action="store_true", help="3 repetitions, in --budget-s 100")
    options.add_argument("--budget-s", type=float, help="seconds; what is left then is not run")
    options.add_argument("--timeout-s", type=float, default=25.0, help="for one row")
    options.add_argument("--worker", choices=PROVIDERS, help=argparse.SUPPRESS)
    args, device = common.arguments(options, on_gpu=15)
    if args.worker:
        serve(handlers(args.worker, device))
        return 0
    if device.type != "cuda":
        options.error("CUDA graphs need a CUDA device")
    args.repetitions = 3 if args.quick else args.repetitions
    args.budget_s = args.budget_s or (100.0 if args.quick else 600.0)
    rows = bench(args, device)
    facts = common.environment(device)
    try:
        facts["a pair of Functions, CPU µs"] = f"{function_pair_us(device):.1f}"
    except Exception as error:
        facts["a pair of Functions, CPU µs"] = reason_of(error)
    return common.finish("graphs", rows, facts, args.output)


if __name__ == "__main__":
    raise SystemExit(main())
