# SPDX-License-Identifier: Apache-2.0
"""lib/layouts.py: ranks in every way train on the rows of one process, and get its gradients."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lorakernels.parallel.ranks import comm
from tests.distributed.test_split_graphs import own_rows_of_the_sum
from tests.graphs.fake import FakeBackend
from tests.processes import on_ranks

ROWS = 8  # of a step
WAYS = {
    2: ("dp", "sharded", "tp 2", "cp 2"),
    4: ("dp", "tp 2", "tp 4, not fused", "sharded x cp 2", "tp 2 x cp 2"),
    8: ("sharded", "tp 2", "tp 8", "cp 8", "tp 4 x cp 2", "tp 2 x cp 2"),
}


def trained(way: Any, spec: Any, device: torch.device) -> tuple[Tensor, Tensor]:
    """(the loss of each replica's first row, all gradients) of one step on ROWS rows."""
    from benchmarks.lib.layouts import Layout
    from benchmarks.peers.models import token_rows

    layout = Layout(way, spec, device)
    text = token_rows(spec.length, ROWS).view(ROWS, 1, spec.length)
    rows = ROWS if way.alone else ROWS // way.replicas
    replica = 0 if way.alone else layout.mesh["dp"].get_local_rank()
    loss = layout.step(text[replica * rows :][:rows])
    layout.check()  # replicas, and ranks of one, have equal adapters after it
    layout.close()
    if layout.split is not None:
        found = layout.split.whole_gradients()
    else:
        found = {n: p.grad for n, p in layout.model.named_parameters() if p.grad is not None}
    return loss, torch.cat([found[name].flatten() for name in sorted(found)])


def every_way(rank: int, device: torch.device, names: tuple[str, ...]) -> dict[str, Any]:
    """{way: (its loss ÷ one process's − 1, how far its gradients are, relative to their norm)}."""
    from benchmarks.lib.layouts import Layout, Way
    from benchmarks.peers.models import SPECS, token_rows

    Layout.dropout = (
        0.0  # masks of replicas, and of a row over ranks, are others than of one process
    )
    spec, ranks = SPECS["tiny-8"], dist.get_world_size()
    one = Way.of("alone", ranks)
    torch.manual_seed(0)
    whole = Layout(one, spec, device)
    text = token_rows(spec.length, ROWS).view(ROWS, 1, spec.length)
    losses = [whole.loss(row).detach() for row in text]
    torch.manual_seed(0)
    _, expected = trained(one, spec, device)
    found = {}
    for name in names:
        torch.manual_seed(0)
        way = Way.of(name, ranks)
        loss, gradients = trained(way, spec, device)
        row = rank // (ranks // way.replicas) * (ROWS // way.replicas)
        off = float((gradients - expected).norm() / expected.norm())
        found[name] = float(loss / losses[row] - 1), off
    return found


@pytest.mark.slow
@pytest.mark.parametrize("ranks", WAYS)
def test_a_step_of_all_ways_is_that_of_one_process(ranks: int) -> None:
    """Rows of a step are dealt to replicas, and their gradients averaged. Sums have another order: in fp32 that is
    1e-7, but over FP8 a rounding may turn (0.7 to 1.4 % were seen), and in a first step ranks that share a row cast
    their tokens by amaxes of their own (2.2 to 3 %). Without an average, or with a row twice, it is above 30 %.
    """
    for rank, ways in enumerate(on_ranks(every_way, ranks, "gloo", WAYS[ranks])):
        for name, (loss, gradients) in ways.items():
            bound = 0.06 if "cp" in name else 0.03 if "tp" in name else 1e-5
            assert abs(loss) < 5e-4 and gradients < bound, (rank, name, loss, gradients)


def chosen(rank: int, device: torch.device) -> dict[str, Any]:
    """{way: [(the plan's choice, what layers keep), …]}, and the room of a rank that has more than the other."""
    from benchmarks.lib import layouts
    from benchmarks.peers.models import SPECS
    from benchmarks.peers.training import NO_LIMIT, Ours
    from lorakernels.parallel.ranks.exchange import LEAST

    found: dict[str, Any] = {}
    for name in ("dp", "tp 2", "cp 2"):
        way = layouts.Way.of(name, 2)
        for mix in (["recompute", "full"], ["fp8", "fp8"], ["checkpoint", "fp8"]):
            with mock.patch.object(layouts, "saves_within", return_value=mix) as planned:
                layout = layouts.Layout(way, SPECS["tiny-8"], device)
            size, batch, room, _ = planned.call_args.args
            assert (batch.tp, batch.ranks) == (way.tp, way.cp) and size.trained > 0
            # a CPU's, less what GPUs would exchange rows in
            assert NO_LIMIT - room == (0 if name == "dp" else LEAST)
            found.setdefault(name, []).append((mix, [*layout.saves]))
    with mock.patch.object(Ours, "room", lambda self, trained: 1000 + rank - trained):
        found["room"] = layout.room(7)
    return found


@pytest.mark.slow
def test_layers_keep_what_the_plan_chooses_on_all_ranks_alike() -> None:
    """`fuse` counts the parts of split layers by their own sizes, and gets a budget that gives the plan's choice."""
    for ways in on_ranks(chosen, 2, "gloo"):
        assert ways.pop("room") == 993
        assert [*ways] == ["dp", "tp 2", "cp 2"]
        for name, pairs in ways.items():
            assert all(planned == kept for planned, kept in pairs), (name, pairs)


def replayed_rows(rank: int, device: torch.device) -> list[float]:
    """How far the gradients of replayed steps are from those of eager ones: of 1, 1, 4 and 4 rows."""
    from lorakernels.graphs import GraphManager, GraphOptions

    from benchmarks.lib.layouts import Layout, Way
    from benchmarks.peers.models import SPECS, token_rows
    from lorakernels.fusion.over_ranks import together_of

    Layout.dropout = 0.0
    spec, layouts = SPECS["tiny"], []
    for _ in range(2):
        torch.manual_seed(0)
        layouts.append(Layout(Way.of("tp", dist.get_world_size()), spec, device))
    eager, graphed = layouts
    layers = graphed.model.model.layers
    options = GraphOptions(backend=FakeBackend, together=together_of(layers))
    states: dict[str, Any] = {"fp8_state": graphed.state, "rng_states": [graphed.rng]}
    graphed.manager = GraphManager(layers, warmup_steps=1, options=options, **states)
    graphed.graphs = "layer"
    text = token_rows(spec.length, 10).view(10, 1, spec.length)
    with pytest.raises(ValueError, match="give it one row, not 4"):
        graphed.step(text[:4])
    found = []
    with mock.patch.object(comm, "sum_rows", own_rows_of_the_sum), sdpa_kernel(SDPBackend.MATH):
        for rows in text.split([1, 1, 4, 4]):
            losses = [layout.step(rows) for layout in layouts]
            pairs = zip(eager.trained, graphed.trained, strict=True)
            found.append(max(float((a.grad - b.grad).abs().max()) for a, b in pairs))
            found.append(float((losses[0] - losses[1]).abs()))
    assert graphed.manager.replayed == 9
    graphed.close()
    return found


@pytest.mark.slow
def test_graphs_of_one_row_serve_all_rows_of_a_step() -> None:
    """Each row is an iteration of its own, whose gradients are added to those of the rows before it."""
    assert on_ranks(replayed_rows, 2, "gloo") == [[0.0] * 8] * 2


def test_replicas_that_drift_apart_are_found() -> None:
    assert on_ranks(drifted, 2, "gloo") == ["replicas have other adapters"] * 2


def drifted(rank: int, device: torch.device) -> str:
    from benchmarks.lib.layouts import Layout, Way
    from benchmarks.peers.models import SPECS

    layout = Layout(Way.of("dp", 2), SPECS["tiny"], device)
    layout.check()
    with torch.no_grad():
        layout.trained[3][0, 0] += 1e-3 * rank
    try:
        layout.check()
    except ValueError as error:
        return str(error)
    return ""


def test_names_of_ways() -> None:
    from benchmarks.lib.layouts import Way

    found = Way.of("tp 2 x cp 2, eager, frozen", 8)
    assert (found.tp, found.cp, found.replicas) == (2, 2, 2) and found.adapted == "one"
    assert (Way.of("cp", 8).cp, Way.of("cp", 8).replicas) == (8, 1)
    assert (Way.of("tp x cp 2", 8).tp, Way.of("dp", 8).replicas) == (4, 8)
    shared = Way.of("sharded x cp 4", 8)
    assert shared.sharded and (shared.cp, shared.replicas) == (4, 2)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("pp 2", "joins"),
        ("tp 0", "joins"),
        ("dp 2", "joins"),
        ("tp 2 x tp 2", "joins"),
        ("tp 3", "multiple of 3 ranks, found 8"),
        ("tp 4 x cp 4", "multiple of 16 ranks"),
        ("dp x tp 2", "by themselves"),
        ("sharded x tp 2", "without a sharded base"),
        ("cp 2, in turn", "variants of 'tp'"),
        ("tp, graphs", "must be of"),
    ],
)
def test_what_is_no_way(name: str, reason: str) -> None:
    from benchmarks.lib.layouts import Way

    with pytest.raises(ValueError, match=reason):
        Way.of(name, 8)
