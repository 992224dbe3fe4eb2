# SPDX-License-Identifier: Apache-2.0
"""The measured values that count, and the bound of each, in the order of the targets' table of docs/performance.md."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

NODE = "h200x8/"  # begins the names of records of a node of eight GPUs


@dataclass(frozen=True)
class Target:
    """One measured value and the bound it is held to: the CSV's first row that has the values of `where`."""

    what: str
    csv: str
    where: dict[str, object]
    column: str
    bound: float
    at_least: bool = False

    def line(self, value: float | None) -> list[str]:
        """Cells: what, measured, target, verdict."""
        digits = 2 if self.bound < 100 else 0
        target = f"{'≥' if self.at_least else '≤'} {self.bound:.{digits}f}"
        if value is None:
            return [self.what, "–", target, "not measured"]
        over = self.bound / value - 1 if self.at_least else value / self.bound - 1
        verdict = "met" if over <= 0 else f"missed by {over:.{0 if over >= 0.005 else 1}%}"
        return [self.what, f"{value:.{digits}f}", target, verdict]


def _gemm(op: str, what: str, shape: str, bound: float, **where: object) -> Target:
    return Target(what, op, {"M x N x K": shape, **where}, "÷ cublaslt", bound)


def _layer(what: str, shape: str, provider: str, column: str, bound: float) -> Target:
    where = {"shape MxNxK": shape, "rank": 16, "dropout": 0.1, "provider": provider}
    return Target(what, "lora_linear", where, column, bound)


def times(shape: str) -> str:
    return shape.replace("x", "×")


def targets() -> Iterator[Target]:
    """The ratios that count, in the order of the targets' table of docs/performance.md."""
    yield from _finetune_targets()
    yield from _loop_targets()
    yield from _generate_targets()
    yield from _host_targets()
    square, forward = "8192x8192x8192", "`fp8_linear_lora` with bias ÷ cuBLASLt's GEMM without LoRA"
    for rank in (16, 64):
        for shape, bound in (
            (square, 0.98),
            ("8192x10240x8192", 0.98),
            ("4096x4096x4096", 0.98),
            ("2048x8192x8192", 1.0),
            ("8192x8192x28672", 1.0),
        ):
            what = f"{forward}, {times(shape)}, R = {rank}"
            yield _gemm("fp8_linear_lora", what, shape, bound, rank=rank, provider="ours")
    what = f"`fp8_grad_input` with mask ÷ cuBLASLt's GEMM on a ready Wᵀ, {times(square)}, R = 16"
    provider = "ours, single, mask given"  # as the layer's backward calls it
    yield _gemm("fp8_grad_input", what, square, 1.06, rank=16, p=0.1, provider=provider)
    for op, bound, where in (
        ("quantize_lora_down", 1.3, {"p": 0.1, "mode": "delayed"}),
        # as a layer's backward calls them
        ("quantize_grad", 1.4, {"mode": "delayed", "provider": "ours, drawing a mask"}),
        ("lora_grad_a", 1.5, {"p": 0.1, "reads": "x8", "provider": "ours, mask given"}),
    ):
        where = {"shape": "8192x8192", "rank": 16, "provider": "ours", **where}
        how = ", ".join(["R = 16", *str(where["provider"]).split(", ")[1:]])
        yield Target(f"`{op}` ÷ its bytes, 8192×8192, {how}", op, where, "÷ floor", bound)
    for direction in ("forward", "backward"):
        where = {"shape": "8192x8192", "p": 0.1, "bias": "yes", "direction": direction}
        what = f"`bias_dropout_add` {direction} ÷ its bytes, 8192×8192"
        op = "bias_dropout_add"
        yield Target(what, op, {**where, "provider": "ours"}, "÷ floor", 1.15)
    layer = f"`LoRALinear` forward + backward, {times(square)}"
    yield _layer(f"{layer} ÷ TE FP8 without LoRA", square, "ours fp8", "÷ te base", 1.02)
    yield _layer(f"{layer} ÷ TE FP8 + LoRA", square, "ours fp8", "÷ te + lora", 0.70)
    yield _layer(f"{layer} ÷ PEFT bf16", square, "ours fp8", "÷ peft", 0.46)
    small = "4096x4096x4096"
    what = f"the same, {times(small)}, graphed ÷ TE FP8 + LoRA graphed by TE"
    yield _layer(what, small, "ours fp8, graphed", "÷ te graphed", 0.52)
    yield _layer("bytes of FP8 weight per parameter", square, "ours fp8", "weight B/param", 1.0)
    yield from _decoder_layer_targets()
    yield from _end_to_end_targets()
    yield from _sharded_targets()


