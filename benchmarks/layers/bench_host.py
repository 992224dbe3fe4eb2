# SPDX-License-Identifier: Apache-2.0
"""The host's time to enqueue a linear layer, a decoder layer and a training step, beside PEFT's.

    python benchmarks/layers/bench_host.py --output DIR [--quick] [--kinds linear layer step] [--repetitions N]

Nothing here is the device's time. The host enqueues work and never waits for the device; lib/host_time.py says how
that is ensured. All rows of a case are made in one process and sampled in turn, in order and then in reverse order.

    linear   8 layers behind each other, forward and backward, ÷ 8; R = 16, with bias. `backward()` itself is an
             eighth in it. The update of the FP8 scales is not in it: a model has one for all of its layers.
    layer    Llama-3.2-1B's decoder layer at 1,024 tokens, LoRA on q, k, v and o with p = 0.1, forward and backward:
             the slope between 1 and 4 layers, so that `backward()` itself is not in it, nor the scales' update
    step     a whole step of Llama-3.2-1B: zero_grad, forward, loss, backward, AdamW; of ours also the scales' update.
             The device is idle when it begins. 512 and 1,024 tokens need the same host: where they differ, it waited.
             transformers' own loop, in PEFT's row alone, waits once for a few small kernels.

Rows:

    peft bf16, hf + peft bf16     PEFT's lora.Linear, alone and in transformers' model
    ours                          LoRALinear over an FP8 base, as a user runs it
    …, by the ops                 the same, not recorded (lorakernels.recorded.routing.without_recordings)
    ours, frozen, no lora         FrozenFP8Linear; "linear bf16, no lora" is a frozen nn.Linear
    ours, not fused               transformers' layers with our LoRALinear, and FrozenFP8Linear for the rest
    ours, fused                   `fuse` with save="recompute"
    ours, fused, replayed         the fused layers, each two graphs replayed by GraphManager

Columns, in µs of the host per layer, or per step:

    least µs, µs     the least and the median of all samples; of "layer" the slope of the least and of the medians
    fwd µs           the forward's part of µs
    ÷ peft           µs over PEFT's in the same case; "least ÷ peft" of the least
    allocations      how often the caching allocator is asked for memory, medians
    behind µs        of a step: how long the device still ran when the host was done
    error            "linear": the largest to float64, of y, dx, dA and dB. Else to PEFT's row: of y − x and dx − dy
                     after four layers, or of the first loss
    check            "ok", WRONG, or why there are no numbers. The exit code is 1 if a row is WRONG; whatever ours
                     raises is.

`--budget-s` ends the sampling, not the making: every row has at least 3 samples.
"""

from __future__ import annotations

import gc
import os
import platform
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from benchmarks.lib.host_providers import (
    LINEARS,
    RECIPES,
    Made,
    compare,
    make_layers,
    make_linears,
    make_step,
)
from benchmarks.lib.host_time import HostWaited, columns, sample_in_turn
from benchmarks.lib.rows import Row, arguments, environment, finish, parser, ratio
from benchmarks.lib.timing import heat
from benchmarks.lib.workers import reason_of
from benchmarks.peers.base import Unavailable, make_case
from benchmarks.peers.models import SPECS

NAME = "host"
KINDS = ("linear", "layer", "step")
PROVIDERS = (*LINEARS, *RECIPES)
PEFT = ("peft bf16", "hf + peft bf16")
RANK = 16
BUDGET, QUICK_BUDGET = 100.0, 40.0  # seconds
Make = Callable[[ExitStack], Made]


def cases(kind: str, quick: bool, device: torch.device) -> dict[str, dict[str, Make]]:
    """Case → provider → what makes it. Without a GPU the sizes are tiny, and the numbers mean nothing."""
    if kind == "linear":
        return linear_cases(quick, device)
    spec, lengths = SPECS["1b"], [1024] if quick or kind == "layer" else [512, 1024]
    if device.type != "cuda":
        spec, lengths = SPECS["tiny"], [32]
    make = make_layers if kind == "layer" else make_step
    return {
        f"{spec.name}, 1 x {length}": {
            name: partial(make, recipe, replace(spec, length=length), device)
            for name, recipe in RECIPES.items()
        }
        for length in lengths
    }


