# SPDX-License-Identifier: Apache-2.0
"""What cannot be split over ranks is refused on all of them before anything moves; norms of split gradients."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lorakernels import (
    LoRAConfig,
    fuse,
    merge_and_unload,
    merge_lora,
    unload,
)
from lorakernels.parallel import (
    ColumnParallelLoRALinear,
    RowParallelLoRALinear,
    ShardedAdamW,
    parallelize,
    shard_base,
)
from lorakernels.parallel.tensor import parallelize as tensor
from tests.distributed.refused_models import CPU, OTHER_SCALES, REFUSED, WHOLE
from tests.distributed.tensor_models import Way, batch, loss_of, make
from tests.fusion.fused_models import LINEARS, VOCABULARY, adapted
from tests.processes import on_ranks

pytestmark = pytest.mark.slow


def said_by(call: Callable[[], Any]) -> str:
    try:
        call()
    except (ValueError, TypeError, RuntimeError, IndexError) as error:
        return str(error)
    return "nothing"


def vocabularies(mesh: Any) -> dict[str, str]:
    """What is refused with vocabulary=True."""
    odd = make(Way("", False, model={"vocab_size": 65}), CPU)
    hooked, whole = make(WHOLE, CPU), make(WHOLE, CPU)
    hooked.enable_input_require_grads()
    scaled = make(Way("", False, family="Granite", model={"logits_scaling": 8.0}), CPU)
    split = parallelize(whole, mesh)
    tokens = batch(0, CPU)
    saved = adapted("Llama", LINEARS, modules_to_save=["lm_head"]).requires_grad_(False)
    values = values_of(saved)
    said = said_by(lambda: parallelize(saved, mesh, vocabulary=True))
    assert values == values_of(saved)
    return {
        "saved": said,
        "odd": said_by(lambda: parallelize(odd, mesh, vocabulary=True)),
        "hooked": said_by(lambda: parallelize(hooked, mesh, vocabulary=True)),
        "plan": said_by(
            lambda: parallelize(make(WHOLE, CPU), mesh, {"*_proj": "column"}, vocabulary=True)
        ),
        "loss": said_by(lambda: split.loss(tokens, input_ids=tokens)),
        "logits": said_by(lambda: parallelize(scaled, mesh, vocabulary=True)),
    }


def edges(mesh: Any) -> dict[str, Any]:
    """Losses where no label counts, where one is outside of the vocabulary, and of rows that do not count."""
    model = make(WHOLE, CPU)
    split = parallelize(model, mesh, vocabulary=True)
    head, ignored = model.get_output_embeddings(), torch.full((2,), -100)
    hidden = torch.randn(2, 64)
    lost = hidden.clone()
    lost[1] = torch.nan

    def both(h: torch.Tensor, labels: torch.Tensor) -> tuple[float, bool]:
        h = h.requires_grad_()
        loss = head.loss(h, labels)
        loss.backward()
        return loss.item(), bool(h.grad.isfinite().all())

    one = torch.tensor([3, -100])
    return {
        "none counts": both(hidden.clone(), ignored),
        "beyond": both(hidden.clone(), torch.tensor([3, VOCABULARY])),
        "as without": both(lost, one) == both(hidden[:1].clone(), one[:1]),
        "token": said_by(lambda: split.model(torch.tensor([[1, VOCABULARY]]))),
        "embedding": said_by(lambda: model.get_input_embeddings()(torch.tensor([VOCABULARY]))),
    }


def drifted(mesh: Any, rank: int) -> dict[str, str]:
    """What `check` says of ranks that drifted apart in one way each."""
    model = make(Way("", True), CPU)
    split = parallelize(model, mesh)
    q_proj = model.model.layers[0].self_attn.q_proj
    said = {"nothing": said_by(split.check)}
    before = q_proj.lora_A.data.clone()
    q_proj.lora_A.data[0, 0] += rank
    said["an adapter"] = said_by(split.check)
    q_proj.lora_A.data.copy_(before)
    q_proj.fp8_state.backward[-1, 3] = 1.0 + rank
    said["a scale"] = said_by(split.check)
    q_proj.fp8_state.reset()
    q_proj.fp8_state.forward[1, 3] = 1.0 + rank
    said["a history"] = said_by(split.check)
    q_proj.fp8_state.reset()
    torch.rand(rank + 1)
    said["a generator"] = said_by(split.check)
    return said


def values_of(model: nn.Module) -> list[Any]:
    return [
        (type(m), [(p.shape, p.data_ptr()) for p in m.parameters(False)]) for m in model.modules()
    ]


def afterwards(mesh: Any) -> dict[str, str]:
    """What a split model refuses."""
    model = make(WHOLE, CPU)
    split = parallelize(model, mesh, sequence_parallel=True)
    attention = model.model.layers[0].self_attn
    odd = torch.zeros(1, 3, dtype=torch.int64)
    compiled = torch.compile(attention.q_proj, backend="eager", fullgraph=True)
    half = torch.randn(4, 1, 64, dtype=torch.float16)
    return {
        "fuse": said_by(lambda: fuse(model, attention="math")),
        "merge": said_by(lambda: merge_lora(model)),
        "unload": said_by(lambda: unload(model)),
        "merge_and_unload": said_by(lambda: merge_and_unload(model)),
        "a sharded base": said_by(lambda: shard_base(model, mesh)),
        "a sharded optimizer": said_by(
            lambda: ShardedAdamW([p for p in model.parameters() if p.requires_grad], mesh)
        ),
        "once more": said_by(lambda: parallelize(model, mesh)),
        "a copy": said_by(lambda: copy.deepcopy(model)),
        "a pickle": said_by(lambda: pickle.dumps(attention.q_proj)),
        "odd rows": said_by(lambda: loss_of(model, odd)),
        "torch.compile": said_by(lambda: compiled(torch.randn(4, 1, 64))),
        "float16": said_by(lambda: attention.q_proj(half)),
        "FSDP2": said_by(lambda: (fully_shard(attention.q_proj, mesh=mesh), split.grad_norm())),
    }


def authors(group: Any) -> dict[str, str]:
    config = LoRAConfig(r=2)
    return {
        "N": said_by(lambda: ColumnParallelLoRALinear(8, 9, config=config, tp_group=group)),
        "K": said_by(lambda: RowParallelLoRALinear(9, 8, config=config, tp_group=group)),
        "gather_output": said_by(
            lambda: ColumnParallelLoRALinear(8, 8, tp_group=group, gather_output=True)
        ),
        "input_is_parallel": said_by(
            lambda: RowParallelLoRALinear(8, 8, tp_group=group, input_is_parallel=False)
        ),
    }


def biases(group: Any) -> list[bool]:
    """Megatron's return, with and without skip_bias_add."""
    x, found = torch.randn(4, 8), []
    for kind, width in ((ColumnParallelLoRALinear, 8), (RowParallelLoRALinear, 4)):
        options = {"config": LoRAConfig(r=2, fp8=None), "tp_group": group}
        torch.manual_seed(1)
        added = kind(8, 8, **options)
        torch.manual_seed(1)
        skipped = kind(8, 8, skip_bias_add=True, **options)
        (y, none), (rest, bias) = added(x[:, :width]), skipped(x[:, :width])
        found.append(none is None and torch.allclose(y, rest + bias, atol=1e-6))
    return found


