# SPDX-License-Identifier: Apache-2.0
"""apply_lora, its report, merge_lora / unmerge_lora and disable_lora on whole models."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lorakernels import (
    DelayedScaling,
    LoRAConfig,
    LoRALinear,
    MMParams,
    PhiloxState,
    apply_lora,
    disable_lora,
    merge_lora,
    unmerge_lora,
)
from lorakernels.modules import lora_modules
from lorakernels.modules.model import report as report_module


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
    said = str(report).splitlines()
    assert "{0,2}.q_proj (2): lora 16→16" in str(report)
    assert said[1] == (
        "FP8 scales: updated at each training forward; dropout masks: drawn from torch's generator; "
        "forward passes without CUDA graphs: none yet"
    )
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


def test_no_merge_inside_disable_lora_which_shows_the_base():
    m = model()
    apply_lora(m, LoRAConfig(target_modules=["q_proj"]))
    with disable_lora(m), pytest.raises(ValueError, match="leave disable_lora first"):
        merge_lora(m)
    assert not any(layer.merged for layer in lora_modules(m).values())


def test_a_failed_merge_leaves_no_layer_merged():
    m = model()
    apply_lora(m, LoRAConfig(target_modules=["q_proj"]))
    list(lora_modules(m).values())[1].lora_B.data.fill_(float("inf"))
    with pytest.raises(ValueError, match="finite"):
        merge_lora(m)
    assert not any(layer.merged for layer in lora_modules(m).values())


def test_a_failed_merge_leaves_what_was_merged_before():
    m = model()
    apply_lora(m, LoRAConfig(target_modules=["q_proj"]))
    first, second = lora_modules(m).values()
    nn.init.normal_(first.lora_B)
    first.merge()
    held = bits(first)
    second.lora_B.data.fill_(float("inf"))
    with pytest.raises(ValueError, match="finite"):
        merge_lora(m)
    assert first.merged and not second.merged
    assert all(torch.equal(v.float(), held[k].float()) for k, v in first.state_dict().items())


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
    trained = {n for n, p in m.named_parameters() if p.requires_grad}
    with pytest.raises(
        ValueError, match=r"is a LoRALinear already \(and 1 more\): call merge_and_unload"
    ):
        apply_lora(m, LoRAConfig(target_modules=["k_proj"]))
    assert trained == {n for n, p in m.named_parameters() if p.requires_grad}
    for call in (merge_lora, unmerge_lora):
        with pytest.raises(ValueError, match="no LoRALinear"):
            call(nn.Linear(2, 2))


def test_bad_adapter_dtype_changes_nothing():
    m = model()
    with pytest.raises(TypeError, match=r"found torch.int8"):
        apply_lora(m, LoRAConfig(target_modules=["q_proj"]), adapter_dtype=torch.int8)
    assert all(p.requires_grad for p in m.parameters())


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.mid = nn.Embedding(12, 8), nn.Linear(8, 8)
        self.lm_head = nn.Linear(8, 12, bias=False)
        self.lm_head.weight = self.embed.weight

    def forward(self, ids):
        return self.lm_head(self.mid(self.embed(ids)))


@pytest.mark.parametrize("how", ["saved", "merged"])
def test_a_tied_weight_is_not_changed_through_the_other_module(how):
    m = Tied()
    before = m.embed.weight.detach().clone()
    if how == "saved":
        report = apply_lora(m, LoRAConfig(target_modules=["mid"], modules_to_save=["lm_head"]))
        with torch.no_grad():
            m.lm_head.weight.add_(1)
        assert not m.embed.weight.requires_grad
    else:
        report = apply_lora(m, LoRAConfig(target_modules=["lm_head"], fp8=None))
        nn.init.normal_(m.lm_head.lora_B)
        merge_lora(m)
    assert torch.equal(m.embed.weight, before) and "untied" in str(report)


@pytest.mark.parametrize("bias", ["none", "lora_only"])
def test_a_weight_that_is_tied_again_and_again_is_not_merged_into_the_other_module(bias):
    """As transformers' tie_weights does, which resizing an embedding and loading call."""
    m = Tied()
    before = m.embed.weight.detach().clone()
    apply_lora(m, LoRAConfig(target_modules=["lm_head"], fp8=None, bias=bias))
    nn.init.normal_(m.lm_head.lora_B)
    for _ in range(2):
        m.lm_head.weight = m.embed.weight
        merge_lora(m)
        assert torch.equal(m.embed.weight, before) and not torch.equal(m.lm_head.weight, before)
        unmerge_lora(m)
        assert torch.equal(m.embed.weight, before) and torch.equal(m.lm_head.weight, before)


