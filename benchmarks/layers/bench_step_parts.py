# SPDX-License-Identifier: Apache-2.0
"""Where a step goes: kernels of one eager layer, as often as a model has it, by what they are for, and the head.

    python benchmarks/layers/bench_step_parts.py --output DIR [--models 8b 70b 1b]

The models and their tokens are those of bench_end_to_end.py. LoRA R = 16 on q, k, v, o, p = 0.1, one layout of W,
save="recompute", and "fp8" for 70B. The layer's kernels are timed by torch's profiler (lib/breakdown.py). The head is
`linear_cross_entropy` of the model's vocabulary, forward and backward, with a weight in bf16 and with one that was
quantized once. Kernels of one layer run at a higher clock than a whole step, which is at the power limit, so that their
sum is less than a step. step_parts.csv has a row for each part:

    ms        of a step
    kernels   that a step launches for it; of a head they are not counted
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

import lorakernels
from benchmarks.lib.breakdown import Call, record
from benchmarks.lib.rows import Row, arguments, environment, finish, parser
from benchmarks.lib.timing import time_of
from benchmarks.peers.layer_case import P, Size, make_layer_case
from benchmarks.peers.layers import Ours, errors, fault, truth
from benchmarks.peers.models import SPECS, Spec, dtype_of, value

DGRAD, TRANSPOSITIONS = "FP8 GEMMs, dgrad", "transpositions of W"
# How the names of a part's ops begin, without their namespace; what is of no part is "rest"
PARTS = {
    "FP8 GEMMs, forward": ("fp8_linear_lora",),
    DGRAD: ("fp8_grad_input",),
    TRANSPOSITIONS: ("transpose_fp8",),
    "attention, bf16": ("_scaled_dot_product",),
    "SwiGLU and its gradient": ("swiglu",),
    "norms, RoPE and their gradients": ("rms_norm", "rope"),
    "quantize_grad, LoRA-down, dA": ("quantize_", "lora_grad_a", "block_diagonal"),
}
REST = "scales, dropout's slots, sums"
TURNED = "transpose_fp8_kernel"
SAVE = {"70b": "fp8"}  # as in a step with activations in host memory, of which 39 layers keep so
HEADS = {"head and loss, bf16": False, "head and loss, FP8": True}


def size_of(spec: Spec) -> Size:
    s = spec.shape
    heads, kv = s["num_attention_heads"], s["num_key_value_heads"]
    return Size(s["hidden_size"], s["intermediate_size"], heads, kv, spec.batch * spec.length)


def part_of(call: Call) -> str:
    op = call.name.partition(".")[2]
    return next((part for part, names in PARTS.items() if op.startswith(names)), REST)


def layer_parts(calls: list[Call], layers: int) -> list[Row]:
    """A row for each part of a step of so many layers. A product that turned W by a kernel of its own has its time."""
    found: dict[str, list[Call]] = {part: [] for part in (*PARTS, REST)}
    for call in calls:
        found[part_of(call)].append(call)
    rows: list[Row] = [
        {
            "part": part,
            "ms": round(layers * sum(call.seconds for call in of) * 1e3, 3),
            "kernels": layers * sum(len(call.kernels) for call in of),
        }
        for part, of in found.items()
    ]
    turned = sum(TURNED in kernel for call in found[DGRAD] for kernel in call.kernels)
    if turned:
        row = next(row for row in rows if row["part"] == TRANSPOSITIONS)
        row |= {"ms": f"in {DGRAD}", "kernels": layers * turned}
    return rows


def head_ms(spec: Spec, fp8: bool, device: torch.device, repetitions: int) -> float:
    """Of the loss and its gradient by the last hidden state."""
    s, dtype = spec.shape, dtype_of(device)
    sizes = (spec.batch * spec.length, s["hidden_size"])
    hidden = value("hidden", sizes, device, dtype).requires_grad_()
    weight = value("lm_head.weight", (s["vocab_size"], s["hidden_size"]), device, dtype)
    labels = torch.randint(s["vocab_size"], sizes[:1], device=device)
    loss_of = partial(lorakernels.linear_cross_entropy, labels=labels, fp8=fp8)
    if fp8:
        w8, scale_inv = lorakernels.quantize_head(weight)
        loss_of = partial(loss_of, weight=w8, weight_scale_inv=scale_inv)
    else:
        loss_of = partial(loss_of, weight=weight)

    def step() -> None:
        torch.autograd.grad(loss_of(hidden), hidden)

    return time_of(step, device, repetitions).median * 1e3


def model_parts(name: str, device: torch.device, repetitions: int) -> list[Row]:
    """The rows of a model."""
    spec, save = SPECS[name], SAVE.get(name, "recompute")
    case = make_layer_case(size_of(spec), P, device)
    small = case.to_check()
    peer = Ours(small, save=save)
    wrong = fault(peer, errors(peer, truth(small, True)))
    peer = Ours(case, save=save)
    peer.warm_up()
    calls, _ = record(peer.forward, peer.backward, device, steps=5)
    rows = layer_parts(calls, spec.shape["num_hidden_layers"])
    del peer, small, case
    for part, fp8 in HEADS.items():
        ms = head_ms(spec, fp8, device, repetitions)
        rows.append({"part": part, "ms": round(ms, 3), "kernels": ""})
    said: Row = {"model": spec.name, "tokens": spec.batch * spec.length, "save": save}
    said["check"] = f"WRONG: {wrong}" if wrong else "ok"
    return [{**row, **said} for row in rows]


def main() -> int:
    options = parser("where a step goes: kernels of one layer by what they are for, and the head")
    options.add_argument("--models", nargs="+", choices=list(SPECS))
    args, device = arguments(options, on_gpu=15)
    models = args.models or (["8b", "70b", "1b"] if device.type == "cuda" else ["tiny"])
    rows = [row for name in models for row in model_parts(name, device, args.repetitions)]
    return finish("step_parts", rows, environment(device), args.output)


if __name__ == "__main__":
    sys.exit(main())
