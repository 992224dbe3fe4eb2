# SPDX-License-Identifier: Apache-2.0
"""ShardedAdamW: what an all-reduce and torch.optim.AdamW on each rank would compute, with a part of the moments."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._pytree import tree_map_only

from lorakernels import DelayedScaling, LoRAConfig, apply_lora, attach
from lorakernels.modules.linear import frozen
from lorakernels.parallel import ShardedAdamW, shard_base
from lorakernels.parallel.optimizer import sharded_adamw as module
from lorakernels.parallel.optimizer.bucket import Bucket
from tests.distributed.sharded_models import Way, batches, loss_of, make
from tests.fusion.fused_models import an_adapter
from tests.graphs.layers import backend_for
from tests.processes import on_ranks

STEPS = 4
# The transposed one fills its vectors: torch's kernels walk through memory, while the buffer has rows in their order.
SHAPES = ((3, 257), (64,), (128, 8), (1,), (5, 5), (200, 3))
BF16, UNUSED, TRANSPOSED = 4, 1, 2  # indices of SHAPES
ALONE = 2  # the step in which only the first has a gradient


def parameters(device: torch.device, seed: int = 0) -> list[nn.Parameter]:
    torch.manual_seed(seed)
    found = [torch.randn(shape) for shape in SHAPES]
    found[BF16] = found[BF16].bfloat16()
    found[TRANSPOSED] = found[TRANSPOSED].t().contiguous().t()
    return [nn.Parameter(x.to(device)) for x in found]


def groups(params: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": params[:2], "weight_decay": 0.3}, {"params": params[2:], "lr": 3e-2}]


def gradients(rank: int, step: int, device: torch.device) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    found = [torch.randn(shape, generator=generator) for shape in SHAPES]
    found[BF16] = found[BF16].bfloat16()
    return [x.to(device) for x in found]


def give_gradients(params: list[nn.Parameter], rank: int, step: int) -> None:
    """One parameter never has one, and in one step only the first has: whole buckets are without."""
    for i, grad in enumerate(gradients(rank, step, params[0].device)[: len(params)]):
        p = params[i]
        without = i == UNUSED or (i > 0 and step == ALONE)
        p.grad = None if without else torch.empty_like(p).copy_(grad)  # strides as autograd's


def mesh_of(device: torch.device) -> Any:
    shape = (dist.get_world_size(),)
    return init_device_mesh(device.type, shape, mesh_dim_names=("dp_shard",))["dp_shard"]


def train(optimizer: Any, params: list[nn.Parameter], rank: int, first: int, reduce: bool) -> None:
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    for step in range(first, first + STEPS):
        give_gradients(params, rank, step)
        if reduce:
            for p in params:
                if p.grad is not None:
                    p.grad.mul_(1 / dist.get_world_size())  # as DistributedDataParallel
                    whole = p.grad.contiguous()  # NCCL takes no other
                    dist.all_reduce(whole)
                    p.grad.copy_(whole)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()


def to_cpu(x: Tensor) -> Tensor:
    return x.detach().to("cpu", copy=True)


def steps(rank: int, device: torch.device, options: dict[str, Any]) -> dict[str, Any]:
    """The same steps by ShardedAdamW and by AdamW after all-reduces; then two times more of the other's state."""
    module.BUCKET_BYTES = 4096  # several buckets of a dtype
    sharded_params, plain_params = parameters(device, seed=rank), parameters(device)
    sharded = ShardedAdamW(groups(sharded_params), mesh_of(device), lr=1e-2, **options)
    assert all(map(torch.equal, sharded_params, plain_params)), "rank 0's values"
    plain = torch.optim.AdamW(groups(plain_params), lr=1e-2, **options)
    found: dict[str, Any] = {"text": str(sharded), "layouts": len(sharded._buckets)}
    for part in ("fresh", "exchanged"):
        train(sharded, sharded_params, rank, 0, reduce=False)
        train(plain, plain_params, rank, 0, reduce=True)
        found[part] = {
            "params": [[x.detach().cpu() for x in ps] for ps in (sharded_params, plain_params)],
            # what a rank returns is pickled by a process without a GPU
            "states": tree_map_only(Tensor, to_cpu, [sharded.state_dict(), plain.state_dict()]),
        }
        ours, theirs = copy.deepcopy(found[part]["states"])
        sharded = ShardedAdamW(groups(sharded_params), mesh_of(device), lr=1e-2, **options)
        plain = torch.optim.AdamW(groups(plain_params), lr=1e-2, **options)
        sharded.load_state_dict(theirs)
        plain.load_state_dict(ours)
    return found