class Scaled(nn.Linear):
    """A saved module with parameters of its own and a part that has some."""

    def __init__(self, n):
        super().__init__(n, n)
        self.inner = nn.Linear(n, n)

    def forward(self, x):
        return super().forward(self.inner(x))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_originals_follow_a_model_that_changes_its_dtype(dtype):
    """To another one and back, while they are hidden and while they are shown."""
    m = nn.Sequential(nn.Linear(8, 8), Scaled(8))
    x = torch.randn(3, 8)
    first = bits(m)
    apply_lora(m, LoRAConfig(target_modules=["0"], modules_to_save=["1"], bias="all", fp8=None))
    with torch.no_grad():
        for p in m.parameters():
            if p.requires_grad:
                p.add_(1)
    trained = bits(m)

    def shown(before):
        return [
            torch.equal(value, before[name].to(dtype).to(value.dtype))
            for name, value in m.state_dict().items()
            if name in first and name != "0.weight"
        ]

    for inside in (False, True, False):
        if not inside:
            m.to(dtype)
        with disable_lora(m):
            if inside:
                m.float().to(dtype)
            assert shown(first) == [True] * 5
            assert m(x.to(dtype)).dtype == dtype
        assert shown(trained) == [True] * 5
        assert m(x.to(dtype)).dtype == dtype
        m.float()


@pytest.mark.parametrize("bias", ["lora_only", "all"])
def test_disable_shows_the_original_biases_and_nests(bias):
    m = model()
    x = torch.randn(5, 16)
    apply_lora(
        m, LoRAConfig(target_modules=["q_proj"], bias=bias, modules_to_save=["head"], fp8=None)
    )
    base = m(x).detach()
    with torch.no_grad():
        for p in m.parameters():
            if p.requires_grad:
                p.add_(1)
    tuned = m(x)
    with disable_lora(m):
        with disable_lora(m):
            assert torch.equal(m(x), base)
        assert torch.equal(m(x), base)
    assert torch.equal(m(x), tuned)
    tuned.sum().backward()  # the swap happened between this graph's forward and backward


def test_the_report_follows_the_model():
    m = model()
    report = apply_lora(m, LoRAConfig(target_modules=["q_proj"], fp8=None))
    rows = {r.name: r for r in report.modules}
    assert rows["0.q_proj"].base == "float32" and rows["0.q_proj"].why["fp8_linear_lora"]
    lora_modules(m)["0.q_proj"].lora_A.requires_grad_(False)
    assert report.trainable_parameters == sum(p.numel() for p in m.parameters() if p.requires_grad)


@pytest.mark.parametrize("split", [False, True])
def test_the_report_asks_about_the_recipe_s_gemm_and_a_linear_layer_s_ops(split, monkeypatch):
    def implementations(_, place):
        return {"bias_dropout_add": ("", ""), "fp8_linear_lora": (str(place.split), "")}

    monkeypatch.setattr(report_module, "implementations", implementations)
    recipe = DelayedScaling(fp8_gemm_fprop=MMParams(split))
    (row,) = apply_lora(model(), LoRAConfig(target_modules=["0.q_proj"], fp8=recipe)).adapted()
    assert row.ops == {"fp8_linear_lora": str(split)}


@pytest.mark.gpu
def test_the_report_names_the_path_of_each_layer_on_the_gpu():
    m = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 7)).cuda()
    rows = {r.name: r for r in apply_lora(m, LoRAConfig(target_modules=["0", "1"])).modules}
    assert rows["0"].ops["fp8_linear_lora"] in ("cublaslt", "csrc", "triton")
    assert (
        rows["1"].ops["fp8_linear_lora"] == "torch" and "N = 7" in rows["1"].why["fp8_linear_lora"]
    )


@pytest.mark.parametrize("frozen", ["plain", "fp8"])
def test_the_model_is_not_walked_for_each_layer(frozen):
    """Mixtures have tens of thousands of layers, half of them adapted here."""

    class Walked(nn.Sequential):
        walks = 0

        def named_modules(self, *args, **kwargs):
            self.walks += 1
            return super().named_modules(*args, **kwargs)

    walks = set()
    for number in (4, 16):
        model = Walked(*(nn.Linear(16, 16) for _ in range(number)))
        targets = [str(index) for index in range(number // 2)]
        apply_lora(model, LoRAConfig(r=2, target_modules=targets), frozen=frozen)
        walks.add(model.walks)
    assert len(walks) == 1
