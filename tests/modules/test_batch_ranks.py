# SPDX-License-Identifier: Apache-2.0
"""An adapter of a rank below the layers' has parameters of its rank, and nothing beyond it runs unseen."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lorakernels
from lorakernels import AdapterBatch, DelayedScaling
from tests.modules.batched_models import NAMES, adapted, alone, batched, rows, tiny_llama

RANKS = {"de": 1, "it": 3}


def filled(**options: Any) -> tuple[Any, AdapterBatch]:
    """With values wherever a user finds parameters."""
    model, batch = batched(ranks=RANKS, **options)
    for name in NAMES:
        for value in batch.parameters(name).values():
            nn.init.normal_(value, std=0.1)
    return model, batch


def rest_of(batch: AdapterBatch, name: str) -> float:
    index, rank = batch.names.index(name), RANKS[name]
    wholes = ((m.lora_A[index], m.lora_B[index].T) for m in batch.layers.values())
    return sum(float(part[rank:].abs().sum()) for pair in wholes for part in pair)


@pytest.mark.parametrize("fp8", [None, DelayedScaling()], ids=["plain", "FP8"])
@pytest.mark.parametrize("fused", [False, True], ids=["layers", "fused"])
def test_what_a_user_writes_is_what_runs_and_is_saved(
    fused: bool, fp8: Any, tmp_path: Path
) -> None:
    model, batch = filled(fp8=fp8)
    if fused:
        lorakernels.fuse(model)
    for name, rank in {"fr": 4, **RANKS}.items():
        for path, value in batch.parameters(name).items():
            assert value.shape[0 if path.endswith("lora_A") else 1] == rank, path
    groups = batch.param_groups()
    assert [len({id(p) for p in g["params"]}) for g in groups] == [2 * len(batch.layers)] * 3
    assert sum(p.numel() for p in groups[1]["params"]) * 3 == sum(
        p.numel() for p in groups[2]["params"]
    )
    ids = rows(model, 1).expand(3, -1)
    model.eval()
    with torch.no_grad():
        found = model(input_ids=ids).logits[1]
    with batch.only("de"):
        lorakernels.save_adapter(model, tmp_path / "de")
    single = tiny_llama()
    lorakernels.load_adapter(single, tmp_path / "de", fp8=fp8)
    with torch.no_grad():
        wanted = single.eval()(input_ids=ids[:1]).logits[0]
    # over FP8 the batch's rows share the scale of x, and e4m3 rounds by 2⁻⁴; values beyond the rank made it 1.1
    assert (found - wanted).norm() <= (1e-5 if fp8 is None else 2**-4) * wanted.norm()


def test_a_step_is_that_of_each_alone() -> None:
    model, batch = filled()
    singles = {name: alone(model, batch, name) for name in NAMES}
    optimizer = torch.optim.SGD(batch.param_groups({"de": {"lr": 0.02}}), lr=0.01, momentum=0.9)
    batch.follow(optimizer)
    others = {
        name: torch.optim.SGD(
            [p for p in single.parameters() if p.requires_grad],
            lr=0.02 if name == "de" else 0.01,
            momentum=0.9,
        )
        for name, single in singles.items()
    }
    for _ in range(2):
        ids = rows(model)
        optimizer.zero_grad()
        model(input_ids=ids).logits.square().sum().backward()
        optimizer.step()
        for i, (name, single) in enumerate(singles.items()):
            others[name].zero_grad()
            single(input_ids=ids[i : i + 1]).logits.square().sum().backward()
            others[name].step()
    for name, single in singles.items():
        for key, value in batch.parameters(name).items():
            # fp32, with sums of four products of which some are zeros
            torch.testing.assert_close(value, single.get_parameter(key), rtol=1e-4, atol=1e-5)
    assert rest_of(batch, "de") == rest_of(batch, "it") == 0


@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
def test_fused_optimizers_take_padded_parameters_only(kind: str) -> None:
    """torch's fused kernels write over the gaps of a view on a CPU."""
    model, batch = filled()
    with pytest.raises(
        ValueError, match=r"fused=True.*lora_B of de, it.*padded=True\), or foreach"
    ):
        batch.follow(getattr(torch.optim, kind)(batch.param_groups(), lr=0.1, fused=True))
    optimizer = getattr(torch.optim, kind)(batch.param_groups(padded=True), lr=0.1, fused=True)
    batch.follow(optimizer)
    before = [p.clone() for p in batch.parameters("de").values()]
    for _ in range(2):
        optimizer.zero_grad()
        model(input_ids=rows(model)).logits.square().sum().backward()
        optimizer.step()
    assert not any(map(torch.equal, before, batch.parameters("de").values()))
    assert rest_of(batch, "de") == rest_of(batch, "it") == 0


