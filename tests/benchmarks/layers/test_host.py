# SPDX-License-Identifier: Apache-2.0
"""bench_host: rows and ratios of every kind; what is wrong is not timed; no sample has waiting in it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.benchmarks.aliases import Load, RowsOf, Run
from tests.graphs.fake import FakeBackend

CPU = torch.device("cpu")
NEVER = float("inf")


@pytest.fixture
def bench(load: Load) -> Any:
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    return load("layers.bench_host")


@pytest.fixture
def providers(bench: Any, load: Load) -> Any:
    return load("lib.host_providers")


@pytest.fixture
def entered(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """One entry for each time that something went without recordings."""
    found: list[str] = []

    @contextmanager
    def without_recordings() -> Iterator[None]:
        found.append("entered")
        yield

    routing = SimpleNamespace(without_recordings=without_recordings)
    monkeypatch.setitem(sys.modules, "lorakernels.recorded.routing", routing)
    return found


def linear_case(shape: str, p: float, device: torch.device) -> Any:
    from benchmarks.peers.base import make_case  # it needs more than torch

    return make_case(shape, 16, p, device)


def test_every_row_is_ok(
    bench: Any,
    providers: Any,
    run: Run,
    rows_of: RowsOf,
    entered: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(providers, "BACKEND", FakeBackend)
    assert run(bench) == 0
    rows = rows_of("host")
    by_case: dict[tuple[str, str], list[dict[str, str]]] = {}
    for row in rows:
        by_case.setdefault((row["kind"], row["case"]), []).append(row)
    assert [kind for kind, _ in by_case] == ["linear", "linear", "layer", "step"]
    gone = {("step", "ours, fused, replayed"): "needs a GPU"}
    for (kind, _), case in by_case.items():
        names = bench.LINEARS if kind == "linear" else bench.RECIPES
        assert [row["provider"] for row in case] == [*names]
        for row in case:
            assert row["check"] == gone.get((kind, row["provider"]), "ok"), row
            assert bool(row["µs"]) == (row["check"] == "ok") == (row["samples"] == "2")
            assert bool(row["fwd µs"]) == (row["check"] == "ok" and kind != "step")
        peft, ours = case[0], case[1]
        assert peft["÷ peft"] == peft["least ÷ peft"] == "1.0" and float(peft["µs"]) > 0
        assert float(ours["÷ peft"]) == round(float(ours["µs"]) / float(peft["µs"]), 3)
    assert entered


def test_without_recordings_to_go_without_a_row_says_so(
    providers: Any, bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "lorakernels.recorded.routing", None)
    makes = bench.linear_cases(True, CPU)["64 -> 64, 32 tokens, p = 0.1"]
    chosen = {name: makes[name] for name in ("ours, by the ops", "linear bf16, no lora")}
    found = bench.bench_case(chosen, CPU, 1, NEVER)
    assert found["ours, by the ops"]["check"].startswith("there are no recordings to go without (")
    assert found["ours, by the ops"]["µs"] == "" and found["linear bf16, no lora"]["µs"] > 0


def test_all_of_an_iteration_is_without_recordings(providers: Any, entered: list[str]) -> None:
    case = linear_case("32x64x64", 0.0, CPU)
    make, within = providers.LINEARS["ours, by the ops"]
    (work,) = providers.make_linears(make, within, case, ExitStack()).works
    before = len(entered)
    work.sample(CPU)
    assert len(entered) == before + 2, (
        "once for the sample, once for the call that finds its length"
    )


def test_a_chain_is_layers_behind_each_other_and_adds_no_gradients(providers: Any) -> None:
    x, dy, w = (torch.randn(3, 3) for _ in range(3))
    w.requires_grad_()
    calls = [lambda y: y @ w, lambda y: (2 * y,)]
    work = providers.chain(calls, x.requires_grad_(), dy, [w], lambda: None, providers.nullcontext)
    for _ in range(2):
        assert torch.equal(work.run(), 2 * (x @ w)) and work.units == 2
    torch.testing.assert_close(x.grad, 2 * dy @ w.t())
    torch.testing.assert_close(w.grad, 2 * x.t() @ dy)


@pytest.mark.parametrize("kind", ["layer", "step"])
@pytest.mark.parametrize("change", ["nothing", "weights", "gradients of B"])
def test_what_is_not_the_model_of_pefts_is_not_timed(
    kind: str, change: str, bench: Any, providers: Any
) -> None:
    """The head's weights change the loss; the gradients of B are looked at after layers only."""

    class Other(providers.HfPeft):  # type: ignore[name-defined,misc]
        def build(self) -> Any:
            model = super().build()
            with torch.no_grad():
                if change == "weights":
                    model.model.layers[0].mlp.down_proj.weight.mul_(-1)
                    model.lm_head.weight.mul_(300)
            if change == "gradients of B":
                for name, parameter in model.named_parameters():
                    if "lora_B" in name:
                        parameter.register_hook(lambda grad: 2 * grad)
            return model

    make = providers.make_layers if kind == "layer" else providers.make_step
    recipes = {"hf + peft bf16": providers.HfPeft, "ours, fused": Other}
    spec = bench.SPECS["tiny"]
    makes = {n: partial(make, providers.Recipe(r), spec, CPU) for n, r in recipes.items()}
    found = bench.bench_case(makes, CPU, 1, NEVER)
    wrong = {"weights": {"layer": "WRONG: y ", "step": "WRONG: loss "}[kind]}
    wrong |= {"gradients of B": "WRONG: dB "} if kind == "layer" else {}
    assert found["ours, fused"]["check"].startswith(wrong.get(change, "ok"))
    assert (found["ours, fused"]["µs"] == "") == (change in wrong)
    assert found["hf + peft bf16"]["check"] == "ok"


