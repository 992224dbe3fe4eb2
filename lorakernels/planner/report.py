# SPDX-License-Identifier: Apache-2.0
"""A plan in words and numbers."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lorakernels.planner.plan import ShardPlan

NAMES = {
    "base": "base, FP8",
    "slots": "slots",
    "outside": "embedding, head, norms",
    "adapters": "adapters, gradients",
    "optimizer": "optimizer",
    "kept": "kept activations",
    "workspace": "workspace",
    "exchange": "keys, values exchanged",
    "rows": "rows exchanged",
    "context": "CUDA context",
    "fragments": "left to the allocator",
}


def describe(plan: ShardPlan) -> str:
    """All of a plan, some 25 lines."""
    return "\n".join([*_choice(plan), *_memory(plan), *_times(plan)])


def _choice(plan: ShardPlan) -> list[str]:
    waiting = plan.gpus * plan.bytes.waiting
    tp = plan.batch.tp
    where = "whole on each GPU" if plan.gpus > 1 else "whole"
    if tp > 1:
        where = f"in {tp} parts, one of each layer on a GPU"
    if plan.pipeline is not None:
        where = f"in {plan.pipeline.ranks} stages of {' + '.join(map(str, plan.pipeline.layers))} layers"
    if plan.placement.ranks > 1:
        parts = f"in {tp} parts, each " if tp > 1 else ""
        where = f"{parts}sharded over {plan.placement.ranks} GPUs"
    if plan.placement.embeddings:
        where += ", embedding and head too"
    if plan.placement.offload:
        pinned = (plan.bytes.host - waiting) / 1e9
        where += f", {plan.placement.offload:.1%} of it in host memory ({pinned:.1f} GB pinned)"
    mix = ", ".join(f"{count} x {save}" for save, count in Counter(plan.saves).items())
    if waiting:
        mix += f" ({waiting / 1e9:.1f} GB of activations in host memory)"
    rows = f"{plan.batch.sequences} x {plan.batch.length} tokens"
    tokens = f"{rows} a GPU"
    if plan.batch.ranks > 1 or tp > 1:
        tokens = f"{rows} over {plan.batch.ranks * tp} GPUs"
    if tp > 1:
        tokens += f" (tp {tp}, cp {plan.batch.ranks})" if plan.batch.ranks > 1 else f" (tp {tp})"
    if plan.pipeline is not None:
        over = f" over {plan.batch.ranks} GPUs a stage" if plan.batch.ranks > 1 else ""
        tokens = f"{plan.pipeline.microbatches} microbatches of {rows}{over}"
    lines = [
        f"{plan.gpus} x {plan.machine.name}, {plan.machine.memory / 1e9:.1f} GB each, {tokens}",
        f"base      {where}",
        f"save      {mix}",
    ]
    if plan.placement.optimizer > 1:
        lines.append(f"optimizer sharded over {plan.placement.optimizer} GPUs")
    return lines


def _memory(plan: ShardPlan) -> list[str]:
    rows = [(text, getattr(plan.bytes, name)) for name, text in NAMES.items()]
    lines = [f"  {text:<24}{size / 1e9:8.2f} GB" for text, size in rows if size]
    total = f"  {'in all':<24}{plan.bytes.total / 1e9:8.2f} GB"
    whose = "bytes of one GPU"
    if plan.pipeline is not None:
        whose += f", of stage {plan.pipeline.fullest}, which holds most"
    return [whose, *lines, f"{total}, of tensors {plan.bytes.peak / 1e9:.2f}"]


def _times(plan: ShardPlan) -> list[str]:
    layer = plan.layer
    shown = (
        ("forward", layer.forward),
        ("backward", layer.backward),
        ("gather, each way", layer.gather),
        ("host copy, each way", layer.copy),
        ("activations, each way", layer.send),
        ("keys, values, both ways", layer.rows),
        ("waits for rows, both", layer.split),
    )
    waits = []
    if plan.pipeline is not None:
        waits = [f"  {'of it a rank waits':<24}{plan.pipeline.bubble:8.1%}"]
    return [
        "times of one layer",
        *(f"  {text:<24}{seconds * 1e3:8.3f} ms" for text, seconds in shown if seconds),
        "times of one step",
        f"  {'step':<24}{plan.step * 1e3:8.1f} ms",
        f"  {'of it not hidden':<24}{plan.exposed * 1e3:8.1f} ms",
        *waits,
        f"  {'tokens a second':<24}{plan.rate:8,.0f}, all GPUs together",
    ]
