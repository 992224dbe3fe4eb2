# SPDX-License-Identifier: Apache-2.0
"""Megatron-style layers: an author's own MLP of a column and a row layer over [S, B, H], which return (y, bias).

torchrun --nproc-per-node 2 examples/megatron_style.py
With Megatron-Core, lorakernels.integrations.megatron has these layers behind its constructors, for a ModuleSpec.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lorakernels import LoRAConfig
from lorakernels.parallel import ColumnParallelLoRALinear, RowParallelLoRALinear
from lorakernels.state.fp8 import FP8State


class ParallelMLP(nn.Module):
    """Between its layers each rank has F/T of the features; outside, S/T of the rows (sequence parallelism)."""

    def __init__(
        self, hidden: int, ffn: int, config: LoRAConfig, group: Any, **options: Any
    ) -> None:
        super().__init__()
        options |= {"config": config, "tp_group": group, "sequence_parallel": True, "bias": False}
        self.norm = nn.RMSNorm(hidden, device=options["device"])
        self.fc1 = ColumnParallelLoRALinear(hidden, ffn, name="fc1", **options)
        self.fc2 = RowParallelLoRALinear(ffn, hidden, name="fc2", **options)

    def forward(self, x: Tensor) -> Tensor:
        h, _ = self.fc1(self.norm(x))  # [S/T, B, H] → [S, B, F/T]
        y, _ = self.fc2(nn.functional.silu(h))  # → [S/T, B, H]
        return x + y


def main(steps: int = 20) -> list[float]:
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    device = torch.device(kind, int(os.environ["LOCAL_RANK"]) if kind == "cuda" else None)
    if kind == "cuda":
        torch.cuda.set_device(device)
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)  # one value on all ranks: each draws the whole layers, and keeps its parts
    config = LoRAConfig(r=8, lora_dropout=0.05)
    state = FP8State(["fc1", "fc2"], config.fp8, device)  # all scales in one: one update a step
    model = ParallelMLP(64, 256, config, group, device=device, fp8_state=state).train()
    model.norm.requires_grad_(False)  # a norm sees this rank's rows alone
    x, target = torch.randn(2, 32, 4, 64, device=device).chunk(size, 1)[rank]
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    losses = []
    for _ in range(steps):
        loss = (
            model(x) - target
        ).square().mean() / size  # of this rank's rows; ranks' losses add up
        loss.backward()  # what a rank holds whole has its gradient summed already
        optimizer.step()
        optimizer.zero_grad()
        state.reduce_and_update()  # over the ranks that share it
        dist.all_reduce(total := loss.detach().clone(), group=group)
        losses.append(float(total))
    if rank == 0:
        print(f"loss {losses[0]:.3f} → {losses[-1]:.3f}")
    dist.barrier()
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
