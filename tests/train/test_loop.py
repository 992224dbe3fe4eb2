# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lorakernels import LoRAConfig, apply_lora, disable_lora, quantize_head
from lorakernels.train.data.packing import PackedRows, RowOrder
from lorakernels.train.errors import CheckpointError, Diverged
from lorakernels.train.files.checkpoint import Checkpoint
from lorakernels.train.model.loss import chunked_cross_entropy
from lorakernels.train.model.model import hidden_states, load_model, save_activations, summed_loss
from lorakernels.train.optimizer.schedule import learning_rate, warmup_steps
from lorakernels.train.options.options import FinetuneOptions
from lorakernels.train.ranks.ranks import STEP, RunRanks
from lorakernels.train.run import loop
from lorakernels.train.run.loop import Trainer, evaluate, evaluation_batches
from lorakernels.train.run.metrics import MetricsLog, plot_losses, read_metrics

MakeTrainer = Callable[..., Trainer]


@pytest.fixture
def rows() -> PackedRows:
    """Six rows of 24 with 13 to 24 targets each: more than half, so that no two documents share a row."""
    text = (b"the quick brown fox jumps over the lazy dog; " * 3)[:116]
    lengths = np.array([25, 14, 20, 16, 23, 18])
    stops = np.cumsum(lengths)
    return PackedRows(
        np.frombuffer(text, dtype=np.uint8), np.stack([stops - lengths, stops], 1), 24
    )


@pytest.fixture
def trainer(model_dir: Path, rows: PackedRows) -> MakeTrainer:
    def make(fp8: bool = False, dropout: float = 0.0, **options: Any) -> Trainer:
        model = load_model(model_dir, torch.float32, torch.device("cpu"))
        torch.manual_seed(1)
        config: dict[str, Any] = {"r": 4, "lora_dropout": dropout, "target_modules": "all-linear"}
        report = apply_lora(model, LoRAConfig(**config) if fp8 else LoRAConfig(**config, fp8=None))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(std=0.1)
        made = Trainer(
            model, FinetuneOptions(seq_len=24, steps=20, lr=1e-2, **options), rows, report.fp8_state
        )
        return made

    return make


class Recording(RunRanks):
    """Two ranks, of which the other adds nothing."""

    def add_up_gradients(
        self, parameters: Sequence[torch.Tensor], *others: torch.Tensor
    ) -> list[torch.Tensor]:
        said.append("sum")
        return [p.grad for p in parameters if p.grad is not None]

    def add_up(self, tensors: Sequence[torch.Tensor]) -> None:
        pass


said: list[str] = []


