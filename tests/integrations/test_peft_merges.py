# SPDX-License-Identifier: Apache-2.0
"""PEFT's merges into our layers' bases, once, again and taken back, and what unloading leaves."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from lorakernels import BlockScaling, FrozenFP8Linear, fuse, training_state_dict, unfuse

peft = pytest.importorskip("peft")
from tests.integrations import test_peft_fused as fused  # noqa: E402
from tests.integrations.test_peft import FP8, MLP, base_bytes, config, layer_of, randomize, wrapped  # noqa: E402


@pytest.mark.parametrize("safe_merge", [False, True])
def test_fp8_merge_and_exact_unmerge(safe_merge):
    model = wrapped(MLP(), FP8).eval()
    model.add_adapter("other", config(r=2))
    randomize(model)
    before, x = base_bytes(model), torch.randn(8, 10)
    y = model(x)
    model.merge_adapter(["default"], safe_merge=safe_merge)
    assert layer_of(model).lorakernels_path == "peft: the adapter is merged"
    # one requantization of W apart: 2**-4 of each weight at most, averaged over K terms
    assert (model(x) - y).norm() < 0.1 * y.norm()
    model.merge_adapter(["other"], safe_merge=safe_merge)
    assert layer_of(model).merged_adapters == ["default", "other"]
    assert base_bytes(model) != before
    model.unmerge_adapter()
    assert base_bytes(model) == before
    assert torch.equal(model(x), y)


@pytest.mark.parametrize("fp8", [FP8, BlockScaling()], ids=["FP8 base", "FP8 blocks"])
def test_adapters_merged_one_after_the_other_are_all_in_the_base(fp8):
    """Also when they are merged anew after an unmerge: base and deltas are rounded once, from the base's own bytes."""
    model = wrapped(MLP(), fp8).eval()
    for name in ("second", "third"):
        model.add_adapter(name, config(r=2))
    randomize(model)
    layer = layer_of(model)
    base = layer.base_layer.dequantized_weight()
    deltas = {name: layer.get_delta_weight(name).float() for name in layer.lora_A}
    for steps in (["default"], ["third"]), (["second"], ["third", "default"]):
        for names in steps:
            layer.merge(adapter_names=names)
            assert layer.is_merged  # graphs watch it
        exact = base + sum(deltas[name] for names in steps for name in names)
        found = layer.base_layer.dequantized_weight()
        # e4m3: 2⁻⁴ of a value, or 2⁻¹⁰ of its scale, at most the largest of all / 448; fp32's roundings are few
        bound = exact.abs() * 2.0**-4 + exact.abs().max() / 448 * 2.0**-10
        assert bool(((found - exact).abs() <= bound * (1 + 2.0**-20)).all())
        layer.unmerge()
        assert not layer.is_merged and torch.equal(layer.base_layer.dequantized_weight(), base)


@pytest.mark.parametrize("older", [False, True], ids=["now", "as older versions pickled it"])
def test_a_merged_fp8_model_is_copied_saved_and_moved_with_its_base(older):
    model = wrapped(MLP(), FP8).eval()
    randomize(model)
    before, x = base_bytes(model), torch.randn(8, 10)
    parts = copy.deepcopy(training_state_dict(model))
    y = model(x)
    model.merge_adapter()
    held = base_bytes(model)
    if older:
        for layer in (model.base_model.model.lin0, model.base_model.model.lin1):
            layer.base_layer.__class__ = FrozenFP8Linear
    twin = pickle.loads(pickle.dumps(model)).double().float()
    assert base_bytes(twin) == held
    found = training_state_dict(twin)
    assert set(found) == set(parts)
    weights = [key for key in parts if key.endswith(("base_layer.weight", "weight_scale_inv"))]
    assert len(weights) == 4 and all(
        torch.equal(found[k].view(torch.uint8), parts[k].view(torch.uint8)) for k in weights
    )
    with pytest.raises(RuntimeError, match="unmerge the adapter before loading"):
        twin.load_state_dict(parts)
    twin.unmerge_adapter()
    assert base_bytes(twin) == before and torch.equal(twin(x), y)


def test_a_second_merge_that_fails_leaves_the_first(monkeypatch):
    model = wrapped(MLP(), FP8).eval()
    model.add_adapter("other", config(r=2))
    randomize(model)
    before = base_bytes(model)
    layer = layer_of(model)
    layer.merge(adapter_names=["default"])
    first, write, calls = base_bytes(model), layer.base_layer._write_weight, []

    def failing(*values):
        write(*values)
        calls.append(1)
        if len(calls) == 1:
            raise MemoryError

    with monkeypatch.context() as patched, pytest.raises(MemoryError):
        patched.setattr(layer.base_layer, "_write_weight", failing)
        layer.merge(adapter_names=["other"])
    assert base_bytes(model) == first and layer.merged_adapters == ["default"]
    layer.unmerge()
    assert base_bytes(model) == before


@pytest.mark.parametrize("merge_first", [False, True])
def test_merge_and_unload_leaves_plain_linears(merge_first):
    base = MLP().to(torch.bfloat16)
    model = wrapped(base, FP8).eval()
    randomize(model)
    layer = layer_of(model)
    expected = layer.base_layer.dequantized_weight() + layer.get_delta_weight("default").float()
    if merge_first:
        model.merge_adapter()
    layer.train()
    plain = model.merge_and_unload()
    assert plain.lin0.training and not plain.lin1.training
    assert type(plain.lin0) is nn.Linear and plain.lin0.weight.dtype == torch.bfloat16
    assert torch.equal(plain.lin0.weight, expected.to(torch.bfloat16))
    assert torch.equal(plain.lin0.bias, base.lin0.bias)


def test_broken_adapter_is_not_merged():
    model = wrapped(MLP(), FP8)
    layer_of(model).lora_B["default"].weight.data[0, 0] = float("nan")
    before = base_bytes(model)
    with pytest.raises(ValueError, match="NaNs detected in the merged weights"):
        model.merge_adapter(safe_merge=True)
    assert base_bytes(model) == before and not layer_of(model).is_merged


@pytest.mark.parametrize("call", ["merge_and_unload", "unload"])
def test_unloading_a_fused_model_is_refused(call: str) -> None:
    model = fused.peft_model(fp8=None)
    on = fused.logits(model)
    fuse(model)
    modules = dict(model.named_modules())
    with pytest.raises(ValueError, match=r"fused layer's adapters cannot be unloaded: .*unfuse"):
        getattr(model, call)()
    assert dict(model.named_modules()) == modules
    unfuse(model)
    unloaded = getattr(model, call)()
    kinds = {n.rpartition(".")[2]: type(m) for n, m in unloaded.named_modules()}
    assert [k for k in kinds if k.endswith("_proj") and kinds[k] is not nn.Linear] == ["up_proj"]
    if call == "merge_and_unload":
        torch.testing.assert_close(fused.logits(unloaded), on, **fused.FP32)
