# SPDX-License-Identifier: Apache-2.0
"""quality.py, tiny and on the CPU: variants start alike, a worse one is caught, what it writes can be read."""

from __future__ import annotations

import copy
import dataclasses
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lorakernels
from benchmarks.lib.quality_variants import REFERENCE, fp8_head_loss
from tests.benchmarks.aliases import Load, RowsOf, Run

CPU = torch.device("cpu")
OPTIONS = ("--models", "--variants", "--seeds", "--output")
SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


class Says:
    """A model whose decoder returns `hidden`."""

    def __init__(self, hidden: Tensor) -> None:
        self.model = lambda input_ids: SimpleNamespace(last_hidden_state=hidden)


@pytest.fixture
def quality(load: Load) -> Any:
    pytest.importorskip("transformers")
    with load("peers.te").te_first_or_hidden(False):  # which PEFT would import, and remember it
        pytest.importorskip("peft")
    return load("models.quality")


def tiny(quality: Any, **changes: Any) -> Any:
    plan = quality.PLANS["random"]
    values = {"shape": SHAPE, "length": 32, "held": 16, "base_steps": 3, "steps": 12, "p": 0.0}
    texts = lambda length: quality.random_texts(length, 200)  # noqa: E731
    return dataclasses.replace(plan, texts=texts, **{**values, **changes})


def test_bf16_and_fp8_bases_train_alike_and_te_says_why_not(quality: Any) -> None:
    rows, curves = quality.bench_model("random", tiny(quality), list(quality.VARIANTS), CPU, [0])
    bf16, ours, *fused, te = rows
    assert [row["check"] for row in fused] == ["needs a GPU"] * 2
    assert [row["held-out loss"] for row in fused] == [""] * 2
    assert bf16["check"] == ours["check"] == "ok" and te["held-out loss"] == ""
    assert "cannot be imported" in te["check"] or te["check"] == "needs a GPU"
    assert 0 < abs(ours["held-out loss"] - bf16["held-out loss"]) < 0.005 * bf16["held-out loss"]
    assert bf16["held-out loss"] < bf16["loss before"], "it learns"
    assert {(c["variant"], c["step"]) for c in curves} == {
        (variant, step) for variant in ("hf + peft bf16", "ours fp8 + lora") for step in (0, 10)
    }
    assert "transformer_engine" not in sys.modules or sys.modules["transformer_engine"], "hidden"


def test_a_seed_decides_all_but_the_base(quality: Any) -> None:
    plan = tiny(quality, p=0.1)
    rows, curves = quality.bench_model("random", plan, [REFERENCE], CPU, [0, 1, 0])
    assert [row["seed"] for row in rows] == [0, 1, 0]
    assert len({(row["base"], row["loss before"]) for row in rows}) == 1
    losses = [row["held-out loss"] for row in rows]
    assert losses[0] == losses[2] != losses[1]
    assert [c["loss"] for c in curves[:2]] == [c["loss"] for c in curves[4:]], "the same steps"


def test_every_variant_starts_from_one_adapter(quality: Any) -> None:
    plan, found = tiny(quality, steps=1), {}
    base = quality.make_base(plan, plan.texts(plan.length)[0], CPU)
    logits = {}
    for name in ("hf + peft bf16", "ours fp8 + lora"):
        model = copy.deepcopy(base)
        quality.VARIANTS[name](model, plan)
        found[name] = [p.detach() for n, p in model.named_parameters() if "lora_A" in n]
        trained = [n for n, p in model.named_parameters() if p.requires_grad]
        assert len(found[name]) == 7 and all("lora_" in n for n in trained)
        logits[name] = model.eval()(input_ids=torch.arange(8)[None]).logits
    assert all(torch.equal(*pair) for pair in zip(*found.values(), strict=True))
    assert all(p.dtype == torch.float32 for p in found["hf + peft bf16"])
    bf16, fp8 = (values.detach() for values in logits.values())
    assert 0 < (bf16 - fp8).norm() < 0.1 * bf16.norm(), "the bases' rounding is all that differs"


