# SPDX-License-Identifier: Apache-2.0
"""apply_lora, its report, merge_lora / unmerge_lora and disable_lora on whole models."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lorakernels import (
    LoRAConfig,
    LoRALinear,
    PhiloxState,
    apply_lora,
    disable_lora,
    merge_lora,
    unmerge_lora,
)
from lorakernels.modules import lora_modules


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(16, 16), nn.Linear(16, 16, bias=False)
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.norm(self.q_proj(x) + self.k_proj(x)))


def model():
    return nn.Sequential(Block(), nn.Linear(4, 16), Block())


def bits(m):
    return {k: v.detach().clone() for k, v in m.state_dict().items()}


def test_replaces_targets_freezes_the_rest_and_reports_every_module():
    m = model()
    report = apply_lora(m, LoRAConfig(r=2, lora_dropout=0.1, target_modules=["q_proj", "1"]))
    assert list(lora_modules(m)) == ["0.q_proj", "1", "2.q_proj"]
    trained = {n for n, p in m.named_parameters() if p.requires_grad}
    assert trained == {f"{n}.lora_{x}" for n in lora_modules(m) for x in "AB"}
    assert {r.name: r.action for r in report.modules} == {
        "0.q_proj": "lora", "0.k_proj": "frozen", "0.norm": "frozen", "0.head": "frozen", "1": "lora",
        "2.q_proj": "lora", "2.k_proj": "frozen", "2.norm": "frozen", "2.head": "frozen",
    }  # fmt: skip
    assert report.trainable_parameters == sum(p.numel() for p in m.parameters() if p.requires_grad)
    row = report.adapted()[0]
    assert (row.r, row.dropout, row.base) == (2, 0.1, "e4m3") and row.ops[
        "fp8_linear_lora"
    ] == "reference"
    assert "0.q_proj: lora 16→16" in str(report) and "FP8 scales: auto" in str(report)
    assert len({layer.site for layer in lora_modules(m).values()}) == 3
    assert all(layer.fp8_state is report.fp8_state for layer in lora_modules(m).values())
    m(torch.randn(3, 16)).sum().backward()


def test_patterns_bias_and_saved_modules():
    m = model()
    config = LoRAConfig(
        r=4,
        lora_alpha=8,
        use_rslora=True,
        target_modules=["q_proj", "k_proj"],
        rank_pattern={"2.q_proj": 2},
        alpha_pattern={"k_proj": 4},
        bias="lora_only",
        modules_to_save=["head"],
    )
    report = apply_lora(m, config, adapter_dtype=torch.bfloat16, rng_state=PhiloxState(1))
    layers = lora_modules(m)
    assert layers["2.q_proj"].r == 2 and layers["0.q_proj"].r == 4
    assert layers["0.q_proj"].scaling == 8 / 4**0.5 and layers["0.k_proj"].scaling == 4 / 4**0.5
    trained = {n for n, p in m.named_parameters() if p.requires_grad and "lora_" not in n}
    expected = {f"{i}.{n}" for i in (0, 2) for n in ("q_proj.bias", "head.weight", "head.bias")}
    assert trained == expected
    assert {r.action for r in report.modules if r.name.endswith("head")} == {"saved"}
    assert "PhiloxState" in str(report) and layers["0.k_proj"].lora_A.dtype == torch.bfloat16


def test_bias_all_trains_every_bias():
    m = model()
    apply_lora(m, LoRAConfig(target_modules=["q_proj"], bias="all"))
    trained = {n for n, p in m.named_parameters() if p.requires_grad and "lora_" not in n}
    assert trained == {n for n, _ in m.named_parameters() if n.endswith("bias")}


def test_a_shared_module_stays_shared():
    shared = nn.Linear(8, 8)
    m = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared)})
    apply_lora(m, LoRAConfig(target_modules=["a"]))
    assert isinstance(m["a"], LoRALinear) and m["b"][0] is m["a"]


def train_a_little(m):
    for p in m.parameters():
        if p.requires_grad:
            p.data.add_(torch.randn_like(p) * 0.1)
    for _ in range(2):
        m(torch.randn(4, 16)).sum().backward()


def test_disable_merge_and_unmerge_on_a_model():
    m = model()
    x = torch.randn(5, 16)
    config = LoRAConfig(target_modules=["q_proj"], modules_to_save=["head"])
    apply_lora(m, config)
    m.eval()
    base = m(x)
    m.train()
    train_a_little(m)
    m.eval()
    with disable_lora(m):
        quiet = m(x)
    # the scales of x moved with training, so the base is the same up to x's own quantization step (2⁻⁴)
    torch.testing.assert_close(quiet, base, rtol=0, atol=0.06 * base.abs().max().item())
    before, tuned = bits(m), m(x)
    assert not torch.allclose(tuned, base, atol=0.06 * base.abs().max().item())
    merge_lora(m)
    with disable_lora(m):
        assert torch.equal(m(x), quiet), "the base shows through a merged adapter too"
    unmerge_lora(m)
    assert torch.equal(m(x), tuned)
    assert all(torch.equal(v.float(), before[k].float()) for k, v in m.state_dict().items())


def test_a_failed_merge_leaves_no_layer_merged():
    m = model()
    apply_lora(m, LoRAConfig(target_modules=["q_proj"]))
    list(lora_modules(m).values())[1].lora_B.data.fill_(float("inf"))
    with pytest.raises(ValueError, match="finite"):
        merge_lora(m)
    assert not any(layer.merged for layer in lora_modules(m).values())


@pytest.mark.parametrize(
    ("config", "error", "match"),
    [
        (LoRAConfig(target_modules=["q_prj"]), ValueError, "q_proj"),
        (LoRAConfig(target_modules=["norm"]), TypeError, "LayerNorm"),
        (LoRAConfig(), ValueError, "target_modules"),
        (LoRAConfig(target_modules=["q_proj"], modules_to_save=["haed"]), ValueError, "haed"),
    ],
    ids=["near name", "not linear", "nothing named", "unknown module to save"],
)
def test_refusals_change_nothing(config, error, match):
    m = model()
    with pytest.raises(error, match=match):
        apply_lora(m, config)
    assert not lora_modules(m) and all(p.requires_grad for p in m.parameters())


def test_several_devices_and_bad_weights_are_refused_before_any_change():
    m = model()
    m[2].q_proj.to("meta")
    with pytest.raises(ValueError, match=r"found \['cpu', 'meta'\]"):
        apply_lora(m, LoRAConfig(target_modules=["q_proj"]))
    m = model()
    m[2].q_proj.weight.data[0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"2\.q_proj\.weight must be finite"):
        apply_lora(m, LoRAConfig(target_modules=["q_proj"]))
    assert not lora_modules(m) and all(p.requires_grad for p in m.parameters())


def test_a_second_adapter_is_refused():
    m = model()
    apply_lora(m, LoRAConfig(target_modules=["q_proj"]))
    with pytest.raises(TypeError, match="LoRALinear already"):
        apply_lora(m, LoRAConfig(target_modules=["q_proj"]))
    for call in (merge_lora, unmerge_lora):
        with pytest.raises(ValueError, match="no LoRALinear"):
            call(nn.Linear(2, 2))
