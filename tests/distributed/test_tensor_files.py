# SPDX-License-Identifier: Apache-2.0
"""Adapter files of a model over tensor-parallel ranks: those of one process, written and read at any layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh

from lorakernels import load_adapter, save_adapter
from lorakernels.modules.lora import LoRALinear
from lorakernels.parallel import comm, parallelize
from tests.distributed.tensor_models import Way, batch, loss_of, make
from tests.processes import on_ranks

pytestmark = pytest.mark.slow
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
WAYS = (
    Way("plain", True),
    Way("fused", True, save="recompute"),
    Way("trained biases", False, fp8=False, family="Qwen2", bias="lora_only", dropout=0.0),
)


def changed(way: Way, device: torch.device) -> Any:
    """Other adapters than `make` gives."""
    model = make(way, device)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.requires_grad:
                p.mul_(1.5).add_(len(name) / 64)
    return model


def files(rank: int, device: torch.device, way: Way, folder: Path) -> dict[str, bool]:
    mesh = init_device_mesh(device.type, (2,), mesh_dim_names=("tp",))["tp"]
    whole, model = changed(way, device), changed(way, device)
    if rank == 0:
        save_adapter(whole, folder / "one")
    split = parallelize(model, mesh)
    kept = {n: (p.data_ptr(), p.shape) for n, p in model.named_parameters()}
    save_adapter(model, folder / "two")
    comm.agree(split.ranks.group, None)
    configs = [json.loads((folder / name / CONFIG).read_text()) for name in ("one", "two")]
    one, two = (load_file(folder / name / WEIGHTS) for name in ("one", "two"))
    found = {
        "config": configs[0] == configs[1],
        "tensors": one.keys() == two.keys() and all(torch.equal(one[n], two[n]) for n in one),
        "memory": kept == {n: (p.data_ptr(), p.shape) for n, p in model.named_parameters()},
    }
    expected = split.whole_adapters()
    other = make(way, device)
    other_split = parallelize(other, mesh)
    load_adapter(other, folder / "one")
    read = other_split.whole_adapters()
    found["read"] = all(torch.equal(read[n], expected[n]) for n in expected)
    tokens = batch(0, device)
    torch.manual_seed(3)
    losses = [loss_of(each.eval(), tokens) for each in (model, other)]
    found["loss"] = torch.equal(*losses)
    alone = make(way, device)
    load_adapter(alone, folder / "two")
    values = dict(alone.named_parameters())
    found["one process"] = all(torch.equal(values[n], expected[n]) for n in expected)
    return found


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_files_are_those_of_one_process(way: Way, tmp_path: Path) -> None:
    for found in on_ranks(files, 2, "gloo", way, tmp_path):
        assert all(found.values()), found


def refused(rank: int, device: torch.device, folder: Path) -> list[Any]:
    """What is said of a file without a tensor, and of a path that is a file; whether values stay."""
    mesh = init_device_mesh(device.type, (2,), mesh_dim_names=("tp",))["tp"]
    model = make(Way("", True, fp8=False), device)
    split = parallelize(model, mesh)
    save_adapter(model, folder / "whole")
    if rank == 0:
        tensors = load_file(folder / "whole" / WEIGHTS)
        del tensors[min(tensors)]
        save_file(tensors, folder / "whole" / WEIGHTS, {"format": "pt"})
        (folder / "a file").write_text("")
    comm.agree(split.ranks.group, None)
    before = split.whole_adapters()
    said = []
    for what in (
        lambda: load_adapter(model, folder / "whole"),
        lambda: save_adapter(model, folder / "a file"),
    ):
        with pytest.raises((ValueError, OSError)) as caught:
            what()
        said.append(str(caught.value))
    after = split.whole_adapters()
    stay = all(torch.equal(after[n], before[n]) for n in before)
    split_still = all("ranks" in vars(m) for m in model.modules() if isinstance(m, LoRALinear))
    return [*said, stay and split_still]


def test_bad_files_end_on_all_ranks_and_change_nothing(tmp_path: Path) -> None:
    for said in on_ranks(refused, 2, "gloo", tmp_path):
        assert "missing" in said[0] and "a file" in said[1] and said[2]
