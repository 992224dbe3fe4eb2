# SPDX-License-Identifier: Apache-2.0
"""Layers of transformers' Llama, unmodified: keywords, rotary embeddings, masks, checkpointing, evaluation."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.graphs.layers import managed, same

transformers = pytest.importorskip("transformers")


def llama(device: torch.device):
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
        attn_implementation="eager",  # deterministic backward
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).to(device).train()


@pytest.mark.parametrize("masked", [False, True], ids=["causal", "padded"])
def test_training_is_bit_equal(device: torch.device, masked: bool) -> None:
    ours = llama(device)
    theirs = copy.deepcopy(ours)
    manager = managed(ours.model.layers, device, num_microbatches=2, warmup_steps=2)
    for step in range(5):
        for _ in range(2):
            tokens = torch.randint(64, (2, 12), device=device)
            mask = torch.ones_like(tokens)
            if masked:
                mask[0, :3] = 0
            losses = [m(tokens, attention_mask=mask, labels=tokens).loss for m in (ours, theirs)]
            assert torch.equal(*losses), step
            for loss in losses:
                loss.backward()
        same(ours, theirs, step)
        for model in (ours, theirs):
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.1 * p.grad
            model.zero_grad()
        manager.end_iteration()
    assert manager.phase == "replaying" and not manager.report().copied
    ours.eval(), theirs.eval()
    with torch.no_grad():
        assert torch.equal(ours(tokens).logits, theirs(tokens).logits)


def test_gradient_checkpointing_moves_into_the_graph(device: torch.device) -> None:
    """Without the user's help, and with as many activations as before: the backward recomputes."""
    ours = llama(device)
    ours.gradient_checkpointing_enable({"use_reentrant": False})
    theirs = copy.deepcopy(ours)
    manager = managed(ours.model.layers, device)
    for step in range(3):
        tokens = torch.randint(64, (2, 12), device=device)
        for model in (ours, theirs):
            model.zero_grad()
            model(tokens, labels=tokens).loss.backward()
        same(ours, theirs, step)
        manager.end_iteration()
    nodes = count_nodes(manager)
    ours.gradient_checkpointing_disable()
    manager.reset()
    for _ in range(2):
        ours(tokens, labels=tokens).loss.backward()
        manager.end_iteration()
    plain = count_nodes(manager)
    assert nodes["forward"] <= plain["forward"]
    # All of a forward but what comes after the last tensor that backward needs
    assert nodes["backward"] > plain["backward"] + 0.7 * plain["forward"]


def count_nodes(manager) -> dict[str, int]:
    graphs = manager.report().graphs
    return {
        direction: sum(sum(g.nodes.values()) for g in graphs if g.direction == direction)
        for direction in ("forward", "backward")
    }