def test_without_peft_a_row_says_that_it_is_compared_with_nothing(
    bench: Any, providers: Any
) -> None:
    make = partial(providers.make_step, providers.RECIPES["ours, fused"], bench.SPECS["tiny"], CPU)
    found = bench.bench_case({"ours, fused": make}, CPU, 1, NEVER)["ours, fused"]
    assert found["check"] == "ok (there is no PEFT to compare with)" and found["samples"] == 1


def test_a_linear_layer_that_is_wrong_is_not_timed(bench: Any, providers: Any) -> None:
    class Wrong(providers.Frozen):  # type: ignore[name-defined,misc]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 1.5 * super().forward(x)

    def broken(case: Any) -> Any:
        raise ValueError("no such width")

    case = linear_case("32x64x64", 0.0, CPU)
    makes = {
        name: partial(providers.make_linears, make, providers.nullcontext, case)
        for name, make in (("ours", Wrong), ("ours, broken", broken), ("broken", broken))
    }
    found = bench.bench_case(makes, CPU, 1, NEVER)
    assert str(found["ours"]["check"]).startswith("WRONG: y ") and found["ours"]["µs"] == ""
    assert found["ours, broken"]["check"] == "WRONG: ValueError: no such width"
    assert found["broken"]["check"] == "raised: ValueError: no such width"


class Gate:
    """An event behind a spin: reached after `short` spins already, before the host is done."""

    def __init__(self, short: int) -> None:
        self.short = short
        self.leads: list[float] = []

    def spin(self, seconds: float, device: torch.device) -> Any:
        if not seconds:
            return None
        self.leads.append(seconds)
        return SimpleNamespace(query=lambda: len(self.leads) <= self.short)


