# SPDX-License-Identifier: Apache-2.0
"""The README's five numbers: what users run, beside HF + PEFT in bf16."""

from __future__ import annotations

from typing import NamedTuple

from benchmarks.report.ops import Row, find, markdown, number, run_of


class Headline(NamedTuple):
    """A line of the README: what was run, and the row of which CSV has its tokens/s and its ratio to PEFT's."""

    words: str
    csv: str
    where: dict[str, object]
    ratio: str


HEADLINES = (
    Headline(
        "`lorakernels finetune`, 8 layers of 8B's widths, vocabulary 32,000, LoRA on all linear layers, 2×4096 tokens",
        "check_gpu",
        {"shape": "8b/8 2x4096", "part": "finetune"},
        "× PEFT",
    ),
    Headline(
        "the ten lines below, 16 layers of 1B's widths, vocabulary 32,000, 1×2048 tokens",
        "check_gpu",
        {"shape": "1b 1x2048", "part": "drop-in, fused, attached"},
        "× PEFT",
    ),
    Headline(
        "TRL's SFTTrainer with fused layers and the callback, the first row's model; beside SFTTrainer with PEFT",
        "check_gpu",
        {"shape": "8b/8 2x4096", "part": "SFTTrainer, fused, callback"},
        "× PEFT",
    ),
    Headline(
        "Llama-3.1-8B, LoRA on q, k, v, o, 1×4096 tokens, the step as one graph",
        "end_to_end",
        {"model": "Llama-3.1-8B", "LoRA on": "qkvo", "provider": "ours, one graph"},
        "× hf + peft",
    ),
    Headline(
        "Llama-2-70B, LoRA on q, k, v, o, 1×8192 tokens, on this one GPU",
        "end_to_end",
        {
            "model": "Llama-2-70B",
            "LoRA on": "qkvo",
            "provider": "ours, fit, offload, graphs by layer",
        },
        "× hf + peft",
    ),
)


def _peer_s_end(rows: list[Row], ours: Row) -> str:
    """Why there is no ratio: what became of PEFT on the same model."""
    peers = (
        row["check"]
        for row in rows
        if row["model"] == ours["model"] and row["provider"].startswith("hf + peft")
    )
    return f"PEFT: {next(peers, '–').partition(':')[0]}"


def headlines(results: dict[str, list[Row]]) -> str:
    """What stands between the README's markers.

    Args:
        results: name → rows of each CSV.
    """
    lines = [["", "tokens/s", "× HF + PEFT bf16, same run"], ["---"] * 3]
    used = []
    for headline in HEADLINES:
        row = find(results.get(headline.csv, []), headline.where)
        rate = number(row["tokens/s"]) if row else None
        if row is None or rate is None:
            lines.append([headline.words, "–", "not measured"])
            continue
        used.append(row)
        ratio = number(row[headline.ratio])
        beside = _peer_s_end(results[headline.csv], row) if ratio is None else f"{ratio:.2f}"
        lines.append([headline.words, f"{rate:,.0f}", beside])
    return f"LoRA of rank 16 on one GPU, random weights ({run_of(used)}):\n\n{markdown(lines)}"
