# SPDX-License-Identifier: Apache-2.0
"""What runs in a provider's process of bench_end_to_end.py: a model is built, warmed up and timed as it trains."""

from __future__ import annotations

import contextlib
import importlib
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.lib.energy import joules
from benchmarks.lib.timing import synchronize
from benchmarks.lib.workers import reason_of
from benchmarks.peers.base import Unavailable
from benchmarks.peers.models import SPECS
from benchmarks.peers.training import HfPeft, HfTe, Ours, OursInBlocks, Training
from lorakernels.train.model.flops import Peak, find_peak

PROVIDERS: dict[str, Callable[..., Training]] = {
    "hf + peft bf16": HfPeft,
    "hf + peft bf16, liger": partial(HfPeft, liger=True),
    "hf + peft bf16, compiled": partial(HfPeft, compiled=True),
    "hf + peft bf16, liger, checkpointed": partial(HfPeft, liger=True, checkpointed=True),
    "hf + te fp8 + lora": HfTe,
    "hf + te fp8 + lora, checkpointed": partial(HfTe, quantized=True, checkpointed=True),
    "ours, not fused, eager": partial(Ours, save=None),
    "ours, eager": Ours,
    "ours, graphs by layer": partial(Ours, graphs="layer"),
    "ours, one graph": partial(Ours, graphs="iteration"),
    "ours, blocks, eager": OursInBlocks,
    "ours, blocks, one graph": partial(OursInBlocks, graphs="iteration"),
    "ours, fast, one graph": partial(Ours, graphs="iteration", save="full"),
    "ours, fast, FP8 head, one graph": partial(
        Ours, graphs="iteration", save="full", fp8_head=True
    ),
    "ours, fit, eager": partial(Ours, save="fit"),
    "ours, fit, graphs by layer": partial(Ours, graphs="layer", save="fit"),
    "ours, fit, offload, graphs by layer": partial(Ours, graphs="layer", save="fit, offload"),
    "ours, checkpoint, graphs by layer": partial(Ours, graphs="layer", save="checkpoint"),
}
SECONDS = 3.0  # of measured steps


def measure(
    provider: str, model: str, adapted: str, device: str, rows: str, at_most: int
) -> dict[str, Any]:
    """Train `provider`'s model; a "check" that is not "ok" comes alone."""
    try:
        return _measured(provider, model, adapted, torch.device(device), torch.load(rows), at_most)
    except Unavailable as why:
        return {"check": str(why)}
    except torch.OutOfMemoryError as error:
        must_fit = "WRONG: " if provider.startswith("ours") else ""
        return {"check": f"{must_fit}out of memory: {str(error).partition('. GPU')[0]}"}
    except Exception as problem:
        return {"check": f"{kind_of(provider)}: {reason_of(problem)}"}


def kind_of(provider: str) -> str:
    return "WRONG" if provider.startswith("ours") else "raised"


def _measured(
    provider: str, model: str, adapted: str, device: torch.device, rows: torch.Tensor, at_most: int
) -> dict[str, Any]:
    torch.manual_seed(0)
    spec, began = SPECS[model], time.perf_counter()
    training = PROVIDERS[provider](spec, adapted, device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    rows = rows.pin_memory() if device.type == "cuda" else rows
    count = len(rows) // spec.batch

    def step(number: int) -> torch.Tensor:
        at = number % count * spec.batch
        return training.step(rows[at : at + spec.batch].to(device, non_blocking=True))

    first = float(step(0))
    for number in range(1, training.warmup_steps + 1):
        step(number)
    synchronize(device)
    start, hosts, done = time.perf_counter() - began, [], training.warmup_steps + 1
    for _ in range(2):
        enqueued = time.perf_counter()
        step(done)
        hosts.append(time.perf_counter() - enqueued)
        synchronize(device)
        took, done = time.perf_counter() - enqueued, done + 1
    often = max(2, min(at_most, int(SECONDS / took)))
    began, energy = time.perf_counter(), joules(device)
    for _ in range(often):
        last = step(done)
        done += 1
    synchronize(device)
    seconds = (time.perf_counter() - began) / often
    energy = (joules(device) - energy) / often
    result = {
        "check": "ok",
        "seconds": seconds,
        "joules": energy,
        "host": statistics.median(hosts),
        "losses": [first, float(last)],
        "trained": sum(p.numel() for p in training.trained),
        "start": start,
        "note": training.note,
        "peak": _peak(device, training.fp8),
    }
    if device.type == "cuda":
        result["allocated"] = torch.cuda.max_memory_allocated(device)
        result["reserved"] = torch.cuda.max_memory_reserved(device)
    return result


def import_for(provider: str) -> None:
    """What building it will import, while another provider is measured."""
    names = ["transformers.models.llama.modeling_llama"]
    names += ["peft"] * ("peft" in provider) + ["liger_kernel.transformers"] * ("liger" in provider)
    names += ["torch._inductor.compile_fx"] * ("compiled" in provider)
    for name in names:
        with contextlib.suppress(Exception):  # its row will say so
            importlib.import_module(name)


def _peak(device: torch.device, fp8: bool) -> list[Any]:
    found = find_peak(device, torch.bfloat16, fp8)
    return [found.name, found.tflops] if isinstance(found, Peak) else ["", None]
