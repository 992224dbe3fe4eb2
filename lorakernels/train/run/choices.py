# SPDX-License-Identifier: Apache-2.0
"""Report what a run chose and why, in five lines before its first step."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.attention import SDPBackend

from lorakernels import BlockScaling, ContextParallel, LoRAReport
from lorakernels.train.errors import OptionError
from lorakernels.train.model.flops import ModelCounts
from lorakernels.train.model.model import decoder_and_head, takes_starts, window_of
from lorakernels.train.options.options import FinetuneOptions
from lorakernels.train.options.running import CAPTURED_OPTIMS
from lorakernels.train.run.runtime import Fused, Runtime

NAMES = {
    "cudnn_graph": "cuDNN's graphs",
    "fp8": "cuDNN's FP8 forward and 16-bit backward",
    "packed": "FlashAttention-2 by where documents begin",
    "cudnn": "cuDNN",
    "flash": "FlashAttention-2",
    "efficient": "torch's memory-efficient kernel",
    "math": "plain matrix products",
}


def choices(
    report: LoRAReport, runtime: Runtime, fused: Fused, where: str, sizes: ModelCounts, longest: int
) -> list[str]:
    """One line each for device and precision, layers, attention, graphs and reproducibility.

    `longest`: the tokens of the longest document in the training rows.
    """
    options, model = runtime.options, runtime.model
    unlike_peft = f". {report.unlike_peft}" if report.unlike_peft else ""
    return [
        f"device: {where}; {_precision(model, report)}{_head(model, options)}; "
        f"{len(report.adapted())} adapters of rank {options.r}, "
        f"{sizes.trained:,} of {sizes.total:,} parameters trained{unlike_peft}",
        f"layers: {fused}",
        f"attention: {_attention(model, options, fused, longest)}",
        f"graphs: {_graphs(runtime)}",
        f"kernels: {_kernels(runtime.device)}",
    ]


def _precision(model: Any, report: LoRAReport) -> str:
    dtype = str(model.get_input_embeddings().weight.dtype).removeprefix("torch.")
    if isinstance(report.config.fp8, BlockScaling):
        return f"{dtype}, frozen weights in FP8 blocks"
    return f"{dtype}, frozen weights in FP8" if report.fp8_state is not None else dtype


def _head(model: Any, options: FinetuneOptions) -> str:
    if not options.fp8_head:
        return ""
    size = decoder_and_head(model)[1].get_parameter("weight").numel()
    return f", output head in FP8 while training ({size:,} bytes besides the plain one)"


def _attention(model: Any, options: FinetuneOptions, fused: Fused, longest: int) -> str:
    rows = "documents apart" if options.isolate_documents else "rows causal as a whole"
    if options.isolate_documents and longest < options.seq_len:
        rows += f", of at most {longest:,} tokens"
    if (window := _window(model, options, longest)) is not None:
        rows += f", by masks with a sliding window of {window:,} tokens"
    if ContextParallel.of(model) is not None:
        return f"{options.cp} ranks gather the keys and values of their rows; {rows}"
    implementation = getattr(decoder_and_head(model)[0].config, "_attn_implementation", None)
    if implementation != "sdpa":
        return f"transformers' {implementation}; {rows}"
    try:
        name, why = attention_backend(model, options, fused, longest)
    except AttributeError:  # the decoder's config names its sizes differently
        return f"transformers' sdpa; {rows}"
    except (ValueError, RuntimeError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise OptionError(f"{rows}: {error}") from error
    on_gpu = next(model.parameters()).is_cuda
    named = (
        NAMES.get(name, name) if on_gpu or name == "eager" else f"torch's {name} kernel for CPUs"
    )
    return f"{named}; {rows}{why and f'; not cuDNN: {why}'}"


def attention_backend(
    model: Any, options: FinetuneOptions, fused: Fused, longest: int
) -> tuple[str, str]:
    """The attention backend that a step's rows take, and why it is not cuDNN's graphs where those were faster.

    torch chooses by shapes, so the question is asked with tensors of the rows' shapes. `longest`: tokens of the longest
    document.

    Raises:
        ValueError: `options.attention` does not take them.
    """
    decoder: Any = decoder_and_head(model)[0]
    config, weight = decoder.config, decoder.get_input_embeddings().weight
    heads, rows, tokens = config.num_attention_heads, options.batch_size, options.seq_len
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads

    counts = [heads, kv_heads, kv_heads]  # columns of one matrix, as fused layers have them
    shape = (rows, tokens, sum(counts), width)
    made = torch.empty(shape, dtype=weight.dtype, device=weight.device, requires_grad=True)
    q, k, v = (t.transpose(1, 2) for t in made.split(counts, 2))
    window = _window(model, options, longest)
    mask = None
    if options.isolate_documents or window is not None:
        mask = torch.ones(tokens, dtype=torch.bool, device=weight.device)
        mask = mask.expand(rows, 1, tokens, tokens)
    if fused.report is not None:
        pattern: str | torch.Tensor = "causal" if mask is None else mask
        if takes_starts(decoder, weight) and mask is not None and window is None:
            pattern = "packed"
        chosen = fused.report.backend_for(q, k, v, pattern, longest)
        if chosen[0] != "torch":  # torch chooses among its kernels below
            return chosen
    if mask is not None:  # transformers repeats k and v when it passes a mask
        k = v = q
    backend = torch._fused_sdp_choice(q, k, v, mask, 0.0, mask is None, enable_gqa=mask is None)
    return SDPBackend(backend).name.lower().removesuffix("_attention"), ""


def _window(model: Any, options: FinetuneOptions, longest: int) -> int | None:
    """The sliding window that masks hold, as documents or rows may be longer."""
    tokens = longest if options.isolate_documents else options.seq_len
    return window_of(decoder_and_head(model)[0].config, tokens)


def _graphs(runtime: Runtime) -> str:
    if runtime.scope is None:
        return f"none, every kernel is launched one by one: {runtime.why_not}"
    what = "whole steps" if runtime.scope == "step" else "layers"
    optim = runtime.options.optim
    why = "" if optim in CAPTURED_OPTIMS else f"; no graph of a whole step can hold {optim}"
    return f"{what}, captured after {runtime.warmup} steps and replayed from then on{why}"


def _kernels(device: torch.device) -> str:
    if device.type == "cpu":
        return "the same bits every time: equal runs and --resume are exact"
    if torch.are_deterministic_algorithms_enabled():
        return "deterministic: equal runs and --resume are exact"
    return "the fastest; not bit-exact: --deterministic"
