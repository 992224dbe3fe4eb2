# SPDX-License-Identifier: Apache-2.0
"""quality_recipes.py, tiny and on the CPU: every variant's row, what is resumed, and the KL of a base alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.benchmarks.aliases import Load, RowsOf, Run

SMALL = ("--steps", 3, "--batch", 2, "--length", 32, "--held", 2, "--characters", 4000)
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads of 32 columns, whose rows do not end with a block of 128."""
    transformers = pytest.importorskip("transformers")
    from lorakernels.train.data.byte_tokenizer import byte_tokenizer

    folder = tmp_path_factory.mktemp("model")
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=len(tokenizer), **SIZES)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def recipes(load: Load) -> Any:
    with load("peers.te").te_first_or_hidden(False):
        pytest.importorskip("peft")
    return load("models.quality_recipes")


@pytest.mark.slow
def test_every_variant_has_a_row_and_a_second_call_runs_what_is_missing(
    recipes: Any, checkpoint: Path, run: Run, rows_of: RowsOf
) -> None:
    assert run(recipes, checkpoint, *SMALL, "--seeds", 0, "--variants", *recipes.VARIANTS[:3]) == 0
    before = rows_of("quality_recipes_seeds")
    assert run(recipes, checkpoint, *SMALL, "--seeds", 0) == 0
    after = rows_of("quality_recipes_seeds")
    assert after[:3] == before and {r["variant"] for r in after} == set(recipes.VARIANTS)
    found = {row["variant"]: row for row in rows_of("quality_recipes")}
    assert [*found] == list(recipes.VARIANTS)
    assert (
        "needs a GPU" in found["te fp8 + lora"]["check"]
        or "import" in found["te fp8 + lora"]["check"]
    )
    assert found["ours, one scale"]["how"] == "fused" and found["ours, blocks"]["how"] == "unfused"
    for name in recipes.VARIANTS[:2]:  # over the plain base; both compute in fp32 here
        assert float(found[name]["KL"]) < 1e-6
        assert float(found[name]["÷ bf16"]) == pytest.approx(1, abs=1e-2)
    kl = {name: float(found[name]["KL"]) for name in recipes.VARIANTS[2:5]}
    assert all(1e-8 < value < 1e-2 for value in kl.values()), kl
    exact = {row["variant"]: float(row["KL"]) for row in after if row["KL"]}
    ratio = exact["ours, blocks"] / exact["ours, one scale"]  # of one seed; shown with three digits
    shown = float(found["ours, blocks"]["KL ÷ one scale"])
    assert shown == pytest.approx(ratio, abs=5.1e-4)


def test_what_the_time_does_not_suffice_for_is_said(
    recipes: Any, checkpoint: Path, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(recipes, checkpoint, *SMALL, "--minutes", 0.0) == 2
    assert "18 of 18 runs are missing" in capsys.readouterr().out


def test_the_kl_of_a_model_from_another_is_that_of_their_distributions(recipes: Any) -> None:
    class Fixed(torch.nn.Module):
        def __init__(self, logits: torch.Tensor) -> None:
            super().__init__()
            self.logits = logits[None]

        def forward(self, input_ids: torch.Tensor) -> Any:
            return self

    p, q = torch.randn(2, 5, 7, dtype=torch.float64).float()
    ids = torch.randint(7, (1, 5))
    kl, loss = recipes.judged(Fixed(q), Fixed(p), ids, recipes.Run())
    of = torch.distributions.Categorical
    exact = torch.distributions.kl_divergence(of(logits=p.double()), of(logits=q.double())).mean()
    assert kl == pytest.approx(float(exact), rel=1e-5)
    assert loss == pytest.approx(float(torch.nn.functional.cross_entropy(q[:-1], ids[0, 1:])))
