# SPDX-License-Identifier: Apache-2.0
"""TRL's SFTTrainer on chats: PEFT's adapters over our layers, fused, packed, and replayed as CUDA graphs on a GPU.

    python examples/trl_sft.py [MODEL_DIR]      # without one, a small Llama with random weights and a byte tokenizer

Only the assistant's turns have a loss. Documents are packed and do not see each other. `FixedShapes` gives every batch
the shapes that graphs need. The adapter that SFTTrainer saves is PEFT's.
"""

from __future__ import annotations

import sys
from typing import Any

import peft
import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)
from trl import SFTConfig, SFTTrainer

from lorakernels import fuse
from lorakernels.integrations.collators import FixedShapes
from lorakernels.integrations.peft import register
from lorakernels.integrations.transformers import LoRAKernelsCallback

LENGTH, ROWS, EPOCHS = 256, 2, 6
LORA = {"r": 8, "lora_alpha": 16, "lora_dropout": 0.05, "target_modules": "all-linear"}
TEMPLATE = """{%- for message in messages %}{{ '<|' + message['role'] + '|>' }}{% if message['role'] == 'assistant' %}\
{% generation %}{{ message['content'] + '<|end|>' }}{% endgeneration %}{% else %}{{ message['content'] + '<|end|>' }}\
{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""


def chats() -> list[list[dict[str, str]]]:
    """Chats about sums. All that can be learned is in the assistant's turns."""
    found = []
    for a in range(2, 26):
        for b in (a % 7, a % 5 + 3):
            question = f"What is {a} plus {b}?"
            answer = f"{a} plus {b} is {a + b}."
            turns = [("system", "You add numbers."), ("user", question), ("assistant", answer)]
            found.append([{"role": role, "content": content} for role, content in turns])
    return found


def byte_tokenizer() -> PreTrainedTokenizerFast:
    special = ["<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {word: index for index, word in enumerate([*special, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|end|>"
    )
    made.chat_template = TEMPLATE
    return made


def load(folder: str | None, device: str) -> tuple[Any, Any]:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    if folder is not None:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        return model.to(device), AutoTokenizer.from_pretrained(folder)
    tokenizer = byte_tokenizer()
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes, **heads))
    return model.to(device, dtype), tokenizer


def main(folder: str | None = None, output: str = "sft-output", **options: Any) -> Any:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    base, tokenizer = load(folder, device)
    lora = peft.LoraConfig(task_type="CAUSAL_LM", **LORA)
    model = peft.get_peft_model(base, register(lora))
    print(str(fuse(model)).split("\n")[0])
    kernels = LoRAKernelsCallback(model, **options)
    arguments = SFTConfig(
        output_dir=output,
        max_length=LENGTH,
        packing=True,
        assistant_only_loss=True,
        per_device_train_batch_size=ROWS,
        num_train_epochs=EPOCHS,
        learning_rate=5e-3,
        logging_steps=1,
        report_to=[],
        bf16=False,  # the model computes in its own dtype
        gradient_checkpointing=False,  # fuse(save="checkpoint") recomputes inside its layers instead
        use_cpu=device == "cpu",
    )
    trainer = SFTTrainer(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_list([{"messages": chat} for chat in chats()]),
        processing_class=tokenizer,
        callbacks=[kernels],
    )
    trainer.data_collator = FixedShapes(trainer.data_collator, ROWS * LENGTH, longest=LENGTH)
    trainer.train()
    trainer.save_model()
    print("layers eager: " + kernels.why_not if kernels.why_not else "layers replayed as graphs")
    return trainer


if __name__ == "__main__":
    main(*sys.argv[1:3])