def norms(mesh: Any) -> tuple[float, float, float]:
    """(torch's norm of the whole model, the split one's, the largest difference of a gradient after clipping)."""
    way = Way("", True, fp8=False, dropout=0.0)
    whole, model = make(way, CPU), make(way, CPU)
    split = parallelize(model, mesh)
    for one in (whole, model):
        loss_of(one, batch(0, CPU)).backward()
    trained = {n: p for n, p in whole.named_parameters() if p.requires_grad}
    expected = torch.nn.utils.clip_grad_norm_(trained.values(), 0.1)
    found = split.clip_grad_norm_(0.1)
    clipped = split.whole_gradients()
    worst = max(float((clipped[n] - p.grad).abs().max()) for n, p in trained.items())
    return float(expected), float(found), worst


def full_on_one_rank(rank: int, mesh: Any) -> str:
    """What is said where rank 1 lacks memory for a part."""
    real = tensor.split_linear

    def split_linear(model: nn.Module, cut_by: tuple[str, str], *rest: Any) -> Any:
        if rank and cut_by[0].endswith("1.mlp.down_proj"):
            raise torch.OutOfMemoryError("no memory")
        return real(model, cut_by, *rest)

    with mock.patch.object(tensor, "split_linear", split_linear):
        return said_by(lambda: parallelize(make(WHOLE, CPU), mesh))


