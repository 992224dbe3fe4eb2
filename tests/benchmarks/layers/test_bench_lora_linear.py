# SPDX-License-Identifier: Apache-2.0
"""bench_lora_linear's peers: the checks pass what is right and catch what has been wrong in such layers elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.benchmarks.aliases import Load, RowsOf, Run

SHAPE, RANK, P = "64x96x128", 16, 0.25
CPU = torch.device("cpu")
ON_CPU = ("linear bf16, no lora", "peft bf16", "hand autograd bf16", "ours bf16", "ours fp8")
Masks = Callable[[Tensor], dict[str, Tensor]]


def by_formula(base: ModuleType, masks: Masks, change: dict[str, float] | None = None) -> Any:
    """A peer that computes y, dx, dA and dB, each under the mask that `masks` gives it and times its `change`."""

    class ByFormula(base.Peer):  # type: ignore[name-defined,misc]
        fp8 = False

        def step(self) -> tuple[Tensor, ...]:
            c = self.case
            keep = (torch.rand(c.x.shape) >= c.p).float() / (1 - c.p)
            of = {**dict.fromkeys(("base", "y", "dx", "dA", "dB"), keep), **masks(keep)}
            of["base"] = masks(keep).get("base", torch.ones_like(keep))
            scale = {**dict.fromkeys(("y", "dx", "dA", "dB"), 1.0), **(change or {})}
            s, ds = (c.x * of["y"]) @ c.lora_A.t(), c.scaling * c.dy @ c.lora_B
            y = (
                (c.x * of["base"]) @ c.weight.t()
                + c.bias
                + scale["y"] * c.scaling * s @ c.lora_B.t()
            )
            dx = c.dy @ c.weight + scale["dx"] * of["dx"] * (ds @ c.lora_A)
            dB = scale["dB"] * c.scaling * c.dy.t() @ ((c.x * of["dB"]) @ c.lora_A.t())
            return y, dx, scale["dA"] * ds.t() @ (c.x * of["dA"]), dB

    return ByFormula


def right(keep: Tensor) -> dict[str, Tensor]:
    return {}


def other(keep: Tensor) -> Tensor:
    return keep.roll(1, 1)


@pytest.mark.parametrize(
    ("masks", "change", "check"),
    [
        (right, {}, "ok"),
        (right, {"y": 0.5}, "WRONG: y "),
        (right, {"dx": 0.0}, "WRONG: dx "),
        (right, {"dA": 2.0}, "WRONG: dA "),
        (right, {"dB": 2.0}, "WRONG: dB "),
        (lambda k: {"y": other(k), "dB": other(k)}, {}, "WRONG: dropout: y "),
        (lambda k: {"dA": other(k)}, {}, "WRONG: dropout: dA "),
        (lambda k: {"dB": other(k)}, {}, "WRONG: dropout: dB "),
        (lambda k: {"dx": torch.ones_like(k)}, {}, "WRONG: dropout: keeps 1.0000 of dx"),
        (
            lambda k: dict.fromkeys(("y", "dx", "dA", "dB"), k.ne(0).float()),
            {},
            "WRONG: dropout: y ",
        ),
    ],
    ids=[
        "right",
        "scaling-forgotten",
        "no-lora-in-dx",
        "dA-doubled",
        "dB-doubled",
        "another-mask-in-forward",
        "another-mask-for-dA",
        "another-mask-for-dB",
        "dx-without-mask",
        "kept-but-not-scaled-up",
    ],
)
def test_a_wrong_layer_is_not_timed(
    masks: Masks,
    change: dict[str, float],
    check: str,
    load: Load,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench, base = load("layers.bench_lora_linear"), load("peers.base")
    monkeypatch.setitem(bench.PEERS, "peft bf16", by_formula(base, masks, change))
    peer, columns = bench.checked("peft bf16", base.make_case(SHAPE, RANK, P, CPU), {})
    assert columns["check"].startswith(check), columns
    assert (peer is None) == (check != "ok")


@pytest.mark.parametrize("name", ON_CPU)
def test_the_peers_of_this_machine_are_right(name: str, load: Load) -> None:
    bench, base = load("layers.bench_lora_linear"), load("peers.base")
    peer, columns = bench.checked(name, base.make_case(SHAPE, RANK, P, CPU), {})
    assert columns["check"] == "ok" and peer is not None
    assert len(peer.step()) == (4 if peer.has_lora else 2)


def test_every_peer_has_a_row_and_ours_have_numbers(load: Load, run: Run, rows_of: RowsOf) -> None:
    bench = load("layers.bench_lora_linear")
    assert run(bench, "--shapes", "64x96x128") == 0
    rows = {row["provider"]: row for row in rows_of("lora_linear")}
    assert set(rows) == set(bench.PEERS)
    assert {"÷ te base", "weight B/param", "device", "commit"} <= set(rows["ours fp8"])
    assert all(float(rows[name]["ms"]) > float(rows[name]["fwd ms"]) > 0 for name in ON_CPU)


@pytest.mark.gpu
def test_the_peers_of_the_gpu_are_right_or_say_why_not(load: Load) -> None:
    bench, base = load("layers.bench_lora_linear"), load("peers.base")
    case = base.make_case("512x768x1024", RANK, 0.1, torch.device("cuda"))
    checks = {name: bench.checked(name, case, {})[1]["check"] for name in bench.PEERS}
    assert not {name: check for name, check in checks.items() if "WRONG" in str(check)}
    assert all(checks[name] == "ok" for name in checks if name.startswith(("ours", "cublaslt")))


def test_the_full_set_builds_and_checks_a_layer_once_for_all_rows(
    load: Load,
    run: Run,
    rows_of: RowsOf,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = load("layers.bench_lora_linear")
    small = {"FULL_WEIGHTS": [(48, 32)], "FULL_ROWS": (8, 24), "FULL_RANKS": (4, 8)}
    for name, value in small.items():
        monkeypatch.setattr(bench, name, value)
    checks, checked, shapes = [], bench.checked, []
    monkeypatch.setattr(bench, "checked", lambda *args: checks.append(args) or checked(*args))
    of = bench.samples_of
    monkeypatch.setattr(
        bench, "samples_of", lambda call, *a: shapes.append(call.__self__.x.shape) or of(call, *a)
    )
    assert run(bench, "--full", "--budget-s", 1) == 0
    rows = rows_of("lora_linear_full")
    assert len(checks) == 2 * len(bench.SWEEP) and len(rows) == 2 * len(checks)
    timed = [(r["shape MxNxK"], r["rank"]) for r in rows if r["provider"] == "ours fp8" and r["ms"]]
    assert timed == [(f"{m}x48x32", r) for r in ("4", "8") for m in (8, 24)]
    assert {tuple(shape) for shape in shapes} == {(8, 32), (24, 32)}, "each with its own x"


def test_a_graph_takes_no_other_rows(
    load: Load, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = load("layers.bench_lora_linear")
    with pytest.raises(SystemExit):
        run(bench, "--full", "--providers", "ours fp8", "ours fp8, graphed")
    assert "found ours fp8, graphed" in capsys.readouterr().err


def test_a_budget_is_spread_over_the_timings_that_are_left(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, now = load("layers.bench_lora_linear"), [0.0]
    monkeypatch.setattr(bench.time, "perf_counter", lambda: now[0])
    budget = bench.Budget(10.0, 100)
    assert budget.share() == pytest.approx(bench.SHARE * 0.1)
    now[0] = 5.05
    assert budget.share() == pytest.approx(bench.SHARE * 4.95 / 99)
    now[0] = 20.0
    assert budget.share() == 0.0, "nothing is left: as few samples as there may be"