def linear_cases(quick: bool, device: torch.device) -> dict[str, dict[str, Make]]:
    tokens, chosen = 1024, [(2048, 0.1), (2048, 0.0), *([] if quick else [(4096, 0.1)])]
    if device.type != "cuda":
        tokens, chosen = 32, [(64, 0.1), (64, 0.0)]
    found: dict[str, dict[str, Make]] = {}
    for width, p in chosen:
        case = make_case(f"{tokens}x{width}x{width}", RANK, p, device)
        found[f"{width} -> {width}, {tokens} tokens, p = {p:g}"] = {
            name: partial(make_linears, make, within, case)
            for name, (make, within) in LINEARS.items()
        }
    return found


def why(name: str, problem: Exception) -> str:
    """A row's check: a peer's own limits are its row's business, ours are wrong."""
    if isinstance(problem, (Unavailable, HostWaited)):
        return str(problem)
    return f"{'WRONG' if name.startswith('ours') else 'raised'}: {reason_of(problem)}"


def made_of(makes: dict[str, Make], closing: ExitStack) -> tuple[dict[str, Made], dict[str, str]]:
    """(what could be made, the checks of all)."""
    made: dict[str, Made] = {}
    checks: dict[str, str] = {}
    for name, make in makes.items():
        try:
            made[name] = make(closing)
        except Exception as problem:
            checks[name] = why(name, problem)
    peft = next((made[name] for name in PEFT if name in made), None)
    for name, each in made.items():
        if peft is not None:
            compare(each, peft)
        alone = " (there is no PEFT to compare with)" if each.found and peft is None else ""
        checks[name] = f"WRONG: {each.check}" if each.check else f"ok{alone}"
    return made, checks


def bench_case(
    makes: dict[str, Make], device: torch.device, rounds: int, until: float
) -> dict[str, Row]:
    """Provider → its columns, the ratios aside. What is wrong is not timed."""
    with ExitStack() as closing:
        made, checks = made_of(makes, closing)
        works = {name: each.works for name, each in made.items() if not each.check}
        heat(device, 0.1)
        for name, problem in sample_in_turn(works, device, rounds, until).items():
            checks[name] = why(name, problem)
        return {
            name: {
                "check": checks[name],
                "error": f"{made[name].error:.1e}" if name in made else "",
                **columns(works.get(name, []), device),
            }
            for name in makes
        }


def rows_of(kind: str, case: str, found: dict[str, Row]) -> list[Row]:
    """A case's rows with their ratios to PEFT's."""
    peft = next((found[peer] for peer in PEFT if peer in found), {})
    return [
        {
            "kind": kind,
            "case": case,
            "provider": name,
            **row,
            "÷ peft": ratio(row["µs"], peft.get("µs", "")),
            "least ÷ peft": ratio(row["least µs"], peft.get("least µs", "")),
        }
        for name, row in found.items()
    ]


def host_facts() -> dict[str, str]:
    """What the host's time depends on besides."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    found = {"cpu": f"{len(names)} x {names[0]}" if names else platform.processor()}
    found["load"] = f"{os.getloadavg()[0]:.1f}"
    for package in ("peft", "transformers"):
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def main() -> int:
    options = parser("the host's time to enqueue a layer and a step, beside PEFT's")
    options.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    options.add_argument("--quick", action="store_true", help="fewer cases, 10 repetitions at most")
    options.add_argument(
        "--budget-s", type=float, help=f"default: {BUDGET:g}, quick {QUICK_BUDGET:g}"
    )
    args, device = arguments(options, on_gpu=60)
    began, budget = time.monotonic(), args.budget_s or (QUICK_BUDGET if args.quick else BUDGET)
    rounds = min(args.repetitions, 10) if args.quick else args.repetitions
    chosen = [
        (kind, *case) for kind in args.kinds for case in cases(kind, args.quick, device).items()
    ]
    rows: list[Row] = []
    for index, (kind, case, makes) in enumerate(chosen, 1):
        until = began + budget * index / len(chosen)
        rows += rows_of(kind, case, bench_case(makes, device, rounds, until))
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        print(f"{kind}, {case}: {time.monotonic() - began:.0f} s", flush=True)
    return finish(NAME, rows, {**environment(device), **host_facts()}, args.output)


if __name__ == "__main__":
    sys.exit(main())
