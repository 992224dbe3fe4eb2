# SPDX-License-Identifier: Apache-2.0
"""DDP and FSDP2 around an adapted model on two ranks: the gradients are those of the full batch."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.torch_version import TorchVersion

from lorakernels import BlockScaling, DelayedScaling, LoRAConfig, apply_lora, merge_lora
from lorakernels.modules.linear import stored_weight
from tests.processes import on_ranks

WORLD = 2


def net(recipe=DelayedScaling()):  # noqa: B008  (frozen)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 8))
    apply_lora(model, LoRAConfig(r=4, target_modules=["0", "2"], fp8=recipe))
    for layer in (model[0], model[2]):
        nn.init.normal_(layer.lora_B, std=0.2)
    return model


def batch():
    generator = torch.Generator().manual_seed(5)
    return torch.randn(8, 16, generator=generator)


def loss_of(model, x):
    return model(x).pow(2).mean()


def wrapped_as(wrap, model, device):
    if wrap == "ddp":
        wrapped = nn.parallel.DistributedDataParallel(model)
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        mesh = init_device_mesh(device.type, (WORLD,))
        dtype = torch.bfloat16 if wrap == "fsdp2, bf16" else None
        policy = MixedPrecisionPolicy(param_dtype=dtype, output_dtype=torch.float32)
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        wrapped = fully_shard(model, mesh=mesh, mp_policy=policy)
        with pytest.raises(RuntimeError, match="sharded"):
            merge_lora(model)
    return wrapped


def full_gradients(model):
    grads = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    full = {n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in grads.items()}
    return {n: g.cpu().numpy() for n, g in full.items()}


def worker(rank, device, wrap, storage):
    stored_weight.STORAGE = storage
    model = net().to(device)
    wrapped = wrapped_as(wrap, model, device)
    for _ in range(2):
        model.zero_grad()
        loss_of(wrapped, batch().chunk(WORLD)[rank].to(device)).backward()
        model[0].fp8_state.reduce_and_update()
    scales = torch.cat((model[0].fp8_state.forward[-1], model[0].fp8_state.backward[-1]))
    return full_gradients(model), scales.cpu().numpy()


def worker_in_blocks(rank, device, wrap, storage):
    stored_weight.STORAGE = storage
    model = net(BlockScaling()).to(device)
    wrapped = wrapped_as(wrap, model, device)  # DDP reduces in backward, as long as it lives
    loss_of(wrapped, batch().chunk(WORLD)[rank].to(device)).backward()
    return full_gradients(model)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrap", "storage", "backend"),
    [
        pytest.param("ddp", torch.uint8, "gloo", id="ddp"),
        pytest.param("fsdp2", stored_weight.STORAGE, "gloo", id="fsdp2"),
        pytest.param("fsdp2, bf16", stored_weight.STORAGE, "gloo", id="fsdp2, bf16"),
        pytest.param(
            "fsdp2, bf16", torch.float8_e4m3fn, "gloo", id="fsdp2, bf16, as before torch 2.13"
        ),
        *(
            pytest.param(
                wrap, stored_weight.STORAGE, "nccl", id=f"{wrap}, nccl", marks=pytest.mark.gpu
            )
            for wrap in ("ddp", "fsdp2", "fsdp2, bf16")
        ),
    ],
)
def test_gradients_are_those_of_the_full_batch(wrap, storage, backend):
    if backend == "nccl" and torch.cuda.device_count() < WORLD:
        pytest.skip(f"needs {WORLD} GPUs, found {torch.cuda.device_count()}")
    if backend == "gloo" and wrap != "ddp" and TorchVersion(torch.__version__) < "2.9":
        pytest.skip("torch 2.8's FSDP2 sums gradients over gloo, a plain nn.Linear's too")
    (grads, scales), (_, other_scales) = on_ranks(worker, WORLD, backend, wrap, storage)
    assert (scales == other_scales).all(), "ranks with different data end with equal scales"
    model = net()
    for _ in range(2):
        model.zero_grad()
        loss_of(model, batch()).backward()
        model[0].fp8_state.reduce_and_update()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            # each rank's dy has its own amax in the first steps, so its e5m2 grid differs: 2 mantissa bits, 2⁻³
            error = (torch.tensor(grads[name]) - parameter.grad).norm() / parameter.grad.norm()
            assert error < 0.1, (name, error)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrap", "storage", "allowed"),
    [("ddp", torch.uint8, 1e-5), ("fsdp2", stored_weight.STORAGE, 1e-5), ("fsdp2, bf16", stored_weight.STORAGE, 0.1)],
    ids=["ddp", "fsdp2", "fsdp2, bf16"],
)  # fmt: skip
def test_gradients_in_blocks_are_those_of_the_full_batch(wrap, storage, allowed):
    """A row has its own scales, whichever rank has it, so that only fp32 sums are in another order.

    Under the bf16 policy, x and the adapters are bf16: 2⁻⁸ of each, and bytes of FP8 that fall to the other side, 2⁻⁴.
    """
    if wrap != "ddp" and TorchVersion(torch.__version__) < "2.9":
        pytest.skip("torch 2.8's FSDP2 sums gradients over gloo, a plain nn.Linear's too")
    grads, _ = on_ranks(worker_in_blocks, WORLD, "gloo", wrap, storage)
    model = net(BlockScaling())
    loss_of(model, batch()).backward()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            error = (torch.tensor(grads[name]) - parameter.grad).norm() / parameter.grad.norm()
            assert error < allowed, (name, error)
