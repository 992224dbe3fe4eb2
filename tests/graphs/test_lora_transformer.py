# SPDX-License-Identifier: Apache-2.0
"""Graphed and eager training of a LoRA transformer over an FP8 base, dropout and checkpointed layers on: equal bits."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from lorakernels import DelayedScaling, LoRAConfig, LoRALinear, PhiloxState, apply_lora
from tests.graphs.layers import managed

HIDDEN, HEADS, SEQ, LAYERS, MICROBATCHES = 64, 4, 32, 4, 2
TARGETS = ["q", "k", "v", "o", "up", "down"]


class Layer(nn.Module):
    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN)
        self.norms = nn.ModuleList([nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)])
        self.checkpointed = checkpointed

    def attend(self, x: Tensor, mask: Tensor) -> Tensor:
        def heads(y: Tensor) -> Tensor:
            return y.view(*y.shape[:-1], HEADS, -1).transpose(1, 2)

        # The math backend: the others' backward adds with atomics, whose bits differ from run to run
        with sdpa_kernel(SDPBackend.MATH):
            y = nn.functional.scaled_dot_product_attention(
                heads(self.q(x)), heads(self.k(x)), heads(self.v(x)), attn_mask=mask
            )
        return self.o(y.transpose(1, 2).flatten(2))

    def body(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x + self.attend(self.norms[0](x), mask)
        return x + self.down(nn.functional.silu(self.up(self.norms[1](x))))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        if self.checkpointed:
            return checkpoint(self.body, x, mask, use_reentrant=False)
        return self.body(x, mask)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, HIDDEN)
        self.layers = nn.ModuleList([Layer(i % 2 == 1) for i in range(LAYERS)])
        self.head = nn.Linear(HIDDEN, 50)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(tokens)
        mask = torch.ones(SEQ, SEQ, dtype=torch.bool, device=tokens.device).tril()
        for layer in self.layers:
            x = layer(x, mask)
        logits = self.head(x).float()
        return logits, nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
        )


def adapted(device: torch.device) -> tuple[Model, Any, PhiloxState]:
    model = Model().to(device, torch.bfloat16)
    state = PhiloxState(11, device)
    config = LoRAConfig(
        r=8,
        lora_alpha=16,
        lora_dropout=0.1,
        target_modules=TARGETS,
        fp8=DelayedScaling(amax_history_len=4),
    )
    report = apply_lora(model, config, rng_state=state)
    for layer in model.modules():
        if isinstance(layer, LoRALinear):
            nn.init.normal_(layer.lora_B, std=0.1)
    return model.train(), report.fp8_state, state


def parts(model: Model) -> tuple[Any, PhiloxState]:
    layer = next(m for m in model.modules() if isinstance(m, LoRALinear))
    return layer.fp8_state, layer.rng_state


def train(model: Model, tokens: Tensor, optimizer: Any, before: Any, after: Any) -> list[Tensor]:
    """One iteration; everything it computed."""
    found = []
    for batch in tokens:
        before()
        logits, loss = model(batch)
        loss.backward()
        after()
        found += [logits.detach().clone(), loss.detach().clone()]
    found += [p.grad.clone() for p in model.parameters() if p.requires_grad]
    optimizer.step()
    optimizer.zero_grad()
    fp8, rng = parts(model)
    fp8.reduce_and_update()
    found += [p.detach().clone() for p in model.parameters() if p.requires_grad]
    return [*found, fp8.forward.clone(), fp8.backward.clone(), rng.tensor.clone()]


@pytest.mark.slow
@pytest.mark.parametrize("grads", ["add", "autograd"])
def test_three_steps_of_two_microbatches(device: torch.device, grads: str) -> None:
    model, fp8, rng = adapted(device)
    twin = copy.deepcopy(model)
    optimizers = [
        torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=1e-2)
        for m in (model, twin)
    ]
    manager = managed(
        model.layers,
        device,
        num_microbatches=MICROBATCHES,
        warmup_steps=2,
        fp8_state=fp8,
        rng_states=[rng],
        grads=grads,
    )
    logits = []
    same_tokens = torch.randint(50, (MICROBATCHES, 2, SEQ), device=device)
    for step in range(2 + 3):
        replaying = manager.phase == "replaying"
        tokens = same_tokens if step > 2 else torch.randint_like(same_tokens, 50)
        start = torch.get_rng_state()
        found = train(model, tokens, optimizers[0], lambda: None, lambda: None)

        def before(replaying: bool = replaying, step: int = step) -> None:
            if replaying:
                torch.set_rng_state(manager.cpu_rng_at_capture)

        def after(replaying: bool = replaying) -> None:
            if replaying:
                parts(twin)[1].advance()

        torch.set_rng_state(start)
        expected = train(twin, tokens, optimizers[1], before, after)
        for index, (a, b) in enumerate(zip(found, expected, strict=True)):
            assert torch.equal(a, b), (step, index, len(found))
        logits.append(found[0])
        manager.end_iteration()
    assert manager.phase == "replaying" and rng.tensor[1] == 3 * MICROBATCHES
    assert not torch.equal(logits[-1], logits[-2]), "same tokens, other masks"
    assert fp8.pinned_by is not None
    manager.close()
    assert fp8.pinned_by is None


def test_an_fp8_state_that_updates_itself_is_refused(device: torch.device) -> None:
    model, fp8, rng = adapted(device)
    manager = managed(model.layers, device, fp8_state=fp8, rng_states=[rng])
    model(torch.randint(50, (2, SEQ), device=device))[1].backward()
    with pytest.raises(
        RuntimeError, match=r"in_charge='auto'.*reduce_and_update\(\) once per iteration"
    ):
        manager.end_iteration()
    assert fp8.pinned_by is None
    fp8.reduce_and_update()
    before = [t.clone() for t in (fp8.forward, fp8.backward, rng.tensor)]
    manager.capture()
    assert all(map(torch.equal, before, (fp8.forward, fp8.backward, rng.tensor)))
    assert "lorakernels.graphs" in fp8.pinned_by
    with pytest.raises(RuntimeError, match=r"pinned by .*lorakernels.graphs"):
        fp8.register("late")


def test_merging_under_a_graph_is_refused(device: torch.device) -> None:
    """F30: a merged adapter would be applied twice."""
    from lorakernels import merge_lora, unmerge_lora

    model, fp8, rng = adapted(device)
    fp8.reduce_and_update()
    manager = managed(model.layers, device, fp8_state=fp8, rng_states=[rng])
    tokens = torch.randint(50, (2, SEQ), device=device)
    for _ in range(2):
        model(tokens)[1].backward()
        manager.end_iteration()
    merge_lora(model)
    with pytest.raises(
        RuntimeError, match="attributes of q: expected merged=False, found merged=True"
    ):
        model(tokens)
    unmerge_lora(model)
    manager.discard_iteration()
    model(tokens)[1].backward()