def _finetune_targets() -> Iterator[Target]:
    what = "`lorakernels finetune`, 8 layers of 8B widths, 2×4096, all linear layers"
    yield Target(
        f"{what}: tokens/s, no options, vocabulary 32,000",
        "check_gpu",
        {"shape": "8b/8 2x4096", "part": "finetune"},
        "tokens/s",
        88_000,
        at_least=True,
    )
    dense: dict[str, object] = {"rows": "2 x 4096", "provider": "cli, --no-isolate-documents"}
    for column, more, bound in (
        ("tokens/s", "tokens/s, `--no-isolate-documents`, vocabulary 128,256", 98_000),
        ("÷ ours, one graph", "the same ÷ a loop of our own, a step as one graph", 0.97),
    ):
        yield Target(f"{what}: {more}", "finetune", dense, column, bound, at_least=True)


def _loop_targets() -> Iterator[Target]:
    """Loops as users write them."""
    for shape, part, what, bound in (
        ("1b 1x2048", "drop-in, eager", "after `apply_lora`, eager, ÷ HF + PEFT's", 1.3),
        ("8b/8 2x4096", "drop-in, eager", "after `apply_lora`, eager, ÷ HF + PEFT's", 1.5),
        ("1b 1x2048", "drop-in, fused", "fused, eager, ÷ HF + PEFT's", 2.5),
        ("8b/8 2x4096", "drop-in, fused", "fused, eager, ÷ HF + PEFT's", 1.9),
        ("1b 1x2048", "drop-in, compiled by layer", "compiled by layer ÷ PEFT's likewise", 1.0),
        ("8b/8 2x4096", "drop-in, compiled by layer", "compiled by layer ÷ PEFT's likewise", 1.4),
    ):
        where: dict[str, object] = {"shape": shape, "part": part}
        what = f"own loop, {times(shape)}, tokens/s {what}"
        yield Target(what, "check_gpu", where, "× PEFT", bound, at_least=True)


def _generate_targets() -> Iterator[Target]:
    """transformers' generate beside PEFT's over a base in bf16."""
    shape: dict[str, object] = {"model": "8 layers of Llama-3.1-8B", "provider": "ours, fused"}
    for batch in (1, 64):
        for forwards in ("eager", "one graph"):
            what = f"`generate`, 8 layers of 8B widths, {batch} × 512 tokens before, {forwards}"
            where = {**shape, "batch": batch, "forwards": forwards}
            yield Target(f"{what}: a token ÷ HF + PEFT's bf16", "generate", where, "÷ peft", 1.0)


def _sharded_targets() -> Iterator[Target]:
    where: dict[str, object] = {"model": "Llama-2-70B", "base": "sharded, peer", "ranks": 2}
    one: dict[str, object] = {"model": "Llama-2-70B", "base": "offloaded, 0.27", "ranks": 1}
    what = "70B, 1×8192, an H200 held to 80 GB, 27 % of the base in host memory: tokens/s"
    yield Target(what, "sharded_base", one, "tokens/s a GPU", 1900, at_least=True)
    for ranks, length, base, least in (
        (2, 4096, "offloaded, 0.54", 300),
        (4, 4096, "sharded, peer", 425),
        (8, 8192, "sharded, peer", 425),
    ):
        large: dict[str, object] = {"model": "Llama-3.1-405B", "base": base, "ranks": ranks}
        large["tokens"] = f"1 x {length}"
        what = f"405B's shape, 1×{length} a GPU, {ranks} H200, base {base}: tokens/s a GPU"
        record = f"{NODE}sharded_base" if ranks == 8 else "sharded_base"
        yield Target(what, record, large, "tokens/s a GPU", least, at_least=True)
    four = {**where, "ranks": 4}
    what = "70B, 1×8192 a GPU, base sharded over four GPUs: tokens/s a GPU"
    yield Target(what, "sharded_base", four, "tokens/s a GPU", 3000, at_least=True)
    what = "70B, 1×8192 a GPU, base sharded over two GPUs: tokens/s a GPU"
    straight = {**where, "check": "finite"}  # loaded so, and not beside a whole base
    yield Target(what, "sharded_base", straight, "tokens/s a GPU", 2950, at_least=True)
    yield Target(
        f"{what}, ÷ a GPU's with the whole base",
        "sharded_base",
        {**where, "check": "ok"},
        "÷ whole",
        0.98,
        at_least=True,
    )


