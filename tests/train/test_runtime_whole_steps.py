# SPDX-License-Identifier: Apache-2.0
"""Runs whose whole steps are replayed: what falls back to the layers' graphs, what only a whole step can replay."""

from __future__ import annotations

import pytest
import torch

from lorakernels.train.data.packing import PackedRows
from lorakernels.train.model.model import summed_loss
from tests.train.replays import assert_same, trained


@pytest.mark.slow
def test_rows_as_one_sequence_replay_too(make, rows: PackedRows):
    """Without isolation, attention has no mask: a row's loss is the model's own on that row."""
    graphed, _ = make(True, isolate_documents=False)
    eager, _ = make(False, isolate_documents=False)
    assert [graphed.step().loss for _ in range(4)] == [eager.step().loss for _ in range(4)]
    batch = rows.batch([0])
    assert len(set(batch.segments[0].tolist())) > 2, "two documents and padding"
    graphed.close(), eager.close()
    model = eager.model.eval()
    with torch.no_grad():
        found = summed_loss(model, batch, 1000, isolate=False)
        logits = model(input_ids=batch.input_ids).logits.flatten(0, 1)
        expected = torch.nn.functional.cross_entropy(
            logits, batch.labels.flatten(), ignore_index=-100, reduction="sum"
        )
        isolated = summed_loss(model, batch, 1000)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
    assert abs(isolated - found) > 1e-3


def test_what_waits_outside_of_the_layers_leaves_their_graphs(make):
    """The last norm waits for the device: the step cannot be captured, the layers can, after as many more steps."""
    eager, _ = make(False)
    trainer, said = make(True)
    norm = trainer.model.model.norm
    real = norm.forward
    norm.forward = lambda x: real(x) if x.sum().item() < 1e30 else x
    results = [trainer.step() for _ in range(7)]
    assert [r.replayed for r in results] == [False] * 4 + [True] * 3, said
    assert "layers replayed as CUDA graphs from step 5 on" in said
    assert any(line.startswith("steps are not replayed as a whole: ") for line in said)
    assert [r.loss for r in results] == [eager.step().loss for _ in range(7)]
    assert_same(trained(eager), trained(trainer))
    eager.close(), trainer.close()


def test_dropout_outside_of_the_layers_rules_their_graphs_out(make):
    """The head would draw the first layer's nonce once the layers are replayed; a whole step draws both."""
    targets = ["q_proj", "lm_head"]
    trainer, _ = make(True, targets=targets, graphs="layer")
    assert trainer.runtime.why_not == "lm_head has dropout 0.2 outside of the decoder layers"
    trainer.close()
    (eager, _), (whole, said) = make(False, targets=targets), make(True, targets=targets)
    results = [[trainer.step() for _ in range(5)] for trainer in (eager, whole)]
    assert [r.loss for r in results[0]] == [r.loss for r in results[1]]
    assert [r.replayed for r in results[1]] == [False, False, True, True, True], said
    eager.close(), whole.close()
