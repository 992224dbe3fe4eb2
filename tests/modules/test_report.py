# SPDX-License-Identifier: Apache-2.0
"""print(report) is short however many layers there are, and says of every module what `report.modules` says."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lorakernels import LoRAConfig, apply_lora
from lorakernels.modules.model import report as report_module
from lorakernels.modules.model.report_text import grouped


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        sizes = {"q": (16, 16), "k": (16, 8), "v": (16, 8), "o": (16, 16)}
        self.self_attn = nn.ModuleDict({f"{n}_proj": nn.Linear(*s) for n, s in sizes.items()})
        self.mlp = nn.ModuleDict(
            {
                "gate_proj": nn.Linear(16, 32),
                "up_proj": nn.Linear(16, 32),
                "down_proj": nn.Linear(32, 16),
            }
        )
        self.input_layernorm, self.post_attention_layernorm = nn.LayerNorm(16), nn.LayerNorm(16)


class Model(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embed_tokens, self.lm_head = nn.Embedding(9, 16), nn.Linear(16, 9)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))


def test_eighty_layers_are_ten_lines():
    model = Model(80)
    report = apply_lora(
        model,
        LoRAConfig(target_modules=r"layers\..*_proj", r=4, lora_alpha=2, modules_to_save=["head"]),
    )
    text = str(report)
    lines = text.splitlines()
    assert len(lines) <= 11
    for line in (
        "  layers.{0-79}.self_attn.{q,o}_proj (160): lora 16→16 r=4 scaling=0.5 p=0 base=e4m3 (matches target_modules)",
        "  layers.{0-79}.mlp.down_proj (80): lora 32→16 r=4 scaling=0.5 p=0 base=e4m3 (matches target_modules)",
        "  layers.{0-79}.{input,post_attention}_layernorm (160): frozen LayerNorm (not a target)",
        "  embed_tokens: frozen Embedding (not a target)",
        "  lm_head: saved Linear (in modules_to_save)",
    ):
        assert line in lines
    assert lines[0].startswith("LoRA on 560 modules") and lines[-1].startswith("  reference: ")
    names = [line.split(":")[0].strip() for line in report.details().splitlines()]
    assert [row.name for row in report.modules] == names[2:-1]


def test_a_layer_that_differs_has_a_line_of_its_own():
    model = Model(4)
    report = apply_lora(
        model,
        LoRAConfig(
            target_modules=["q_proj", "o_proj"], rank_pattern={"layers.1.self_attn.q_proj": 2}
        ),
    )
    text = str(report)
    assert "layers.{0,2-3}.self_attn.q_proj (3): lora 16→16 r=8" in text
    assert "layers.1.self_attn.q_proj: lora 16→16 r=2" in text
    assert "layers.{0-3}.self_attn.o_proj (4): lora 16→16 r=8" in text


def test_layers_that_take_other_paths_say_theirs(monkeypatch):
    def implementations(_, place):
        triton = ("triton", "N is no multiple of 32")
        return {"fp8_linear_lora": ("csrc", "sm90") if place.sizes[0] == 32 else triton}

    model = Model(2)
    report = apply_lora(model, LoRAConfig(target_modules=["up_proj", "gate_proj"]))
    monkeypatch.setattr(report_module, "implementations", implementations)
    assert "[" not in str(report) and str(report).endswith("  csrc: fp8_linear_lora (sm90)")
    model = Model(2)
    text = str(apply_lora(model, LoRAConfig(target_modules=["up_proj", "q_proj"])))
    assert re.search(r"up_proj \(2\): lora 16→32 .* \[csrc: fp8_linear_lora\]", text)
    assert re.search(r"q_proj \(2\): lora 16→16 .* \[triton: fp8_linear_lora\]", text)
    assert "  triton: fp8_linear_lora (N is no multiple of 32)" in text


def expanded(text: str) -> list[str]:
    """Every path that the braces in `text` stand for."""
    choices = []
    for piece in re.split(r"(\{.*?\})", text):
        names = piece.strip("{}").split(",") if piece.startswith("{") else [piece]
        found = []
        for name in names:
            numbers = re.fullmatch(r"(\d+)-(\d+)", name)
            found += map(str, range(int(numbers[1]), int(numbers[2]) + 1)) if numbers else [name]
        choices.append(found)
    return ["".join(pieces) for pieces in itertools.product(*choices)]


part = st.sampled_from(
    ["0", "1", "2", "7", "q_proj", "k_proj", "q_a_proj", "proj", "norm", "q_norm"]
)
path = st.lists(part, min_size=1, max_size=4).map(".".join)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(path, st.sampled_from("ab"), max_size=30))
def test_braces_stand_for_each_path_once(said):
    found = []
    for names, count, text in grouped(said.items()):
        paths = expanded(names)
        assert len(paths) == count
        found += [(path, text) for path in paths]
    assert sorted(found) == sorted(said.items())


@pytest.mark.parametrize(
    "names, line",
    [
        (("linear_q_proj", "linear_k_proj"), "linear_{q,k}_proj"),
        (("query", "key"), "{query,key}"),
        (("norm", "q_norm"), "{norm,q_norm}"),
        (("w1", "w3"), "{w1,w3}"),
        (("10", "9", "2"), "{2,9-10}"),
        (("x.1.a", "x.3.a", "x.1.b", "x.3.b"), "x.{1,3}.{a,b}"),
    ],
)
def test_what_braces_look_like(names, line):
    assert grouped((name, "") for name in names) == [(line, len(names), "")]