OVERLAPS: dict[str, dict[str, Any]] = {
    "default": {},
    "whole rows": {"sequence_parallel": False},
    "off": {"overlap": False},
}


def worker(rank: int, device: torch.device) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))["tp"]
    before: dict[str, Any] = {}
    for name, (model_of, plan, _) in REFUSED.items():
        model = model_of(rank)
        values = values_of(model)
        said = said_by(lambda m=model, p=plan: parallelize(m, mesh, p))
        before[name] = (said, values == values_of(model))
    for name, rows in (("overlap on CPUs", True), ("overlap of whole rows", False)):
        model = make(WHOLE, CPU)
        values = values_of(model)
        options: dict[str, Any] = {"sequence_parallel": rows, "overlap": True}
        said = said_by(lambda m=model, o=options: parallelize(m, mesh, **o))
        before[name] = (said, values == values_of(model))
    asked = {}
    for name, options in OVERLAPS.items():
        with mock.patch.object(tensor, "row_exchange", wraps=tensor.row_exchange) as exchange:
            parallelize(make(WHOLE, CPU), mesh, **options)
        asked[name] = exchange.call_args.args[3]
    one = make(WHOLE, CPU)
    before["overlap on one"] = (said_by(lambda: parallelize(one, mesh, overlap=rank == 1)), True)
    values = values_of(one)
    for name, other in (("vocabulary", bool(rank)), ("transport", ("auto", "gloo")[rank])):
        said = said_by(lambda n=name, o=other: parallelize(one, mesh, **{n: o}))
        before[f"{name} on one"] = (said, values == values_of(one))
    square = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    before["two dimensions"] = (said_by(lambda: parallelize(make(WHOLE, CPU), square)), True)
    group = dist.group.WORLD
    return {
        "before": before,
        "asked": asked,
        "afterwards": afterwards(mesh),
        "authors": authors(group),
        "vocabularies": vocabularies(mesh),
        "biases": biases(group),
        "drifted": drifted(mesh, rank),
        "full": full_on_one_rank(rank, mesh),
        "norms": norms(mesh),
        "edges": edges(mesh),
    }


@pytest.fixture(scope="module")
def results() -> Any:
    return on_ranks(worker, 2, "gloo")


def test_a_rank_that_lacks_memory_for_a_part_leaves_none_waiting(results: Any) -> None:
    assert [found["full"] for found in results] == ["rank 1: no memory", "no memory"]


@pytest.mark.parametrize("case", REFUSED)
def test_every_rank_refuses_and_nothing_changes(results: Any, case: str) -> None:
    for rank, found in enumerate(results):
        said, unchanged = found["before"][case]
        assert said.removeprefix("rank 0: ").startswith(REFUSED[case][2]), rank
        assert unchanged


def test_a_mesh_of_two_dimensions_is_refused(results: Any) -> None:
    assert all("one dimension" in found["before"]["two dimensions"][0] for found in results)


def test_rows_travel_beside_products_by_default_and_no_rank_needs_it(results: Any) -> None:
    wanted = {"default": None, "whole rows": False, "off": False}
    assert [found["asked"] for found in results] == [wanted] * 2


