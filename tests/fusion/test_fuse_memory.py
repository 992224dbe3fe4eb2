# SPDX-License-Identifier: Apache-2.0
"""What fused layers keep for their backward, and how a memory budget is spent."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lorakernels import BlockScaling, DelayedScaling, FuseReport, fuse
from lorakernels.fusion.memory import SAVE
from lorakernels.modules.marks import became
from tests.fusion.fused_models import (
    ATTENTION,
    E4M3_GATE_UP,
    LINEARS,
    PACKINGS,
    adapted,
    fused_copy,
    run,
    same_within,
    tokens,
)


def kept_bytes(model: nn.Module, x: torch.Tensor) -> int:
    """Bytes of the distinct storages that a forward's graph keeps inside the layers, parameters and angles apart."""
    held = [*model.parameters(), *model.buffers()]
    known = {p.untyped_storage().data_ptr() for p in held}
    for module in model.modules():
        parts = became(module).fused
        for group in () if parts is None else parts.groups:
            known |= {a.untyped_storage().data_ptr() for a in group.joined.lora_A.values()}
    found: dict[int, int] = {}
    inside = [False]

    def pack(t: torch.Tensor) -> torch.Tensor:
        pointer = t.untyped_storage().data_ptr()
        if inside[0] and pointer not in known:
            found[pointer] = t.untyped_storage().nbytes()
        return t

    h = model.get_input_embeddings()(x).detach().requires_grad_()
    positions = torch.arange(x.shape[1])[None]
    angles = model.model.rotary_emb(h, positions)
    known |= {t.untyped_storage().data_ptr() for t in angles}
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        inside[0] = True
        for layer in model.model.layers:
            h = layer(h, position_embeddings=angles)
            kept.append(h)
        inside[0] = False
    return sum(found.values())


@pytest.mark.parametrize("targets", [ATTENTION, LINEARS], ids=["attention", "all linears"])
@pytest.mark.parametrize("save", SAVE)
@pytest.mark.parametrize("fp8", [DelayedScaling(), None], ids=["fp8", "plain"])
@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Phi3", "Olmo2", "Gemma2"])
def test_kept_bytes_are_the_predicted_ones(family: str, fp8, save: str, targets) -> None:
    wide = {"head_dim": 16}  # 4 heads are wider than the hidden size, 32
    model = adapted(family, targets, model=wide, fp8=fp8, dtype=torch.bfloat16, lora_dropout=0.1)
    x = tokens(2, 32)
    report = fuse(model, save=save, tokens=x.numel())
    kept = kept_bytes(model, x)
    slots = 2 * 4 * (16 + 8)  # per layer: masks' slots and FP8 scales, not in the formula
    assert abs(kept - report.saved_bytes) <= 0.02 * report.saved_bytes + slots, (kept, report)


@pytest.mark.parametrize("targets", [ATTENTION, LINEARS], ids=["attention", "all linears"])
@pytest.mark.parametrize("save", SAVE)
def test_kept_bytes_under_block_scaling_are_the_predicted_ones(save: str, targets) -> None:
    """Each x8 of "full" has a scale for 128 columns, and o's input is kept as attention keeps it."""
    wide = {"hidden_size": 256, "intermediate_size": 128}  # the rows of k and v are a block
    options = {"fp8": BlockScaling(), "dtype": torch.bfloat16, "lora_dropout": 0.1}
    model = adapted(
        "Llama", targets, model=wide, rank_pattern={"k_proj": 2, "up_proj": 2}, **options
    )
    x = tokens(2, 32)
    report = fuse(model, save=save, tokens=x.numel())
    slots = 2 * 2 * 16  # masks' slots of q, k, v, and of gate, up, ... are not in the formula
    kept = kept_bytes(model, x)
    assert abs(kept - report.saved_bytes) <= 0.02 * report.saved_bytes + slots, (kept, report)


def test_the_largest_layer_in_fp8_keeps_little() -> None:
    """Llama-2-70B: hidden 8192, ffn 28672, 64 / 8 heads, 8192 tokens, r = 16 on q, k, v, o: at most 1.1 GB."""
    from lorakernels.fusion.memory import LayerSize

    size = LayerSize(8192, 28672, 64, 8, 128, (48, 16, 0, 0), True, False)
    assert size.saved_bytes("fp8", 8192) <= 1.1e9 < size.saved_bytes("recompute", 8192)


def layer_lines(report: FuseReport) -> list[str]:
    return [line.strip() for line in str(report).splitlines() if "DecoderLayer save=" in line]


def test_the_report_has_a_line_for_equal_layers() -> None:
    """Layers that became FP8 in other places, or keep other bytes, have lines of their own."""
    model = adapted("Llama", LINEARS, model={"num_hidden_layers": 12})
    report = fused_copy(model)[1]
    line = f"LlamaDecoderLayer save=recompute {report.layers[0].bytes:,} bytes"
    assert layer_lines(report) == [f"model.layers.{{0-11}} (12): {line}"]
    for number in (0, 1, 4):
        mlp = model.model.layers[number].mlp
        mlp.up_proj = nn.Linear(32, 48, bias=False).requires_grad_(False)
    first, second = layer_lines(fused_copy(model)[1])
    assert first.startswith("model.layers.{0-1,4} (3): LlamaDecoderLayer save=recompute ")
    assert first.endswith(" bytes; now FP8: up_proj")
    assert second == f"model.layers.{{2-3,5-11}} (9): {line}"
    one = adapted("Llama", LINEARS, model={"num_hidden_layers": 1})
    assert layer_lines(fused_copy(one)[1]) == [f"model.layers.0: {line}"]


@pytest.mark.parametrize("family", PACKINGS)
def test_a_memory_budget_mixes_neighbours(family: str) -> None:
    model = adapted(family, LINEARS, model={"num_hidden_layers": 4})
    x = tokens()
    least = fused_copy(model, save="checkpoint", tokens=x.numel())[1].saved_bytes
    fp8 = fused_copy(model, save="fp8", tokens=x.numel())[1].saved_bytes
    expected = run(model, x)
    for budget, modes in (
        (10**9, {"full"}),
        (fp8, {"fp8"}),
        (fp8 - 1, {"fp8", "checkpoint"}),
        (least, {"checkpoint"}),
    ):
        twin, report = fused_copy(model, memory_budget=budget, tokens=x.numel())
        assert {layer.save for layer in report.layers} == modes
        assert report.saved_bytes <= budget and f"{report.saved_bytes:,}" in str(report)
        same_within(run(twin, x), expected, E4M3_GATE_UP)
    before = model.state_dict()
    with pytest.raises(ValueError, match=rf"{least} bytes together"):
        fuse(model, memory_budget=least - 1, tokens=x.numel())
    assert list(before) == list(model.state_dict())
    with pytest.raises(ValueError, match="needs tokens"):
        fuse(model, memory_budget=10**9)
