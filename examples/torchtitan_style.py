# SPDX-License-Identifier: Apache-2.0
"""A torchtitan-style loop: one DeviceMesh, a plan of parallelism, and checkpoints by torch.distributed.checkpoint.

torchrun --nproc-per-node 4 examples/torchtitan_style.py 2      # 2 tensor-parallel ranks, 2 replicas of them
"""

from __future__ import annotations

import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from lorakernels import LoRAConfig, apply_lora, parallelize

SIZES = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
PLAN = {
    **{f"*.{name}_proj": "column" for name in ("q", "k", "v", "gate", "up")},
    **{f"*.{name}_proj": "row" for name in ("o", "down")},
}


def main(tp: int = 2, steps: int = 10) -> list[float]:
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    device = torch.device(kind, int(os.environ["LOCAL_RANK"]) if kind == "cuda" else None)
    if kind == "cuda":
        torch.cuda.set_device(device)
    shape = (dist.get_world_size() // tp, tp)
    mesh = init_device_mesh(kind, shape, mesh_dim_names=("dp_replicate", "tp"))

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, num_attention_heads=4)).to(device).train()
    report = apply_lora(model, LoRAConfig(r=8, target_modules="all-linear", lora_dropout=0.0))
    split = parallelize(model, mesh["tp"], PLAN, sequence_parallel=False)

    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), lr=1e-2)
    generator = torch.Generator().manual_seed(mesh.get_local_rank("dp_replicate"))
    tokens = torch.randint(256, (2, 32), generator=generator).to(device)  # a replica's own
    losses = []
    for _ in range(steps):
        loss = model(tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        for p in trained.values():
            dist.all_reduce(p.grad, group=mesh["dp_replicate"].get_group())
            p.grad /= shape[0]
        split.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        report.fp8_state.reduce_and_update(dist.group.WORLD)  # one scale for all ranks
        losses.append(float(loss.detach()))

    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    before = split.whole_adapters()
    state: dict[str, DTensor] = split.state_dict()  # shares the parameters' memory
    dcp.save({"adapter": state}, checkpoint_id=folder[0])  # loads at any other layout, too
    for p in trained.values():
        p.data.zero_()
    dcp.load({"adapter": state}, checkpoint_id=folder[0])
    assert all(map(torch.equal, split.whole_adapters().values(), before.values()))
    if dist.get_rank() == 0:
        print(f"loss {losses[0]:.3f} → {losses[-1]:.3f}")
    dist.barrier()
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
