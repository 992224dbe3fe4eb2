# SPDX-License-Identifier: Apache-2.0
"""Train adapters of a Llama whose layers are stages on several GPUs, or processes on a CPU.

torchrun --nproc-per-node 2 examples/pipeline_parallel.py

Fused layers over an FP8 base. Each rank keeps two of four stages, which torch's interleaved 1F1B schedule runs.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

from lorakernels import LoRAConfig, PhiloxState, apply_lora, fuse
from lorakernels.parallel import pipeline_parallel

CHUNKS, MICROBATCHES = 2, 4
SIZES = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def main(steps: int = 10) -> list[float]:
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    device = torch.device(kind, int(os.environ["LOCAL_RANK"]) if kind == "cuda" else None)
    if kind == "cuda":
        torch.cuda.set_device(device)
    ranks = dist.get_world_size()
    mesh = init_device_mesh(kind, (ranks,), mesh_dim_names=("pp",))

    torch.manual_seed(
        0
    )  # one value on all ranks: they make the same model and draw the masks of one process
    sizes = LlamaConfig(**SIZES, num_hidden_layers=CHUNKS * ranks)
    model = LlamaForCausalLM(sizes).to(device, torch.bfloat16)
    config = LoRAConfig(r=8, target_modules="all-linear", lora_dropout=0.05)
    rng_state = PhiloxState(0, device)
    report = apply_lora(model, config, rng_state=rng_state)
    fuse(model.train())
    microbatches = MICROBATCHES * ranks // 2
    pipeline = pipeline_parallel(model, mesh["pp"], microbatches=microbatches, chunks=CHUNKS)
    if dist.get_rank() == 0:
        print(pipeline)

    trained = [p for p in model.parameters() if p.requires_grad]  # this rank's
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    tokens = torch.randint(256, (microbatches, 32)).to(device)  # all ranks have the whole rows
    losses = []
    for _ in range(steps):
        loss = pipeline.forward_backward(tokens, input_ids=tokens)
        pipeline.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        report.fp8_state.reduce_and_update()
        rng_state.advance()
        losses.append(float(loss))
    pipeline.check()
    if dist.get_rank() == 0:
        print(f"loss {losses[0]:.3f} → {losses[-1]:.3f}")
    dist.barrier()  # a rank that leaves first closes what the others may still read
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
