# SPDX-License-Identifier: Apache-2.0
"""ShardedAdamW: every rank keeps AdamW's moments for its part of the trained parameters only (ZeRO-2).

    mesh = init_device_mesh("cuda", (8,), mesh_dim_names=("dp_shard",))
    optimizer = ShardedAdamW(trained, mesh["dp_shard"], max_grad_norm=1.0, lr=1e-4, weight_decay=0.01)

A step copies the gradients into a flat buffer and reduce-scatters it. AdamW then updates the rank's own part. One
all-gather brings the new parameters to all ranks. This replaces DistributedDataParallel's all-reduce: do not use both.
Parameters and gradients stay where they are, so fused layers and captured graphs do not notice.

torch.optim.AdamW itself runs over views of the rank's part, so elements are computed as it computes them. With two
ranks there is one order to add two gradients, so parameters are bit-equal to those after an all-reduce. With more ranks
the backend chooses the order of a sum, in an all-reduce and in a reduce-scatter alike.
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
        mesh: of one dimension, such as `mesh["dp_shard"]`. It must contain all ranks over which gradients are summed:
            flatten several dimensions into one.
        average: divide the summed gradients by the number of ranks, as DistributedDataParallel does. False for a loss
            that is divided by the number of all ranks' tokens already.
        max_grad_norm: clip the summed gradient to this norm. None does not clip. After `pipeline_parallel` the norm is
            taken over all stages. `torch.nn.utils.clip_grad_norm_` would see this rank's gradients only.
        adamw: AdamW's keywords: lr, betas, eps, weight_decay, foreach, fused, maximize, capturable.

    Attributes:
        grad_norm: fp32 [], the norm of the last step's summed gradient before clipping. None without `max_grad_norm`.

    Raises:
        ValueError: the mesh has several dimensions, a parameter requires no gradient or is on another kind of device,
            the ranks' parameters or options differ, or an option is not supported. In the first step: ranks have
            gradients of different parameters, or their options differ by then. If one rank raises, all do.
        TypeError: a parameter is sharded already (FSDP2).

    A parameter must have a gradient on all ranks or on none. A parameter without one is not updated, as in AdamW. The
    first step compares the ranks; later steps do not, because that would make the host wait. The constructor,
    `add_param_group` and the first step after them also compare `average`, `max_grad_norm`, and AdamW's keywords of
    each group. A scheduler that changes these later must do so on all ranks. After `pipeline_parallel` every stage
    needs a ShardedAdamW, and the very first step compares `average` and `max_grad_norm` over the stages.

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
        self._adamw: torch.optim.AdamW | None = None  # over this rank's shards
        self._stages: Any = None  # the process group over the model's stages
        self._compared = self._compared_stages = False
        with comm.together(self._group):  # torch raises where a rank's list is empty
            if max_grad_norm is not None and not max_grad_norm > 0:
                raise ValueError(f"max_grad_norm must be positive or None, found {max_grad_norm!r}")
            if refused := [name for name in REFUSED if adamw.get(name)]:
                raise ValueError(f"ShardedAdamW has no {refused[0]}")
            super().__init__(params, **adamw)
        self._shard(self.param_groups)
        self._adamw = torch.optim.AdamW([self._mirror(group) for group in self.param_groups])
        self._begin_state()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Collective: as AdamW's. The new parameters get buckets of their own.

        If one rank lacks memory for them, all raise, and the optimizer is as before.
        """
        if self._adamw is None:  # in __init__
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
        self._adamw.add_param_group(self._mirror(self.param_groups[-1]))
        self._begin_state()

    def _mirror(self, group: dict[str, Any]) -> dict[str, Any]:
        """The group over this rank's shards, with the same options."""
        options = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        return {"params": [self._shards[p] for p in group["params"]], **options}

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
        """The buffer that buckets of one kind share. Larger buckets of a later group get a new one."""
        whole = self._wholes.get(kind)
        if whole is None or len(whole) < size:
            dtype, device = kind
            whole = self._wholes[kind] = torch.zeros(size, dtype=dtype, device=device)
        return whole

    @torch.no_grad()
    def _add(self, bucket: Bucket) -> None:
        torch._foreach_copy_(bucket.views(), [p.detach() for p in bucket.params])
        comm.from_first(self._group, bucket.whole)
        torch._foreach_copy_(bucket.params, bucket.views())
        self._buckets.append(bucket)
        self._shards.update(zip(bucket.params, bucket.shards, strict=True))

    def _numbers(self, groups: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """{name: value} of the options that must be equal on all ranks, for the last groups. Tensors become numbers."""
        numbers = {"average": self._factor < 1, "max_grad_norm": _plain(self.max_grad_norm)}
        for index, group in enumerate(groups, len(self.param_groups) - len(groups)):
            numbers |= {
                f"{name} of group {index}": _plain(group.get(name)) for name in self.defaults
            }
        return numbers

    def _check(self, params: Sequence[Tensor], groups: Sequence[dict[str, Any]]) -> None:
        """Collective: all ranks raise if one does, before anything is changed."""
        objection = _objection(params, self._mesh.device_type)
        sizes = [len(group["params"]) for group in groups]
        forms = [(tuple(p.shape), str(p.dtype)) for p in params]
        every = comm.agree(self._group, (objection, (sizes, forms), self._numbers(groups)))
        objections, shapes, numbers = zip(*every, strict=True)
        for rank, refused in enumerate(objections):
            if refused is not None:
                kind, text = refused
                raise kind(f"rank {rank}: {text}")
        differs = [rank for rank, other in enumerate(shapes) if other != shapes[0]]
        if differs:
            raise ValueError(
                f"params must be the same on all ranks: shapes, dtypes or groups of rank {differs[0]} are not rank 0's"
            )
        _check_numbers(numbers)

    def _begin_state(self) -> None:
        """Give shards without a state a step of 0 and moments of zeros."""
        assert self._adamw is not None
        groups = {p: group for group in self.param_groups for p in group["params"]}
        for bucket in self._buckets:
            for p, shard, piece in bucket.pieces():
                if not self._adamw.state[shard]:
                    moments = {name: piece.of(whole) for name, whole in bucket.moments.items()}
                    self._adamw.state[shard] = {"step": _new_step(p, groups[p]), **moments}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Collective: sum the gradients over the ranks, and update the parameters on all of them.

        Raises:
            ValueError: in the first step, ranks have gradients of different parameters, or their options differ.
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
        assert self._adamw is not None
        for mirror, group in zip(self._adamw.param_groups, self.param_groups, strict=True):
            mirror.update(self._mirror(group))
        for bucket in buckets:
            bucket.take()
        self._adamw.step()
        self._adamw.zero_grad()  # the next step may leave out this bucket

    def _clip(self, buckets: Sequence[Bucket], most: float) -> None:
        """As torch.nn.utils.clip_grad_norm_, over the parts of all ranks."""
        norms = [torch.linalg.vector_norm(b.grad, dtype=torch.float32) for b in buckets]
        device = self._buckets[0].param.device
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
        """Collective, in the very first step: `_compare`, and check that all stages average and clip alike.

        Parameter groups are not compared over stages.
        """
        with comm.together(self._stages):
            self._compare()
        _check_numbers(comm.agree(self._stages, self._numbers([])), " of the pipeline")
        self._compared_stages = True

    def _compare(self) -> None:
        """Collective, in the first step: check that ranks have equal options, and gradients of the same parameters."""
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
        """Collective: the state_dict that torch.optim.AdamW has on one rank, with whole moments, on the CPU.

        It loads into torch.optim.AdamW, and into ShardedAdamW on any number of ranks.
        """
        state_dict = super().state_dict()
        assert self._adamw is not None
        numbers = {p: index for index, p in enumerate(self._params())}
        for bucket in self._buckets:
            steps = [self._adamw.state[shard]["step"] for shard in bucket.shards]
            states: list[dict[str, Tensor]] = [
                {"step": step.cpu().clone()} if float(step) else {} for step in steps
            ]
            for name, moment in bucket.moments.items():
                comm.all_gather(self._group, bucket.whole, moment)
                for p, state, view in zip(bucket.params, states, bucket.views(), strict=True):
                    if state:  # with the parameter's strides, as torch's fused kernel on CPUs does not check them
                        state[name] = torch.empty_like(p, device="cpu", requires_grad=False)
                        state[name].copy_(view)
            named = zip(bucket.params, states, strict=True)
            state_dict["state"].update({numbers[p]: state for p, state in named if state})
        state_dict["state"] = dict(sorted(state_dict["state"].items()))
        return state_dict

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the options of the groups, and this rank's part of the moments.

        Args:
            state_dict: from `state_dict` of this class or of torch.optim.AdamW, whole on every rank.

        Raises:
            ValueError: groups or shapes differ, or a state is not AdamW's. The optimizer is not changed then.
        """
        saved = [i for group in state_dict["param_groups"] for i in group["params"]]
        loaded = map(state_dict["state"].get, saved)
        states = dict(
            zip(self._params(), loaded, strict=False)
        )  # torch refuses other lengths below
        for index, (p, state) in enumerate(states.items()):
            _check_state(index, p, state)
        super().load_state_dict({**state_dict, "state": {}})
        self._compared = False  # each rank may have read another file
        assert self._adamw is not None
        groups = {p: group for group in self.param_groups for p in group["params"]}
        for bucket in self._buckets:
            for p, shard, piece in bucket.pieces():
                held, state = self._adamw.state[shard], states[p]
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
        part = sum(_bytes(b.param) for b in self._buckets)
        whole = sum(map(_bytes, self._params()))
        buffers = sum(map(_bytes, self._wholes.values()))
        return (
            f"ShardedAdamW over {self._ranks} ranks: {sum(1 for _ in self._params())} parameters in "
            f"{len(self._buckets)} buckets; a rank keeps {_size(2 * part)} of {_size(2 * whole)} of moments, "
            f"{_size(2 * part)} of gradients and parameters of its part, and {_size(buffers)} of buffer"
        )


def _size(count: int) -> str:
    unit, text = (1e6, "MB") if count >= 1e6 else (1e3, "kB")
    return f"{count / unit:,.1f} {text}"


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


def _new_step(p: Tensor, group: dict[str, Any]) -> Tensor:
    """A step count of 0, fp32 [], on the device on which AdamW keeps it."""
    on_device = group["capturable"] or group["fused"]
    return torch.zeros((), dtype=torch.float32, device=p.device if on_device else "cpu")


def _objection(params: Sequence[Tensor], device_type: str) -> tuple[type[Exception], str] | None:
    """Why these parameters cannot be sharded, as an exception's type and text."""
    for index, p in enumerate(params):
        name = f"parameter {index} {tuple(p.shape)}"
        if is_sharded(p):
            text = "is sharded already (FSDP2): use torch.optim.AdamW"
            return TypeError, f"{name} {text}"
        if is_of_part(p):
            text = "is of a layer that parallelize split, which ShardedAdamW does not support yet"
            return ValueError, f"{name} {text}"
        if not p.requires_grad:
            text = "requires no gradient: pass [p for p in model.parameters() if p.requires_grad]"
            return ValueError, f"{name} {text}"
        if not p.is_floating_point():
            return ValueError, f"{name} must have a floating dtype, found {p.dtype}"
        if p.device.type != device_type:
            return ValueError, f"{name} is on {p.device}, but the mesh is of {device_type}"
    return None


def _plain(value: Any) -> Any:
    """An option with Python numbers for tensors."""
    if isinstance(value, (tuple, list)):
        return [_plain(x) for x in value]
    return value.item() if isinstance(value, Tensor) else value


def _check_numbers(numbers: Sequence[dict[str, Any]], of_group: str = "") -> None:
    """Raise ValueError, which names the first difference, unless all ranks `of_group` have the same `numbers`."""
    first = numbers[0]
    for rank, other in enumerate(numbers):
        for name, value in other.items():
            if value != first[name]:
                raise ValueError(
                    f"{name} must be the same on all ranks{of_group}, found {first[name]!r} on rank 0 and {value!r} on "
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
