# SPDX-License-Identifier: Apache-2.0
"""What a server sees of an adapter that was trained over our FP8 base, if the server holds the base otherwise.

    python benchmarks/models/served.py MODEL_DIR FILE [STEPS [TOKENS]]

The adapter is trained on the first four fifths of a text. On the rest, each form's next-token distributions are
compared with those of the model as it was trained: loss in nats per token, mean KL, how often the most probable token
is the same, and ‖Δlogits‖ / ‖logits‖. bf16 rows leave activations as they are. The per-block row has the exported FP8
weights and plain activations, which is what transformers computes where it dequantizes. An FP8 kernel adds an error of
its own, which is not in that row.
"""

from __future__ import annotations

import argparse
import copy
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lorakernels import LoRAConfig, apply_lora, load_adapter, merge_and_unload, save_adapter
from lorakernels.checkpoints.loading.load import FP8Weight
from lorakernels.modules.model.convert import dequantize
from lorakernels.numerics.blocks import quantize_weight_blocks

BLOCK = (128, 128)


def train(model: nn.Module, rows: Tensor, steps: int) -> None:
    config = LoRAConfig(r=16, lora_alpha=32, target_modules="all-linear")
    apply_lora(model, config)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-4)
    model.train()
    for step in range(steps):
        row = rows[step % len(rows)][None]
        loss = model(input_ids=row, labels=row).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()


def in_blocks(model: nn.Module) -> nn.Module:
    """Every linear layer but the head with the weights that format="fp8" would hold."""
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear) and path != "lm_head":
            raw, scales = quantize_weight_blocks(module.weight.detach(), BLOCK)
            weight = dequantize(FP8Weight(f"{path}.weight", raw, scales, BLOCK))
            module.weight = nn.Parameter(weight.to(module.weight.dtype), requires_grad=False)
    return model


def variants(base: Any, trained: nn.Module, adapter: Path) -> Iterator[tuple[str, nn.Module]]:
    plain = copy.deepcopy(base)
    load_adapter(plain, adapter, fp8=None)
    yield "FP8 base + adapter, as trained", trained
    yield "bf16 base + adapter", plain
    merged = merge_and_unload(copy.deepcopy(plain))
    yield "merged, bf16 (export)", merged
    yield "merged, FP8 per block (export --format fp8)", in_blocks(copy.deepcopy(merged))
    yield (
        "merged over the FP8 base, bf16 (merge_and_unload)",
        merge_and_unload(copy.deepcopy(trained)),
    )
    per_tensor = copy.deepcopy(base)
    load_adapter(per_tensor, adapter)
    yield "bf16 base quantized per tensor on load + adapter", per_tensor.eval()
    yield "base alone, bf16", base


@torch.no_grad()
def compare(model: Any, reference: list[Tensor], rows: Tensor) -> dict[str, float]:
    sums = dict.fromkeys(("loss", "kl", "same", "difference"), 0.0)
    for row, expected in zip(rows, reference, strict=True):
        found = model(input_ids=row[None]).logits[0].float()
        log_p, log_q = expected.log_softmax(-1), found.log_softmax(-1)
        sums["loss"] += F.nll_loss(log_q[:-1], row[1:]).item()
        sums["kl"] += F.kl_div(log_q, log_p, log_target=True, reduction="batchmean").item()
        sums["same"] += (found.argmax(-1) == expected.argmax(-1)).float().mean().item()
        sums["difference"] += (found - expected).norm().item() / expected.norm().item()
    return {name: value / len(rows) for name, value in sums.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description="what a server sees of an adapter over FP8")
    parser.add_argument("model", metavar="MODEL_DIR", help="a checkpoint")
    parser.add_argument("text", type=Path, metavar="FILE")
    parser.add_argument("steps", type=int, nargs="?", default=40, help="of training (40)")
    parser.add_argument("tokens", type=int, nargs="?", default=256, help="of a row (256)")
    args = parser.parse_args()
    import transformers

    folder, length = args.model, args.tokens
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    base: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    base = base.to("cuda" if torch.cuda.is_available() else "cpu").eval()
    ids = tokenizer(args.text.read_text(encoding="utf-8"), return_tensors="pt").input_ids[0]
    rows = ids[: len(ids) // length * length].view(-1, length).to(base.device)
    held = rows[len(rows) * 4 // 5 :][:4]
    torch.manual_seed(0)
    trained = copy.deepcopy(base)
    train(trained, rows[: len(rows) * 4 // 5], args.steps)
    with tempfile.TemporaryDirectory() as adapter, torch.no_grad():
        save_adapter(trained, adapter)
        reference = [trained(input_ids=row[None]).logits[0].float() for row in held]
        print(f"{len(held)} rows of {length} tokens, {args.steps} steps")
        print(
            "| served as | loss | KL | same first token | ‖Δlogits‖ / ‖logits‖ |\n|---|---|---|---|---|"
        )
        for name, model in variants(base, trained, Path(adapter)):
            row = compare(model.eval(), reference, held)
            print(
                f"| {name} | {row['loss']:.4f} | {row['kl']:.5f} | {row['same']:.3f} | {row['difference']:.4f} |",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
