# SPDX-License-Identifier: Apache-2.0
"""A small Llama with adapters, and training steps on it."""

from __future__ import annotations

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from lorakernels import DelayedScaling, LoRAConfig, apply_lora

HISTORY = DelayedScaling(amax_history_len=4)
# fp32 sums in another order: losses near 4 have an ulp of 2⁻²² of their own, and eight steps with AdamW let
# perturbations of one ulp in the embeddings grow to 1e-6.
ROUNDING = 1e-5
# Over an FP8 base an ulp can turn the rounding of an e4m3 value, which moves that value by up to 1/16. In eight steps
# of AdamW that grows to 5e-4 at most (whole model, dropout 0.1); another dropout mask makes 7e-2.
FP8_ROUNDING = 2e-3


def llama(layers=4, p=0.0, fp8=HISTORY, checkpointing=False, device="cpu", **options):
    """(model, its FP8State); every layer has another site, column, name and scaling."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    alphas = {rf"layers\.{i}\.self_attn\.q_proj": 2 + i for i in range(layers)}
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    lora = LoRAConfig(
        r=4, lora_dropout=p, fp8=fp8, target_modules=targets, alpha_pattern=alphas, **options
    )
    report = apply_lora(model, lora)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.to(device).train(), report.fp8_state


def train(model, state, explicit=False, steps=8, seed=5, after=lambda step: None):
    """Losses [steps, 2] of two microbatches in flight per step of AdamW; `after(step)` is called after each."""
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    torch.manual_seed(seed)
    losses = []
    for _ in range(steps):
        batches = [torch.randint(0, 64, (2, 12)).to(device) for _ in range(2)]
        found = [model(input_ids=ids, labels=ids).loss for ids in batches]
        for loss in found:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if explicit:
            state.reduce_and_update()
        losses.append(torch.stack(found).detach())
        after(len(losses))
    return torch.stack(losses).cpu()
