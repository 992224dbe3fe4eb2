# SPDX-License-Identifier: Apache-2.0
"""`disable_lora` over ranks shows the model as it was before training, with biases that were trained, or is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from lorakernels import disable_lora, fuse
from lorakernels.parallel import parallelize
from tests.fusion.fused_models import LINEARS, adapted, an_adapter, difference, fp32_bound, tokens
from tests.processes import on_ranks

WORLD = 2
CASES = {
    "all layers adapted": (LINEARS, False),
    "some layers adapted": (("q_proj", "down_proj"), False),
    "fused": (LINEARS, True),
}


def make(case: str, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    targets, fused = CASES[case]
    biased = {"attention_bias": True, "mlp_bias": True, "num_hidden_layers": 1}
    model = adapted("Llama", targets, model=biased, bias="all", device=device)
    if fused:
        fuse(model, attention="math")
    return model


@torch.no_grad()
def shown(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Logits with trained biases, without adapters and as trained again."""
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter += 0.5
    found = [model(x, use_cache=False).logits]
    with disable_lora(model):
        found.append(model(x, use_cache=False).logits)
    return [*found, model(x, use_cache=False).logits]


def split(rank: int, device: torch.device) -> dict[str, list[float]]:
    """How far the logits of a split model are from those of the whole one."""
    mesh, found = init_device_mesh(device.type, (WORLD,)), {}
    for case in CASES:
        whole, model = make(case, device), make(case, device)
        parallelize(model, mesh)
        x = tokens(device=device)
        pairs = zip(shown(model, x), shown(whole, x), strict=True)
        found[case] = [difference(ours, theirs) for ours, theirs in pairs]
    return found


def sharded(rank: int, device: torch.device) -> list[Any]:
    """What is said where FSDP2 has the biases, and how far logits are where it has the adapters alone, and nothing."""
    from torch.distributed.fsdp import fully_shard

    mesh, case = init_device_mesh(device.type, (WORLD,)), "all layers adapted"
    whole, x = make(case, device), tokens(device=device)
    expected = shown(whole, x)
    found: list[Any] = []
    for has in (("lora_A", "lora_B", "bias"), ("lora_A", "lora_B"), ()):
        model = make(case, device)
        ignored = {p for n, p in model.named_parameters() if not n.endswith(has)}
        fully_shard(model.model.layers[0], mesh=mesh, ignored_params=ignored)
        if "bias" in has:
            with pytest.raises(RuntimeError, match="FSDP2"), disable_lora(model):
                pass
            found.append(an_adapter(model).disable_adapters)
        else:
            with disable_lora(model):  # while what FSDP2 has is sharded
                pass
            found += map(difference, shown(model, x), expected)
    return found


def a_saved_head(rank: int, device: torch.device) -> dict[str, Any]:
    """What is said where FSDP2 has a head of modules_to_save, and how far logits are where it is gathered, or not."""
    from torch.distributed.fsdp import fully_shard

    mesh, x = init_device_mesh(device.type, (WORLD,)), tokens(device=device)

    def made() -> nn.Module:
        torch.manual_seed(0)
        model = adapted("Llama", LINEARS, modules_to_save=["lm_head"], device=device)
        with torch.no_grad():
            model.lm_head.weight += 0.5
        return model

    def logits(model: nn.Module) -> Tensor:
        found: Tensor = model(x, use_cache=False).logits
        return found.detach()

    def both(model: nn.Module) -> list[Tensor]:
        """Before training, also after a backward inside, and as trained again."""
        with disable_lora(model):
            found = [logits(model)]
            model(x, use_cache=False).logits.sum().backward()
            found.append(logits(model))
        return [*found, logits(model)]

    expected, found = both(made()), dict[str, Any]()
    for name in ("sharded", "gathered", "ignored"):
        model = made()
        ignored = {p for p in model.parameters() if name == "ignored" and p is model.lm_head.weight}
        fully_shard(model, mesh=mesh, ignored_params=ignored, reshard_after_forward=False)
        if name == "gathered":
            logits(model)
        try:
            found[name] = [*map(difference, both(model), expected)]
        except RuntimeError as error:
            found[name] = str(error), an_adapter(model).disable_adapters
    return found


@pytest.mark.slow
def test_a_head_of_modules_to_save_that_fsdp_shards_is_refused_and_others_shown() -> None:
    for found in on_ranks(a_saved_head, WORLD, "gloo"):
        said, disabled = found.pop("sharded")
        assert "modules_to_save that FSDP2 shards cannot show" in said and disabled is False
        assert found == dict.fromkeys(("gathered", "ignored"), [0.0] * 3)


@pytest.mark.slow
def test_biases_that_fsdp_shards_are_refused_and_others_shown() -> None:
    for disabled, *differences in on_ranks(sharded, WORLD, "gloo"):
        assert disabled is False and differences == [0.0] * 6


def test_parts_show_the_biases_from_before_training() -> None:
    for found in on_ranks(split, WORLD, "gloo"):
        for case, differences in found.items():
            assert max(differences) < fp32_bound("Llama"), (case, differences)
