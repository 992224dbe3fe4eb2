# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core's own CUDA graph manager over blocks of our layers: replays are the eager steps."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lorakernels import DelayedScaling, FP8State, LoRAConfig
from lorakernels.integrations.megatron import ColumnParallelLinear, RowParallelLinear
from tests.processes import on_ranks

WIDTH, TOKENS, STEPS = 256, 128, 5
OPTIONS: dict[str, Any] = {"bias": False, "skip_bias_add": False}
RECIPE = DelayedScaling(amax_history_len=4)


def filled(seed: int, weight: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return weight.copy_(0.05 * torch.randn(weight.shape, generator=generator))


def blocks(config: Any, group: Any, base: Any) -> tuple[Any, FP8State]:
    """Two MLPs with their residual. `base` is Megatron's, which replays what it calls, or a plain Module."""
    names = [f"{i}.{part}" for i in range(2) for part in ("up", "down")]
    state = FP8State(names, RECIPE, "cuda")
    lora = LoRAConfig(r=4, fp8=RECIPE, lora_dropout=0.0)

    class Block(base):  # type: ignore[misc]
        def __init__(self, index: int) -> None:
            super().__init__(*([] if base is nn.Module else [config]))
            self.layer_number = index + 1
            options = {**OPTIONS, "config": config, "lora": lora, "tp_group": group}
            options["fp8_state"] = state
            up, down = (partial(filled, 2 * index + part) for part in range(2))
            self.up = ColumnParallelLinear(
                WIDTH,
                2 * WIDTH,
                init_method=up,
                gather_output=False,
                name=names[2 * index],
                **options,
            )
            self.down = RowParallelLinear(
                2 * WIDTH, WIDTH, init_method=down, input_is_parallel=True, name=names[2 * index + 1],
                **options,
            )  # fmt: skip

        def forward(self, hidden_states: Tensor) -> Tensor:
            h, _ = self.up(hidden_states)
            y, _ = self.down(nn.functional.gelu(h))
            found: Tensor = hidden_states + y
            return found

    torch.manual_seed(1)
    made = nn.ModuleList([Block(0), Block(1)])
    with torch.no_grad():  # B = 0 would give A no gradient
        for name, parameter in made.named_parameters():
            if name.endswith("lora_B"):
                filled(9, parameter)
    return made, state


def step(layers: Any, state: FP8State, x: Tensor, dy: Tensor) -> list[Tensor]:
    """y, dx and the gradients of the adapters."""
    own = x.clone().requires_grad_()
    hidden = own
    for layer in layers:
        hidden = layer(hidden_states=hidden)
        hidden = hidden[0] if isinstance(hidden, tuple) else hidden
    trained = [p for p in layers.parameters() if p.requires_grad]
    for parameter in trained:
        parameter.grad = None
    hidden.backward(dy)
    state.reduce_and_update()
    assert own.grad is not None
    return [
        hidden.detach().clone(),
        own.grad,
        *(p.grad.clone() for p in trained if p.grad is not None),
    ]


def worker(rank: int, device: torch.device) -> dict[str, Any]:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.cuda_graphs import create_cudagraphs
    from megatron.core.transformer.module import GraphableMegatronModule
    from megatron.core.transformer.transformer_config import TransformerConfig

    torch.cuda.set_device(device)
    parallel_state.initialize_model_parallel(1)
    model_parallel_cuda_manual_seed(3, use_cudagraphable_rng=True, force_reset_rng=True)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=WIDTH,
        num_attention_heads=4,
        params_dtype=torch.bfloat16,
        bf16=True,
        cuda_graph_impl="local",
    )
    group = parallel_state.get_tensor_model_parallel_group()
    eager, eager_state = blocks(config, group, nn.Module)
    graphed, state = blocks(config, group, GraphableMegatronModule)
    generator = torch.Generator("cuda").manual_seed(7)
    unequal, count = [], 0
    for number in range(STEPS):
        x, dy = (
            torch.randn(TOKENS, 1, WIDTH, generator=generator, device=device, dtype=torch.bfloat16)
            for _ in range(2)
        )
        expected = step(eager, eager_state, x, dy)
        found = step(graphed, state, x, dy)
        count = len(found)
        unequal += [
            (number, at)
            for at, pair in enumerate(zip(found, expected, strict=True))
            if not torch.equal(*pair)
        ]
        create_cudagraphs()
    runners = [runner for block in graphed for runner in block.cudagraph_manager.cudagraph_runners]
    return {
        "unequal": unequal,
        "count": count,
        "graphs": [r.fwd_graph is not None and r.bwd_graph is not None for r in runners],
        "scales": torch.equal(state.forward, eager_state.forward),
    }


@pytest.mark.gpu
def test_megatrons_graph_manager_replays_our_layers_to_the_bit() -> None:
    """Its graphs are made after the first step, and the four others replay them."""
    pytest.importorskip("megatron.core", exc_type=ImportError)
    (found,) = on_ranks(worker, 1, "nccl")
    assert found["graphs"] == [True, True]
    assert found["count"] == 2 + 2 * 4  # A and B of four layers
    assert found["unequal"] == [] and found["scales"]
