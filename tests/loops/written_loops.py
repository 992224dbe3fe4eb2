# SPDX-License-Identifier: Apache-2.0
"""Training loops as somebody writes them, a small model to run them on, and what `attach` does in them by hand."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lorakernels import LoRAConfig, LoRALinear, PhiloxState, apply_lora, attach, fuse

transformers = pytest.importorskip("transformers")


End = Callable[[int], None]


def llama(device: Any = "cpu", dropout: float = 0.0, fused: bool = True, **lora: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(vocab_size=64, **sizes, **heads)
    dtype = torch.float32 if torch.device(device).type == "cpu" else torch.bfloat16
    model = transformers.LlamaForCausalLM(config).to(device, dtype)  # adapters stay fp32
    rng_state = lora.pop("rng_state", None)
    made = LoRAConfig(r=4, lora_dropout=dropout, target_modules="all-linear", **lora)
    apply_lora(model, made, rng_state=rng_state)
    if fused:
        fuse(model)
    return model.train()


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def adamw(model: nn.Module, lr: Any = 1e-2) -> torch.optim.Optimizer:
    return torch.optim.AdamW(trained(model), lr=lr)


def state_of(model: nn.Module) -> Any:
    return next(m.fp8_state for m in model.modules() if isinstance(m, LoRALinear))


def batch(length: int = 12, device: Any = "cpu") -> Tensor:
    """Drawn anew: not from the generators that masks come from."""
    batch.calls += 1  # type: ignore[attr-defined]
    generator = torch.Generator().manual_seed(batch.calls)  # type: ignore[attr-defined]
    return torch.randint(64, (2, length), generator=generator).to(device)


def loss_of(model: nn.Module, length: int = 12) -> Tensor:
    ids = batch(length, next(model.parameters()).device)
    return model(input_ids=ids, labels=ids).loss


class Loops:
    """Each is a loop as somebody writes it; `end(n)` is what he writes by hand after a step of n microbatches."""

    @staticmethod
    def plain(model: Any, end: End) -> None:
        optimizer = yield
        for _ in range(8):
            loss_of(model).backward()
            optimizer.step()
            optimizer.zero_grad()
            end(1)

    @staticmethod
    def short_last_batches(model: Any, end: End) -> None:
        optimizer = yield
        for length in (12, 12, 12, 12, 7, 12, 12, 7, 12, 7, 7, 12, 7):
            optimizer.zero_grad()
            loss_of(model, length).backward()
            optimizer.step()
            end(1)

    @staticmethod
    def changing_number_of_microbatches(model: Any, end: End) -> None:
        optimizer = yield
        for count in (1, 2, 3, 2, 1, 4, 2):
            for _ in range(count):
                (loss_of(model) / count).backward()
            optimizer.step()
            optimizer.zero_grad()
            end(count)

    @staticmethod
    def two_forwards_then_one_backward(model: Any, end: End) -> None:
        optimizer = yield
        for _ in range(8):
            (loss_of(model) + loss_of(model)).backward()
            optimizer.step()
            optimizer.zero_grad()
            end(2)

    @staticmethod
    def user_skips(model: Any, end: End) -> None:
        optimizer = yield
        for step in range(9):
            loss_of(model).backward()
            if step not in (1, 5, 6):
                optimizer.step()
            optimizer.zero_grad()
            end(1)

    @staticmethod
    def grad_scaler_skips(model: Any, end: End) -> None:
        optimizer = yield
        device = next(model.parameters()).device.type
        scaler = torch.amp.GradScaler(device, init_scale=4.0)
        for step in range(9):
            factor = float("inf") if step in (0, 5) else 1.0
            scaler.scale(loss_of(model) * factor).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            end(1)

    @staticmethod
    def forward_raises(model: Any, end: End) -> None:
        optimizer = yield
        for step in range(9):
            if step in (1, 5, 6):
                with _raising(model.model.layers[1]), contextlib.suppress(KeyError):
                    loss_of(model)
            loss_of(model).backward()
            optimizer.step()
            optimizer.zero_grad()
            end(1)

    @staticmethod
    def loss_is_thrown_away(model: Any, end: End) -> None:
        optimizer = yield
        for step in range(9):
            loss = loss_of(model)
            if step in (1, 5, 6):
                continue
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            end(1)

    @staticmethod
    def backward_raises(model: Any, end: End) -> None:
        optimizer = yield
        for step in range(9):
            if step in (1, 5, 6):
                with _raising(model.model.layers[1], backward=True):
                    loss = loss_of(model)
                with contextlib.suppress(KeyError):
                    loss.backward()
                optimizer.zero_grad()
            loss_of(model).backward()
            optimizer.step()
            optimizer.zero_grad()
            end(1)

    @staticmethod
    def closure(model: Any, end: End) -> None:
        optimizer = yield

        def compute() -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model)
            loss.backward()
            return loss

        for _ in range(8):
            optimizer.step(compute)
            end(1)

    @staticmethod
    def evaluation_between(model: Any, end: End) -> None:
        optimizer = yield
        for step in range(8):
            loss_of(model).backward()
            optimizer.step()
            optimizer.zero_grad()
            end(1)
            model.eval()
            if step % 2:
                with torch.no_grad():
                    loss_of(model, 9)
            else:
                loss_of(model)
            model.train()

    @staticmethod
    def evaluation_inside_a_step(model: Any, end: End) -> None:
        optimizer = yield
        for _ in range(8):
            loss_of(model).backward()
            with torch.no_grad():
                model.eval()
                loss_of(model)
                model.train()
            loss_of(model).backward()
            optimizer.step()
            optimizer.zero_grad()
            end(2)

    @staticmethod
    def learning_rate_schedule(model: Any, end: End) -> None:
        optimizer = yield
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=6)
        for _ in range(8):
            loss_of(model).backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=False)
            end(1)

    @staticmethod
    def clipping(model: Any, end: End) -> None:
        optimizer = yield
        for _ in range(8):
            model.zero_grad()
            loss_of(model).backward()
            nn.utils.clip_grad_norm_(trained(model), 0.1)
            optimizer.step()
            end(1)


LOOPS = [name for name in vars(Loops) if not name.startswith("_")]


@contextlib.contextmanager
def _raising(layer: nn.Module, backward: bool = False) -> Iterator[None]:
    def raises(*_: Any) -> None:
        raise KeyError("imitated: out of memory")

    if backward:
        handle = layer.register_forward_hook(lambda _, args, y: y.register_hook(raises) and None)
    else:
        handle = layer.register_forward_pre_hook(raises)
    try:
        yield
    finally:
        handle.remove()


def run(name: str, model: nn.Module, optimizer: Any, end: End = lambda n: None) -> None:
    batch.calls = 0  # type: ignore[attr-defined]
    loop = getattr(Loops, name)(model, end)
    next(loop)
    with contextlib.suppress(StopIteration):
        loop.send(optimizer)


def by_hand(name: str, model: nn.Module, philox: PhiloxState | None = None) -> int:
    """The loop, with what `attach` does written out; how many microbatches it had."""
    state, total = state_of(model), 0

    def end(microbatches: int) -> None:
        nonlocal total
        total += microbatches
        state.reduce_and_update()
        if philox is not None:
            philox.advance(microbatches)

    state.reduce_and_update()
    run(name, model, adamw(model), end)
    return total


def assert_equal(one: nn.Module, other: nn.Module) -> None:
    for (name, a), b in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name
    for direction in ("forward", "backward"):
        a, b = getattr(state_of(one), direction), getattr(state_of(other), direction)
        assert torch.allclose(a, b, rtol=0, atol=0, equal_nan=True), direction
    assert state_of(one).forward.any() and state_of(one).backward.any()


@contextlib.contextmanager
def attached_to(model: nn.Module, **options: Any) -> Iterator[Any]:
    optimizer = adamw(model)
    attached = attach(model, optimizer, **options)
    try:
        yield attached, optimizer
    finally:
        attached.detach()


def no_layers(model: Any) -> Any:
    model.model.layers = nn.Sequential(*model.model.layers)
    return model
