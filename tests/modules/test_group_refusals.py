# SPDX-License-Identifier: Apache-2.0
"""LoRALinearGroup and group_projections: what does not fit is refused, and nothing is changed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lorakernels import (
    DelayedScaling,
    FP8State,
    LoRAConfig,
    LoRALinear,
    LoRALinearGroup,
    PhiloxState,
    apply_lora,
    batch_adapters,
    group_projections,
)
from lorakernels.modules import GroupedLoRALinear
from tests.modules.grouped_models import MODE_IDS, MODES, NAMES, Attention, model, one_group


@pytest.mark.parametrize("mode", MODES, ids=MODE_IDS)
def test_a_sharded_adapter_is_not_read_by_another_member(mode, monkeypatch):
    """FSDP2 around each projection gathers its own parameters only."""
    layer, group = one_group(mode)
    sharded = layer.k_proj.lora_A
    monkeypatch.setattr("lorakernels.modules.group.layer.is_sharded", lambda p: p is sharded)
    if mode == (0.3, False):
        layer.q_proj(torch.randn(5, 32))
        return
    with pytest.raises(RuntimeError, match=r"0.k_proj.lora_A is sharded while 0.q_proj runs"):
        layer.q_proj(torch.randn(5, 32))
    assert group._entry is None


def test_the_mask_of_all_needs_one_probability_when_it_is_drawn():
    layer, group = one_group((0.5, True))
    layer.k_proj.lora_dropout = 0.25
    with pytest.raises(
        ValueError, match=r"one lora_dropout, found \{'0.q_proj': 0.5, '0.k_proj': 0.25"
    ):
        group(torch.randn(5, 32))
    layer.eval()
    group(torch.randn(5, 32))


def pair(**changes):
    """Two layers, of one FP8 state unless one of them has another recipe."""
    config = {"r": 4, "lora_dropout": 0.1}
    state = FP8State(["first", "second"], DelayedScaling())
    first = LoRALinear(32, 16, config=LoRAConfig(**config), name="first", fp8_state=state)
    second = LoRALinear(
        changes.pop("k", 32),
        16,
        config=LoRAConfig(**config | changes),
        name="second",
        fp8_state=None if "fp8" in changes else state,
    )
    return [first, second]


def apart():
    """As `pair`, each with a state of its own."""
    return [LoRALinear(32, 16, config=LoRAConfig(r=4), name=name) for name in ("first", "second")]


@pytest.mark.parametrize(
    ("members", "error", "match"),
    [
        (pair(k=48), ValueError, r"one in_features, found \{'first': 32, 'second': 48\}"),
        (
            pair(lora_dropout=0.2),
            ValueError,
            "one lora_dropout, found {'first': 0.1, 'second': 0.2",
        ),
        (pair(fp8=None), ValueError, "one recipe, found"),
        (pair(fp8=DelayedScaling(fp8_format="E4M3")), ValueError, "one recipe, found"),
        (apart(), ValueError, "must have one fp8_state, .* x's scale would be updated by"),
        (pair()[:1], ValueError, "two or more different members, found"),
        (pair()[:1] * 2, ValueError, "two or more different members, found"),
        ([*pair(), nn.Linear(32, 16)], TypeError, "must be a LoRALinear, found Linear"),
    ],
    ids=["K", "p", "plain and FP8", "formats", "states", "one", "twice the same", "not ours"],
)
def test_members_that_do_not_fit_are_refused_and_stay_as_they_are(members, error, match):
    with pytest.raises(error, match=match):
        LoRALinearGroup(members)
    assert not any(isinstance(member, GroupedLoRALinear) for member in members)


def test_several_adapters_in_one_batch_are_refused():
    members = pair()
    for member in members:
        member.lora_dropout = 0.0
    batch_adapters(nn.ModuleList(members), ["a", "b"])
    with pytest.raises(
        ValueError, match="first has several adapters in one batch: a group does not compute them"
    ):
        LoRALinearGroup(members)
    assert not any(isinstance(member, GroupedLoRALinear) for member in members)


def test_one_mask_needs_one_source():
    members = pair()
    members[1].rng_state = PhiloxState(3)
    with pytest.raises(ValueError, match="one rng_state"):
        LoRALinearGroup(members, shared_dropout=True)
    LoRALinearGroup(members)


@pytest.mark.parametrize(
    ("groups", "match"),
    [
        ([("q_proj", "k_prj")], r"\['q_proj'\] are LoRALinears, but not \{'k_prj': 'missing'\}"),
        ([("q_proj", "norm")], r"but not \{'norm': 'LayerNorm'\}"),
        ([("query", "key")], r"no module of Sequential has LoRALinears \['query', 'key'\]"),
        ([NAMES, ("v_proj", "o_proj")], "a projection is in two of the groups"),
        (["q_proj"], "found the string 'q_proj'"),
        ([NAMES, ("o_proj",)], "two or more different members"),
    ],
    ids=["near name", "not linear", "nowhere", "in two", "a string", "alone"],
)
def test_bad_groups_are_refused_and_nothing_is_grouped(groups, match):
    m, _ = model()
    m[0].norm = nn.LayerNorm(32)
    with pytest.raises(ValueError, match=match):
        group_projections(m, groups)
    assert not any(isinstance(layer, GroupedLoRALinear) for layer in m.modules())


def test_layers_without_adapters_are_left_alone_and_the_report_says_what_is_shared():
    m = nn.Sequential(Attention(), Attention())
    report = apply_lora(m, LoRAConfig(target_modules=[f"0.{name}" for name in NAMES]))
    (group,) = group_projections(m, [NAMES])
    assert group.names == tuple(f"0.{name}" for name in NAMES)
    assert type(m[1].q_proj) is nn.Linear
    rows = {row.name: row for row in report.modules}
    assert rows["0.k_proj"].shares_x == ("0.q_proj", "0.v_proj") and not rows["1.k_proj"].shares_x
    assert "0.k_proj: lora 32→16" in report.details()
    assert "x shared by k_proj, q_proj, v_proj" in str(report)
    with pytest.raises(ValueError, match="is in a group of projections: a layer has one group"):
        group_projections(m, [NAMES])
