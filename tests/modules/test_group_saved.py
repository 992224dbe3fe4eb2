# SPDX-License-Identifier: Apache-2.0
"""Copies, state dicts, adapter files, merging and inference: nobody sees from outside that a model is grouped."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from lorakernels import (
    LoRAConfig,
    apply_lora,
    disable_lora,
    group_projections,
    load_adapter,
    merge_lora,
    save_adapter,
    unmerge_lora,
)
from lorakernels.modules import lora_modules
from tests.modules.grouped_models import (
    NAMES,
    Attention,
    gradients,
    grouped,
    model,
    one_group,
    quantizations,
)


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_are_grouped_among_themselves(how):
    m, groups, _ = grouped((0.3, False))
    m[0].q_proj(x := torch.randn(4, 32))  # an entry that must not travel
    twin = copy.deepcopy(m) if how == "deepcopy" else pickle.loads(pickle.dumps(m))
    for layer in twin:
        group = layer.q_proj.group
        assert group not in groups and group._entry is None
        assert [m is getattr(layer, n) for m, n in zip(group.members, NAMES, strict=True)] == [
            True
        ] * 3
    results = []
    for net in (m, twin):
        torch.manual_seed(1)
        net.zero_grad()
        net(x).sum().backward()
        results.append([p.grad for p in net.parameters() if p.requires_grad])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_replica_is_not_its_original():
    """nn.DataParallel's replicas share __dict__ entries, the group among them, but have other parameters."""
    layer, group = one_group()
    replica = layer.q_proj._replicate_for_data_parallel()
    replica._parameters = {
        n: p.detach() * 2 for n, p in layer.q_proj._parameters.items() if n != "weight"
    }
    replica._parameters["weight"] = layer.q_proj._parameters["weight"]
    x = torch.randn(4, 32)
    layer.k_proj(x)
    assert quantizations(lambda: replica(x)) == 1 and group._entry is not None
    assert not torch.equal(replica(x), layer.q_proj(x))


def test_state_dicts_know_nothing_of_groups():
    """A grouped model's state loads into one that is not, and the other way: both go on with the same bits."""
    m, _ = model(0.3)
    twin = copy.deepcopy(m)
    group_projections(twin, [NAMES])
    x = torch.randn(6, 32, requires_grad=True)
    for net in (m, twin):
        gradients(net, x)
    ours, theirs = twin.state_dict(), m.state_dict()
    assert list(ours) == list(theirs)
    for key, value in theirs.items():
        same = ours[key].view(torch.uint8), value.view(torch.uint8)
        assert torch.equal(*same), key
    plain, _ = model(0.3)
    plain.load_state_dict(ours)
    again, _ = model(0.3)
    group_projections(again, [NAMES])
    again.load_state_dict(theirs)
    expected, *others = (gradients(net, x) for net in (m, plain, again))
    for other in others:
        for name, value in expected.items():
            assert name in ("forward", "backward") or torch.equal(other[name], value), name


def test_adapters_are_pefts_and_round_trip(tmp_path):
    m, _, _ = grouped((0.0, False))
    plain, _ = model()
    base = {k: v for k, v in m.state_dict().items() if "lora_" not in k}
    plain.load_state_dict(base, strict=False)
    save_adapter(m, tmp_path)
    load_adapter(plain, tmp_path)
    x = torch.randn(6, 32)
    torch.testing.assert_close(m.eval()(x), plain.eval()(x), rtol=1e-5, atol=1e-5)
    other, _, _ = grouped((0.0, False))
    other.load_state_dict(base, strict=False)
    report = load_adapter(other, tmp_path)
    assert torch.equal(other.eval()(x), m(x)) and "x shared by k_proj, q_proj, v_proj" in str(
        report
    )


def test_peft_reads_a_grouped_models_adapter(tmp_path):
    peft = pytest.importorskip("peft")
    base = nn.Sequential(Attention(), Attention())
    m = copy.deepcopy(base)
    apply_lora(m, LoRAConfig(r=4, target_modules=[*NAMES], fp8=None))
    for layer in lora_modules(m).values():
        nn.init.normal_(layer.lora_B, std=0.2)
    group_projections(m, [NAMES])
    save_adapter(m, tmp_path)
    theirs = peft.PeftModel.from_pretrained(base, str(tmp_path))
    x = torch.randn(6, 32)
    torch.testing.assert_close(m.eval()(x), theirs.eval()(x), rtol=1e-5, atol=1e-5)


def test_merge_and_disable():
    apart, _ = model()
    together = copy.deepcopy(apart)
    group_projections(together, [NAMES])
    x = torch.randn(6, 32)
    with torch.no_grad():
        for m in (apart, together):
            m.eval()
        tuned = together(x)
        for change in (merge_lora, unmerge_lora):
            for m in (apart, together):
                change(m)
            torch.testing.assert_close(together(x), apart(x), rtol=1e-5, atol=1e-5)
        with disable_lora(apart), disable_lora(together):
            assert torch.equal(together(x), apart(x)), "the base alone"
            assert quantizations(lambda: together[0](x)) == 2, "shared all the same: q, k, v; o"
        assert torch.equal(together(x), tuned)


def test_inference_mode_and_generation():
    """Inference tensors have no version to go by, so that nothing is shared; the result is the same."""
    m, _, _ = grouped((0.3, False))
    m.eval()
    x = torch.randn(6, 32)
    with torch.no_grad():
        expected = m(x)
    with torch.inference_mode():
        inside = torch.randn(6, 32)
        assert quantizations(lambda: m[0](inside)) == 4
        torch.testing.assert_close(m(x), expected, rtol=1e-5, atol=1e-5)
