# SPDX-License-Identifier: Apache-2.0
"""ShardedAdamW: every rank keeps AdamW's moments of its part of the trained parameters only (ZeRO-2).

    mesh = init_device_mesh("cuda", (8,), mesh_dim_names=("dp_shard",))
    optimizer = ShardedAdamW(trained, mesh["dp_shard"], max_grad_norm=1.0, lr=1e-4, weight_decay=0.01)

A step copies the gradients into a flat buffer and reduce-scatters it. AdamW then updates the rank's own part. One
all-gather brings the new parameters to all ranks. This replaces DistributedDataParallel's all-reduce: do not use both.
Parameters and gradients stay where they are, so fused layers and captured graphs do not notice.

Elements are computed as torch.optim.AdamW computes them, because it is torch.optim.AdamW that runs, over views of the
rank's part. With two ranks the sum of two gradients has one order, so parameters are bit-equal to those after an
all-reduce. With more ranks the backend chooses the order of a sum, for an all-reduce and for a reduce-scatter alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lorakernels.autograd.lent import is_of_part
from lorakernels.modules.linear.frozen import is_sharded
from lorakernels.parallel.optimizer.bucket import MOMENTS, Bucket
from lorakernels.parallel.optimizer.flat import cut, lay_out
from lorakernels.parallel.pipeline.cut import ranks_of
from lorakernels.parallel.ranks import comm

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

BUCKET_BYTES = 512 << 20  # of the buffer that all buckets of one dtype share
REFUSED = ("amsgrad", "differentiable")


class ShardedAdamW(torch.optim.AdamW):
    """torch.optim.AdamW whose moments are cut over the ranks of a mesh.

    Use it as torch's: parameter groups, LR schedulers, step hooks and `attach(model, optimizer)` work. The gradients
    in `p.grad` are this rank's own before and after a step.

    The constructor, `add_param_group`, `step` and `state_dict` are collective. All ranks call them in one order.

    Args:
        params: as for AdamW, in one order on all ranks. Rank 0's values are copied to the others, as
            DistributedDataParallel does.
        mesh: of one dimension, such as `mesh["dp_shard"]`. It must hold all ranks whose gradients are summed:
            flatten several dimensions into one.
        average: divide the summed gradients by the number of ranks, as DistributedDataParallel does. False for a loss
            that is divided by the number of all ranks' tokens already.
        max_grad_norm: clip the summed gradient to this norm. None does not clip. After `pipeline_parallel` the norm is
            that of all stages. `torch.nn.utils.clip_grad_norm_` would see this rank's gradients only.
        adamw: AdamW's keywords: lr, betas, eps, weight_decay, foreach, fused, maximize, capturable.

    Attributes:
        grad_norm: fp32 [], of the last step's summed gradient before it was clipped. None without `max_grad_norm`.

    Raises:
        ValueError: the mesh has several dimensions, a parameter needs no gradient or is on another kind of device,
            ranks have other parameters or numbers, or an option is not supported. In the first step: ranks have
            gradients of other parameters, or other numbers by then. Where one rank raises, all do.
        TypeError: a parameter is sharded already (FSDP2).

    A parameter must have a gradient on all ranks or on none. One without is left alone, as AdamW does. The first step
    compares the ranks; later ones do not, because that would make the host wait. So it is with `average`,
    `max_grad_norm`, and AdamW's keywords of each group: the constructor, `add_param_group` and the first step after
    them compare these. What a scheduler does to them afterwards, it must do on all ranks. After `pipeline_parallel` the
    very first step compares `average` and `max_grad_norm` of all stages, each of which needs a ShardedAdamW then.

    fp16's GradScaler is not supported: it judges each rank's gradients alone.
    """

    def __init__(
        self,
        params: Iterable[Any],
        mesh: DeviceMesh,
        *,
        average: bool = True,
        max_grad_norm: float | None = None,
        **adamw: Any,
    ) -> None:
        if mesh.ndim != 1:
            raise ValueError(
                f"mesh must have one dimension, found {mesh.ndim} ({mesh.mesh_dim_names}): name one, or flatten them"
            )
        self._mesh, self._group = mesh, mesh.get_group()
        self._rank, self._ranks = mesh.get_local_rank(), mesh.size()
        self._factor = 1.0 / self._ranks if average else 1.0
        self.max_grad_norm = max_grad_norm
        self.grad_norm: Tensor | None = None
        self._buckets: list[Bucket] = []
        self._shards: dict[Tensor, Tensor] = {}
        self._wholes: dict[tuple[torch.dtype, torch.device], Tensor] = {}
        self._own: torch.optim.AdamW | None = None
        self._stages: Any = None  # the group of ranks with the other stages of the model
        self._compared = self._compared_stages = False
        with comm.together(self._group):  # torch refuses a rank's list without parameters
            if max_grad_norm is not None and not max_grad_norm > 0:
                raise ValueError(f"max_grad_norm must be positive or None, found {max_grad_norm!r}")
            if refused := [name for name in REFUSED if adamw.get(name)]:
                raise ValueError(f"ShardedAdamW has no {refused[0]}")
            super().__init__(params, **adamw)
        self._shard(self.param_groups)
        self._own = torch.optim.AdamW([self._mirror(group) for group in self.param_groups])
        self._begin_state()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As AdamW's. Collective; the new parameters get buffers of their own.

        Where one rank lacks memory for them, all raise, and the optimizer is as it was.
        """
        if self._own is None:  # in __init__
            super().add_param_group(param_group)
            return
        count = len(self.param_groups)
        try:
            with comm.together(self._group):
                super().add_param_group(param_group)
            self._shard(self.param_groups[count:])
        except BaseException:
            del self.param_groups[count:]
            raise
        self._own.add_param_group(self._mirror(self.param_groups[-1]))
        self._begin_state()

    def _mirror(self, group: dict[str, Any]) -> dict[str, Any]:
        """The group over this rank's shards, with the same numbers."""
        numbers = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        return {"params": [self._shards[p] for p in group["params"]], **numbers}

    def _shard(self, groups: Sequence[dict[str, Any]]) -> None:
        """Collective: check the parameters, lay them out in buckets, and take rank 0's values."""
        params = [p for group in groups for p in group["params"]]
        self._check(params, groups)
        for stages in filter(None, map(ranks_of, params)):
            self._stages = stages.group
        kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for p in params:
            kinds.setdefault((p.dtype, p.device), []).append(p)
        buckets: list[Bucket] = []
        with comm.together(self._group):  # one rank's GPU may be full
            for kind, alike in kinds.items():
                sizes = [p.numel() * p.element_size() for p in alike]
                parts = [alike[run] for run in cut(sizes, BUCKET_BYTES)]
                layouts = [lay_out([p.numel() for p in part], self._ranks) for part in parts]
                whole = self._whole(kind, max(layout.size for layout in layouts))
                for part, layout in zip(parts, layouts, strict=True):
                    buckets.append(Bucket(part, layout, layout.pieces(self._rank), whole))
        for bucket in buckets:
            self._add(bucket)
        self._compared = False

    def _whole(self, kind: tuple[torch.dtype, torch.device], size: int) -> Tensor:
        """The buffer that buckets of one kind share; a larger one for a later group is another."""
        found = self._wholes.get(kind)
        if found is None or len(found) < size:
            dtype, device = kind
            found = self._wholes[kind] = torch.zeros(size, dtype=dtype, device=device)
        return found

    @torch.no_grad()
    def _add(self, bucket: Bucket) -> None:
        torch._foreach_copy_(bucket.views(), [p.detach() for p in bucket.params])
        comm.from_first(self._group, bucket.whole)
        torch._foreach_copy_(bucket.params, bucket.views())
        self._buckets.append(bucket)
        self._shards.update(zip(bucket.params, bucket.shards, strict=True))

    def _numbers(self, groups: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """{name: value} of what all ranks must have alike, of the last groups; a tensor's value is its number."""
        found = {"average": self._factor < 1, "max_grad_norm": _plain(self.max_grad_norm)}
        for index, group in enumerate(groups, len(self.param_groups) - len(groups)):
            found |= {f"{name} of group {index}": _plain(group.get(name)) for name in self.defaults}
        return found

    def _check(self, params: Sequence[Tensor], groups: Sequence[dict[str, Any]]) -> None:
        """Collective. All ranks raise where one does, and nothing has changed then."""
        said = _objection(params, self._mesh.device_type)
        sizes = [len(group["params"]) for group in groups]
        forms = [(tuple(p.shape), str(p.dtype)) for p in params]
        found = comm.agree(self._group, (said, (sizes, forms), self._numbers(groups)))
        first = next(((rank, one[0]) for rank, one in enumerate(found) if one[0]), None)
        if first is not None:
            kind, text = first[1]
            raise kind(f"rank {first[0]}: {text}")
        differs = [rank for rank, one in enumerate(found) if one[1] != found[0][1]]
        if differs:
            raise ValueError(
                f"params must be the same on all ranks: shapes, dtypes or groups of rank {differs[0]} are not rank 0's"
            )
        _check_numbers([numbers for _, _, numbers in found])

    def _begin_state(self) -> None:
        """Zero moments in the buckets' parts for shards without a state."""
        assert self._own is not None
        groups = {p: group for group in self.param_groups for p in group["params"]}
        for bucket in self._buckets:
            for p, shard, piece in bucket.each():
                if not self._own.state[shard]:
                    moments = {name: piece.of(whole) for name, whole in bucket.moments.items()}
                    self._own.state[shard] = {"step": _new_step(p, groups[p]), **moments}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Collective: sum the gradients over the ranks, and update the parameters on all of them.

        Raises:
            ValueError: in the first step, ranks have gradients of other parameters, or other numbers.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self._compared_stages:
            self._compare_stages()
        elif not self._compared:
            self._compare()
        buckets = [b for b in self._buckets if any(p.grad is not None for p in b.params)]
        for bucket in buckets:
            bucket.reduce(self._group, self._factor)
        if self.max_grad_norm is not None:
            self._clip(buckets, self.max_grad_norm)
        self._update(buckets)
        for bucket in buckets:
            bucket.give(self._group)
        return loss

    def _update(self, buckets: Sequence[Bucket]) -> None:
        """AdamW on this rank's part."""
        assert self._own is not None
        for own, group in zip(self._own.param_groups, self.param_groups, strict=True):
            own.update(self._mirror(group))
        for bucket in buckets:
            bucket.take()
        self._own.step()
        self._own.zero_grad()  # a bucket without gradients in the next step has none

    def _clip(self, buckets: Sequence[Bucket], most: float) -> None:
        """As torch.nn.utils.clip_grad_norm_, of all ranks' parts."""
        norms = [torch.linalg.vector_norm(b.grad, dtype=torch.float32) for b in buckets]
        device = self._buckets[0].own.device
        squares = [norm.to(device).square() for norm in norms]
        total = torch.stack(squares).sum() if squares else torch.zeros((), device=device)
        comm.all_reduce(self._group, total)
        if self._stages is not None:
            comm.all_reduce(self._stages, total)
        self.grad_norm = norm = total.sqrt()
        factor = (most / (norm + 1e-6)).clamp(max=1.0)
        for bucket in buckets:
            bucket.grad.mul_(factor.to(bucket.grad.device))

    def _compare_stages(self) -> None:
        """Collective, in the very first step: `_compare`, and whether all stages clip, and by one norm.

        Groups of parameters are each stage's own.
        """
        with comm.together(self._stages):
            self._compare()
        _check_numbers(comm.agree(self._stages, self._numbers([])), " of the pipeline")
        self._compared_stages = True

    def _compare(self) -> None:
        """Collective, in the first step: whether ranks have the same numbers, and gradients of the same parameters."""
        params = list(self._params())
        mine = [p.grad is not None for p in params], self._numbers(self.param_groups)
        every, numbers = zip(*comm.agree(self._group, mine), strict=True)
        _check_numbers(numbers)
        for index, has in enumerate(zip(*every, strict=True)):
            if len(set(has)) > 1:
                where = [rank for rank, one in enumerate(has) if not one]
                raise ValueError(
                    f"parameter {index} {tuple(params[index].shape)} has a gradient on some ranks, and none on {where}"
                    ": give it a gradient of zeros there"
                )
        self._compared = True

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Collective: as torch.optim.AdamW's on one rank, with whole moments, on the CPU.

        It loads into torch.optim.AdamW, and here on any number of ranks.
        """
        found = super().state_dict()
        assert self._own is not None
        numbers = {p: index for index, p in enumerate(self._params())}
        for bucket in self._buckets:
            steps = [self._own.state[shard]["step"] for shard in bucket.shards]
            states: list[dict[str, Tensor]] = [
                {"step": step.cpu().clone()} if float(step) else {} for step in steps
            ]
            for name, moment in bucket.moments.items():
                comm.all_gather(self._group, bucket.whole, moment)
                for p, state, view in zip(bucket.params, states, bucket.views(), strict=True):
                    if state:  # with the parameter's strides: torch's fused kernel on CPUs trusts that they agree
                        state[name] = torch.empty_like(p, device="cpu", requires_grad=False)
                        state[name].copy_(view)
            named = zip(bucket.params, states, strict=True)
            found["state"].update({numbers[p]: state for p, state in named if state})
        found["state"] = dict(sorted(found["state"].items()))
        return found

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the numbers of the groups, and this rank's part of the moments.

        Args:
            state_dict: from `state_dict` of this class or of torch.optim.AdamW, whole on every rank.

        Raises:
            ValueError: groups or shapes differ, or a state is not AdamW's. The optimizer is then as it was.
        """
        saved = [i for group in state_dict["param_groups"] for i in group["params"]]
        found = map(state_dict["state"].get, saved)
        states = dict(zip(self._params(), found, strict=False))  # torch refuses other lengths below
        for index, (p, state) in enumerate(states.items()):
            _check_state(index, p, state)
        super().load_state_dict({**state_dict, "state": {}})
        self._compared = False  # each rank read a file of its own
        assert self._own is not None
        groups = {p: group for group in self.param_groups for p in group["params"]}
        for bucket in self._buckets:
            for p, shard, piece in bucket.each():
                held, state = self._own.state[shard], states[p]
                held["step"] = _new_step(p, groups[p])
                for name in MOMENTS:
                    held[name].zero_()
                if state:
                    held["step"].fill_(float(state["step"]))
                    for name in MOMENTS:
                        held[name].copy_(state[name].reshape(-1)[piece.start : piece.stop])

    def _params(self) -> Iterator[Tensor]:
        return (p for group in self.param_groups for p in group["params"])

    def __str__(self) -> str:
        own = sum(_bytes(b.own) for b in self._buckets)
        whole = sum(map(_bytes, self._params()))
        buffers = sum(map(_bytes, self._wholes.values()))
        return (
            f"ShardedAdamW over {self._ranks} ranks: {sum(1 for _ in self._params())} parameters in "
            f"{len(self._buckets)} buckets; a rank keeps {_size(2 * own)} of {_size(2 * whole)} of moments, "
            f"{_size(2 * own)} of gradients and parameters of its part, and {_size(buffers)} of buffer"
        )


def _size(count: int) -> str:
    unit, text = (1e6, "MB") if count >= 1e6 else (1e3, "kB")
    return f"{count / unit:,.1f} {text}"


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


def _new_step(p: Tensor, group: dict[str, Any]) -> Tensor:
    """A count of steps, fp32 [], where AdamW wants it."""
    on_device = group["capturable"] or group["fused"]
    return torch.zeros((), dtype=torch.float32, device=p.device if on_device else "cpu")


def _objection(params: Sequence[Tensor], device_type: str) -> tuple[type[Exception], str] | None:
    """Why these parameters cannot be sharded, as an exception's type and text."""
    for index, p in enumerate(params):
        what = f"parameter {index} {tuple(p.shape)}"
        if is_sharded(p):
            text = "is sharded already (FSDP2): torch.optim.AdamW takes its parts"
            return TypeError, f"{what} {text}"
        if is_of_part(p):
            text = "is of a layer that parallelize split, whose norm other ranks have, too: that is not there yet"
            return ValueError, f"{what} {text}"
        if not p.requires_grad:
            text = "requires no gradient: pass [p for p in model.parameters() if p.requires_grad]"
            return ValueError, f"{what} {text}"
        if not p.is_floating_point():
            return ValueError, f"{what} must have a floating dtype, found {p.dtype}"
        if p.device.type != device_type:
            return ValueError, f"{what} is on {p.device}, but the mesh is of {device_type}"
    return None


def _plain(value: Any) -> Any:
    """An option as plain numbers."""
    if isinstance(value, (tuple, list)):
        return [_plain(each) for each in value]
    return value.item() if isinstance(value, Tensor) else value


def _check_numbers(found: Sequence[dict[str, Any]], whose: str = "") -> None:
    """ValueError, which names the first difference, unless all ranks have the same numbers. `whose` ranks they are."""
    for rank, other in enumerate(found):
        for name, value in other.items():
            if value != found[0][name]:
                raise ValueError(
                    f"{name} must be the same on all ranks{whose}, found {found[0][name]!r} on rank 0 and {value!r} on "
                    f"rank {rank}"
                )


def _check_state(index: int, p: Tensor, state: dict[str, Any] | None) -> None:
    if not state:
        return
    if set(state) != {"step", *MOMENTS}:
        raise ValueError(
            f"state of parameter {index} must have step, exp_avg and exp_avg_sq, found {sorted(state)}"
        )
    for name in MOMENTS:
        if state[name].shape != p.shape:
            raise ValueError(
                f"{name} of parameter {index} must be {tuple(p.shape)}, found {tuple(state[name].shape)}"
            )
