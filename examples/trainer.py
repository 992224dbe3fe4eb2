# SPDX-License-Identifier: Apache-2.0
"""HF Trainer with fused decoder layers, replayed as CUDA graphs on a GPU. It trains one epoch on this file's own
bytes.

    python examples/trainer.py [MODEL_DIR]      # without one, a small Llama with random weights

It runs in one process on one GPU, because the loss below bypasses DistributedDataParallel, which would not reduce its
gradients. Graphs need batches whose shapes repeat; here these are blocks of a fixed length. Embedding, last norm, head
and loss, clipping, optimizer and evaluation run eagerly.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from lorakernels import (
    LoRAConfig,
    PhiloxState,
    apply_lora,
    change_of_logits,
    fuse,
    linear_cross_entropy,
    load_quantized,
)
from lorakernels.integrations.transformers import AdapterCallback, LoRAKernelsCallback

LENGTH = 64
LORA = LoRAConfig(r=8, lora_alpha=16, lora_dropout=0.1, target_modules="all-linear")


class LoRATrainer(Trainer):
    """Computes the model's loss without the logits of all tokens."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = F.pad(inputs["labels"][:, 1:], (0, 1), value=-100)
        hidden = model.model(input_ids=inputs["input_ids"]).last_hidden_state
        loss = linear_cross_entropy(
            hidden,
            model.lm_head.weight,
            labels,
            num_items=num_items_in_batch,
            change=change_of_logits(model.config),
        )
        return (loss, {"loss": loss}) if return_outputs else loss


def small_llama(device: str, philox: PhiloxState) -> Any:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes, **heads))
    model.to(device, torch.bfloat16 if device == "cuda" else torch.float32)
    return model, apply_lora(model, LORA, rng_state=philox)


def main(folder: str | None = None, output: str = "trainer-output", **options: Any) -> Any:
    if (processes := int(os.environ.get("WORLD_SIZE", "1"))) > 1:
        raise SystemExit(f"this example trains in one process, found WORLD_SIZE={processes}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    philox = PhiloxState(1, device)
    if folder is None:
        model, report = small_llama(device, philox)
    else:
        loaded = load_quantized(folder, device=device, lora=LORA, rng_state=philox)
        model, report = loaded.model, loaded.report
    print(str(fuse(model)).split("\n")[0])
    text = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()
    rows = [{"input_ids": block, "labels": block} for block in text.split(LENGTH)[:-1]]
    kernels = LoRAKernelsCallback(model, report, rng_state=philox, **options)
    arguments = TrainingArguments(
        output_dir=output,
        num_train_epochs=1,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=1,
        dataloader_drop_last=True,
        learning_rate=5e-3,
        logging_steps=5,
        report_to=[],
        use_cpu=device == "cpu",
    )
    trainer = LoRATrainer(
        model, arguments, train_dataset=rows, callbacks=[kernels, AdapterCallback()]
    )
    trainer.train()
    print(
        "layers eager: " + kernels.why_not if kernels.why_not else "layers replayed as CUDA graphs"
    )
    return trainer


if __name__ == "__main__":
    main(*sys.argv[1:3])
