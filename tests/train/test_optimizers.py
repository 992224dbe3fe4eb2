# SPDX-License-Identifier: Apache-2.0
"""Optimizers and schedules by name: as in torch, transformers and PEFT, skipped steps included."""

from __future__ import annotations

import copy
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lorakernels.train.errors import FinetuneError, OptionError
from lorakernels.train.optimizer.optimizers import FACTORS, Updater, check_package
from lorakernels.train.optimizer.schedule import make_schedule
from lorakernels.train.options.options import FinetuneOptions
from lorakernels.train.options.running import OPTIMS, OWN_SCHEDULE, SCHEDULES
from tests.train.conftest import Cli
from tests.train.replays import assert_same, trained
from tests.train.test_resume import adapter, steps_logged, stop_after

TRUE, FALSE = torch.tensor(True), torch.tensor(False)
HERE = [name for name in OPTIMS if name != "adamw_8bit"]


def parameters(seed: int = 0) -> dict[str, nn.Parameter]:
    torch.manual_seed(seed)
    shapes = {"q.lora_A": (3, 5), "q.lora_B": (7, 3), "norm.weight": (5,)}
    return {name: nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()}


def by_torch(name: str, given: list[nn.Parameter], options: FinetuneOptions) -> Any:
    from transformers import Adafactor

    betas = (options.beta1, options.beta2)
    if name == "sgd":
        return torch.optim.SGD(given, lr=options.lr, momentum=options.beta1)
    if name == "adafactor":
        return Adafactor(given, lr=options.lr, scale_parameter=False, relative_step=False)
    return torch.optim.AdamW(given, lr=options.lr, betas=betas, weight_decay=0.0)


@pytest.mark.parametrize("name", HERE)
def test_updates_are_the_librarys_and_a_step_that_is_not_finite_is_none(name: str) -> None:
    """Also if it is the first one, before the optimizer has any state."""
    options = FinetuneOptions(optim=name, lr=0.1)
    ours, theirs = parameters(), parameters()
    updater = Updater(ours, options)
    reference = by_torch(name, list(theirs.values()), options)
    for step, finite in enumerate((False, True, True, False, True)):
        rate = 0.1 / (step + 1)
        torch.manual_seed(step)
        for key, parameter in theirs.items():
            parameter.grad = torch.randn_like(parameter)
            ours[key].grad = parameter.grad * (1.0 if finite else math.nan)
        before = {key: p.detach().clone() for key, p in ours.items()}
        updater.set_rate(rate)
        updater.step(TRUE if finite else FALSE)
        if not finite:
            assert_same({key: p.detach() for key, p in ours.items()}, before)
            continue
        for group in reference.param_groups:
            group["lr"] = rate
        reference.step()
        for key, parameter in theirs.items():
            torch.testing.assert_close(ours[key], parameter, rtol=1e-5, atol=1e-6)


def test_groups_are_those_of_pefts_loraplus() -> None:
    from peft import LoraConfig, get_peft_model
    from peft.optimizers import create_loraplus_optimizer

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(self.q(x))

    model = get_peft_model(
        Model(), LoraConfig(r=2, target_modules=["q"], modules_to_save=["norm"], bias="all")
    )
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    theirs = create_loraplus_optimizer(
        model, torch.optim.AdamW, lr=0.1, loraplus_lr_ratio=16.0, loraplus_weight_decay=0.3
    )
    options = FinetuneOptions(lr=0.1, loraplus_lr_ratio=16.0, weight_decay=0.3)
    ours = Updater(named, options).optimizer

    def terms(optimizer: torch.optim.Optimizer) -> dict[str, tuple[float, float]]:
        of = {
            id(p): (round(float(group["lr"]), 6), group["weight_decay"])
            for group in optimizer.param_groups
            for p in group["params"]
        }
        return {name: of[id(p)] for name, p in named.items()}

    assert terms(ours) == terms(theirs)
    assert set(terms(ours).values()) == {(0.1, 0.3), (1.6, 0.3), (1.6, 0.0)}