def test_what_cannot_be_or_one_rank_alone_asks_for_is_refused_before_anything_changes(
    results: Any,
) -> None:
    for name, why in (
        ("overlap on CPUs", "overlap=True needs ranks that read each other's memory"),
        ("overlap of whole rows", "overlap=True needs sequence_parallel=True"),
        ("overlap on one", "overlap differ between rank 0 and rank 1"),
        ("vocabulary on one", "vocabulary differ between rank 0 and rank 1"),
        ("transport on one", "transport differ between rank 0 and rank 1"),
    ):
        for found in results:
            said, unchanged = found["before"][name]
            assert why in said and unchanged, (name, said)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        (
            "fuse",
            "q_proj is split over tensor-parallel ranks: matrices are joined before they are split; call fuse",
        ),
        ("merge", "merge_lora needs the whole layer"),
        ("unload", "unloading needs the whole layer"),
        ("merge_and_unload", "unloading needs the whole layer"),
        ("a sharded optimizer", "is of a layer that parallelize split"),
        ("a sharded base", "the part of layers that parallelize split differs"),
        ("once more", "call parallelize once"),
        ("a copy", "cannot be copied or pickled, as its process group cannot"),
        ("a pickle", "cannot be copied or pickled, as its process group cannot"),
        ("odd rows", "batch · length must be a positive multiple of the 2 ranks, found 3"),
        ("torch.compile", "is split over ranks and cannot be compiled yet"),
        ("float16", "x must be float32 or bfloat16 over ranks, found torch.float16"),
        ("FSDP2", "is a part of a layer that parallelize split, and FSDP2 shards it"),
    ],
)
def test_a_split_model_refuses_what_is_not_there(results: Any, what: str, said: str) -> None:
    for found in results:
        assert said in found["afterwards"][what]


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("N", "output_size must be a multiple of the 2 ranks, found 9"),
        ("K", "input_size must be a multiple of the 2 ranks, found 9"),
        ("gather_output", "gather_output must be False, found True"),
        ("input_is_parallel", "input_is_parallel must be True, found False"),
    ],
)
def test_authors_layers_refuse(results: Any, what: str, said: str) -> None:
    for found in results:
        assert found["authors"][what].startswith(said)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("odd", "the vocabulary must be a multiple of the 2 ranks, found 65"),
        ("hooked", "vocabulary=True replaces the Embedding, which has hooks"),
        (
            "saved",
            "vocabulary=True replaces the Linear, which keeps its values from before training",
        ),
        ("plan", "vocabulary=True needs a model of transformers"),
        ("loss", "loss needs a split head"),
        (
            "logits",
            "takes a model whose loss is of plain logits, found LogitChange(scale=0.125, cap=None)",
        ),
    ],
)
def test_a_vocabulary_that_cannot_be_split_is_refused(results: Any, what: str, said: str) -> None:
    for found in results:
        assert said in found["vocabularies"][what]


def test_a_split_loss_at_its_edges(results: Any) -> None:
    for found in results:
        edge = found["edges"]
        assert edge["none counts"] == (0.0, True) and edge["as without"]
        assert math.isnan(edge["beyond"][0]) and not edge["beyond"][1]
        assert "index out of range" in edge["embedding"]
        assert "input_ids must be in [0, 64), found 1 to 64" in edge["token"]


def test_authors_layers_return_y_and_the_bias_that_was_skipped(results: Any) -> None:
    assert [found["biases"] for found in results] == [[True, True]] * 2


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("nothing", "nothing"),
        ("an adapter", "the values of model.layers.0.self_attn.q_proj.lora_A differ"),
        ("a scale", OTHER_SCALES),
        ("a history", OTHER_SCALES),
        ("a generator", "torch's CPU generator, from which masks draw, differ"),
    ],
)
def test_ranks_that_drift_apart_are_found(results: Any, what: str, said: str) -> None:
    for found in results:
        assert said in found["drifted"][what]


def test_clipping_uses_the_norm_of_the_whole_model(results: Any) -> None:
    """Two orders of fp32 sums: 2^-24 for each of some thousand squares, whose root halves it."""
    for expected, norm, worst in (found["norms"] for found in results):
        assert norm == pytest.approx(expected, rel=1e-5)
        assert worst <= 1e-5 * 0.1