def test_a_base_that_forgot_itself_is_wrong(quality: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    original = quality.VARIANTS["ours fp8 + lora"]

    def broken(model: Any, plan: Any) -> Any:
        for module in model.modules():
            if isinstance(module, nn.Linear) and module.weight.shape[0] == SHAPE["hidden_size"]:
                module.weight.data.mul_(-3)
        return original(model, plan)

    monkeypatch.setitem(quality.VARIANTS, "ours fp8 + lora", broken)
    plan = tiny(quality, base_steps=60, base_lr=1e-2)
    chosen = ["hf + peft bf16", "ours fp8 + lora"]
    rows = quality.summary(quality.bench_model("random", plan, chosen, CPU, [0])[0])
    assert rows[1]["check"] == "WRONG: more than 0.5% above bf16's", rows


def of_seeds(model: str, variant: str, losses: list[Any], **changes: Any) -> list[dict[str, Any]]:
    """What quality_seeds.csv holds of one variant."""
    row = {"model": model, "variant": variant, "check": "ok", "steps": "9", "base": "ab"}
    row |= {"loss before": "3.0", "seconds": "1.5", **changes}
    return [{**row, "seed": seed, "held-out loss": loss} for seed, loss in enumerate(losses)]


@pytest.mark.parametrize(
    ("variant", "losses", "changes", "check", "ratio"),
    [
        ("ours fp8 + lora", ["2.019", "1.999"], {}, "ok", 1.0045),
        ("ours fp8 + lora", ["2.021", "2.001"], {}, "WRONG: more than 0.5% above bf16's", 1.0055),
        ("te fp8 + lora", ["2.021", "2.001"], {}, "missed: more than 0.5%", 1.0055),
        ("ours fp8 + lora", ["2.0", "2.0"], {"base": "cd"}, "WRONG: trained another base", 1.0),
        ("te fp8 + lora", ["", ""], {"check": "needs a GPU"}, "needs a GPU", ""),
    ],
    ids=["within", "ours-above", "te-above", "another-base", "not-run"],
)
def test_a_mean_of_seeds_is_judged_by_bf16s_of_the_same_model(
    quality: Any, variant: str, losses: list[Any], changes: Any, check: str, ratio: Any
) -> None:
    """The first seed alone is 0.95 % above bf16's in the row that is ok: that much a seed is worth there."""
    bf16 = of_seeds("m", "hf + peft bf16", ["2.0", "2.0"])
    other = of_seeds("n", "hf + peft bf16", ["1.0", "1.0"])
    rows = quality.summary([*other, *of_seeds("m", variant, losses, **changes), *bf16])
    assert [row["model"] for row in rows] == ["n", "m", "m"]
    assert rows[1]["check"].startswith(check) and rows[1]["÷ bf16"] == ratio
    assert rows[1]["seeds"] == 2 and rows[2]["spread"] == 0.0
    if losses[0]:
        assert rows[1]["spread"] == pytest.approx(float(losses[0]) - float(losses[1]))


def test_a_seed_that_failed_is_its_variants_result(quality: Any) -> None:
    rows = of_seeds("m", "ours fp8 + lora", ["2.0", ""])
    rows[1]["check"] = "WRONG: ValueError"
    assert quality.summary(rows)[0]["check"] == "WRONG: ValueError"
    assert quality.summary(rows)[0]["held-out loss"] == ""


def test_processes_beside_each_other_give_one_result(
    quality: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a stand-in for the process, which writes what the real one writes."""

    class Process:
        def __init__(self, command: list[str], **_: Any) -> None:
            model, variant, seed, folder = (command[command.index(o) + 1] for o in OPTIONS)
            assert command[-2:] == ["--steps", "7"]
            (row,) = of_seeds(model, variant, [2.0])
            row["seed"] = seed
            if variant != "te fp8 + lora":
                quality.write_csv(Path(folder, "quality_seeds.csv"), [row], {"device": "gpu"})
                quality.write_csv(Path(folder, "quality_curves.csv"), [{"step": 0}], {})

        def wait(self) -> None: ...

    monkeypatch.setattr(quality.subprocess, "Popen", Process)
    jobs = [
        ("demo", name, seed) for name in ("hf + peft bf16", "ours fp8 + lora") for seed in (3, 4)
    ]
    rows, curves = quality.in_parallel(jobs, ["--steps", "7"])
    assert "device" not in rows[0] and [row["seed"] for row in rows] == ["3", "4"] * 2
    assert [row["÷ bf16"] for row in quality.summary(rows)] == [1.0, 1.0] and len(curves) == 4
    with pytest.raises(RuntimeError, match="te fp8"):
        quality.in_parallel([*jobs, ("demo", "te fp8 + lora", 3)], ["--steps", "7"])


def test_two_bases_of_one_plan_are_equal_bit_for_bit(quality: Any) -> None:
    plan = tiny(quality)
    rows = plan.texts(plan.length)[0]
    first, second = (quality.make_base(plan, rows, CPU) for _ in range(2))
    assert quality.checksum(first) == quality.checksum(second)
    next(second.parameters()).data.view(-1)[0] += 1
    assert quality.checksum(first) != quality.checksum(second)


def test_it_writes_summary_and_curves(
    quality: Any,
    run: Run,
    rows_of: RowsOf,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(quality.PLANS, "random", tiny(quality))
    options = ("--models", "random", "--steps", 11, "--seeds", 1, 2)
    assert run(quality, *options) == 0
    assert [row["steps"] for row in rows_of("quality")] == ["11"] * 5
    seeds = rows_of("quality_seeds")
    assert [row["seed"] for row in seeds] == ["1", "2"] * 5
    curves = rows_of("quality_curves")
    assert [row["step"] for row in curves] == ["0", "10"] * 2 * 2
    assert all(4 < float(row["loss"]) < 7 for row in curves), "about ln 264 = 5.6"


def test_an_fp8_head_has_the_loss_and_the_gradients_of_the_head_but_for_its_rounding(
    quality: Any,
) -> None:
    """264 rows are padded to 272, and what is padded changes nothing."""
    plan = tiny(quality)
    text = plan.texts(plan.length)[0]
    base, ids = quality.make_base(plan, text, CPU), text[:4]
    head, found = base.lm_head.weight, []
    for loss_of in (quality.loss_of, fp8_head_loss(head)):
        trained = base.model.layers[0].mlp.down_proj.weight.requires_grad_()
        loss = loss_of(base, ids)
        found.append((loss.item(), torch.autograd.grad(loss, trained)[0]))
    (loss, grad), (loss8, grad8) = found
    assert 0 < abs(loss8 / loss - 1) < 1e-3
    assert 0 < (grad8 - grad).norm() < 0.1 * grad.norm(), "e5m2 rounds to 1/8"
    hidden, labels = torch.randn(3, 5, len(head[0])), torch.randint(264, (3, 5))
    w8, inv = lorakernels.quantize_head(head)
    options = {"fp8": True, "weight_scale_inv": inv}
    plain = lorakernels.linear_cross_entropy(hidden[:, :-1], w8, labels[:, 1:], **options)
    padded = fp8_head_loss(head)(Says(hidden), labels)
    torch.testing.assert_close(padded, plain, rtol=1e-6, atol=0)


@pytest.mark.gpu
def test_a_fused_model_in_graphs_trains_like_bf16(quality: Any) -> None:
    fused = ["ours, fused + graphs", "ours, fused + graphs, FP8 head"]
    plan, chosen = tiny(quality), [REFERENCE, *fused]
    rows, curves = quality.bench_model("random", plan, chosen, torch.device("cuda"), [0])
    assert [row["check"] for row in rows] == ["ok"] * 3, rows
    for row in rows[1:]:
        assert row["held-out loss"] == pytest.approx(rows[0]["held-out loss"], rel=0.005)
    assert len(curves) == 6
