# SPDX-License-Identifier: Apache-2.0
"""Capture the decoder layers of a transformers Llama as CUDA graphs. It is plain PyTorch, without lorakernels'
kernels.

python examples/graphs_llama.py
"""

from __future__ import annotations

import time

import torch
from lorakernels.graphs import GraphManager
from transformers import LlamaConfig, LlamaForCausalLM

STEPS, MICROBATCHES, WARMUP = 30, 2, 3


def main() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=8,
        num_attention_heads=8,
        use_cache=False,  # a cache object cannot go into a graph
    )
    model = LlamaForCausalLM(config).to("cuda", torch.bfloat16).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    manager = GraphManager(model.model.layers, num_microbatches=MICROBATCHES, warmup_steps=WARMUP)
    tokens = torch.randint(config.vocab_size, (4, 256), device="cuda")
    for step in range(STEPS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(MICROBATCHES):
            loss = model(tokens, labels=tokens).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        elapsed = time.perf_counter() - start
        phase = manager.phase
        manager.end_iteration()
        if step % 5 == 0 or step == WARMUP:
            print(f"step {step:2}  {phase:9}  loss {loss.item():.3f}  {1e3 * elapsed:.1f} ms")
    print(manager.report())
    manager.close()


if __name__ == "__main__":
    main()
