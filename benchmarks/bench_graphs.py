# SPDX-License-Identifier: Apache-2.0
"""Replaying decoder layers: eager, torch.cuda.make_graphed_callables, TE's, torch.compile and GraphManager, in one run.

A step is the forward and the backward of a stack of Llama decoder layers (transformers' own), with LoRA on q, k, v, o
over an FP8 base and dropout 0.1. Columns:

    ms            wall time of a step, device idle before and after; median
    CPU µs/layer  time of the calling thread and of autograd's to enqueue forward and backward, per layer; median
    ÷ kernels     ms over the sum of the eager step's kernel times, by torch's profiler: 1 is a device without a gap
    capture s     warm-up and capture, compilation included
    MB            memory reserved by the allocator at the peak, above the weights; eager's is what training needs
    driver MB     what the driver took besides (graphs' own memory), where it could be told

    python -m benchmarks.bench_graphs --sizes small medium large --layers 4 16 32 --output benchmarks/results
"""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from lorakernels.graphs import GraphManager
from torch import Tensor, nn

from benchmarks import common
from lorakernels import DelayedScaling, LoRAConfig, LoRALinear, PhiloxState, apply_lora

SIZES = {  # hidden, ffn, heads, key-value heads, tokens
    "small": (2048, 8192, 32, 8, 1024),
    "medium": (4096, 14336, 32, 8, 2048),
    "large": (8192, 28672, 64, 8, 8192),
    "tiny": (64, 128, 4, 2, 32),
}
Step = Callable[[], None]


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
    rng_state: PhiloxState

    @property
    def trained(self) -> list[nn.Parameter]:
        return [p for layer in self.layers for p in layer.parameters() if p.requires_grad]

    def run(self, layers: list[Any]) -> None:
        x = self.x
        for layer in layers:
            x = layer(x, self.cos, self.sin)
        x.backward(self.dy)


def make_stack(size: str, count: int, device: torch.device) -> Stack:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

    hidden, ffn, heads, kv_heads, tokens = SIZES[size]
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=ffn,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        num_hidden_layers=count,
        attn_implementation="sdpa",
        use_cache=False,
    )
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


@contextmanager
def eager(stack: Stack) -> Iterator[Step]:
    yield lambda: stack.run(stack.layers)


@contextmanager
def graph_manager(stack: Stack, grads: str = "add") -> Iterator[Step]:
    manager = GraphManager(
        stack.layers,
        warmup_steps=1,
        fp8_state=stack.fp8_state,
        rng_states=[stack.rng_state],
        grads=grads,
    )

    def step() -> None:
        stack.run(stack.layers)
        manager.end_iteration()

    step()
    step.driver_bytes = manager.report().driver_bytes  # type: ignore[attr-defined]
    try:
        yield step
    finally:
        manager.close()


@contextmanager
def through_autograd(stack: Stack) -> Iterator[Step]:
    with graph_manager(stack, "autograd") as step:
        yield step


def samples_like(stack: Stack) -> list[Tensor]:
    return [stack.x.detach().clone().requires_grad_() for _ in stack.layers]


@contextmanager
def make_graphed_callables(stack: Stack) -> Iterator[Step]:
    state = stack.fp8_state.save()
    samples = [(x, stack.cos, stack.sin) for x in samples_like(stack)]
    forwards = [layer.forward for layer in stack.layers]
    graphed = torch.cuda.make_graphed_callables(tuple(stack.layers), tuple(samples))
    stack.fp8_state.restore(state)
    try:
        yield lambda: stack.run(list(graphed))
    finally:
        for layer, forward in zip(stack.layers, forwards, strict=True):
            layer.forward = forward


@contextmanager
def te_make_graphed_callables(stack: Stack) -> Iterator[Step]:
    from transformer_engine.pytorch import make_graphed_callables as make

    samples = tuple((x, stack.cos, stack.sin) for x in samples_like(stack))
    forwards = [layer.forward for layer in stack.layers]
    graphed = make(tuple(stack.layers), samples)
    try:
        yield lambda: stack.run(list(graphed))
    finally:
        for layer, forward in zip(stack.layers, forwards, strict=True):
            layer.forward = forward


