# SPDX-License-Identifier: Apache-2.0
"""Two replicas of two stages, whose gradients ShardedAdamW averages and clips, train as one process."""

from __future__ import annotations

import gc
import io
import weakref

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from lorakernels.parallel import ShardedAdamW, pipeline_parallel
from tests.distributed.pipeline_models import Way, batch, make, step_alone
from tests.fusion.fused_models import difference
from tests.processes import on_ranks

pytestmark = pytest.mark.slow

STEPS, NORM, RATE = 3, 0.05, 1e-2
WHOLE, HALF = Way("one process"), Way("a replica", microbatches=2)


def stages(rank: int, device: torch.device) -> list[float]:
    """How far norms and adapters are from those of one process with the rows of both replicas."""
    mesh = init_device_mesh(device.type, (2, 2), mesh_dim_names=("dp", "pp"))
    whole, model = make(WHOLE, device), make(HALF, device)
    pipeline = pipeline_parallel(model, mesh["pp"], microbatches=HALF.microbatches)
    alone = torch.optim.AdamW([p for p in whole.parameters() if p.requires_grad], lr=RATE)
    own = [p for p in model.parameters() if p.requires_grad]
    optimizer = ShardedAdamW(own, mesh["dp"], max_grad_norm=NORM, lr=RATE)
    found = []
    for step in range(STEPS):
        labels, inputs = batch(step, WHOLE, device)
        step_alone(whole, labels, inputs, WHOLE)
        norm = torch.nn.utils.clip_grad_norm_(list(whole.parameters()), NORM)
        mine = slice(4 * mesh.get_local_rank("dp"), 4 * mesh.get_local_rank("dp") + 4)
        count = (labels[:, 1:] != -100).sum() / 2  # gradients are averaged, not summed
        pipeline.forward_backward(labels[mine], items=count, input_ids=inputs["input_ids"][mine])
        for each in (alone, optimizer):
            each.step()
            each.zero_grad()
        assert norm > 2 * NORM and optimizer.grad_norm is not None, "each step is clipped"
        found.append(difference(optimizer.grad_norm, norm))
    file = io.BytesIO()
    torch.save(own, file)  # as a loop of one's own saves adapters
    file.seek(0)
    assert all(map(torch.equal, torch.load(file), own))
    expected = dict(whole.named_parameters())
    adapters = pipeline.whole_adapters()
    return [*found, *(difference(x, expected[name].detach()) for name, x in adapters.items())]


@pytest.mark.slow
def test_replicas_of_stages_are_clipped_by_the_norm_of_all_stages_and_their_adapters_can_be_saved() -> (
    None
):
    """AdamW divides by small numbers, so that orders of fp32 sums show more than by themselves."""
    for found in on_ranks(stages, 4, "gloo"):
        assert max(found) < 1e-4


def norms_of_some_stages(rank: int, device: torch.device) -> list[str]:
    """What is said where one stage alone clips; "" once all are alike."""
    mesh = init_device_mesh(device.type, (1, 2), mesh_dim_names=("dp", "pp"))
    model, found = make(HALF, device), []
    pipeline = pipeline_parallel(model, mesh["pp"], microbatches=HALF.microbatches)
    own = [p for p in model.parameters() if p.requires_grad]
    optimizer = ShardedAdamW(own, mesh["dp"], max_grad_norm=NORM if rank else None)
    labels, inputs = batch(0, HALF, device)
    pipeline.forward_backward(labels, **inputs)
    for norm in (optimizer.max_grad_norm, NORM * (1 + rank), NORM):
        optimizer.max_grad_norm = norm
        before = [p.detach().clone() for p in own]
        try:
            optimizer.step()
            found.append("")
        except ValueError as error:
            found.append(str(error))
            assert all(map(torch.equal, before, own)), "nothing is changed"
    return found


@pytest.mark.slow
def test_stages_that_do_not_clip_alike_are_refused_on_all_ranks() -> None:
    said = "max_grad_norm must be the same on all ranks of the pipeline, found {} on rank 0 and {} on rank 1"
    expected = [said.format(None, NORM), said.format(NORM, 2 * NORM), ""]
    assert on_ranks(norms_of_some_stages, 2, "gloo") == [expected] * 2


def freed(rank: int, device: torch.device) -> list[bool]:
    """Whether a model in stages is gone, with its parameters, once nobody refers to it."""
    mesh = init_device_mesh(device.type, (2,), mesh_dim_names=("pp",))
    model = make(HALF, device)
    pipeline = pipeline_parallel(model, mesh["pp"], microbatches=HALF.microbatches)
    left = [weakref.ref(model), *map(weakref.ref, model.parameters())]
    del model, pipeline
    gc.collect()
    return [ref() is None for ref in left]


def test_a_model_in_stages_is_freed_with_its_parameters() -> None:
    for found in on_ranks(freed, 2, "gloo"):
        assert len(found) > 1 and all(found)