@pytest.mark.parametrize("name", OPTIMS)
def test_every_rate_is_a_multiple_of_the_runs_at_every_step(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """LoRA+'s and a job's own, also after the optimizer's state was loaded, once and once more."""
    made = SimpleNamespace(optim=SimpleNamespace(AdamW8bit=torch.optim.AdamW))
    monkeypatch.setitem(sys.modules, "bitsandbytes", made)
    factors = {"q.lora_A": 1.0, "q.lora_B": 16.0, "norm.weight": 16.0}
    ratios = {"fr": 1.0, "de": 0.5}
    both = {f"{job}: {n}": p for job in ratios for n, p in parameters().items()}
    options = FinetuneOptions(optim=name, lr=0.1, loraplus_lr_ratio=16.0)
    updater = Updater(both, options, lambda path: ratios[path.partition(": ")[0]])

    def rates() -> dict[str, float]:
        groups = updater.optimizer.param_groups
        found = {id(p): float(group["lr"]) for group in groups for p in group["params"]}
        return {path: found[id(p)] for path, p in both.items()}

    for rate in (0.1, 0.03, 0.2, 0.01):
        updater.set_rate(rate)
        expected = {
            f"{job}: {n}": rate * r * f for job, r in ratios.items() for n, f in factors.items()
        }
        assert rates() == pytest.approx(expected, rel=1e-6)  # fp32 tensors hold some of them
        for parameter in both.values():
            parameter.grad = torch.ones_like(parameter)
        updater.step(TRUE)
        updater.load_state_dict(copy.deepcopy(updater.optimizer.state_dict()))


@pytest.mark.parametrize("place", ["fr_lora_B", "q.lora_B.v", "lora_B"])
def test_loraplus_takes_lora_b_alone_whatever_jobs_and_modules_are_called(place: str) -> None:
    """Only the factor itself has the ratio: not what lies in a module, or belongs to a job, of such a name."""
    for path in (f"{place}: q_proj", f"model.{place}.q_proj", f"{place}: {place}.q_proj"):
        factors = {f"{path}.{factor}": nn.Parameter(torch.ones(2, 2)) for factor in FACTORS}
        options = FinetuneOptions(lr=0.1, loraplus_lr_ratio=16.0)
        rates = [float(g["lr"]) for g in Updater(factors, options).optimizer.param_groups]
        assert rates == pytest.approx([0.1, 1.6])


def test_default_is_fused_adamw_that_decays_matrices_only() -> None:
    options = FinetuneOptions(weight_decay=0.5, beta1=0.8, beta2=0.7)
    optimizer = Updater(parameters(), options).optimizer
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.5, 0.0]
    assert optimizer.defaults["fused"] is True and optimizer.defaults["betas"] == (0.8, 0.7)
    rates = [group["lr"] for group in optimizer.param_groups]
    assert rates[0] is rates[1] and isinstance(rates[0], torch.Tensor)


