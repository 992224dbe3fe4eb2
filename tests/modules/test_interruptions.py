# SPDX-License-Identifier: Apache-2.0
"""What changes a model is interrupted at every allocation: the model is as it was, or changed as a whole."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lorakernels import (
    DelayedScaling,
    FrozenFP8Linear,
    LoRAConfig,
    LoRALinear,
    apply_lora,
    disable_lora,
    fuse,
    load_adapter,
    merge_lora,
    save_adapter,
    unfuse,
    unmerge_lora,
)
from lorakernels.modules.marks import KEY, became
from tests.fusion.fused_models import adapted, model_of, tokens
from tests.interrupt import Interrupt

INTERRUPTIONS = 40  # of each call, the first and the last allocation among them
CONFIG = LoRAConfig(
    r=4,
    target_modules=["q_proj", "v_proj", "up_proj"],
    fp8=DelayedScaling(amax_history_len=3),
    modules_to_save=["lm_head"],
    bias="all",
)


def _plain(value: object) -> object:
    return value.__qualname__ if callable(value) and hasattr(value, "__qualname__") else value


def looks(model: nn.Module, ids: Tensor) -> dict[str, Any]:
    """Everything a caller can see of `model`; tensors as bytes."""
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        found[f"{path} class"] = type(module).__name__
        found[f"{path} attributes"] = sorted(k for k in vars(module) if k != KEY)
        record = dict(vars(became(module)), fused=None)
        found[f"{path} marks"] = sorted(k for k, value in record.items() if value)
        found[f"{path} training"] = module.training
        for kind, held in vars(module).items():
            if "hooks" in kind:
                found[f"{path} {kind}"] = [_plain(hook) for hook in held.values()]
        if isinstance(module, FrozenFP8Linear):
            found[f"{path} state"] = (module.name, module.column, getattr(module, "merged", False))
            if module.fp8_state is not None:
                found[f"{path} names"] = (module.fp8_state.names, sorted(module.fp8_state.joint))
                found[f"{path} charge"] = module.fp8_state.in_charge
            if isinstance(module, LoRALinear):
                found[f"{path} disabled"] = module.disable_adapters
        if (config := getattr(module, "config", None)) is not None and hasattr(config, "use_cache"):
            found[f"{path} use_cache"] = config.use_cache
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found[f"{name} trains"] = parameter.requires_grad
    for name, value in model.state_dict().items():
        found[f"{name} bits"] = (
            value.dtype,
            value.contiguous().view(torch.uint8).numpy().tobytes(),
        )
    modes = {module: module.training for module in model.modules()}
    with torch.no_grad():
        logits = model.eval()(ids, use_cache=False).logits
    for module, mode in modes.items():
        module.training = mode
    found["logits"] = logits.numpy().tobytes()
    return found


def _with_frozen() -> nn.Module:
    """FP8 layers with states of their own beside what is to be adapted."""
    model = model_of("Qwen2")
    for layer in model.model.layers:
        old = layer.mlp.down_proj
        layer.mlp.down_proj = FrozenFP8Linear.from_linear(old, CONFIG.fp8, name="mine")
        layer.mlp.down_proj.fp8_state.forward.uniform_()
    return model


def _tuned() -> nn.Module:
    model = adapted("Qwen2", ("q_proj", "v_proj", "up_proj"), fp8=CONFIG.fp8)
    next(m for m in model.modules() if isinstance(m, LoRALinear)).fp8_state.backward.uniform_()
    return model


def _fused() -> nn.Module:
    model = _tuned()
    fuse(model, keep_linears=True)
    return model


def _merged() -> nn.Module:
    model = _tuned()
    merge_lora(model)
    return model


def _leave_disabled(model: nn.Module) -> None:
    with disable_lora(model):
        pass


CALLS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Any]]] = {
    "apply_lora": (_with_frozen, lambda m: apply_lora(m, CONFIG)),
    "apply_lora over FP8": (_with_frozen, lambda m: apply_lora(m, CONFIG, frozen="fp8")),
    "fuse": (_tuned, fuse),
    "fuse over a plain base": (lambda: adapted("Qwen3"), fuse),
    "unfuse": (_fused, unfuse),
    "merge_lora": (_tuned, merge_lora),
    "unmerge_lora": (_merged, unmerge_lora),
    "disable_lora": (_merged, _leave_disabled),
}


def _seeded(call: Callable[[nn.Module], Any], model: nn.Module) -> None:
    torch.manual_seed(0)
    call(model)


def check(make: nn.Module, call: Callable[[nn.Module], Any], seed: str) -> None:
    ids = tokens(1, 5)
    before, done = looks(make, ids), copy.deepcopy(make)
    with Interrupt() as counter:
        _seeded(call, done)
    after = looks(done, ids)
    choose = random.Random(seed)
    middle = range(2, counter.count)
    some = choose.sample(middle, min(len(middle), INTERRUPTIONS - 2))
    for at in (1, *sorted(some), counter.count):
        error = choose.choice((KeyboardInterrupt, torch.OutOfMemoryError))
        model = copy.deepcopy(make)
        with pytest.raises(error), Interrupt(at, error):
            _seeded(call, model)
        found = looks(model, ids)
        if found == before:
            _seeded(call, model)
            found = looks(model, ids)
        wrong = [key for key in after.keys() | found.keys() if after.get(key) != found.get(key)]
        assert not wrong, (
            at,
            error,
            sorted(wrong)[:5],
            [k for k in before if before[k] != found.get(k)][:5],
        )


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_interrupted_at_any_allocation(name: str) -> None:
    make, call = CALLS[name]
    check(make(), call, name)


@pytest.mark.slow
@pytest.mark.parametrize("onto", ["a plain model", "the same adapter"])
def test_load_adapter_interrupted_at_any_allocation(onto: str, tmp_path) -> None:
    model = model_of("Qwen2")
    trained = copy.deepcopy(model)
    apply_lora(trained, CONFIG)
    for parameter in trained.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.1)
    save_adapter(trained, tmp_path)
    if onto == "the same adapter":
        apply_lora(model, CONFIG)
    check(model, lambda m: load_adapter(m, tmp_path, fp8=CONFIG.fp8), onto)