def keep_a_record(
    trainer: Trainer, size: int, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In `said`: waits for the device, forwards, backwards and sums. A step takes `seconds` times LONG."""
    clock, real = [0.0], loop.mean_loss
    trainer.ranks, trainer.rows_per_step = Recording(0, size), size * trainer.rows_per_step
    monkeypatch.setattr(loop, "wait_for", lambda device: said.append("wait"))

    def later() -> float:
        clock[0] += seconds * loop.LONG
        return clock[0]

    def forward(*args: Any) -> torch.Tensor:
        said.append("forward")
        loss = real(*args)
        loss.register_hook(lambda _: said.append("backward"))
        return loss

    monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=later))
    monkeypatch.setattr(loop, "mean_loss", forward)
    said.clear()


@pytest.mark.parametrize(("size", "seconds"), [(2, 0.9), (2, 1.1), (1, 1.1)])
def test_the_host_stays_near_the_device_in_long_steps(
    size: int, seconds: float, trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL gives up 60 s after a collective was launched. Nobody knows how long the first step takes."""
    made = trainer(batch_size=1, grad_accum=2)
    keep_a_record(made, size, seconds, monkeypatch)
    for _ in range(2):
        made.step()
    made.close()
    step = ["forward", "backward"] * 2 + ["sum"]
    near = [each for work in step for each in ("wait", work)]
    first, second = size == 2, size == 2 and seconds > 1
    assert said == [*(near if first else step), *(near if second else step)]
    assert STEP.total_seconds() > 2 * loop.LONG


def test_stages_and_evaluations_over_ranks_stay_near_the_device(
    trainer: MakeTrainer, rows: PackedRows, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = trainer(batch_size=1)
    keep_a_record(made, 2, 1.1, monkeypatch)

    def through_stages(batches: Any, items: Any, begins: Callable[[], None]) -> torch.Tensor:
        begins()
        said.append("stages")
        return torch.zeros(())

    made.stages = SimpleNamespace(forward_backward=through_stages)  # type: ignore[assignment]
    made.step()
    made.close()
    assert said == ["wait", "stages", "wait", "sum"]
    for size in (1, 2):
        said.clear()
        evaluate(made.model, rows, made.options, Recording(0, size))
        own = len(rows) // size  # one row a batch
        assert said == ["wait"] * own * (size > 1)


def gradients(trainer: Trainer) -> tuple[dict[str, torch.Tensor], float]:
    trainer.optimizer.step = lambda: None  # type: ignore[method-assign]
    trainer.options.max_grad_norm = 0.0
    result = trainer.step()
    trainer.close()
    return {
        name: p.grad.clone() for name, p in trainer.trainable.items() if p.grad is not None
    }, result.loss


def test_one_times_four_equals_four_times_one(trainer: MakeTrainer, rows: PackedRows) -> None:
    """Loss and gradients of a step do not depend on how its rows are cut, though the rows hold unequal counts."""
    one = trainer(batch_size=1, grad_accum=4)
    counts = [rows.batch([n]).targets for n in one.order.take(0, 4)[0]]
    assert len(set(counts)) > 1, f"the rows must be uneven for this test, found {counts}"
    (many, many_loss), (few, few_loss) = (
        gradients(one),
        gradients(trainer(batch_size=4, grad_accum=1)),
    )
    assert many_loss == pytest.approx(few_loss, rel=1e-6)
    assert many.keys() == few.keys() and many
    for name in few:  # fp32 sums of up to 96 tokens in another order
        torch.testing.assert_close(
            many[name], few[name], rtol=1e-4, atol=1e-5 * float(few[name].abs().max())
        )


def test_gradient_is_of_the_mean_over_tokens(trainer: MakeTrainer, rows: PackedRows) -> None:
    made = trainer(batch_size=2, grad_accum=2)
    found, loss = gradients(made)
    made.model.zero_grad()
    batch = rows.batch(made.order.take(0, 4)[0])
    expected = summed_loss(made.model, batch, 1000) / batch.targets
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-6)
    for name, parameter in made.trainable.items():
        assert parameter.grad is not None
        torch.testing.assert_close(
            found[name], parameter.grad, rtol=1e-4, atol=1e-5 * float(parameter.grad.abs().max())
        )


def test_loss_falls_and_scales_are_updated_once_per_step(
    trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = trainer(fp8=True, dropout=0.1, batch_size=2, grad_accum=2)
    state = made.fp8_state
    assert state is not None and state.in_charge == "explicit"
    calls: list[int] = []
    real = state.reduce_and_update
    monkeypatch.setattr(
        state, "reduce_and_update", lambda: (calls.append(made.counters.step), real())
    )
    losses = [made.step().loss for _ in range(20)]
    assert calls == list(range(20))
    assert sum(losses[-3:]) < sum(losses[:3])
    assert bool((state.forward[-1] > 0).all()) and bool((state.backward[-1] > 0).all())
    made.close()


@pytest.mark.parametrize("fp8", [False, True], ids=["plain", "fp8"])
def test_bad_steps_are_skipped_counted_and_finally_stop(trainer: MakeTrainer, fp8: bool) -> None:
    made = trainer(fp8=fp8, batch_size=2, max_bad_steps=3)
    made.step()
    before = {name: p.detach().clone() for name, p in made.trainable.items()}
    head = made.model.get_output_embeddings()  # type: ignore[operator]
    good = head.weight.detach().clone()
    head.weight.data[7] = float("inf")
    place = made.counters.rows
    assert made.step().skipped and made.step().skipped
    assert all(torch.equal(p, before[name]) for name, p in made.trainable.items())
    assert made.counters.bad_rows == made.order.take(place, 4)[0]
    head.weight.data.copy_(good)
    result = made.step()
    assert made.counters.bad_rows == []
    assert not result.skipped and math.isfinite(result.loss) and made.counters.bad_in_a_row == 0
    assert made.counters.skipped == 2 and made.counters.step == 4
    head.weight.data[7] = float("nan")
    made.step(), made.step()
    with pytest.raises(
        Diverged, match=r"not finite in 3 steps in a row \(up to step 7\).*unchanged since step 4"
    ):
        made.step()
    made.close()


def test_a_loss_that_is_not_finite_is_skipped_whatever_the_gradients(
    trainer: MakeTrainer,
) -> None:
    made = trainer(batch_size=2)
    before = {name: p.detach().clone() for name, p in made.trainable.items()}
    real = made._forward_and_backward
    made._forward_and_backward = lambda batches: real(batches) * math.inf  # type: ignore[method-assign]
    result = made.step()
    assert result.skipped and math.isfinite(result.grad_norm)
    assert all(torch.equal(p, before[name]) for name, p in made.trainable.items())
    assert not any(bool(s["exp_avg"].any()) for s in made.optimizer.state.values())
    made._forward_and_backward = real  # type: ignore[method-assign]
    assert not made.step().skipped
    assert any(not torch.equal(p, before[name]) for name, p in made.trainable.items())
    made.close()


def test_clipping(trainer: MakeTrainer) -> None:
    made = trainer(batch_size=2, max_grad_norm=1e-3)
    norm = made.step().grad_norm
    clipped = torch.nn.utils.get_total_norm(
        [p.grad for p in made.trainable.values() if p.grad is not None]
    )
    assert norm > 1e-3 and float(clipped) == pytest.approx(1e-3, rel=1e-2)
    made.close()


def test_evaluation_tells_its_batches(trainer: MakeTrainer, rows: PackedRows) -> None:
    """The last one is told when the loss is there."""
    made, told = trainer(batch_size=1), []
    expected = evaluate(made.model, rows, made.options)
    found = evaluate(made.model, rows, made.options, progress=lambda *both: told.append(both))
    assert found == expected and len(rows) > 1
    handed_out = [min(n, len(rows) - 1) for n in range(1, len(rows) + 1)]
    assert told == [(n, len(rows)) for n in (*handed_out, len(rows))]
    made.close()


def test_evaluation_changes_nothing(trainer: MakeTrainer, rows: PackedRows) -> None:
    made = trainer(fp8=True, dropout=0.5, batch_size=2)
    made.step()
    before = made.checkpoint({})
    rng = torch.get_rng_state()
    first = evaluate(made.model, rows, made.options)
    assert evaluate(made.model, rows, made.options) == first
    assert torch.equal(torch.get_rng_state(), rng) and made.model.training
    assert evaluate(made.model.eval(), rows, made.options) == first and not made.model.training
    after = made.checkpoint({})
    for key in ("forward", "backward"):
        assert torch.equal(before.state["fp8"][key], after.state["fp8"][key])
    limited = evaluate(made.model, rows, FinetuneOptions(seq_len=24, eval_rows=1, batch_size=2))
    batch = rows.batch([0])
    with torch.no_grad():
        made.model.eval()
        assert limited == pytest.approx(
            float(summed_loss(made.model, batch, 7)) / batch.targets, rel=1e-6
        )
    made.close()


@pytest.mark.parametrize(
    ("limit", "numbers"), [(3, [0, 2, 4]), (4, [0, 1, 3, 4]), (0, [0, 1, 2, 3, 4, 5])]
)
def test_evaluated_rows_are_spread_over_all(
    rows: PackedRows, limit: int, numbers: list[int]
) -> None:
    """Rows are packed longest document first: the first ones are not like the others."""
    batches = list(evaluation_batches(rows, limit, 2))
    assert [len(batch.input_ids) for batch in batches[:-1]] == [2] * (len(batches) - 1)
    found = torch.cat([batch.input_ids for batch in batches])
    assert torch.equal(found, rows.batch(numbers).input_ids)


def test_an_fp8_head_is_what_trains(trainer: MakeTrainer) -> None:
    """Its first loss differs from the plain head's by rounding to e4m3, and evaluation keeps the plain head."""
    plain, rounded = trainer(batch_size=4), trainer(batch_size=4, fp8_head=True)
    batch = plain.rows.batch(plain.order.take(0, 4)[0])
    assert evaluate(rounded.model, plain.rows, rounded.options) == evaluate(
        plain.model, plain.rows, plain.options
    )
    hidden = hidden_states(plain.model, batch).flatten(0, 1)
    head = plain.model.get_output_embeddings()  # type: ignore[operator]
    items = torch.tensor(float(batch.targets))
    labels = batch.labels.flatten()
    head8 = quantize_head(head.weight)
    expected = chunked_cross_entropy(hidden, head, labels, 1000, items, head8).item()
    losses = plain.step().loss, rounded.step().loss
    assert losses[1] == pytest.approx(expected, rel=1e-6)
    assert 0 < abs(losses[0] - losses[1]) < 0.02 * losses[0]
    plain.close(), rounded.close()


@pytest.fixture
def two_documents() -> PackedRows:
    """Four rows of two documents: what they see of each other changes the loss."""
    text = (b"the quick brown fox jumps over the lazy dog; " * 4)[:96]
    stops = np.arange(12, 97, 12)
    return PackedRows(np.frombuffer(text, dtype=np.uint8), np.stack([stops - 12, stops], 1), 24)


@pytest.mark.parametrize("isolate", [True, False], ids=["apart", "as one sequence"])
def test_rows_are_trained_and_evaluated_as_the_option_says(
    trainer: MakeTrainer, two_documents: PackedRows, isolate: bool
) -> None:
    made = trainer(batch_size=4, isolate_documents=isolate, eval_rows=0)
    made.rows = two_documents
    batch = two_documents.batch(range(4))
    with torch.no_grad():
        same, other = (
            float(summed_loss(made.model, batch, 1000, i)) / batch.targets
            for i in (isolate, not isolate)
        )
    assert abs(same - other) > 1e-4
    assert evaluate(made.model, two_documents, made.options) == pytest.approx(same, rel=1e-6)
    made.order = RowOrder(4, 0)
    assert made.step().loss == pytest.approx(same, rel=1e-6)
    made.close()


def test_gradient_checkpointing_gives_the_same_gradients(trainer: MakeTrainer) -> None:
    plain = trainer(fp8=True, dropout=0.1, batch_size=2, grad_accum=2)
    torch.manual_seed(4)
    expected, _ = gradients(plain)
    saving = trainer(fp8=True, dropout=0.1, batch_size=2, grad_accum=2)
    save_activations(saving.model)
    torch.manual_seed(4)
    found, _ = gradients(saving)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_learning_rate() -> None:
    rates = [learning_rate(s, peak=1.0, steps=10, warmup=4, floor=0.1) for s in range(10)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[9] == pytest.approx(0.1) and rates[4:] == sorted(rates[4:], reverse=True)
    assert rates[6] == pytest.approx(0.1 + 0.9 * 0.5, abs=1e-9)
    assert (warmup_steps(0.1, 50), warmup_steps(7, 50)) == (5, 7)


def test_a_step_takes_the_rate_of_its_number(trainer: MakeTrainer) -> None:
    """Of a warm-up of 8 steps, the first eighth first; the optimizer reads the tensor that it is put into."""
    made = trainer(batch_size=2, warmup=8.0)
    rates = [made.step().lr for _ in range(3)]
    assert rates == pytest.approx([1e-2 / 8, 2e-2 / 8, 3e-2 / 8])
    groups = made.optimizer.param_groups
    assert all(float(group["lr"]) == pytest.approx(rates[-1]) for group in groups)
    made.close()


def test_an_adapter_of_zero_evaluates_as_the_base_in_fp8(
    trainer: MakeTrainer, rows: PackedRows
) -> None:
    """To the bit: the demo shows a run's first evaluation as its base's."""
    made = trainer(fp8=True)
    evaluated = [evaluate(made.model, rows, made.options)]
    with disable_lora(made.model):
        evaluated.append(evaluate(made.model, rows, made.options))
    with torch.no_grad():
        for name, parameter in made.trainable.items():
            if "lora_B" in name:
                parameter.zero_()
    evaluated.append(evaluate(made.model, rows, made.options))
    assert evaluated[0] != evaluated[1] == evaluated[2]
    made.close()


def test_metrics_survive_a_crash_and_drop_what_is_done_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    log.begin(0, resumed=False)
    log.write(step=0, eval_loss=3.0)
    for step in (1, 2, 3):
        log.write(step=step, loss=float("nan") if step == 2 else 1.0 / step)
    log.close()
    with path.open("a") as file:
        file.write('{"step": 4, "lo')
    again = MetricsLog(path)
    again.begin(2, resumed=True)
    again.close()
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"step": 0, "eval_loss": 3.0},
        {"step": 1, "loss": 1.0},
        {"step": 2, "loss": None},
    ]
    plot_losses(path, tmp_path / "loss.png", "title")
    assert (tmp_path / "loss.png").read_bytes()[:4] == b"\x89PNG"
    again.begin(0, resumed=True)
    again.close()
    assert read_metrics(path) == [{"step": 0, "eval_loss": 3.0}]
    again.begin(0, resumed=False)
    again.close()
    assert read_metrics(path) == []


def other_layers(checkpoint: Checkpoint, other: Trainer) -> None:
    checkpoint.state["fp8"]["names"][0] = "another layer"


def no_gpu(checkpoint: Checkpoint, other: Trainer) -> None:
    other.device = torch.device("cuda")


def more_parameters(checkpoint: Checkpoint, other: Trainer) -> None:
    checkpoint.state["optimizer"]["param_groups"][0]["params"].append(99)


def no_fp8(checkpoint: Checkpoint, other: Trainer) -> None:
    checkpoint.state["fp8"] = None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (other_layers, r"of another run: .*'another layer'"),
        (no_gpu, "made without a GPU"),
        (more_parameters, r"of another run: its optimizer has groups of \[29\]"),
        (no_fp8, "differ in fp8"),
    ],
)
def test_a_checkpoint_that_does_not_fit_changes_nothing(
    trainer: MakeTrainer, change: Callable[[Checkpoint, Trainer], None], said: str
) -> None:
    one, other = trainer(fp8=True), trainer(fp8=True)
    one.step()
    checkpoint = one.checkpoint({})
    assert other.fp8_state is not None
    before = {name: p.detach().clone() for name, p in other.trainable.items()}
    scales, rng = other.fp8_state.forward.clone(), torch.get_rng_state()
    change(checkpoint, other)
    with pytest.raises(CheckpointError, match=said):
        other.restore(checkpoint)
    assert all(torch.equal(p, before[name]) for name, p in other.trainable.items())
    assert torch.equal(other.fp8_state.forward, scales) and not other.optimizer.state
    assert torch.equal(torch.get_rng_state(), rng) and other.counters.step == 0
    one.close(), other.close()


