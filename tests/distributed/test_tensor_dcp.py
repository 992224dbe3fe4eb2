# SPDX-License-Identifier: Apache-2.0
"""torch.distributed.checkpoint saves split adapters, and loads them at another number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from lorakernels.parallel import TensorParallel, parallelize, shard_base
from tests.distributed.tensor_models import Way, batch, loss_of, make
from tests.processes import on_ranks

pytestmark = pytest.mark.slow
CPU, WAY = torch.device("cpu"), Way("", True, family="Qwen2", bias="lora_only")


def drawn(seed: int) -> nn.Module:
    """A model whose trained values are random, and equal on all ranks."""
    model = make(WAY, CPU)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.copy_(torch.randn(p.shape, generator=generator))
    return model


def trained(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}


def same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in theirs)


def loaded(split: TensorParallel, folder: Path) -> dict[str, Tensor]:
    """Whole values after `dcp.load` into the parts."""
    dcp.load(split.state_dict(), checkpoint_id=folder)
    return split.whole_adapters()


def said_by(split: TensorParallel, values: dict[str, Tensor]) -> str:
    with pytest.raises(ValueError) as error:
        split.dtensors(values)
    return str(error.value)


def worker(rank: int, device: torch.device, folder: str, tp: int) -> dict[str, Any]:
    shape = (dist.get_world_size() // tp, tp)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))["tp"]
    model, path = drawn(1), Path(folder)
    split = parallelize(model, mesh)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    loss_of(model, batch(0, CPU)).backward()
    optimizer.step()
    named = dict(model.named_parameters())
    moments = split.dtensors({n: optimizer.state[named[n]]["exp_avg"] for n in trained(model)})
    dcp.save({"adapter": split.state_dict(), "exp_avg": moments}, checkpoint_id=path / f"saved{tp}")
    other = parallelize(drawn(2), mesh)
    resharded = None
    if tp == 4:  # TP 4 → two replicas of TP 2, whose frozen base is sharded
        again = drawn(5)
        both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
        two = parallelize(again, both["tp"])
        base = shard_base(again, both["dp_shard"])
        dcp.load({"adapter": two.state_dict()}, checkpoint_id=path / "saved4")
        resharded = two.whole_adapters()
        dist.barrier()
        base.unshard()
    dtensors = split.state_dict()
    name = next(iter(dtensors))
    return {
        "values": split.whole_adapters(),
        "gradients": split.whole_gradients(),
        "resharded": resharded,
        "one process's": loaded(other, path / "one"),
        "shapes": {n: (tuple(d.shape), tuple(d.to_local().shape)) for n, d in dtensors.items()},
        "unknown": said_by(split, {"model.norm.weight": torch.zeros(64)}),
        "shape": said_by(split, {name: torch.zeros(3)}),
    }


@pytest.fixture(scope="module", params=[(2, 2), (4, 2), (4, 4)], ids=["tp2", "dp2 tp2", "tp4"])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(folder, tp, results by rank)."""
    world, tp = request.param
    folder = tmp_path_factory.mktemp("dcp")
    dcp.save(trained(drawn(3)), checkpoint_id=folder / "one", no_dist=True)
    return folder, tp, on_ranks(worker, world, "gloo", str(folder), tp)


def test_parts_load_into_one_process(found: Any) -> None:
    folder, tp, results = found
    model = drawn(4)
    parameters = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
    moments = {n: torch.full_like(p, torch.nan) for n, p in parameters.items()}
    dcp.load(
        {"adapter": parameters, "exp_avg": moments},
        checkpoint_id=folder / f"saved{tp}",
        no_dist=True,
    )
    for result in results:
        assert same(trained(model), result["values"])
        for name, gradient in result["gradients"].items():  # AdamW's first moment after a step
            torch.testing.assert_close(moments[name], 0.1 * gradient, rtol=1e-6, atol=0.0)


def test_one_process_loads_into_parts(found: Any) -> None:
    expected = trained(drawn(3))
    assert all(same(result["one process's"], expected) for result in found[2])


def test_parts_load_at_another_layout(found: Any) -> None:
    _, tp, results = found
    for result in results:
        assert (result["resharded"] is None) == (tp != 4)
        assert tp != 4 or same(result["resharded"], result["values"])


def test_dtensors_know_the_whole_shape(found: Any) -> None:
    _, tp, results = found
    whole = {n: tuple(v.shape) for n, v in trained(drawn(3)).items()}
    for result in results:
        assert {n: shape for n, (shape, _) in result["shapes"].items()} == whole
        for n, (shape, own) in result["shapes"].items():
            is_row = ".o_proj." in n or ".down_proj." in n
            is_cut = n.endswith(".lora_A") == is_row and not (is_row and n.endswith(".bias"))
            product = torch.Size(shape).numel() // torch.Size(own).numel()
            assert product == (tp if is_cut else 1), n


def test_values_of_no_trained_parameter_are_refused(found: Any) -> None:
    for result in found[2]:
        assert (
            "must have names of trained parameters, found 'model.norm.weight'" in result["unknown"]
        )
        assert "must have this rank's shape" in result["shape"] and "found (3,)" in result["shape"]
