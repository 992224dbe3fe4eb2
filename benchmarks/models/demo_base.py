# SPDX-License-Identifier: Apache-2.0
"""The small Llama that `lorakernels finetune --demo` adapts: trained here, and shipped in lorakernels/train/demo_base.

    python benchmarks/models/demo_base.py [--output DIR] [--steps 8000] [--device cuda]

It reads bytes and has 0.9 million parameters. It learns the Python sources of the standard library, tests left out,
with all weights and without LoRA: two minutes on an H200. `model.safetensors` takes 1.8 MB in bf16.
"""

from __future__ import annotations

import argparse
import sys
import sysconfig
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from benchmarks.peers.texts import sources_below
from lorakernels.train.data.byte_tokenizer import VOCABULARY, byte_tokenizer

SHIPPED = Path(__file__).parents[2] / "lorakernels" / "train" / "demo_base"
SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
LENGTH = 512  # bytes in a row
ROWS = 64  # in a step
HELD_OUT = 64  # rows
LR = 4e-3
NOT_READ = ("site-packages", "test", "tests", "idle_test", "encodings", "pydoc_data")


def rows_of(texts: list[str], eos: int) -> Tensor:
    """uint8-valued int64 [rows, LENGTH]: one text after the other, <eos> after each."""
    tokens: list[int] = []
    for text in texts:
        tokens += [*text.encode(), eos]
    rows = torch.tensor(tokens[: len(tokens) // LENGTH * LENGTH]).view(-1, LENGTH)
    return rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]


def new_model(tokenizer: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        **SHAPE,
    )
    return transformers.LlamaForCausalLM(config)


def train(model: Any, rows: Tensor, steps: int, device: torch.device) -> None:
    model.to(device).train()
    held, rows = rows[:HELD_OUT].to(device), rows[HELD_OUT:].to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.05, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, LR, total_steps=steps, pct_start=0.05, cycle_momentum=False
    )
    order = torch.Generator().manual_seed(1)
    for step in range(1, steps + 1):
        batch = rows[torch.randint(len(rows), (ROWS,), generator=order).to(device)]
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % max(steps // 10, 1) == 0:
            with torch.no_grad():
                unseen = model(input_ids=held, labels=held).loss
            print(f"step {step}: loss {loss:.4f}, held out {unseen:.4f} nats per byte", flush=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=SHIPPED, metavar="DIR")
    parser.add_argument("--steps", type=int, default=8000)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(argv)
    tokenizer = byte_tokenizer()
    texts = sources_below(Path(sysconfig.get_path("stdlib")), NOT_READ)
    rows = rows_of(texts, tokenizer.eos_token_id)
    print(f"{len(texts)} files, {rows.numel():,} bytes of Python {sys.version.split()[0]}")
    model = new_model(tokenizer)
    train(model, rows, args.steps, torch.device(args.device))
    model.to(torch.bfloat16).save_pretrained(args.output)
    tokenizer.save_pretrained(args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
