# SPDX-License-Identifier: Apache-2.0
"""Step times and peak memory of shapes that no constant of `lorakernels plan` was made from, beside its predictions.

    python benchmarks/parallel/bench_plan.py --output DIR [--shapes 8b-6144 …] [--budget-s S]

Each shape trains by the loop of bench_end_to_end.py. The prediction is computed and printed before the shape runs.

    predicted, measured ms      of one step; "÷" is predicted over measured
    predicted, measured GiB     of tensors at most
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from benchmarks.lib.rows import Row, arguments, environment, finish, parser
from benchmarks.lib.timing import synchronize
from benchmarks.peers.models import ADAPTED, ALPHA, RANK, Spec, token_rows
from benchmarks.peers.training import Ours
from lorakernels import LoRAConfig
from lorakernels.planner.machine import MACHINES
from lorakernels.planner.memory import Placement
from lorakernels.planner.plan import predict
from lorakernels.planner.size import ModelSize
from lorakernels.planner.time import REPLAY, BatchSize


@dataclass(frozen=True)
class Case:
    spec: Spec
    adapted: str
    save: str
    graphs: str = "iteration"


def _llama(widths: tuple[int, int, int, int], layers: int, vocabulary: int) -> dict[str, Any]:
    """`widths`: hidden, ffn, query heads, key heads."""
    hidden, ffn, heads, kv = widths
    return {
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "vocab_size": vocabulary,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
    }


W1, W3, W8 = (2048, 8192, 32, 8), (3072, 8192, 24, 8), (4096, 14336, 32, 8)
W13, W70 = (5120, 13824, 40, 40), (8192, 28672, 64, 8)
CASES = {
    "8b-6144": Case(Spec("8 layers of Llama-3.1-8B", _llama(W8, 8, 128256), 6144), "qkvo", "full"),
    "13b-4096": Case(
        Spec("8 layers of Llama-2-13B", _llama(W13, 8, 32000), 4096), "all", "checkpoint", "layer"
    ),
    "3b-2048": Case(Spec("Llama-3.2-3B", _llama(W3, 28, 128256), 2048, 2), "qkvo", "fp8"),
    "70b-2048": Case(
        Spec("8 layers of Llama-2-70B", _llama(W70, 8, 32000), 2048), "qkvo", "recompute", "layer"
    ),
    "1b-2048": Case(
        Spec("16 layers of Llama-3.2-1B", _llama(W1, 16, 128256), 2048, 4), "all", "full"
    ),
    "tiny": Case(Spec("tiny", _llama((64, 128, 4, 2), 2, 320), 32), "qkvo", "full"),
}


def predicted(case: Case) -> tuple[float, float]:
    """(seconds, bytes)."""
    spec = case.spec
    lora = LoRAConfig(r=RANK, lora_alpha=ALPHA, target_modules=list(ADAPTED[case.adapted]))
    size = ModelSize.of(spec.config(), lora)
    saves = [case.save] * len(size.layers)
    batch = BatchSize(spec.batch, spec.length)
    plan = predict(size, batch, MACHINES["H200"], 1, Placement(), saves)
    replays = 2 * len(saves) * REPLAY if case.graphs == "layer" else 0.0
    return plan.step + replays, plan.bytes.peak


def measured(case: Case, device: torch.device, often: int) -> tuple[float, float]:
    """(seconds, bytes)."""
    torch.manual_seed(0)
    spec, gpu = case.spec, device.type == "cuda"
    graphs = case.graphs if gpu else None
    training = Ours(spec, case.adapted, device, graphs=graphs, save=case.save)
    if gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    rows = token_rows(spec.length, 8 * spec.batch).view(8, spec.batch, spec.length)
    batches = [row.to(device) for row in rows]
    for number in range(training.warmup_steps + 3):
        training.step(batches[number % 8])
    synchronize(device)
    samples = []
    for _ in range(3):
        began = time.perf_counter()
        for number in range(often):
            training.step(batches[number % 8])
        synchronize(device)
        samples.append((time.perf_counter() - began) / often)
    peak = torch.cuda.max_memory_allocated(device) if gpu else 0
    return statistics.median(samples), peak


def bench(name: str, device: torch.device, often: int) -> Row:
    case = CASES[name]
    seconds, size = predicted(case)
    print(f"{name}: predicted {seconds * 1e3:.2f} ms, {size / 2**30:.2f} GiB", flush=True)
    took, held = measured(case, device, often)
    print(f"{name}: measured {took * 1e3:.2f} ms, {held / 2**30:.2f} GiB", flush=True)
    return {
        "model": case.spec.name,
        "tokens": f"{case.spec.batch} x {case.spec.length}",
        "LoRA on": case.adapted,
        "save": case.save,
        "graphs": case.graphs,
        "check": "ok",
        "predicted ms": round(seconds * 1e3, 2),
        "measured ms": round(took * 1e3, 2),
        "÷ ms": round(seconds / took, 3),
        "predicted GiB": round(size / 2**30, 2),
        "measured GiB": round(held / 2**30, 2),
        "÷ GiB": round(size / held, 3) if held else "",
    }


def main() -> int:
    options = parser("a plan's predictions beside steps of shapes that it was not made from")
    options.add_argument("--shapes", nargs="+", choices=list(CASES))
    options.add_argument(
        "--budget-s", type=float, default=100.0, help="what begins later is not run"
    )
    args, device = arguments(options, on_gpu=8)
    began, rows = time.perf_counter(), []
    names = args.shapes or (
        [n for n in CASES if n != "tiny"] if device.type == "cuda" else ["tiny"]
    )
    for name in names:
        if time.perf_counter() - began > args.budget_s:
            break
        rows.append(bench(name, device, args.repetitions))
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return finish("plan", rows, environment(device), args.output)


if __name__ == "__main__":
    sys.exit(main())
