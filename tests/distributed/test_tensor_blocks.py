# SPDX-License-Identifier: Apache-2.0
"""Column and row layers under BlockScaling: the whole layer's bytes and scales on 2 ranks, and results near it."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from lorakernels import BlockScaling, LoRAConfig, LoRALinear, PhiloxState, fuse, ops
from lorakernels.autograd.linear import linear
from lorakernels.numerics.fp8 import E4M3
from lorakernels.parallel import ColumnParallelLoRALinear, RowParallelLoRALinear, parallelize
from lorakernels.values import Scaled
from tests.fusion.fused_models import LINEARS, VOCABULARY, adapted
from tests.processes import on_ranks

pytestmark = pytest.mark.slow
K, N, ROWS, R = 512, 256, 12, 4
CLASSES = {"column": ColumnParallelLoRALinear, "row": RowParallelLoRALinear}
RECIPES = {"e4m3": BlockScaling(), "e5m2, powers of two": BlockScaling("HYBRID", True)}
WAYS = [(by, rows, name) for by in CLASSES for rows in (False, True) for name in RECIPES]


def make(kind: Any, recipe: BlockScaling, device: torch.device, **options: Any) -> Any:
    torch.manual_seed(3)
    config = LoRAConfig(r=R, lora_alpha=8, lora_dropout=0.25, fp8=recipe, bias="lora_only")
    layer = kind(K, N, config=config, device=device, dtype=torch.float32, **options)
    B = torch.randn(N, R, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        whole = len(layer.lora_B) == N
        layer.lora_B.copy_(B if whole else B[layer.ranks.share(N)])
    layer.rng_state = PhiloxState(11, device)
    return layer.train()


def own(ranks: Any, value: Tensor, dim: int | None) -> Tensor:
    return (
        value
        if dim is None
        else value.narrow(dim, ranks.share(value.shape[dim]).start, value.shape[dim] // 2)
    )


def step(layer: Any, x: Tensor, dy: Tensor) -> tuple[dict[str, Tensor], list[Scaled]]:
    """y and all gradients; and the operands of both products, as they were multiplied."""
    torch.manual_seed(7)
    x, seen = x.clone().requires_grad_(), []
    forward, backward = linear.project, linear.grad_x

    def project(operand: Scaled, *others: Any) -> Tensor:
        seen.append(operand)
        return forward(operand, *others)

    def grad_x(to: Any, operand: Scaled, *others: Any) -> Tensor:
        seen.append(operand)
        return backward(to, operand, *others)

    with mock.patch.object(linear, "project", project), mock.patch.object(linear, "grad_x", grad_x):
        y = layer(x)
        y = y[0] if isinstance(y, tuple) else y
        y.backward(dy)
    names = ("lora_A", "lora_B", "bias")
    return {"y": y.detach(), "dx": x.grad, **{n: getattr(layer, n).grad for n in names}}, seen


def compare(device: torch.device, by: str, sequence: bool, recipe: BlockScaling) -> dict[str, Any]:
    """{what: whether it is the whole layer's to the bit, or how far it is from it}."""
    generator = torch.Generator().manual_seed(100)
    x, dy = (torch.randn(ROWS, n, generator=generator).exp().to(device) for n in (K, N))
    whole = make(LoRALinear, recipe, device)
    group = dist.group.WORLD
    part = make(CLASSES[by], recipe, device, tp_group=group, sequence_parallel=sequence)
    ranks, column, rows = part.ranks, by == "column", 0 if sequence else None
    dims = {name: part.dimensions.get(name) for name in ("lora_A", "lora_B", "bias", "weight")}
    dims |= {"dx": rows, "y": 1} if column else {"dx": 1, "y": rows}
    expected, _ = step(whole, x, dy)
    found, (x8, dy8) = step(part, own(ranks, x, dims["dx"]), own(ranks, dy, dims["y"]))
    bits = {
        "W8": torch.equal(part.stored, own(ranks, whole.stored, dims["weight"])),
        "W's scales": torch.equal(
            part.weight_scale_inv, own(ranks, whole.weight_scale_inv, dims["weight"])
        ),
    }
    sides = (("x", x8, x, E4M3, not column), ("dy", dy8, dy, recipe.backward_dtype, column))
    for name, operand, value, dtype, is_cut in sides:
        data, scales = ops.quantize_blocks(value, dtype, recipe.power_2_scale)
        bits[f"{name}8"] = torch.equal(operand.data, own(ranks, data, 1 if is_cut else None))
        theirs = own(ranks, scales, 0 if is_cut else None)
        bits[f"{name}'s scales"] = torch.equal(operand.scale_inv, theirs)
    far = {}
    for name, value in found.items():
        theirs = own(ranks, expected[name], dims[name]).double()
        far[name] = float((value.double() - theirs).norm() / theirs.norm())
    return {"bits": bits, "far": far}


def worker(rank: int, device: torch.device) -> dict[Any, Any]:
    return {
        (by, sequence, name): compare(device, by, sequence, RECIPES[name])
        for by, sequence, name in WAYS
    }


_ran: list[Any] = []


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_parts_multiply_the_whole_layer_s_bytes(way: tuple[str, bool, str]) -> None:
    """fp32 sums of at most n = K + R products, in two orders: as in test_tensor_layers.py."""
    if not _ran:
        _ran.extend(on_ranks(worker, 2, "gloo"))
    for found in _ran:
        assert all(found[way]["bits"].values()), found[way]["bits"]
        assert max(found[way]["far"].values()) < 2 * (K + R) ** 1.5 * 2.0**-24, found[way]["far"]


def model_of() -> Any:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    return adapted(
        targets=LINEARS,
        model={**sizes, "num_key_value_heads": 4},
        fp8=BlockScaling(),
        lora_dropout=0.0,
    )


def parallelized(
    rank: int, device: torch.device, sequence: bool, save: str | None
) -> dict[str, float]:
    """How far the loss and B's gradients of a model over ranks are from those of a whole one; unequal bytes as 1.0."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    ids = torch.arange(24).view(2, 12) % VOCABULARY
    both: list[dict[str, Tensor]] = []
    first: list[Scaled] = []
    project = linear.project

    def watched(operand: Scaled, *others: Any) -> Tensor:
        first.append(operand)
        return project(operand, *others)

    for is_split in (False, True):
        torch.manual_seed(0)
        model = model_of().train()
        if save is not None:
            fuse(model, save=save, attention="math")
        if is_split:
            parallelize(model, mesh["tp"], sequence_parallel=sequence)
        with mock.patch.object(linear, "project", watched):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        layer = model.model.layers[0]
        both.append(
            {
                "loss": loss.detach(),
                "down": layer.mlp.down_proj.lora_B.grad,
                "q": layer.self_attn.q_proj.lora_A.grad,
            }
        )
    far = {
        name: float((both[1][name] - value).norm() / value.norm())
        for name, value in both[0].items()
    }
    if (
        save is not None and sequence
    ):  # what q, k and v of the first layer multiply was gathered as bytes
        x8, sent = first[0], first[len(first) // 2]
        assert sent.scale_inv is not None and x8.scale_inv is not None
        far["x8"] = float(not (x8.data.equal(sent.data) and x8.scale_inv.equal(sent.scale_inv)))
    return far


@pytest.mark.slow
@pytest.mark.parametrize("save", [None, "recompute", "full"], ids=lambda s: s or "not fused")
@pytest.mark.parametrize("sequence", [False, True], ids=["rows whole", "rows split"])
def test_a_model_over_ranks_is_near_the_whole_one(sequence: bool, save: str | None) -> None:
    """A sum in another order moves an x to the next FP8 value here and there, by 2^-4 of it at most; the loss sees
    a mean of many. A missing factor or scale is farther away."""
    for found in on_ranks(parallelized, 2, "gloo", sequence, save):
        assert found["loss"] < 2.0**-10 and max(found.values()) < 2.0**-4, found


def inside_a_block(rank: int, device: torch.device) -> str:
    config = LoRAConfig(r=R, fp8=BlockScaling())
    with pytest.raises(ValueError, match="follows BlockScaling") as caught:
        RowParallelLoRALinear(384, N, config=config, tp_group=dist.group.WORLD)
    return str(caught.value)


def test_a_part_that_would_end_within_a_block_is_refused() -> None:
    expected = "in_features 384, which must be a multiple of 2 ranks · 128"
    assert all(expected in said for said in on_ranks(inside_a_block, 2, "gloo"))
