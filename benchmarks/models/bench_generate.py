# SPDX-License-Identifier: Apache-2.0
"""transformers' `generate` on our models, fused and not, beside PEFT's in bf16: a token's time, adapters switched on.

    python benchmarks/models/bench_generate.py --output DIR [--models 1b 8b8] [--batch 1 8 64]

Greedy, in evaluation, with transformers' dynamic cache. All linear layers but the head have adapters of R = 16, with
random A and B. The models are random: 1B's with all 16 layers, 8B's with 8.

    first token ms   of the prompt's forward
    ms a token       between the forwards of the tokens after it, by events on the stream
    tokens/s         of all rows
    repeatable ms    ms a token in the run that is checked, once, without cuDNN's attention
    ÷ peft           a token's time over that of "hf + peft bf16" of the same forwards

Rows of "one graph" replay a token's forward by `graphed_generation`, PEFT's too, with transformers' static cache. The
capture is not timed. Providers take turns, and a row has the median of --repetitions turns.

The fused model has to generate exactly the tokens of the one that is not fused, and a graph those of the same cache
without one. That is checked in runs without cuDNN's attention, which does not repeat its bits (docs/facts.md, P9). The
logits of the prompt's last token must not be off from PEFT's by more than ALLOWED of their norm ("error").
"""

from __future__ import annotations

import gc
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor

from benchmarks.lib.generation import UNTIMED, Generation, generation, repeatable_attention
from benchmarks.lib.rows import Row, arguments, environment, finish, parser, ratio
from benchmarks.peers.models import SPECS, Spec, token_rows, value
from benchmarks.peers.training import HfPeft, Ours

PEFT, UNFUSED, FUSED = "hf + peft bf16", "ours, not fused", "ours, fused"
ONE_GRAPH = "one graph"
PROVIDERS: dict[str, Callable[..., Any]] = {
    PEFT: HfPeft,
    UNFUSED: partial(Ours, save=None),
    FUSED: Ours,
}
MODELS = {"1b": SPECS["1b"], "8b8": SPECS["8b"].cut(8), "tiny": SPECS["tiny"]}
# Of the norm. Each of e4m3's products is off by 0.04 of its own, and a row of layers adds them up: 0.15 after four
# layers of 1B (bench_host.py). A model that computes something else is off by 1 or more.
ALLOWED = 0.5


@torch.no_grad()
def built(provider: str, spec: Spec, device: torch.device) -> Any:
    """A provider's model in evaluation, with B of the same random values for all."""
    model = PROVIDERS[provider](spec, "all", device).model
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            path = name.partition(".lora_B")[0]
            made = value(f"{path}.lora_B", tuple(parameter.shape), device, torch.float32)
            parameter.copy_(made)
    return model.eval()


@torch.no_grad()
def last_logits(model: Any, ids: Tensor) -> Tensor:
    """fp32 [B, V] of the last token."""
    found: Tensor = model(input_ids=ids, use_cache=False, logits_to_keep=1).logits[:, -1].float()
    return found


def wrong(tokens: dict[str, Tensor], error: float) -> str:
    """What is wrong with a provider's results, "" if nothing: all `tokens`, by whose they are, have to be equal."""
    if not error <= ALLOWED:
        return f"logits are off by {error:.2g} of their norm"
    whose, own = next(iter(tokens.items()))
    for other, found in tokens.items():
        if not torch.equal(own, found):
            return f"{int((own != found).sum())} tokens of {whose} differ from {other}'s"
    return ""


def turns_of(
    models: dict[str, Any], ids: Tensor, new: int, repetitions: int, graphed: bool
) -> dict[str, list[Generation] | str]:
    """What each provider generated, turn by turn without the first, or what it raised."""
    found: dict[str, list[Generation] | str] = {provider: [] for provider in models}
    for _ in range(repetitions + 1):
        for provider, model in models.items():
            turns = found[provider]
            if isinstance(turns, list):
                try:
                    turns.append(generation(model, ids, new, static=graphed, graphed=graphed))
                except Exception as problem:  # of one way of one provider
                    message = str(problem).partition("\n")[0][:160]
                    found[provider] = f"raised {type(problem).__name__}: {message}"
    return {p: turns[1:] if isinstance(turns, list) else turns for p, turns in found.items()}


