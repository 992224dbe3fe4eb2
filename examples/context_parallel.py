# SPDX-License-Identifier: Apache-2.0
"""Train adapters of a Llama on rows whose tokens are cut over several GPUs, or processes on a CPU.

torchrun --nproc-per-node 2 examples/context_parallel.py

Fused layers over an FP8 base, of which each rank keeps a part.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

from lorakernels import LoRAConfig, PhiloxState, apply_lora, fuse
from lorakernels.parallel import context_parallel, shard_base

SIZES = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def main(steps: int = 10) -> list[float]:
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    device = torch.device(kind, int(os.environ["LOCAL_RANK"]) if kind == "cuda" else None)
    if kind == "cuda":
        torch.cuda.set_device(device)
    mesh = init_device_mesh(kind, (dist.get_world_size(),), mesh_dim_names=("cp",))

    torch.manual_seed(0)  # one value on all ranks: they make the same model and draw the same masks
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).to(device, torch.bfloat16)
    config = LoRAConfig(r=8, target_modules="all-linear", lora_dropout=0.05)
    rng_state = PhiloxState(0, device)
    report = apply_lora(model, config, rng_state=rng_state)
    fuse(model.train())
    shard_base(model, mesh["cp"])
    context = context_parallel(model, mesh["cp"])

    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    tokens = torch.randint(256, (1, 128)).to(device)  # all ranks have whole rows of token ids
    losses = []
    for _ in range(steps):
        loss = context.loss(tokens, input_ids=tokens)
        loss.backward()
        context.reduce_gradients()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        report.fp8_state.reduce_and_update()
        rng_state.advance()
        losses.append(float(loss))
    context.check()
    if dist.get_rank() == 0:
        print(f"loss {losses[0]:.3f} → {losses[-1]:.3f}")
    dist.barrier()  # a rank that leaves first takes its part of the base with it
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