def test_a_spin_that_ends_too_early_is_repeated_longer(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    host_time, gate = load("lib.host_time"), Gate(2)
    monkeypatch.setattr(host_time, "_spin", gate.spin)
    work = host_time.Work(lambda: 1, lambda y: None)
    for _ in range(3):
        work.sample(CPU)
    assert len(work.samples) == 3 and len(gate.leads) == 5
    first, *rest = gate.leads
    assert rest == [2 * first, 4 * first, 4 * first, 4 * first]


def test_who_waits_or_fails_has_no_numbers_and_stops_no_other(
    bench: Any, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    host_time, gate = load("lib.host_time"), Gate(10**6)
    monkeypatch.setattr(host_time, "_spin", gate.spin)
    waits = host_time.Work(lambda: 1, lambda y: None)
    step = host_time.Work(lambda: 1, None, spins=False)
    fails = host_time.Work([0, 0, 1].pop, lambda y: 1 / y)
    works = {"waits": [waits], "ours": [fails], "step": [step]}
    failed = host_time.sample_in_turn(works, CPU, 4, NEVER)
    texts = {name: bench.why(name, problem) for name, problem in failed.items()}
    assert [*texts] == ["waits", "ours"] and texts["waits"].startswith(
        "the host waits for the device"
    )
    assert texts["ours"] == "WRONG: ZeroDivisionError: division by zero"
    assert max(gate.leads) == host_time.LONGEST and host_time.columns([waits], CPU)["µs"] == ""
    assert host_time.columns([step], CPU)["samples"] == 4


def test_the_time_that_is_left_ends_the_rounds(load: Load) -> None:
    host_time = load("lib.host_time")
    order: list[str] = []
    works = {n: [host_time.Work(partial(order.append, n), None, spins=False)] for n in "ab"}
    assert host_time.sample_in_turn(works, CPU, 50, 0.0) == {}
    assert [len(works[n][0].samples) for n in "ab"] == [host_time.FEWEST] * 2 == [3, 3]
    turns = [name for i, name in enumerate(order) if i == 0 or order[i - 1] != name]
    assert "".join(turns) == "abab", "in order, in reverse order, in order"


def test_columns_are_of_one_layer(load: Load) -> None:
    """Medians 30 and 110 µs, least 20 and 80, forward half of it: a slope over 4 − 1 layers, or ÷ 8."""
    host_time = load("lib.host_time")

    def work(units: int, *both: float) -> Any:
        made = host_time.Work(lambda: None, lambda y: None, units=units)
        made.samples += [host_time.Sample(b / 2e6, b / 1e6, 0.0, 0) for b in both]
        return made

    short, long = work(1, 20, 30, 70), work(4, 80, 110, 500)
    found = host_time.columns([short, long], CPU)
    assert (found["least µs"], found["µs"], found["fwd µs"]) == (20.0, 26.7, 13.3)
    found = host_time.columns([work(8, 80, 160, 800)], CPU)
    assert (found["least µs"], found["µs"], found["fwd µs"]) == (10.0, 20.0, 10.0)


@pytest.mark.gpu
def test_every_row_of_the_gpu_is_ok(bench: Any, providers: Any) -> None:
    """Tiny models; a row that needs recordings may lack them, but nothing of ours may be wrong or wait."""
    device, spec = torch.device("cuda"), bench.SPECS["tiny"]
    case = linear_case("128x256x256", 0.1, device)
    kinds = [{n: partial(providers.make_linears, *m, case) for n, m in bench.LINEARS.items()}]
    for make in (providers.make_layers, providers.make_step):
        kinds.append({n: partial(make, r, spec, device) for n, r in bench.RECIPES.items()})
    for makes in kinds:
        found = bench.bench_case(makes, device, 3, NEVER)
        for name, row in found.items():
            if not str(row["check"]).startswith("there are no recordings"):
                assert row["check"] == "ok" and row["samples"] == 3, (name, row)


@pytest.mark.gpu
@pytest.mark.parametrize("waits_for", ["a value", "room in the queue", "nothing"])
def test_a_spin_shows_who_waits(waits_for: str, load: Load) -> None:
    """The queue takes about 1,024 launches."""
    host_time, device = load("lib.host_time"), torch.device("cuda")
    x = torch.ones(8, device=device)

    def forward() -> None:
        for _ in range(20_000 if waits_for == "room in the queue" else 200):
            x.add_(1)
        if waits_for == "a value":
            x[0].item()

    work = host_time.Work(forward, None)
    if waits_for == "nothing":
        work.sample(device)
        assert len(work.samples) == 1 and work.samples[0].behind > 0
        return
    with pytest.raises(host_time.HostWaited):
        work.sample(device)