def test_a_checkpoint_with_a_number_for_a_learning_rate_goes_on(trainer: MakeTrainer) -> None:
    """As they were before the rate became a tensor: the groups keep the one that a step fills."""
    one, other = trainer(), trainer()
    one.step()
    checkpoint = copy.deepcopy(one.checkpoint({}))
    for group in checkpoint.state["optimizer"]["param_groups"]:
        group.update(lr=1e-3, capturable=False)
    groups = other.optimizer.param_groups
    rates = [group["lr"] for group in groups]
    other.restore(checkpoint)
    assert all(group["capturable"] for group in groups)
    assert all(group["lr"] is rate for group, rate in zip(groups, rates, strict=True))
    assert one.step().loss == other.step().loss
    assert all(torch.equal(p, one.trainable[n]) for n, p in other.trainable.items())
    one.close(), other.close()


@pytest.mark.parametrize(("epochs", "steps"), [(1.0, 2), (2.0, 3), (0.1, 1)])
def test_epochs_are_whole_rows(
    trainer: MakeTrainer, rows: PackedRows, epochs: float, steps: int
) -> None:
    """Six rows, four a step: the last step of an epoch takes rows of the next."""
    made = trainer()
    options = FinetuneOptions(seq_len=24, epochs=epochs, batch_size=4)
    other = Trainer(made.model, options, rows, None)
    assert other.steps == steps and made.steps == 20
    made.close(), other.close()
