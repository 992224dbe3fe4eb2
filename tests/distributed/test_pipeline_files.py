# SPDX-License-Identifier: Apache-2.0
"""Adapter files of a model that was cut into stages: those of one process, written by rank 0 and read by each rank."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lorakernels import load_adapter, save_adapter
from lorakernels.checkpoints.adapters import files as adapters
from lorakernels.parallel import pipeline_parallel
from lorakernels.parallel.ranks import comm
from tests.distributed.pipeline_models import Way, make
from tests.fusion.fused_models import an_adapter
from tests.processes import on_ranks

pytestmark = pytest.mark.slow
WAYS = (
    Way("unfused"),
    Way("fused, FP8, interleaved", fused=True, fp8=True, chunks=2),
    Way("some layers", lora={"layers_to_transform": [1, 2]}),
    Way("ranks", lora={"rank_pattern": {"layers.3.mlp.down_proj": 2}}),
    Way("DoRA", lora={"use_dora": True}),
    Way("OLoRA", lora={"init_lora_weights": "olora"}),
)
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def another(way: Way) -> nn.Module:
    """With other adapters."""
    model = make(way, torch.device("cpu"))
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(1)
    return model


def files(rank: int, device: torch.device, way: Way, folder: Path) -> dict[str, bool]:
    """Whether the files are those of one process, and whether they are read as there."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    whole = make(way, device)
    expected = {n: p.detach() for n, p in whole.named_parameters() if p.requires_grad}
    if rank == 0:
        save_adapter(whole, folder / "one")
    cut = pipeline_parallel(make(way, device), mesh["pp"], microbatches=2, chunks=way.chunks)
    before = [n for n, _ in cut.model.named_modules()]
    values = [p.detach().clone() for p in cut.model.parameters()]
    with torch.no_grad():  # what is saved is what is there at the time
        for p in cut.model.parameters():
            if p.requires_grad:
                p.add_(1)
        save_adapter(cut.model, folder / "two")
        for p, value in zip(cut.model.parameters(), values, strict=True):
            p.copy_(value)
    save_adapter(cut.model, folder / "two")
    comm.agree(cut.ranks.group, None)
    configs = [json.loads((folder / name / CONFIG).read_text()) for name in ("one", "two")]
    one, two = (load_file(folder / name / WEIGHTS) for name in ("one", "two"))
    found = {
        "config": configs[0] == configs[1],
        "tensors": one.keys() == two.keys() and all(torch.equal(one[n], two[n]) for n in one),
        "modules": before == [n for n, _ in cut.model.named_modules()],
    }
    other = pipeline_parallel(another(way), mesh["pp"], microbatches=2, chunks=way.chunks)
    load_adapter(other.model, folder / "one")
    read = other.whole_adapters()
    found["read"] = read.keys() == expected.keys() and all(
        torch.equal(read[n], expected[n]) for n in read
    )
    early = another(way)
    load_adapter(early, folder / "two")
    early_cut = pipeline_parallel(early, mesh["pp"], microbatches=2, chunks=way.chunks)
    read = early_cut.whole_adapters()
    found["read before"] = all(torch.equal(read[n], expected[n]) for n in expected)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_files_are_those_of_one_process(way: Way, tmp_path: Path) -> None:
    for found in on_ranks(files, 2, "gloo", way, tmp_path):
        assert all(found.values()), found


def refusals(rank: int, device: torch.device, folder: Path) -> list[Any]:
    """What is said of a file without a tensor of the other rank, and of a folder that is a file; what is changed."""
    way = Way("")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    model = make(way, device)
    cut = pipeline_parallel(model, mesh["pp"], microbatches=2)
    before = an_adapter(model).lora_A.detach().clone()
    save_adapter(model, folder / "whole")
    if rank == 0:
        tensors = load_file(folder / "whole" / WEIGHTS)
        del tensors[next(n for n in sorted(tensors) if "layers.3" in n)]
        save_file({n: t + 1 for n, t in tensors.items()}, folder / "whole" / WEIGHTS)
        (folder / "taken").write_text("")
    comm.agree(cut.ranks.group, None)
    said = []
    for call in (
        lambda: load_adapter(model, folder / "whole"),
        lambda: save_adapter(model, folder / "taken"),
    ):
        try:
            call()
            said.append("nothing")
        except (OSError, ValueError) as error:
            said.append(str(error))
    return [*said, torch.equal(an_adapter(model).lora_A, before)]


def loads(rank: int, device: torch.device, folder: Path) -> dict[str, list[Any]]:
    """What is said of loads that fail on rank 1 alone, or read another file there; whether the adapters stay."""
    group = dist.new_group(timeout=timedelta(seconds=30))  # a rank that waits gives up by then
    mesh, way = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("pp",)), Way("")
    cut = pipeline_parallel(make(way, device), mesh, microbatches=2)
    other = pipeline_parallel(another(way), mesh, microbatches=2)
    for name, each in (("one", cut), ("other", other)):
        save_adapter(each.model, folder / name)
    before = cut.whole_adapters()

    def full(*given: Any) -> Any:
        raise torch.OutOfMemoryError("no memory")

    found: dict[str, list[Any]] = {}
    for case, name in (("no folder", "none"), ("another file", "one"), ("no memory", "other")):
        with pytest.MonkeyPatch.context() as patch:
            if rank and case == "no memory":
                patch.setattr(adapters, "_like", full)
            try:
                load_adapter(cut.model, folder / (name if rank else "other"))
                said = "nothing"
            except (OSError, ValueError, torch.OutOfMemoryError) as error:
                said = str(error)
        after = cut.whole_adapters()
        found[case] = [said, all(torch.equal(after[n], x) for n, x in before.items())]
    load_adapter(cut.model, folder / "other")
    after, wanted = cut.whole_adapters(), other.whole_adapters()
    found["right"] = ["", all(torch.equal(after[n], x) for n, x in wanted.items())]
    return found


def test_a_load_that_fails_on_one_rank_fails_on_all(tmp_path: Path) -> None:
    said = {"no folder": "none", "another file": "differs between rank 0 and rank 1"}
    for found in on_ranks(loads, 2, "gloo", tmp_path):
        for case, text in {**said, "no memory": "no memory", "right": ""}.items():
            assert text in found[case][0] and found[case][1], (case, found[case])


def test_what_does_not_fit_is_refused_on_all_ranks(tmp_path: Path) -> None:
    for missing, taken, unchanged in on_ranks(refusals, 2, "gloo", tmp_path):
        assert "missing" in missing and "layers.3" in missing, missing
        assert "taken" in taken, taken
        assert unchanged
