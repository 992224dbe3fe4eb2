# SPDX-License-Identifier: Apache-2.0
"""FSDP2 over our layers, cause by cause, beside one whole copy a GPU, a sharded base, and transformers with PEFT.

    torchrun --nproc-per-node 2 benchmarks/parallel/bench_fsdp2.py --output DIR [--short] [--layers 8] [--budget-s S]

The layers have Llama-3.1-8B's shapes, R = 16 on all linear layers, eager, 1 x 4096 tokens a GPU. Ours are in FP8,
PEFT's in bf16. `--short` measures the whole copies, the fused layers with their base in `ignored_params`, full sharding
of the unfused ones and of PEFT's, and a sharded base. What would begin after the budget, 170 s, is not run. Columns:

    p50 ms        of one step by rank 0: forward, backward, AdamW, the FP8 scales' update
    ÷ whole       ÷ the time of the same layers without sharding; those do not sum their gradients over the ranks
    peak GiB      of torch's allocator; a sharded base over peer copies has its shards elsewhere
    check         "ok" if the first step's loss is that of the whole copy, bit for bit; else WRONG
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.lib.ranks import start_ranks, step_seconds, time_left
from benchmarks.lib.rows import Row, arguments, environment, finish, parser, ratio, write_csv
from benchmarks.peers.models import ADAPTED, ALPHA, RANK, SPECS
from lorakernels import DelayedScaling, LoRAConfig, PhiloxState, apply_lora, fuse
from lorakernels.parallel import ShardedAdamW, shard_base

WARMUP = 4
WHOLE, OPTIMIZER, BASE = "whole", "ShardedAdamW", "ShardedAdamW, shard_base"
BASE_ENDS = "ShardedAdamW, shard_base, embedding and head too"
# What fully_shard manages of a model. The ends are embedding, last norm and head.
ALL, KEPT = "FSDP2, all", "FSDP2, layers kept after forward"
OWN_ENDS, LAYERS = "FSDP2, all, ends in groups of their own", "FSDP2, layers"
TRAINED = "FSDP2, what is trained"


class Case(NamedTuple):
    layers: str
    how: str


FUSED, UNFUSED, PEFT = "fused", "unfused", "transformers + PEFT, bf16"
SHORT = [
    *(Case(FUSED, how) for how in (WHOLE, TRAINED)),
    *(Case(layers, how) for layers in (UNFUSED, PEFT) for how in (WHOLE, ALL)),
    Case(UNFUSED, OWN_ENDS),
    *(Case(FUSED, how) for how in (BASE, BASE_ENDS)),
]
CASES = [
    *SHORT,
    Case(FUSED, OPTIMIZER),
    *(Case(UNFUSED, how) for how in (BASE, TRAINED, LAYERS, KEPT)),
    Case(PEFT, OWN_ENDS),
]


def make(case: Case, layers: int, device: torch.device) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    spec = SPECS["8b" if device.type == "cuda" else "tiny"]
    shape = {**spec.shape, "num_hidden_layers": layers}
    config = transformers.LlamaConfig(attn_implementation="sdpa", use_cache=False, **shape)
    with torch.device(device):
        torch.set_default_dtype(torch.bfloat16)
        model = transformers.LlamaForCausalLM(config).train()
        torch.set_default_dtype(torch.float32)
    options: dict[str, Any] = {"r": RANK, "lora_alpha": ALPHA, "lora_dropout": 0.0}
    if case.layers == PEFT:
        from peft import LoraConfig, inject_adapter_in_model

        config = LoraConfig(target_modules=list(ADAPTED["all"]), **options)
        return inject_adapter_in_model(config, model.requires_grad_(False)).train()
    lora = LoRAConfig(target_modules="all-linear", fp8=DelayedScaling(), **options)
    apply_lora(model, lora, rng_state=PhiloxState(0, device))
    if case.layers == FUSED:
        fuse(model)
    return model


def shard(model: Any, how: str, mesh: Any) -> torch.optim.Optimizer:
    """Shard `model` as `how` says; the optimizer of what is trained."""
    decoder, head = model.model, model.lm_head
    if how.startswith("FSDP2"):
        ends = {decoder.embed_tokens.weight, head.weight, decoder.norm.weight}
        frozen = {p for p in model.parameters() if not p.requires_grad}
        ignored = {LAYERS: ends, KEPT: ends, TRAINED: frozen}.get(how, set())
        for layer in decoder.layers:
            fully_shard(layer, mesh=mesh, ignored_params=ignored, reshard_after_forward=how != KEPT)
        if how == OWN_ENDS:
            fully_shard(decoder.embed_tokens, mesh=mesh)
            fully_shard(head, mesh=mesh)
        fully_shard(model, mesh=mesh, ignored_params=ignored)
    if how in (BASE, BASE_ENDS):
        shard_base(model, mesh, embeddings=how == BASE_ENDS)
    trained = [p for p in model.parameters() if p.requires_grad]
    if how in (OPTIMIZER, BASE, BASE_ENDS):
        return ShardedAdamW(trained, mesh, lr=1e-4)
    return torch.optim.AdamW(trained, lr=1e-4)


def bench(case: Case, args: argparse.Namespace, device: torch.device) -> Row:
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("dp_shard",))
    model: Any = make(case, args.layers, device)
    state = next((m.fp8_state for m in model.modules() if hasattr(m, "fp8_state")), None)
    optimizer = shard(model, case.how, mesh["dp_shard"])
    generator = torch.Generator().manual_seed(7 + dist.get_rank())
    tokens = 4096 if device.type == "cuda" else 32
    ids = torch.randint(model.config.vocab_size, (1, tokens), generator=generator).to(device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)

    def step(number: int) -> Tensor:
        loss: Tensor = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if state is not None:
            state.reduce_and_update()
        return loss.detach()

    first = float(step(0))
    for number in range(1, WARMUP):
        step(number)
    samples = step_seconds(step, args.repetitions, device)
    peak = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0
    dist.barrier()  # no rank frees what another one reads
    return {
        "layers": case.layers,
        "sharded": case.how,
        "ranks": dist.get_world_size(),
        "check": "ok",
        "p50 ms": round(statistics.median(samples) * 1e3, 2),
        "÷ whole": "",
        "p99 ms": round(max(samples) * 1e3, 2),
        "peak GiB": round(peak, 2),
        "loss": first,
    }


def compared(rows: list[Row]) -> list[Row]:
    """With the time and the loss of the whole copy beside each row."""
    wholes = {row["layers"]: row for row in rows if row["sharded"] == WHOLE}
    for row in rows:
        whole = wholes[row["layers"]]
        row["÷ whole"] = ratio(row["p50 ms"], whole["p50 ms"])
        if row["loss"] != whole["loss"]:
            row["check"] = f"WRONG: the whole copy's loss is {whole['loss']!r}"
    return rows


def main() -> int:
    options = parser(__doc__.partition("\n")[0])
    options.add_argument("--layers", type=int, default=8)
    options.add_argument("--short", action="store_true", help="the ratios alone")
    options.add_argument(
        "--budget-s", type=float, default=170.0, help="what would begin later is not run"
    )
    args, device = arguments(options, on_gpu=8)
    if device.type == "cuda":  # a rank that hangs ends
        faulthandler.dump_traceback_later(args.budget_s + 60, exit=True)
    began, rows = time.perf_counter(), list[Row]()
    device = start_ranks(device)
    try:
        for case in SHORT if args.short else CASES:
            if not time_left(began + args.budget_s, device):
                break
            rows.append(bench(case, args, device))
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
            if dist.get_rank() == 0:
                print(f"{time.perf_counter() - began:.0f} s: {rows[-1]}", flush=True)
                if args.output:  # a later case may end the run
                    write_csv(args.output / "fsdp2.csv", compared(rows), environment(device))
        if dist.get_rank():
            return 0
        if not rows:
            print("no case was run within the budget")
            return 0
        return finish("fsdp2", compared(rows), environment(device), args.output)
    finally:
        faulthandler.cancel_dump_traceback_later()
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
