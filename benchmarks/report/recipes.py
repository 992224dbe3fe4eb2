# SPDX-License-Identifier: Apache-2.0
"""What each recipe of benchmarks/recipes measured: the table of its README, from the records."""

from __future__ import annotations

from typing import NamedTuple

from benchmarks.report.ops import Row, find, markdown, number, run_of


class Recipe(NamedTuple):
    """One file of options, and the record of the same model, adapters and tokens."""

    file: str
    words: str
    csv: str
    where: dict[str, object]
    rate: str = "tokens/s"


SHARDED = {"model": "Llama-2-70B", "tokens": "1 x 8192"}
RECIPES = (
    Recipe(
        "8b_chat.yaml",
        "Llama-3.1-8B, 1×4096, one GPU",
        "end_to_end",
        {"model": "Llama-3.1-8B", "LoRA on": "qkvo", "provider": "ours, one graph"},
    ),
    Recipe(
        "70b_one_gpu.yaml",
        "Llama-2-70B, 1×8192, one H200",
        "end_to_end",
        {
            "model": "Llama-2-70B",
            "LoRA on": "qkvo",
            "provider": "ours, fit, offload, graphs by layer",
        },
    ),
    Recipe(
        "70b_80gb.yaml",
        "Llama-2-70B, 1×8192, one H200 held to 80 GB",
        "sharded_base",
        SHARDED | {"base": "offloaded, 0.27"},
        "tokens/s a GPU",
    ),
    Recipe(
        "70b_two_gpus.yaml",
        "Llama-2-70B, 1×8192 a GPU, two H200",
        "sharded_base",
        SHARDED | {"base": "sharded, peer", "check": "ok"},  # layers keep what memory_budget says
        "tokens/s a GPU",
    ),
    Recipe(
        "405b_four_gpus.yaml",
        "Llama-3.1-405B, 1×4096 a GPU, four H200",
        "sharded_base",
        {"model": "Llama-3.1-405B", "tokens": "1 x 4096", "base": "sharded, peer"},
        "tokens/s a GPU",
    ),
)
PEER = "hf + peft bf16"


def _beside(results: dict[str, list[Row]], recipe: Recipe) -> str:
    """The fastest PEFT of the same model and adapters, or what became of it."""
    rows = [
        row
        for row in results.get("end_to_end", [])
        if row["model"] == recipe.where["model"]
        and row["LoRA on"] == "qkvo"
        and row["provider"].startswith(PEER)
    ]
    timed = [(value, row) for row in rows if (value := number(row["tokens/s"])) is not None]
    if timed:
        best, row = max(timed, key=lambda pair: pair[0])
        return f"{best:,.0f}, {row['peak GiB']} GiB ({row['provider']})"
    return f"{rows[0]['check'].partition(':')[0]} ({rows[0]['provider']})" if rows else "–"


def recipes(results: dict[str, list[Row]]) -> str:
    """What stands between the markers of benchmarks/recipes/README.md.

    Args:
        results: name → rows of each CSV.
    """
    head = ["recipe", "", "tokens/s a GPU", "peak GiB", "the fastest PEFT in bf16 on one GPU"]
    lines, used = [head, ["---"] * len(head)], []
    for recipe in RECIPES:
        row = find(results.get(recipe.csv, []), recipe.where)
        rate = number(row[recipe.rate]) if row else None
        name = f"[{recipe.file}]({recipe.file})"
        if row is None or rate is None:
            lines.append([name, recipe.words, "not measured", "", ""])
            continue
        used.append(row)
        beside = _beside(results, recipe)
        lines.append([name, recipe.words, f"{rate:,.0f}", row["peak GiB"], beside])
    return f"Random weights, r = 16 on q, k, v, o ({run_of(used)}):\n\n{markdown(lines)}"
