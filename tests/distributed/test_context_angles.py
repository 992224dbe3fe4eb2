# SPDX-License-Identifier: Apache-2.0
"""RoPE whose angles depend on a length has that of whole documents, where each rank sees some of their tokens."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from lorakernels import fuse
from lorakernels.parallel import ContextParallel, context_parallel
from tests.distributed.context_models import DOCUMENTS, LENGTH, ROWS, Way, batch, make, positions
from tests.distributed.tensor_layers import relative
from tests.processes import on_ranks

pytestmark = pytest.mark.slow
LONG: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 4,
    "long_factor": [8.0] * 4,
    "factor": 8.0,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
PACKED = {
    "cu_seq_lens_q": torch.tensor(DOCUMENTS, dtype=torch.int32),
    "max_length_q": 12,
}


def alone(model: nn.Module, cuts: list[int]) -> tuple[float, dict[str, torch.Tensor]]:
    """The mean loss and gradients of documents that are alone in their calls, in one process."""
    tokens, labels = batch(0, torch.device("cpu"))
    shifted = nn.functional.pad(labels, (0, 1), value=-100)[:, 1:].flatten()
    base: Any = model.base_model
    hidden = torch.cat(
        [
            base(tokens.flatten()[None, begin:end], use_cache=False).last_hidden_state[0]
            for begin, end in pairwise(cuts)
            if end > begin
        ]
    )
    loss = nn.functional.cross_entropy(model.get_output_embeddings()(hidden), shifted)  # type: ignore[operator]
    loss.backward()
    return float(loss), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def shared(context: ContextParallel, **places: Any) -> tuple[float, dict[str, torch.Tensor]]:
    tokens, labels = batch(0, torch.device("cpu"))
    loss = context.loss(labels, input_ids=tokens, **places)
    loss.backward()
    context.reduce_gradients()
    named = context.model.named_parameters()
    return float(loss.detach()), {n: p.grad for n, p in named if p.grad is not None}


def long_rope(rank: int, device: torch.device, fused: bool) -> dict[str, float]:
    """By which part of itself a loss or a gradient differs most from that of documents alone."""
    result = {}
    rows = [*range(0, ROWS * LENGTH + 1, LENGTH)]
    for name, trained, cuts, places in (
        ("rows", 12, rows, {}),  # one rank has tokens 4 to 11 alone
        ("documents", 9, DOCUMENTS, PACKED | {"position_ids": positions()}),  # of 1 to 12 tokens
    ):
        rope = LONG | {"original_max_position_embeddings": trained}
        plain = make(Way("", model={"rope_parameters": rope}), device)
        model = copy.deepcopy(plain)
        if fused:
            fuse(model)
        context = context_parallel(
            model, init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))["cp"]
        )
        expected, gradients = alone(plain, cuts)
        loss, mine = shared(context, **places)
        worst = [abs(loss - expected) / expected]
        worst += [relative(mine[n], gradient) for n, gradient in gradients.items()]
        context.close()
        assert fused == any(m._forward_hooks for m in model.modules() if hasattr(m, "rope_type"))
        result[name] = max(worst)
    return result


@pytest.mark.parametrize("fused", [False, True], ids=["layers", "fused"])
def test_long_rope_has_the_angles_of_whole_documents(fused: bool) -> None:
    for result in on_ranks(long_rope, 2, "gloo", fused):
        # orders of fp32 sums; angles of a rank's own largest position change gradients by 0.1 and more
        assert all(worst < 1e-4 for worst in result.values()), result


def dynamic(rank: int, device: torch.device) -> list[str]:
    """What each call said, or that its loss is that of one process."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))["cp"]
    sizes = {"rope_parameters": DYNAMIC}
    said = []
    shifted = positions() + 4  # the longest document then ends at 16
    for most, places in (
        (LENGTH, {}),
        (12, PACKED | {"position_ids": positions()}),
        (LENGTH - 1, {}),
        (11, PACKED | {"position_ids": positions()}),
        (15, PACKED | {"position_ids": shifted}),
    ):
        way = Way("", model=sizes | {"max_position_embeddings": most})
        plain = make(way, device)
        context = context_parallel(copy.deepcopy(plain), mesh)
        cuts = DOCUMENTS if places else [*range(0, ROWS * LENGTH + 1, LENGTH)]
        try:
            loss, _ = shared(context, **places)
        except ValueError as error:
            said.append(str(error))
        else:
            expected, _ = alone(plain, cuts)
            said.append("right" if abs(loss - expected) < 1e-5 * expected else f"{loss}")
    return said


def test_dynamic_rope_is_refused_beyond_its_length_on_all_ranks() -> None:
    for said in on_ranks(dynamic, 2, "gloo"):
        assert said[:2] == ["right"] * 2
        for text, most, result in zip(said[2:], (15, 11, 15), (16, 12, 16), strict=True):
            assert text.startswith(f"a document may have at most {most} tokens over ranks")
            assert f"max_position_embeddings, found {result}: dynamic RoPE" in text
