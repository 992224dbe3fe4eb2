# SPDX-License-Identifier: Apache-2.0
"""Adapter files of a model whose rows ranks share: what one rank cannot read is refused on all, and nothing changes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lorakernels import load_adapter, save_adapter
from lorakernels.checkpoints.adapters import files as adapters
from lorakernels.parallel import context_parallel, parallelize
from lorakernels.parallel.ranks import comm
from tests.distributed import tensor_models
from tests.distributed.context_models import Way, make
from tests.distributed.test_tensor_files import said_by
from tests.fusion.fused_models import an_adapter, model_of
from tests.processes import on_ranks

pytestmark = pytest.mark.slow
SAID = {
    "missing": "is not a directory with an adapter",
    "another shape": "all ranks must read the same tensors from",
    "other values": "all ranks must read the same tensors from",
    "switched off": "disable_lora",
    "no memory": "no memory",
}


def trained(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters() if p.requires_grad]


def written(folder: Path, make: Callable[[], nn.Module], other: nn.Module, last: bool) -> None:
    """An adapter for each case, in this rank's `folder`; what is wrong with it is there on the `last` rank alone."""
    model = make()
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(1)
    for case in (*SAID, "right"):
        save_adapter(model, folder / case)
    if last:
        shutil.rmtree(folder / "missing")
        save_adapter(other, folder / "another shape")
        save_adapter(make(), folder / "other values")


def loads(model: nn.Module, folder: Path, last: bool) -> dict[str, tuple[str, bool]]:
    """{case: (what this rank hears, whether its model stays)}, and whether all is loaded at the end."""

    def full(*given: Any) -> Any:
        raise torch.OutOfMemoryError("no memory")

    found, before = {}, trained(model)
    for case in (*SAID, "right"):
        with pytest.MonkeyPatch.context() as patch:
            if last and case == "no memory":
                patch.setattr(adapters, "_like", full)
            if last and case == "switched off":
                patch.setattr(an_adapter(model), "disable_adapters", True)
            said = said_by(lambda: load_adapter(model, folder / case))  # noqa: B023
        found[case] = said, all(map(torch.equal, trained(model), before))
    return found


def rows(rank: int, device: torch.device, folder: Path) -> dict[str, tuple[str, bool]]:
    group = dist.new_group(timeout=timedelta(seconds=30))  # a rank that waits gives up by then
    mesh, way, last = (
        DeviceMesh.from_group(group, "cpu", mesh_dim_names=("cp",)),
        Way(""),
        rank == 1,
    )
    own = folder / f"rank{rank}"
    written(
        own, lambda: make(way, device), make(Way("", model={"intermediate_size": 64}), device), last
    )
    model = make(way, device)
    context = context_parallel(model, mesh)
    found = loads(model, own, last)
    plain = model_of("Llama")
    other = context_parallel(plain, mesh)
    before = [*plain.state_dict()]
    found["plain"] = (
        said_by(lambda: load_adapter(plain, own / "right")),
        [*plain.state_dict()] == before,
    )
    other.close()
    found["plain, closed"] = said_by(lambda: load_adapter(plain, own / "right")), True
    context.close()
    if rank == 0:  # alone
        found["closed"] = said_by(lambda: load_adapter(model, own / "missing alone")), True
    return found


def test_a_load_that_fails_on_one_rank_fails_on_all_that_share_rows(tmp_path: Path) -> None:
    for rank, found in enumerate(on_ranks(rows, 2, "gloo", tmp_path)):
        for case, text in SAID.items():
            said, unchanged = found[case]
            assert text in said and unchanged, (rank, case, said, unchanged)
            if "all ranks must" not in text:  # what both see
                assert ("rank 1: " in said) == (rank == 0), (rank, case, said)
        assert found["right"] == ("", False)
        said, unchanged = found["plain"]
        assert "it is too late to add adapters: call ContextParallel.close" in said and unchanged, (
            said
        )
        assert found["plain, closed"][0] == ""
        assert rank or "is not a directory" in found["closed"][0]


def parts(rank: int, device: torch.device, folder: Path) -> dict[str, tuple[str, bool]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    way = tensor_models.Way("", False)
    other = tensor_models.Way("", False, model={"intermediate_size": 48})
    own, last = folder / f"rank{rank}", rank == 3
    written(own, lambda: tensor_models.make(way, device), tensor_models.make(other, device), last)
    model = tensor_models.make(way, device)
    parallelize(model, mesh["tp"])
    context_parallel(model, mesh["cp"])
    found = loads(model, own, last)
    comm.agree(mesh["tp"].get_group(), None)
    return found


def test_it_fails_on_all_that_hold_parts_too(tmp_path: Path) -> None:
    for rank, found in enumerate(on_ranks(parts, 4, "gloo", tmp_path)):
        for case, text in SAID.items():
            said, unchanged = found[case]
            assert text in said and unchanged, (rank, case, said, unchanged)
        assert found["right"] == ("", False)
