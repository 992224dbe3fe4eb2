# SPDX-License-Identifier: Apache-2.0
"""Adapter files of a model that is split over ranks: the bytes of one process, read at any layout, refused by all."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from lorakernels import disable_lora, load_adapter, save_adapter
from lorakernels.modules.model.merge import lora_modules
from lorakernels.parallel import TensorParallel, parallelize
from lorakernels.parallel.ranks import comm
from tests.distributed.tensor_models import Way, batch, loss_of, make
from tests.processes import on_ranks

pytestmark = pytest.mark.slow
CPU = torch.device("cpu")
WAYS = {
    "rows split, vocabulary": Way("", True, vocabulary=True),
    "trained biases": Way("", False, family="Qwen2", bias="lora_only"),
    "all biases, bf16": Way("", True, family="Qwen2", bias="all", dtype=torch.bfloat16),
    "fused": Way("", True, save="recompute"),
    "some layers": Way("", True, targets=("q_proj", "down_proj")),
}


def drawn(way: Way, seed: int) -> nn.Module:
    """A model whose trained values are random, and equal on all ranks."""
    model = make(way, CPU)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.copy_(torch.randn(p.shape, generator=generator))
    return model


def trained(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}


def said_by(act: Any) -> str:
    try:
        act()
    except (ValueError, OSError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def round_trip(mesh: Any, way: Way, folder: Path) -> dict[str, bool]:
    whole, model = drawn(way, 5), drawn(way, 5)
    options = {"sequence_parallel": way.sequence, "vocabulary": way.vocabulary}
    split = parallelize(model, mesh, **options)
    rank = mesh.get_local_rank()
    alone, together = folder / f"alone{rank}", folder / "together"
    save_adapter(whole, alone)
    save_adapter(model, together)
    files = ("adapter_config.json", "adapter_model.safetensors")
    found = {n: (alone / n).read_bytes() == (together / n).read_bytes() for n in files}
    other = drawn(way, 6)
    into = parallelize(other, mesh, **options)
    report = load_adapter(other, alone)
    expected = trained(whole)
    found["loaded into parts"] = same(into.whole_adapters(), expected) and report.model is other
    found["still parts"] = same(trained(other), trained(model))
    found["trains"] = all(p.grad is not None for p in parameters_after_a_step(other))
    again = drawn(way, 7)
    load_adapter(again, together)
    found["loaded into one process"] = same(trained(again), expected)
    load_adapter(other, together, is_trainable=False)
    found["frozen"] = not trained(other) and not other.training
    found["split as before"] = same(split.whole_adapters(), expected)
    return found | values_alone(model, split, expected, folder)


def values_alone(
    model: nn.Module, split: TensorParallel, expected: dict[str, torch.Tensor], folder: Path
) -> dict[str, bool]:
    """What `whole`, `gather` and `own` promise, of a model whose whole values are `expected`."""
    before = {n: p.data_ptr() for n, p in model.named_parameters()}
    twice = {n: 2 * p.detach() for n, p in model.named_parameters() if p.requires_grad}
    gathered = split.gather(twice)
    found = {"gathered": same(gathered, {n: 2 * x for n, x in expected.items()})}
    found["own part"] = same(split.own(gathered), twice)
    one = folder / "by rank 0"
    if split.ranks.rank == 0:  # the others do not take part
        with split.whole(expected):
            save_adapter(model, one)
    comm.agree(split.ranks.group, None)
    files = ("adapter_config.json", "adapter_model.safetensors")
    for n in files:
        found[f"{n} by rank 0"] = (one / n).read_bytes() == (folder / "together" / n).read_bytes()
    found["parts again"] = before == {n: p.data_ptr() for n, p in model.named_parameters()}
    save_adapter(model, folder / "together again")
    found["all take part again"] = (folder / "together again").exists()
    name = next(n for n, x in expected.items() if x.shape != twice[n].shape)
    for act, said in (
        (lambda: split.own({name: twice[name]}), f"values['{name}'] must have the whole shape"),
        (lambda: split.gather({name: expected[name]}), f"values['{name}'] must have this rank's shape"),
        (lambda: split.own({"lm_head": expected[name]}), "names of trained parameters, found 'lm_head'"),
    ):  # fmt: skip
        found[said] = said in said_by(act)
    return found


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in theirs)


def parameters_after_a_step(model: nn.Module) -> list[nn.Parameter]:
    loss_of(model, batch(0, CPU)).backward()
    return [p for p in model.parameters() if p.requires_grad]


def refusals(mesh: Any, folder: Path) -> dict[str, tuple[str, bool]]:
    """{case: (what a rank says, whether its model is as before)}. Only one rank sees what is wrong."""
    rank, way = mesh.get_local_rank(), Way("", True)
    model = drawn(way, 5)
    own = folder / f"rank{rank}"
    save_adapter(model, own)
    parallelize(model, mesh)
    before = trained(model)
    file = own / "adapter_model.safetensors"
    whole = file.read_bytes()

    def tried(path: Path) -> tuple[str, bool]:
        said = said_by(lambda: load_adapter(model, path))
        return said, same(trained(model), before)

    found = {}
    if rank == 1:
        file.write_bytes(whole[:-8])
    found["damaged"] = tried(own)
    if rank == 1:
        other = drawn(way, 8)
        save_adapter(other, own)
    found["other values"] = tried(own)
    if rank == 1:
        shutil.rmtree(own)
    found["missing"] = tried(own)
    narrow = folder / f"narrow{rank}"
    save_adapter(drawn(Way("", True, model={"intermediate_size": 48}), 5), narrow)
    found["another shape"] = tried(narrow)
    blocked = folder / "blocked"
    if rank == 0:
        blocked.write_text("a file")
    found["not written"] = said_by(lambda: save_adapter(model, blocked)), True

    def save_disabled() -> None:
        if rank == 1:
            with disable_lora(model):
                save_adapter(model, folder / "never")
        save_adapter(model, folder / "never")

    found["disabled"] = said_by(save_disabled), not (folder / "never").exists()
    plain = drawn(way, 5)
    for layer in lora_modules(plain).values():
        layer.scaling = 1.5
    parallelize(plain, mesh)
    save_adapter(plain, folder / "scaled")
    found["scaling"] = tried(folder / "scaled")
    return found


def worker(rank: int, device: torch.device, folder: str) -> dict[str, Any]:
    world = torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))["tp"]
    ways = {}
    for number, (name, way) in enumerate(WAYS.items()):
        ways[name] = round_trip(mesh, way, Path(folder) / str(number))
    return {"ways": ways, "refusals": refusals(mesh, Path(folder) / "refused")}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return on_ranks(worker, 2, "gloo", str(tmp_path_factory.mktemp("files")))


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_files_of_parts_are_those_of_one_process(results: Any, way: str) -> None:
    for rank, found in enumerate(results):
        assert [name for name, good in found["ways"][way].items() if not good] == [], rank


@pytest.mark.parametrize(
    ("case", "kind", "said"),
    [
        ("damaged", 1, "is not a whole safetensors file"),
        ("other values", None, "all ranks must read the same tensors from"),
        ("missing", 1, "is not a directory with an adapter"),
        ("another shape", None, "of another shape"),
        ("not written", 0, "expected a directory"),
        ("disabled", 1, "disable"),
        ("scaling", None, "has scaling"),
    ],
)
def test_all_ranks_refuse_together(results: Any, case: str, kind: int | None, said: str) -> None:
    for rank, found in enumerate(results):
        text, unchanged = found["refusals"][case]
        assert said in text and unchanged
        if kind is not None:
            assert (f"rank {kind}: " in text) == (rank != kind)
