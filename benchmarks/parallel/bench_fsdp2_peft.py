# SPDX-License-Identifier: Apache-2.0
"""The peer of a sharded base: transformers and PEFT in bf16 under FSDP2, on the models of bench_sharded_base.py.

    torchrun --nproc-per-node 2 benchmarks/parallel/bench_fsdp2_peft.py --output DIR [--models 70b 8b]

Each decoder layer is sharded as soon as its weights are made, so that no rank ever holds the whole model. Embedding,
norm and head are another group. Every layer is a checkpoint, without which 70B does not fit two GPUs. FSDP2 gathers
weights and adapters with NCCL, one layer ahead, and scatters the adapters' gradients. Columns are those of
bench_sharded_base.py. "check" is "ok" if as many parameters are trained as in ours, and the loss is finite.
"""

from __future__ import annotations

import gc
import math
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.lib.ranks import ROWS, start_ranks, step_seconds
from benchmarks.lib.rows import Row, arguments, environment, finish, parser
from benchmarks.peers.models import ALPHA, RANK, SPECS, P, Spec, plain_model, sizes, token_rows
from benchmarks.peers.training import Training, set_adapters


class Fsdp2Peft(Training):
    """Every layer, adapters included, is one FSDP2 group and one checkpoint."""

    def __init__(self, spec: Spec, device: torch.device, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        super().__init__(spec, "qkvo", device)

    def build(self) -> Any:
        model = plain_model(self.spec.config(), self.device, self._shard)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        fully_shard(model, mesh=self.mesh)
        return model

    def _shard(self, layer: nn.Module, path: str) -> None:
        from peft import LoraConfig, inject_adapter_in_model

        config = LoraConfig(
            r=RANK, lora_alpha=ALPHA, lora_dropout=P, target_modules=list(self.targets)
        )
        inject_adapter_in_model(config, layer)
        set_adapters(layer, f"{path}.")
        fully_shard(layer.train(), mesh=self.mesh)


def bench_model(name: str, device: torch.device, often: int) -> Row:
    rank, ranks, spec = dist.get_rank(), dist.get_world_size(), SPECS[name]
    mesh = init_device_mesh(device.type, (ranks,), mesh_dim_names=("dp_shard",))
    torch.manual_seed(0)
    training = Fsdp2Peft(spec, device, mesh)
    rows = token_rows(spec.length, ROWS * spec.batch).view(ROWS, spec.batch, spec.length)
    batches = rows.roll(-rank, 0)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)

    def step(number: int) -> Tensor:
        return training.step(batches[number % ROWS].to(device))

    first = [float(step(number)) for number in range(training.warmup_steps)]
    samples = step_seconds(step, often, device)
    total = torch.tensor(sum(samples), device=device)
    dist.all_reduce(total, dist.ReduceOp.MAX)
    rate = round(spec.batch * spec.length * often / float(total), 1)
    trained, wanted = sum(p.numel() for p in training.trained), sizes(spec, "qkvo")[1]
    check = "ok"
    if trained != wanted or not all(map(math.isfinite, first)):
        check = f"WRONG: trains {trained} parameters of {wanted}, losses {first}"
    peak = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0
    if rank == 0:
        print(f"{spec.name}: {rate} tokens/s a GPU", flush=True)
    return {
        "model": spec.name,
        "tokens": f"{spec.batch} x {spec.length}",
        "base": "FSDP2 + PEFT, bf16",
        "ranks": ranks,
        "check": check,
        "tokens/s a GPU": rate,
        "steps": often,
        "p50 ms": round(statistics.median(samples) * 1e3, 2),
        "p99 ms": round(max(samples) * 1e3, 2),
        "peak GiB": round(peak, 2),
    }


def main() -> int:
    options = parser(__doc__.partition("\n")[0])
    options.add_argument("--models", nargs="+", choices=list(SPECS))
    args, device = arguments(options, on_gpu=3)
    device = start_ranks(device)
    try:
        models = args.models or (["70b", "8b"] if device.type == "cuda" else ["tiny"])
        rows: list[Row] = []
        for name in models:
            rows.append(bench_model(name, device, args.repetitions))
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
        if dist.get_rank():
            return 0
        return finish("fsdp2_peft", rows, environment(device), args.output)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