def _decoder_layer_targets() -> Iterator[Target]:
    layer = "decoder layer, LoRA on q, k, v, o, graphed ÷ `te.TransformerLayer` FP8 without LoRA"
    for size, shape, bound, saves in (
        ("large", "8192 hidden, 8192 tokens", 0.96, ("recompute", "fp8")),
        ("medium", "4096 hidden, 2048 tokens", 0.90, ("recompute",)),
        ("small", "2048 hidden, 1024 tokens", 0.85, ("recompute",)),
    ):
        for save in saves:
            where: dict[str, object] = {"size": size, "provider": f"ours, {save}, graphed"}
            what = f'{layer}, {shape}, `save="{save}"`'
            yield Target(what, "decoder_layer", where, "÷ te layer", bound)
    where = {"size": "large", "provider": "ours, fp8"}
    what = 'MB that this layer saves for backward, 8192 hidden, 8192 tokens, `save="fp8"`'
    yield Target(what, "decoder_layer", where, "saved MB", 1100)


def _host_targets() -> Iterator[Target]:
    """The host's time, which no wait for the device is in."""
    linear = {"case": "2048 -> 2048, 1024 tokens, p = 0.1", "provider": "ours"}
    what = "the host's time, forward + backward, ÷ PEFT's: `LoRALinear`, 2048², 1,024 tokens"
    yield Target(what, "host", linear, "÷ peft", 0.45)
    layer = {"kind": "layer", "case": "Llama-3.2-1B, 1 x 1024"}
    what = "the same of a fused layer of Llama-3.2-1B, 1×1024"
    yield Target(what, "host", {**layer, "provider": "ours, fused"}, "÷ peft", 0.30)
    what = "µs of the host to replay that layer, forward + backward, from Python"
    yield Target(what, "host", {**layer, "provider": "ours, fused, replayed"}, "µs", 75)


def _end_to_end_targets() -> Iterator[Target]:
    for model, provider, column, what, bound in (
        (
            "Llama-3.2-1B",
            "ours, graphs by layer",
            "× hf + peft",
            "1024 tokens, tokens/s ÷ HF + PEFT's",
            4.0,
        ),
        (
            "Llama-3.2-1B",
            "ours, one graph",
            "× hf + peft",
            "1024 tokens, tokens/s ÷ HF + PEFT's, a step as one graph",
            4.0,
        ),
        (
            "Llama-3.2-1B",
            "ours, one graph",
            "tokens/s",
            "the same, tokens/s",
            130_000,
        ),
        (
            "Llama-3.1-8B",
            "ours, graphs by layer",
            "× hf + peft",
            "4096 tokens, tokens/s ÷ HF + PEFT's",
            2.0,
        ),
        (
            "Llama-3.1-8B",
            "ours, fast, one graph",
            "× hf + peft",
            'the same, a step as one graph, `save="full"`',
            2.1,
        ),
        (
            "Llama-3.1-8B",
            "ours, fast, FP8 head, one graph",
            "× hf + peft",
            "the same, and an FP8 head",
            2.2,
        ),
        (
            "Llama-2-70B",
            "ours, fit, graphs by layer",
            "tokens/s",
            "8192 tokens on one GPU, tokens/s",
            2000,
        ),
        (
            "Llama-2-70B",
            "ours, fit, offload, graphs by layer",
            "tokens/s",
            "8192 tokens on one GPU, activations in host memory too, tokens/s",
            3050,
        ),
    ):
        where = {"model": model, "LoRA on": "qkvo", "provider": provider}
        yield Target(f"{model}, {what}", "end_to_end", where, column, bound, at_least=True)
