# SPDX-License-Identifier: Apache-2.0
"""python drop_in.py MODEL_DIR OUTPUT_DIR

Ten lines from a checkpoint to an adapter that PEFT reads, trained on random tokens.
"""

import sys

import torch

from lorakernels import (
    LoRAConfig,
    change_of_logits,
    fuse,
    linear_cross_entropy,
    load_quantized,
    save_adapter,
)

lora = LoRAConfig(r=16, lora_alpha=32, target_modules="all-linear")
loaded = load_quantized(sys.argv[1], lora=lora)  # FP8 base, tensor by tensor
model, report = loaded.model.train(), fuse(loaded.model)  # report: what each layer keeps
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-4)
for step in range(4):
    tokens = torch.randint(model.config.vocab_size, (1, 65), device=model.device)
    hidden = model.model(tokens[:, :-1]).last_hidden_state
    change = change_of_logits(model.config)  # a cap or a factor, of models that have one
    loss = linear_cross_entropy(hidden, model.lm_head.weight, tokens[:, 1:], change=change)
    loss.backward()
    optimizer.step(), optimizer.zero_grad(), print(f"step {step} loss {loss.item():.3f}")
save_adapter(model, sys.argv[2])
