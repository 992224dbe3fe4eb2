# SPDX-License-Identifier: Apache-2.0
"""Train adapters of a Llama that several GPUs, or processes on a CPU, hold together.

torchrun --nproc-per-node 2 examples/tensor_parallel.py
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

from lorakernels import LoRAConfig, PhiloxState, apply_lora
from lorakernels.parallel import parallelize

SIZES = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}


def main(steps: int = 10) -> list[float]:
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    device = torch.device(kind, int(os.environ["LOCAL_RANK"]) if kind == "cuda" else None)
    if kind == "cuda":
        torch.cuda.set_device(device)
    mesh = init_device_mesh(kind, (dist.get_world_size(),), mesh_dim_names=("tp",))

    torch.manual_seed(
        0
    )  # one value on all ranks: they make the same model, and keep a part of it each
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).to(device, torch.bfloat16)
    config = LoRAConfig(r=8, target_modules="all-linear", lora_dropout=0.05)
    rng_state = PhiloxState(0, device)
    report = apply_lora(model, config, rng_state=rng_state)
    split = parallelize(model.train(), mesh["tp"], vocabulary=True)
    if dist.get_rank() == 0:
        print(split)

    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    tokens = torch.randint(256, (2, 32)).to(device)  # all ranks of "tp" train on the same tokens
    losses = []
    for _ in range(steps):
        loss = split.loss(tokens, input_ids=tokens)
        loss.backward()
        split.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        report.fp8_state.reduce_and_update()
        rng_state.advance()
        losses.append(float(loss))
    split.check()
    if dist.get_rank() == 0:
        print(f"loss {losses[0]:.3f} → {losses[-1]:.3f}")
    dist.barrier()  # a rank that leaves first closes what the others may still read
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
