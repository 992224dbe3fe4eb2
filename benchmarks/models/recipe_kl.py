# SPDX-License-Identifier: Apache-2.0
"""What each FP8 recipe costs a trained model: the KL divergence of its base alone from the plain one's, emulated.

    python benchmarks/models/recipe_kl.py DIR FILE                # SmolLM2-135M by smollm2.py, and any text
    python benchmarks/models/recipe_kl.py DIR FILE --tokens 1024

Every linear layer but the head quantizes its weight and its input and dequantizes them again; products are fp32's. So
the rows tell the recipes apart, and not kernels. "none" on one side leaves that side as it is.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lorakernels.numerics import blocks
from lorakernels.numerics.fp8 import E4M3, FP8_MAX, amax_of, quantize_fp8, scale_of
from lorakernels.values import Weight

Quantize = Callable[[Tensor], Tensor]
ROW = 384  # tokens of one forward


def same(x: Tensor) -> Tensor:
    return x


def per_tensor(x: Tensor) -> Tensor:
    scale = scale_of(amax_of(x), FP8_MAX[E4M3])
    return quantize_fp8(x, scale, E4M3).float() / scale


def rows_in_blocks(x: Tensor, power_of_two: bool) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    return blocks.dequantize_rows(blocks.quantize_rows(rows, E4M3, power_of_two)).view(x.shape)


def weight_in_blocks(w: Tensor) -> Tensor:
    return blocks.dequantize_weight_blocks(Weight(*blocks.quantize_weight_blocks(w)))


exact, power = (
    partial(rows_in_blocks, power_of_two=False),
    partial(rows_in_blocks, power_of_two=True),
)
RECIPES: dict[str, tuple[Quantize, Quantize]] = {  # of weights, of inputs
    "none, none": (same, same),
    "per tensor, none": (per_tensor, same),
    "none, per tensor": (same, per_tensor),
    "per tensor, per tensor": (per_tensor, per_tensor),
    "128 × 128, none": (weight_in_blocks, same),
    "none, 1 × 128": (same, exact),
    "none, 1 × 128 powers of two": (same, power),
    "128 × 128, 1 × 128": (weight_in_blocks, exact),
    "128 × 128, 1 × 128 powers of two": (weight_in_blocks, power),
}  # fmt: skip


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, metavar="DIR", help="a checkpoint with a tokenizer")
    parser.add_argument("text", type=Path, metavar="FILE", help="what is read")
    parser.add_argument("--tokens", type=int, default=3072, help="how many (default 3072)")
    return parser.parse_args()


@torch.no_grad()
def logits_of(model: Any, rows: Tensor, weights: dict[str, Tensor], recipe: str) -> Tensor:
    """fp32 [tokens, vocabulary] of the model under a recipe."""
    of_weights, of_inputs = RECIPES[recipe]
    hooks = []
    for path, plain in weights.items():
        layer = model.get_submodule(path)
        layer.weight.copy_(of_weights(plain))
        hooks.append(layer.register_forward_pre_hook(lambda _, given: (of_inputs(given[0]),)))
    found = torch.cat([model(input_ids=row[None]).logits[0] for row in rows])
    for hook in hooks:
        hook.remove()
    return found


def main() -> int:
    args = arguments()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    ids = tokenizer(args.text.read_text(), return_tensors="pt").input_ids[0][: args.tokens]
    rows = ids[: len(ids) // ROW * ROW].view(-1, ROW)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    head = model.get_output_embeddings()
    weights = {
        path: layer.weight.detach().clone()
        for path, layer in model.named_modules()
        if isinstance(layer, nn.Linear) and layer is not head
    }
    labels = torch.cat([F.pad(row[1:], (0, 1), value=-100) for row in rows])
    truth: Tensor | None = None
    print(f"{len(weights)} layers, {rows.numel()} tokens of {args.text.name}\n")
    print("| weights, inputs | KL | same first token | loss |\n|---|---|---|---|")
    for recipe in RECIPES:
        began = time.perf_counter()
        logits = logits_of(model, rows, weights, recipe)
        log_p = logits.log_softmax(1)
        truth = log_p if truth is None else truth
        kl = float((truth.exp() * (truth - log_p)).sum(1).mean())
        same_first = float((truth.argmax(1) == log_p.argmax(1)).float().mean())
        loss = float(F.cross_entropy(logits, labels))
        print(f"| {recipe} | {kl:.4f} | {same_first:.3f} | {loss:.4f} |", flush=True)
        print(f"{recipe}: {time.perf_counter() - began:.0f} s", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