def test_gradients_of_a_left_out_step_are_dropped() -> None:
    model, batch = filled()
    ids = rows(model)
    for padded in (False, True):
        optimizer = torch.optim.SGD(batch.param_groups(padded=padded), lr=0.1)
        batch.follow(optimizer)
        norms = []
        for _ in range(2):
            optimizer.zero_grad()
            model(input_ids=ids).logits.square().sum().backward()
            parts = [p for group in optimizer.param_groups for p in group["params"]]
            norms.append(float(nn.utils.get_total_norm([p.grad for p in parts])))
        assert norms[0] == norms[1] > 0
        batch.clear_gradients()


def test_an_optimizer_that_moves_a_view_is_found_out() -> None:
    """bitsandbytes makes each parameter contiguous: the layer would not see its updates."""
    model, batch = filled()
    optimizer = torch.optim.SGD(batch.param_groups(), lr=0.1)
    batch.follow(optimizer)
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.data = p.data.contiguous()
    model(input_ids=rows(model)).logits.square().sum().backward()
    with pytest.raises(RuntimeError, match=r"'de' other memory.*param_groups\(padded=True\)"):
        optimizer.step()


def in_bf16(model: Any, batch: AdapterBatch) -> tuple[Any, AdapterBatch]:
    return model.to(torch.bfloat16), batch


def loaded(model: Any, batch: AdapterBatch) -> tuple[Any, AdapterBatch]:
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
    return model, batch


def copied(model: Any, batch: AdapterBatch) -> tuple[Any, AdapterBatch]:
    return copy.deepcopy((model, batch))


@pytest.mark.parametrize("moved", [in_bf16, loaded, copied])
def test_parameters_follow_memory_that_moves(moved: Any) -> None:
    model, batch = moved(*filled())
    for value in batch.parameters("de").values():
        value.data.fill_(3.0)
    for layer in batch.layers.values():
        assert bool((layer.lora_A[1, :1] == 3).all()) and bool((layer.lora_B[1, :, :1] == 3).all())
    assert rest_of(batch, "de") == 0
    with pytest.raises(ValueError, match="'de' beyond its rank 1"):  # copies refuse it, too
        model.load_state_dict({k: torch.ones_like(v) for k, v in model.state_dict().items()})


def wider(model: Any, batch: AdapterBatch) -> None:
    model.load_state_dict(batched()[0].state_dict())


def by_hand(model: Any, batch: AdapterBatch) -> None:
    next(iter(batch.layers.values())).lora_B.data[1, 0, 2] = 1.0
    with batch.only("de"):
        raise AssertionError("not reached")


@pytest.mark.parametrize("write", [wider, by_hand])
def test_values_beyond_the_rank_are_refused(write: Callable[..., None]) -> None:
    with pytest.raises(
        ValueError, match=r"lora_[AB] has values of adapter '(de|it)' beyond its rank"
    ):
        write(*filled())


@pytest.mark.parametrize("init", ["gaussian", False])
def test_each_starts_as_a_layer_of_its_rank(init: Any) -> None:
    """The standard deviation of "gaussian" is 1/r, and B's bound without zeros 1/√r."""
    model = adapted(init_lora_weights=init, r=16)
    layers = lorakernels.batch_adapters(model, NAMES, {"de": 1}).layers.values()
    A = torch.cat([layer.lora_A[1, :1].flatten() for layer in layers])
    B = torch.cat([layer.lora_B[1, :, :1].flatten() for layer in layers])
    if init == "gaussian":
        assert 0.9 < float(A.std()) < 1.1 and not B.any()
    else:
        assert 0.9 < float(B.abs().max()) <= 1.0