@pytest.mark.parametrize("name", ["adamw_8bit", "adamw_torch"])
def test_8_bit_adamw_is_that_of_bitsandbytes(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    made = SimpleNamespace(optim=SimpleNamespace(AdamW8bit=torch.optim.RAdam))
    monkeypatch.setitem(sys.modules, "bitsandbytes", made)
    check_package(FinetuneOptions(optim=name))
    optimizer = Updater(parameters(), FinetuneOptions(optim=name)).optimizer
    assert isinstance(optimizer, torch.optim.RAdam) is (name == "adamw_8bit")


def test_a_missing_package_is_named_with_the_command_that_brings_it(
    cli: Cli,
    base_args: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    assert cli(*base_args, "--output", tmp_path, "--optim", "adamw_8bit") == 1
    assert "pip install bitsandbytes" in capsys.readouterr().err
    with pytest.raises(FinetuneError, match="bitsandbytes"):
        check_package(FinetuneOptions(optim="adamw_8bit"))


KWARGS = {
    "cosine_with_restarts": '{"num_cycles": 2}',
    "polynomial": '{"power": 2.0}',
    "warmup_stable_decay": '{"num_decay_steps": 4}',
}


@pytest.mark.parametrize("name", SCHEDULES[1:])
def test_schedules_are_those_of_transformers_trainer(name: str) -> None:
    import json

    from transformers import get_scheduler

    options = FinetuneOptions(
        lr=0.3, lr_scheduler_type=name, warmup=3.0, lr_scheduler_kwargs=KWARGS.get(name)
    )
    schedule = make_schedule(options, 12)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.3)
    more = json.loads(KWARGS.get(name, "{}"))
    scheduler = get_scheduler(name, optimizer, 3, 12, more)
    for step in range(12):
        assert schedule(step) == pytest.approx(optimizer.param_groups[0]["lr"], abs=1e-12)
        optimizer.step(), scheduler.step()
    assert schedule(2) == pytest.approx(optimizer.defaults["lr"] * 2 / 3) or name == "constant"


def test_arguments_that_a_schedule_does_not_have_are_named() -> None:
    again = '{"power": 1, "power": 2}'
    for text, said in (
        ("{", "is not JSON"),
        ("[1]", "must be a JSON object"),
        (again, "lr_scheduler_kwargs: one object has 'power' twice"),
    ):
        with pytest.raises(OptionError, match=said):
            FinetuneOptions(
                lr_scheduler_type="cosine", lr_scheduler_kwargs=text
            ).scheduler_arguments()
    with pytest.raises(OptionError, match=f"{OWN_SCHEDULE} takes none, found power"):
        FinetuneOptions(lr_scheduler_kwargs='{"power": 2}').scheduler_arguments()
    options = FinetuneOptions(lr_scheduler_type="linear", lr_scheduler_kwargs='{"power": 2}')
    with pytest.raises(OptionError, match=r"does not suit lr_scheduler_type linear.*power"):
        make_schedule(options, 10)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("polynomial", '{"power": "2"}'),
        ("cosine", '{"num_cycles": "x"}'),
        ("inverse_sqrt", '{"timescale": 0}'),
    ],
)
@pytest.mark.parametrize("warmup", [0.0, 3.0])
def test_wrong_values_of_a_schedule_are_named(name: str, text: str, warmup: float) -> None:
    options = FinetuneOptions(lr_scheduler_type=name, lr_scheduler_kwargs=text, warmup=warmup)
    with pytest.raises(OptionError, match=f"does not suit lr_scheduler_type {name}"):
        make_schedule(options, 10)


@pytest.mark.parametrize("optim", ["sgd", "adamw_torch_fused"])
def test_whole_steps_replay_with_the_optimizers_that_a_graph_holds(make: Any, optim: str) -> None:
    more = {"optim": optim, "loraplus_lr_ratio": 4.0, "lr_scheduler_type": "linear"}
    (eager, _), (whole, said) = make(False, **more), make(True, **more)
    start = trained(whole)
    results = [[trainer.step() for _ in range(5)] for trainer in (eager, whole)]
    assert [r.loss for r in results[0]] == [r.loss for r in results[1]]
    assert [r.replayed for r in results[1]] == [False, False, True, True, True], said
    assert_same(trained(eager), trained(whole))
    found = trained(whole)
    assert not all(torch.equal(found[name], tensor) for name, tensor in start.items())
    eager.close(), whole.close()


@pytest.mark.parametrize("optim", ["adamw_torch", "adafactor"])
def test_others_leave_the_layers_graphs(make: Any, optim: str) -> None:
    (eager, _), (layers, said) = make(False, optim=optim), make(True, optim=optim)
    assert layers.runtime.scope == "layer"
    results = [[trainer.step() for _ in range(5)] for trainer in (eager, layers)]
    assert [r.loss for r in results[0]] == [r.loss for r in results[1]]
    assert results[1][-1].replayed, said
    eager.close(), layers.close()


@pytest.mark.slow
@pytest.mark.parametrize("optim", HERE)
def test_a_resumed_run_is_the_whole_run(
    cli: Cli, base_args: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optim: str
) -> None:
    run = [*base_args, "--steps", 6, "--save-every", 0, "--optim", optim, "--lr-scheduler-type"]
    run += ["polynomial", "--loraplus-lr-ratio", 4, "--weight-decay", 0.1]
    assert cli(*run, "--output", tmp_path / "whole") == 0
    with monkeypatch.context() as patch:
        stop_after(patch, 3)
        assert cli(*run, "--output", tmp_path / "cut") == 130
    assert cli(*run, "--output", tmp_path / "cut", "--resume") == 0
    assert steps_logged(tmp_path / "cut") == list(range(1, 7))
    assert adapter(tmp_path / "cut") == adapter(tmp_path / "whole")
