# SPDX-License-Identifier: Apache-2.0
"""Capture the decoder layers of a Llama with LoRA over an FP8 base as CUDA graphs.

Dropout draws from a state in device memory, and the scales are updated once per iteration.

python examples/graphs_lora.py
"""

from __future__ import annotations

import torch
from lorakernels.graphs import GraphManager
from transformers import LlamaConfig, LlamaForCausalLM

from lorakernels import DelayedScaling, LoRAConfig, PhiloxState, apply_lora

STEPS, WARMUP = 30, 3


def main() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=8,
        num_attention_heads=8,
        use_cache=False,
    )
    model = LlamaForCausalLM(config).to("cuda", torch.bfloat16).train()
    philox = PhiloxState(1, "cuda")
    lora = LoRAConfig(
        r=16,
        lora_alpha=32,
        lora_dropout=0.1,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        fp8=DelayedScaling(amax_history_len=4),
    )
    fp8_state = apply_lora(model, lora, rng_state=philox).fp8_state
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    manager = GraphManager(
        model.model.layers, warmup_steps=WARMUP, fp8_state=fp8_state, rng_states=[philox]
    )
    tokens = torch.randint(config.vocab_size, (4, 256), device="cuda")
    for step in range(STEPS):
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        fp8_state.reduce_and_update()
        phase = manager.phase
        manager.end_iteration()
        if step % 5 == 0 or step == WARMUP:
            print(f"step {step:2}  {phase:9}  loss {loss.item():.3f}")
    print(manager.report())
    manager.close()


if __name__ == "__main__":
    main()
