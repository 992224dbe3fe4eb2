# SPDX-License-Identifier: Apache-2.0
"""What bench_graphs.py replays, a stack of Llama decoder layers, and how each provider replays it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

SIZES = {  # hidden, ffn, heads, key-value heads, tokens; how many layers by default
    "small": (2048, 8192, 32, 8, 1024, (4, 16, 32)),
    "medium": (4096, 14336, 32, 8, 2048, (4, 16, 32)),
    "large": (8192, 28672, 64, 8, 8192, (4,)),
    "tiny": (64, 128, 4, 2, 32, (2,)),
}


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
    pack([x, dy, *model.parameters(), *model.buffers()])
    return Stack(list(model.train()), x, cos.detach(), sin.detach(), dy, state, rng_state)


def pack(tensors: Iterable[Tensor]) -> None:
    """Move the large ones into one piece of memory. Where they were made, between temporaries that are gone, the
    allocator keeps holes, which eager layers then live in and graphs, with a pool of their own, cannot."""
    large = {id(t): t for t in tensors if t.nbytes > 1 << 20}.values()
    places = [0]
    for t in large:
        assert t.is_contiguous()
        places.append(places[-1] + -(-t.nbytes // 512) * 512)
    memory = (
        torch.empty(places[-1], dtype=torch.uint8, device=next(iter(large)).device)
        if large
        else None
    )
    for t, place in zip(large, places, strict=False):
        there = memory[place : place + t.nbytes].view(t.dtype).view(t.shape)
        t.data = there.copy_(t.detach())


def be_deterministic() -> None:
    """For all providers alike: SDPA's backward adds with atomics, and an ulp in dy becomes percents through FP8."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)


@contextmanager
def eager(stack: Stack) -> Iterator[Run]:
    yield Run(list(stack.layers), exact=True)


@contextmanager
def graph_manager(stack: Stack, grads: str = "add", backend: Any = None) -> Iterator[Run]:
    from lorakernels.graphs import GraphManager, GraphOptions

    manager = GraphManager(
        stack.layers,
        warmup_steps=1,
        fp8_state=stack.fp8_state,
        rng_states=[stack.rng_state],
        grads=grads,
        options=GraphOptions(backend=backend),
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
    from benchmarks.peers.te import te_or_unavailable

    with graphed_by(te_or_unavailable().make_graphed_callables, stack) as run:
        yield run


@contextmanager
def reduce_overhead(stack: Stack) -> Iterator[Run]:
    import torch._dynamo.config as config
    import torch._inductor.config as inductor

    # Else it draws the dropout's nonce, a number on the CPU, inside a GPU kernel, which cannot be launched (torch 2.11)
    inductor.fallback_random = True
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
