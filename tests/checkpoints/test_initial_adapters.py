# SPDX-License-Identifier: Apache-2.0
"""Files of OLoRA and PiSSA: plain adapters of twice the rank over the unchanged base, for us, PEFT and export."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from lorakernels import DelayedScaling, LoRAConfig, apply_lora, merge_and_unload
from lorakernels.checkpoints.adapters.files import load_adapter, read_adapter, save_adapter
from lorakernels.modules.linear.lora import LoRALinear
from tests.adapter_files import CONFIG, WEIGHTS, Model, peft_load, randomize

FIELDS: dict[str, dict[str, Any]] = {
    "olora": {"init_lora_weights": "olora"},
    "pissa, rank and alpha patterns": {
        "init_lora_weights": "pissa",
        "rank_pattern": {"0.q": 5},
        "alpha_pattern": {"v": 11},
    },
    "rslora": {"init_lora_weights": "olora", "use_rslora": True},
}
Q = "base_model.model.layers.0.q"


@pytest.fixture
def base() -> Model:
    torch.manual_seed(torch.seed() % 2**31)
    return Model().eval()


def started(base: nn.Module, fp8: Any = None, **fields: Any) -> Any:
    model = copy.deepcopy(base)
    given = {"target_modules": ["q", "v"], "r": 3, "lora_alpha": 6, **fields}
    apply_lora(model, LoRAConfig(**given, fp8=fp8))
    return model.eval()


def trained(base: nn.Module, fp8: Any = None, **fields: Any) -> Any:
    model = started(base, fp8, **fields)
    randomize(model)
    return model


@pytest.mark.parametrize("case", FIELDS)
def test_the_file_fits_the_unchanged_base(base, tmp_path, case):
    model, x = trained(base, **FIELDS[case]), torch.randn(5, 12)
    save_adapter(model, tmp_path)
    config = json.loads((tmp_path / CONFIG).read_text())
    assert config["init_lora_weights"] is True
    assert load_file(tmp_path / WEIGHTS)[f"{Q}.lora_A.weight"].shape[0] == 2 * model.layers[0].q.r
    fresh = copy.deepcopy(base)
    load_adapter(fresh, tmp_path, fp8=None)
    # float32: W − Δ0 + Δ against W + (Δ − Δ0), through two layers and norms
    torch.testing.assert_close(fresh.eval()(x), model(x), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(peft_load(base, tmp_path).eval()(x), model(x), rtol=1e-4, atol=1e-4)


def test_alpha_stays_whole_and_the_scaling_as_it_was(base, tmp_path):
    save_adapter(trained(base, init_lora_weights="olora"), tmp_path)
    config = json.loads((tmp_path / CONFIG).read_text())
    assert (config["r"], config["lora_alpha"]) == (6, 12) and isinstance(config["lora_alpha"], int)


def test_the_file_is_pefts_conversion(base, tmp_path):
    """PEFT subtracts the initial adapter by the same concatenation, whose order does not matter."""
    peft = pytest.importorskip("peft")
    fields = {"target_modules": ["q", "v"], "r": 3, "lora_alpha": 6, "init_lora_weights": "olora"}
    theirs = peft.get_peft_model(copy.deepcopy(base), peft.LoraConfig(**fields))
    theirs.peft_config["default"].init_lora_weights = True
    theirs.save_pretrained(tmp_path / "start")
    theirs.peft_config["default"].init_lora_weights = "olora"
    ours = started(base, init_lora_weights="olora")
    for name, layer in ours.named_modules():
        if isinstance(layer, LoRALinear):
            randomize(layer)
            peer = theirs.base_model.model.get_submodule(name)
            peer.lora_A["default"].weight.data.copy_(layer.lora_A)
            peer.lora_B["default"].weight.data.copy_(layer.lora_B)
    start = tmp_path / "start"
    theirs.save_pretrained(tmp_path / "peft", path_initial_model_for_weight_conversion=str(start))
    save_adapter(ours, tmp_path / "ours")
    found, expected = (load_file(tmp_path / name / WEIGHTS) for name in ("ours", "peft"))
    assert found.keys() == expected.keys()
    for key in found:
        if ".lora_A." in key:
            b = key.replace(".lora_A.", ".lora_B.")
            products = [held[b].double() @ held[key].double() for held in (found, expected)]
            torch.testing.assert_close(*products, rtol=1e-4, atol=1e-4)
    mine, peers = (json.loads((tmp_path / n / CONFIG).read_text()) for n in ("ours", "peft"))
    assert [mine[k] for k in ("r", "lora_alpha")] == [peers[k] for k in ("r", "lora_alpha")]


@pytest.mark.parametrize("fp8", [None, DelayedScaling()], ids=["plain", "fp8"])
def test_a_run_goes_on_from_its_own_file(base, tmp_path, fp8):
    model, x = trained(base, fp8, init_lora_weights="pissa"), torch.randn(5, 12)
    save_adapter(model, tmp_path)
    other = started(base, fp8, init_lora_weights="pissa")
    load_adapter(other, tmp_path, fp8=fp8)
    assert torch.equal(other.eval()(x), model(x))
    assert torch.equal(other.layers[0].q.lora_A, model.layers[0].q.lora_A)
    found = read_adapter(model, tmp_path)
    assert torch.equal(found["layers.0.q.lora_B_init"], model.layers[0].q.lora_B_init)
    assert torch.equal(found["layers.0.q.lora_B"], model.layers[0].q.lora_B)


def other_start(base: Model, folder: Path) -> Any:
    with torch.no_grad():
        base.layers[0].q.weight += 0.1
    return started(base, init_lora_weights="olora")


def plain_rank(base: Model, folder: Path) -> Any:
    tensors = load_file(folder / WEIGHTS)
    tensors = {k: (v[:3] if ".lora_A." in k else v[:, :3]).contiguous() for k, v in tensors.items()}
    save_file(tensors, folder / WEIGHTS)
    return started(base, init_lora_weights="olora")


def other_kind(base: Model, folder: Path) -> Any:
    return started(base)


REFUSED = {
    "another start": (other_start, "started from other initial values in 2 tensors"),
    "half the rank": (plain_rank, "of another shape"),
    "a plain adapter": (other_kind, "of another shape"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_file_of_another_start_is_refused(base, tmp_path, case):
    make, message = REFUSED[case]
    save_adapter(trained(base, init_lora_weights="olora"), tmp_path)
    model = make(base, tmp_path)
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(ValueError, match=message):
        load_adapter(model, tmp_path, fp8=None)
    assert all(map(torch.equal, before, model.parameters()))


def test_a_changed_scaling_is_not_saved(base, tmp_path):
    model = trained(base, init_lora_weights="olora")
    model.layers[1].v.scaling *= 2
    with pytest.raises(ValueError, match=r"layers\.1\.v\.scaling must be 2 to be saved"):
        save_adapter(model, tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()


def test_merged_weights_are_those_of_the_file_over_the_base(base, tmp_path):
    model = trained(base, init_lora_weights="pissa")
    save_adapter(model, tmp_path)
    fresh = copy.deepcopy(base)
    load_adapter(fresh, tmp_path, fp8=None)
    for one, other in zip(*(merge_and_unload(m).parameters() for m in (model, fresh)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