@contextmanager
def reduce_overhead(stack: Stack) -> Iterator[Step]:
    compiled = [torch.compile(layer, mode="reduce-overhead") for layer in stack.layers]

    def step() -> None:
        torch.compiler.cudagraph_mark_step_begin()
        stack.run(compiled)

    try:
        yield step
    finally:
        torch.compiler.reset()


PROVIDERS = {
    "eager": eager,
    "GraphManager": graph_manager,
    "GraphManager, grads by autograd": through_autograd,
    "torch make_graphed_callables": make_graphed_callables,
    "TE make_graphed_callables": te_make_graphed_callables,
    "torch.compile reduce-overhead": reduce_overhead,
}


def clean(stack: Stack) -> None:
    for parameter in (*stack.trained, stack.x):
        parameter.grad = None


def measure(stack: Stack, step: Step, repetitions: int) -> tuple[float, float]:
    """(seconds of a step, seconds of the host), medians."""
    walls, hosts = [], []
    for _ in range(repetitions):
        clean(stack)
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        enqueued = time.perf_counter()
        torch.cuda.synchronize()
        walls.append(time.perf_counter() - start)
        hosts.append(enqueued - start)
    return statistics.median(walls), statistics.median(hosts)


def kernel_seconds(stack: Stack, step: Step) -> float:
    """The sum of a step's kernel times."""
    from torch.profiler import ProfilerActivity, profile

    clean(stack)
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        step()
        torch.cuda.synchronize()
    return sum(e.self_device_time_total for e in found.key_averages()) / 1e6


def bench(
    size: str, count: int, names: list[str], device: torch.device, repetitions: int
) -> list[common.Row]:
    rows: list[common.Row] = []
    kernels = float("nan")
    for name in names:
        gc.collect()
        torch.cuda.empty_cache()
        stack = make_stack(size, count, device)
        base = torch.cuda.memory_allocated()
        row: common.Row = {"size": size, "layers": count, "provider": name}
        torch.cuda.reset_peak_memory_stats()
        try:
            started = time.perf_counter()
            with PROVIDERS[name](stack) as step:
                for _ in range(3):
                    clean(stack)
                    step()
                torch.cuda.synchronize()
                capture = time.perf_counter() - started
                wall, host = measure(stack, step, repetitions)
                if name == "eager":
                    kernels = kernel_seconds(stack, step)
                peak = torch.cuda.max_memory_reserved() - base
                row |= {
                    "ms": round(wall * 1e3, 4),
                    "CPU µs/layer": round(host / count * 1e6, 1),
                    "÷ kernels": round(wall / kernels, 3),
                    "capture s": "" if name == "eager" else round(capture, 2),
                    "MB": round(peak / 1e6),
                    "driver MB": round(getattr(step, "driver_bytes", 0) / 1e6) or "",
                    "why not": "",
                }
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0][:120]
            columns = ("ms", "CPU µs/layer", "÷ kernels", "capture s", "MB", "driver MB")
            row |= {column: "" for column in columns} | {"why not": reason}
        rows.append(row)
        del stack
    return rows


def main() -> int:
    options = common.parser(__doc__ or "")
    options.add_argument("--sizes", nargs="+", choices=SIZES, default=["small", "medium", "large"])
    options.add_argument("--layers", nargs="+", type=int, default=[4, 16, 32])
    options.add_argument("--providers", nargs="+", choices=PROVIDERS, default=list(PROVIDERS))
    args, device = common.arguments(options, on_gpu=30)
    if device.type != "cuda":
        options.error("CUDA graphs need a CUDA device")
    with contextlib.suppress(Exception):  # its row will say so
        import transformer_engine.pytorch  # noqa: F401  (once torch had loaded its cuDNN, this failed on an H200 machine)
    common.heat(device)
    rows: list[common.Row] = []
    for size in args.sizes:
        for count in args.layers:
            rows += bench(size, count, args.providers, device, args.repetitions)
    return common.finish("graphs", rows, common.environment(device), args.output, check="why not")


if __name__ == "__main__":
    raise SystemExit(main())