def on(backend: str, world: int, worker: Callable[..., Any], *args: Any) -> list[Any]:
    if backend == "nccl" and torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} GPUs, found {torch.cuda.device_count()}")
    return on_ranks(worker, world, backend, *args)


NCCL = pytest.param("nccl", marks=pytest.mark.gpu)


@pytest.mark.parametrize("backend", ["gloo", NCCL])
@pytest.mark.parametrize(
    "options", [{}, {"fused": True, "capturable": True}], ids=["default", "fused"]
)
def test_two_ranks_compute_the_bits_of_an_all_reduce(backend: str, options: Any) -> None:
    ranks = on(backend, 2, steps, options)
    for found in ranks:
        assert found["layouts"] > 2
        for part in ("fresh", "exchanged"):
            ours, theirs = found[part]["params"]
            assert [torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)] == [True] * len(
                ours
            )
            same_states(*found[part]["states"])
    assert not torch.equal(ranks[0]["fresh"]["params"][0][0], parameters(torch.device("cpu"))[0])


def same_states(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours["state"].keys() == theirs["state"].keys() == set(range(len(SHAPES))) - {UNUSED}
    for index, state in theirs["state"].items():
        assert ours["state"][index].keys() == state.keys()
        for name, value in state.items():
            assert torch.equal(ours["state"][index][name], value), (index, name)


def first_moments(rank: int, device: torch.device, max_grad_norm: float | None) -> dict[str, Any]:
    params = parameters(device)
    optimizer = ShardedAdamW(params, mesh_of(device), max_grad_norm=max_grad_norm)
    give_gradients(params, rank, 0)
    optimizer.step()
    state = optimizer.state_dict()["state"]
    norm = None if optimizer.grad_norm is None else float(optimizer.grad_norm)
    moments = {i: one["exp_avg"].double() for i, one in state.items()}
    return {"moments": moments, "norm": norm, "params": [p.detach().cpu() for p in params]}


@pytest.mark.parametrize("backend", ["gloo", NCCL])
@pytest.mark.parametrize("clipped", [None, 0.5, 1e6], ids=["as they are", "clipped", "not clipped"])
def test_the_mean_gradient_over_four_ranks_is_that_of_float64(backend: str, clipped: Any) -> None:
    """exp_avg after one step is a tenth of it. Four terms are scaled and summed, which rounds each seven times at most.

    Clipping's factor has the norm's error: that of a hundredth of its square, the bf16 gradient, is 2^-9.
    """
    world = 4
    ranks = on(backend, world, first_moments, clipped)
    each = [[g.double() for g in gradients(r, 0, torch.device("cpu"))] for r in range(world)]
    mean = {i: sum(g[i] for g in each) / world for i in range(len(SHAPES)) if i != UNUSED}
    norm = torch.stack([m.norm() for m in mean.values()]).norm()
    factor = 1.0 if clipped is None else min(1.0, clipped / (norm + 1e-6))
    for found in ranks:
        assert all(map(torch.equal, found["params"], ranks[0]["params"]))
        if clipped is not None:
            assert abs(found["norm"] - norm) < 2.0**-8 * norm  # the bf16 gradient's rounding
        assert found["moments"].keys() == mean.keys()
        for i, exact in mean.items():
            magnitude = sum(g[i].abs() for g in each) / world
            unit = 2.0**-8 if i == BF16 else 2.0**-15 if clipped is not None else 2.0**-23
            assert (
                (found["moments"][i] * 10 / factor - exact).abs() <= 8 * unit * magnitude
            ).all(), i


def round_trip(rank: int, device: torch.device, state: dict[str, Any]) -> list[list[Any]]:
    """What a new and a used optimizer have after `state` was loaded, and one step later, of all parameters."""
    found = []
    for used in (False, True):
        params = parameters(device)
        optimizer = ShardedAdamW(groups(params), mesh_of(device), lr=1.0)
        states = []
        for load in (False, True) if used else (True,):
            if load:
                optimizer.load_state_dict(state)
                states.append(optimizer.state_dict())
            for i, p in enumerate(params):
                p.grad = torch.full_like(p, i + 1.0)
            optimizer.step()
        found.append([*states, optimizer.state_dict()])
    return found


@pytest.mark.parametrize("world", [1, 3])
def test_a_state_loads_on_another_number_of_ranks(world: int) -> None:
    """Into a new optimizer, and in the place of what a used one had: also of a parameter that the state lacks."""
    state = on("gloo", 2, steps, {})[0]["fresh"]["states"][0]
    for (loaded, new), (loaded_again, used) in on("gloo", world, round_trip, state):
        same_states(loaded, state)
        same_states(loaded_again, state)
        for index in range(len(SHAPES)):
            one, other = new["state"][index], used["state"][index]
            assert one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def refused(make: Callable[[], Any]) -> str:
    try:
        make()
    except (ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def refusals(rank: int, device: torch.device) -> dict[str, str]:
    mesh, params = mesh_of(device), parameters(device)
    two = init_device_mesh(device.type, (2, 1), mesh_dim_names=("dp_replicate", "dp_shard"))
    frozen_too = [*params, nn.Parameter(torch.ones(2), requires_grad=rank == 0)]
    optimizer = ShardedAdamW(params, mesh)
    give_gradients(params, rank, 0)
    optimizer.step()
    state = optimizer.state_dict()
    state["state"][0]["exp_avg"] = torch.zeros(2)
    amsgrad = {**optimizer.state_dict(), "state": {0: {"max_exp_avg_sq": torch.zeros(3, 257)}}}
    fresh, fresh_one = ShardedAdamW(params, mesh), [nn.Parameter(torch.ones(3, 257))]
    if rank == 1:
        params[3].grad = None
    return {
        "mesh": refused(lambda: ShardedAdamW(params, two)),
        "frozen": refused(lambda: ShardedAdamW(frozen_too, mesh)),
        "others": refused(lambda: ShardedAdamW(params[: len(params) - rank], mesh)),
        "none": refused(lambda: ShardedAdamW(params if rank else [], mesh)),
        "there already": refused(
            lambda: optimizer.add_param_group({"params": fresh_one if rank else params[:1]})
        ),
        "group": refused(lambda: optimizer.add_param_group({"params": frozen_too[-1:]})),
        "groups left": str(len(optimizer.param_groups)),
        "amsgrad": refused(lambda: ShardedAdamW(params, mesh, amsgrad=True)),
        "norm": refused(lambda: ShardedAdamW(params, mesh, max_grad_norm=0)),
        "shape": refused(lambda: optimizer.load_state_dict(state)),
        "state": refused(lambda: optimizer.load_state_dict(amsgrad)),
        "gradient": refused(fresh.step),
    }


NUMBERS: dict[str, tuple[dict[str, Any], str]] = {  # of rank 1 alone, and what is said
    "clipping": (
        {"max_grad_norm": 1.0},
        "max_grad_norm must be the same on all ranks, found None on rank 0 and 1.0 on rank 1",
    ),
    "mean": (
        {"average": False},
        "average must be the same on all ranks, found True on rank 0 and False on rank 1",
    ),
    "rate": ({"lr": 0.1}, "lr of group 0 must be the same on all ranks, found 0.001 on rank 0"),
    "rate in a tensor": ({"lr": torch.tensor(0.5)}, "found 0.001 on rank 0 and 0.5 on rank 1"),
    "betas": ({"betas": (0.9, 0.99)}, "betas of group 0 must be the same on all ranks"),
    "no norm": ({"max_grad_norm": -1.0}, "max_grad_norm must be positive or None, found -1.0"),
    "no text": ({"max_grad_norm": "1"}, "not supported between instances of 'str' and 'int'"),
    "amsgrad": ({"amsgrad": True}, "ShardedAdamW has no amsgrad"),
    "decay": ({"weight_decay": -1.0}, "Invalid weight_decay value: -1.0"),
}


def numbers(rank: int, device: torch.device) -> dict[str, str]:
    """What ranks hear of numbers that differ: at once, in a later group, and where they were changed before a step."""
    mesh, params = mesh_of(device), parameters(device)
    found = {
        name: refused(lambda o=options: ShardedAdamW(params[:2], mesh, **(o if rank else {})))  # type: ignore[misc]
        for name, (options, _) in NUMBERS.items()
    }
    optimizer = ShardedAdamW(params[:2], mesh)
    later = {"params": params[2:], "lr": 0.5 - 0.25 * rank}
    found["later group"] = refused(lambda: optimizer.add_param_group(later))
    found["groups left"] = str(len(optimizer.param_groups))
    give_gradients(params, rank, 0)
    optimizer.max_grad_norm = 1.0 if rank else None
    found["before the first step"] = refused(optimizer.step)
    optimizer.max_grad_norm = None
    found["alike"] = refused(optimizer.step)
    state = optimizer.state_dict()
    state["param_groups"][0]["lr"] = 0.5 - 0.25 * rank
    optimizer.load_state_dict(state)
    found["loaded"] = refused(optimizer.step)
    return found


def test_numbers_that_differ_between_ranks_are_refused_on_all() -> None:
    expected = {name: said for name, (_, said) in NUMBERS.items()} | {
        "later group": "lr of group 1 must be the same on all ranks, found 0.5 on rank 0 and 0.25 on rank 1",
        "groups left": "1",
        "before the first step": "max_grad_norm must be the same on all ranks, found None on rank 0",
        "alike": "nothing",
        "loaded": "lr of group 0 must be the same on all ranks, found 0.5 on rank 0 and 0.25 on rank 1",
    }
    for found in on("gloo", 2, numbers):
        assert found.keys() == expected.keys()
        assert {k: found[k] for k, said in expected.items() if said not in found[k]} == {}


def full_on_one_rank(rank: int, device: torch.device) -> list[Any]:
    """What is said where rank 1 lacks memory for a later group, and whether that group leaves a trace."""
    mesh, params, made = mesh_of(device), parameters(device), 0
    optimizers = [ShardedAdamW(parameters(device)[:3], mesh) for _ in range(2)]

    class Full(Bucket):
        def __init__(self, *args: Any) -> None:
            nonlocal made
            super().__init__(*args)
            made += 1
            if rank and made == 2:  # the group has two dtypes
                raise torch.OutOfMemoryError("no memory")

    said = "nothing"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "Bucket", Full)
        try:
            optimizers[0].add_param_group({"params": params[3:]})
        except (torch.OutOfMemoryError, ValueError) as error:
            said = str(error)
    stepped = []
    give_gradients(params, rank, 1)
    for optimizer in optimizers:
        own = optimizer.param_groups[0]["params"]
        give_gradients(own, rank, 0)
        optimizer.step()
        stepped.append([p.detach() for p in own])
    unchanged = all(map(torch.equal, params, parameters(device)))
    forms = [(len(o.param_groups), len(o._buckets), len(o._shards)) for o in optimizers]
    return [said, unchanged, all(map(torch.equal, *stepped)), forms[0] == forms[1]]


def test_a_rank_that_lacks_memory_for_a_group_leaves_none_waiting() -> None:
    found = on("gloo", 2, full_on_one_rank)
    assert found == [["rank 1: no memory", True, True, True], ["no memory", True, True, True]]


def test_what_does_not_fit_is_refused_on_every_rank() -> None:
    expected = {
        "mesh": "one dimension, found 2",
        "frozen": "rank 1: parameter 6 (2,) requires no gradient",
        "others": "of rank 1 are not rank 0's",
        "none": "optimizer got an empty parameter list",
        "there already": "some parameters appear in more than one parameter group",
        "group": "rank 1: parameter 0 (2,) requires no gradient",
        "groups left": "1",
        "amsgrad": "has no amsgrad",
        "norm": "max_grad_norm must be positive",
        "shape": "exp_avg of parameter 0 must be (3, 257), found (2,)",
        "state": "found ['max_exp_avg_sq']",
        "gradient": "parameter 3 (1,) has a gradient on some ranks, and none on [1]",
    }
    for found in on("gloo", 2, refusals):
        assert found.keys() == expected.keys()
        assert {k: v for k, v in expected.items() if v not in found[k]} == {}, found


def later_group(rank: int, device: torch.device) -> list[tuple[list[Tensor], dict[str, Any]]]:
    every = []
    for sharded in (True, False):
        params = parameters(device)
        kind = ShardedAdamW if sharded else torch.optim.AdamW
        optimizer = kind(params[:3], **({"mesh": mesh_of(device)} if sharded else {}), lr=1e-2)
        train(optimizer, params[:3], rank, 0, reduce=not sharded)
        optimizer.add_param_group({"params": params[3:], "lr": 0.1})
        train(optimizer, params, rank, STEPS, reduce=not sharded)
        every.append(([p.detach() for p in params], optimizer.state_dict()))
    return every


def test_a_group_added_later_is_trained_and_moments_stay() -> None:
    for (ours, state), (theirs, expected) in on("gloo", 2, later_group):
        assert all(map(torch.equal, ours, theirs))
        same_states(state, expected)


WIDTH = 64


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2)]
        self.layers = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def attached(rank: int, device: torch.device, sharded: bool, graphs: bool) -> list[Tensor]:
    torch.manual_seed(0)
    model = Model().to(device, torch.bfloat16)
    recipe = DelayedScaling(amax_history_len=4)
    lora = LoRAConfig(r=8, target_modules=["layers.0.0", "layers.1.0"], fp8=recipe)
    apply_lora(model, lora)
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    wrapped: Any = model if sharded else nn.parallel.DistributedDataParallel(model)
    optimizer: Any = (
        ShardedAdamW(trained, mesh_of(device), lr=1e-2)
        if sharded
        else torch.optim.AdamW(trained, lr=1e-2)
    )
    found = attach(wrapped, optimizer, graphs=graphs, backend=backend_for(device))
    generator = torch.Generator().manual_seed(10 + rank)
    for _ in range(7):
        x = torch.randn(32, WIDTH, generator=generator).to(device, torch.bfloat16) * (1 + rank)
        wrapped(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert found.steps == 7 and found.replayed == (4 if graphs else 0)
    found.detach()
    return [p.detach().cpu() for p in trained]


def attached_ways(rank: int, device: torch.device) -> list[list[Tensor]]:
    if device.type == "cpu":
        frozen.STORAGE = torch.uint8  # gloo broadcasts no FP8
    ways = [(False, False), (True, False), (True, True)]
    return [attached(rank, device, sharded, graphs) for sharded, graphs in ways]


@pytest.mark.parametrize("backend", ["gloo", NCCL])
def test_attach_and_its_graphs_take_it_in_the_place_of_ddp(backend: str) -> None:
    for ddp, eager, replayed in on(backend, 2, attached_ways):
        assert all(map(torch.equal, ddp, eager)) and all(map(torch.equal, ddp, replayed))


def over_a_sharded_base(rank: int, device: torch.device) -> list[list[Tensor]]:
    every = []
    for sharded in (True, False):
        model, mesh = make(Way("recompute"), device), mesh_of(device)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer: Any = torch.optim.AdamW(trained, lr=1e-2)
        if sharded:
            shard_base(model, mesh)
            optimizer = ShardedAdamW(trained, mesh, lr=1e-2)
        for x in batches(device):
            loss_of(model, x.flip(rank)).backward()
            if not sharded:
                for p in trained:
                    dist.all_reduce(p.grad.div_(2))
            optimizer.step()
            optimizer.zero_grad()
            an_adapter(model).fp8_state.reduce_and_update()
        every.append([p.detach().cpu() for p in trained])
    return every


@pytest.mark.parametrize("backend", ["gloo", NCCL])
def test_base_and_optimizer_may_both_be_sharded(backend: str) -> None:
    for ours, theirs in on(backend, 2, over_a_sharded_base):
        assert all(map(torch.equal, ours, theirs))


def text(rank: int, device: torch.device) -> str:
    return str(ShardedAdamW(parameters(device), mesh_of(device)))


def test_the_report_counts_what_a_rank_keeps() -> None:
    """fp32: 771 + 64 + 1024 + 1 + 600 elements, each padded to 64s: 832 + 64 + 1024 + 64 + 640 = 41 · 64, and 42 · 64
    in two parts; bf16: 25, and 64 in a part. Moments: 2 · (1344 · 4 + 64 · 2) of 2 · (2460 · 4 + 25 · 2) bytes."""
    assert on("gloo", 2, text)[1] == (
        "ShardedAdamW over 2 ranks: 6 parameters in 2 buckets; a rank keeps 11.0 kB of 19.8 kB of moments, "
        "11.0 kB of gradients and parameters of its part, and 11.0 kB of buffer"
    )