def repeated(
    models: dict[str, Any], ids: Tensor, new: int, graphed: bool
) -> dict[str, dict[str, Generation]]:
    """For each provider what has to be equal, by name: its own generation first. Attention repeats its bits."""
    found: dict[str, dict[str, Generation]] = {}
    with repeatable_attention():
        for provider, model in models.items():
            ways = {provider: graphed} | ({f"{provider} without a graph": False} if graphed else {})
            found[provider] = {
                way: generation(model, ids, new, static=graphed, graphed=by_graph)
                for way, by_graph in ways.items()
            }
    if FUSED in found and UNFUSED in found:
        found[FUSED][UNFUSED] = found[UNFUSED][UNFUSED]
    return found


def case(
    models: dict[str, Any], ids: Tensor, new: int, repetitions: int, graphed: bool
) -> list[Row]:
    """A row for each provider. They take turns."""
    found = turns_of(models, ids, new, repetitions, graphed)
    running = {name: model for name, model in models.items() if isinstance(found[name], list)}
    checked = repeated(running, ids, new, graphed)
    logits = {provider: last_logits(model, ids) for provider, model in models.items()}
    truth = logits.get(PEFT)
    rows: list[Row] = []
    peft_ms: float | None = None
    for provider, turns in found.items():
        row: Row = {"provider": provider, "forwards": ONE_GRAPH if graphed else "eager"}
        row |= {"batch": len(ids), "check": "ok"}
        error = 0.0 if truth is None else float((logits[provider] - truth).norm() / truth.norm())
        problem, first, token, again = turns, "", None, ""
        if isinstance(turns, list):
            problem = wrong({way: each.tokens for way, each in checked[provider].items()}, error)
            first = round(statistics.median(turn.first_ms for turn in turns), 3)
            token = statistics.median(turn.token_ms for turn in turns)
            again = round(checked[provider][provider].token_ms, 3)
        peft_ms = token if provider == PEFT else peft_ms
        if problem:
            row["check"] = problem if provider == PEFT else f"WRONG: {problem}"
        row |= {"error": f"{error:.1e}", "first token ms": first}
        row["ms a token"] = "" if token is None else round(token, 3)
        row["repeatable ms"] = again
        row["tokens/s"] = "" if token is None else round(len(ids) / token * 1e3, 1)
        row["÷ peft"] = ratio(token, peft_ms)
        rows.append(row)
        print(*row.values(), sep="  ", flush=True)
    return rows


def main() -> int:
    options = parser("generate on our models beside PEFT's")
    options.add_argument("--models", nargs="+", choices=list(MODELS))
    options.add_argument("--batch", nargs="+", type=int)
    options.add_argument("--providers", nargs="+", choices=list(PROVIDERS), default=list(PROVIDERS))
    options.add_argument("--prompt", type=int, help="tokens of a row before generation")
    options.add_argument("--new", type=int, default=64, help="tokens that each row gets")
    args, device = arguments(options, on_gpu=3)
    if args.new <= UNTIMED:
        options.error(f"--new must be above {UNTIMED}, found {args.new}")
    on_gpu = device.type == "cuda"
    prompt = args.prompt or (512 if on_gpu else 16)
    rows: list[Row] = []
    for name in args.models or (["1b", "8b8"] if on_gpu else ["tiny"]):
        spec = replace(MODELS[name], length=prompt + args.new)
        models = {provider: built(provider, spec, device) for provider in args.providers}
        for batch in args.batch or ([1, 8, 64] if on_gpu else [1, 2]):
            ids = token_rows(prompt, batch).to(device)
            for graphed in (False, True) if on_gpu else (False,):
                found = case(models, ids, args.new, args.repetitions, graphed)
                head: Row = {"model": spec.name, "prompt": prompt, "new": args.new}
                rows += [{**head, **row} for row in found]
        del models
        gc.collect()
    return finish("generate", rows, environment(device), args.output)


if __name__ == "__main__":
    sys.exit(main())
