# SPDX-License-Identifier: Apache-2.0
"""Our model over several ranks: which of them hold layers together, share rows, or keep one base.

The ranks that are left are replicas, which train on rows of their own. Their adapters' gradients are averaged.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.lib.predictions import machine_of
from benchmarks.lib.ranks import average_gradients, largest
from benchmarks.peers.models import ALPHA, RANK, Spec, dtype_of
from benchmarks.peers.training import Ours, fill_adapters, set_adapters
from lorakernels import LoRAConfig
from lorakernels.fusion.describe import describe_layers
from lorakernels.fusion.find import decoder_layers
from lorakernels.fusion.memory import SAVE, LayerSize, kept_bytes
from lorakernels.parallel import context_parallel, parallelize
from lorakernels.planner.machine import MACHINES, Machine
from lorakernels.planner.memory import Placement, bytes_of, kept_of, saves_within
from lorakernels.planner.plan import ShardPlan, predict
from lorakernels.planner.size import ModelSize
from lorakernels.planner.time import BatchSize

CONNECTED = 1 << 22  # numbers of an all-reduce for which NCCL connects the ranks as for gradients
KINDS = ("alone", "dp", "sharded", "tp", "cp")
VARIANTS = ("eager", "in turn", "not fused", "frozen")


@dataclass(frozen=True)
class Way:
    """How ranks train one model.

    Attributes:
        name: kinds joined by " x ", each with its number of ranks if it has one, and variants after commas, such as
            "tp 4 x cp 2, eager".
        tp, cp: how many ranks hold each layer together, and how many share each row.
        replicas: how many groups of `tp · cp` ranks train on rows of their own.
        kinds, variants: those of the name.
    """

    name: str
    tp: int
    cp: int
    replicas: int
    kinds: tuple[str, ...]
    variants: tuple[str, ...]

    @classmethod
    def of(cls, name: str, ranks: int) -> Way:
        """The way of that name on so many ranks. "tp" or "cp" without a number takes all ranks that the other leaves.

        Raises:
            ValueError: the name is not one, or its numbers do not divide the ranks.
        """
        first, *variants = name.split(", ")
        sizes: dict[str, int] = {}
        for part in first.split(" x "):
            kind, _, size = part.partition(" ")
            if kind not in KINDS or kind in sizes or (size and not _counts(kind, size)):
                raise ValueError(
                    f"a way joins {KINDS} by ' x ', 'tp' and 'cp' with their ranks, found {name!r}"
                )
            sizes[kind] = int(size or 0)
        _check(name, tuple(sizes), variants)
        product = max(1, sizes.get("tp", 1)) * max(1, sizes.get("cp", 1))
        if ranks % product:
            raise ValueError(f"{name!r} needs a multiple of {product} ranks, found {ranks}")
        tp, cp = (sizes.get(kind, 1) or ranks // product for kind in ("tp", "cp"))
        return cls(name, tp, cp, ranks // (tp * cp), tuple(sizes), tuple(variants))

    @property
    def sharded(self) -> bool:
        return "sharded" in self.kinds

    @property
    def alone(self) -> bool:
        return "alone" in self.kinds

    @property
    def adapted(self) -> str:
        return "one" if "frozen" in self.variants else "qkvo"


def _counts(kind: str, size: str) -> bool:
    return kind in ("tp", "cp") and size.isdecimal() and int(size) > 0


def _check(name: str, kinds: tuple[str, ...], variants: list[str]) -> None:
    if unknown := [v for v in variants if v not in VARIANTS]:
        raise ValueError(f"variants of a way must be of {VARIANTS}, found {unknown} in {name!r}")
    if len(kinds) > 1 and {"alone", "dp"} & {*kinds}:
        raise ValueError(f"'alone' and 'dp' stand by themselves, found {name!r}")
    if {"sharded", "tp"} <= {*kinds}:
        raise ValueError(f"split layers are read without a sharded base here, found {name!r}")
    if {"in turn", "not fused"} & {*variants} and "tp" not in kinds:
        raise ValueError(f"'in turn' and 'not fused' are variants of 'tp', found {name!r}")


@cache
def mesh_of(device: str, sizes: tuple[int, ...], names: tuple[str, ...]) -> Any:
    """Collective: one mesh, and so one set of communicators, for all ways of the same sizes.

    They have their memory from here on, so that what is free for layers does not count it.
    """
    mesh = init_device_mesh(device, sizes, mesh_dim_names=names)
    for group in mesh.get_all_groups():
        dist.all_reduce(torch.zeros(CONNECTED, device=device), group=group)
    return mesh


class Layout(Ours):
    """`way` on all ranks of the process group. `step` takes the rows of this rank's replica.

    Attributes:
        mesh: ("dp", "cp", "tp").
        split, context: what holds layers together, and what shares rows; None without.
    """

    def __init__(self, way: Way, spec: Spec, device: torch.device) -> None:
        self.way = way
        self.split: Any = None
        self.context: Any = None
        shape = (way.replicas, way.cp, way.tp)
        self.mesh = mesh_of(device.type, shape, ("dp", "cp", "tp"))
        # replicas draw masks of their own
        self.seed = 1 + (0 if way.alone else self.mesh["dp"].get_local_rank())
        base: dict[str, Any] = {}
        if way.sharded:
            base = {"mesh": mesh_of(device.type, (dist.get_world_size(),), ("dp_shard",))}
        if "tp" in way.kinds:
            base = {"tp": self.mesh["tp"]}
        fused = "not fused" not in way.variants
        graphed = device.type == "cuda" and fused and "eager" not in way.variants
        save = "fit" if fused else None
        super().__init__(
            spec, way.adapted, device, graphs="layer" if graphed else None, save=save, base=base
        )

    @property
    def batch(self) -> BatchSize:
        """Of one rank."""
        return BatchSize(self.spec.batch, self.spec.length, self.way.cp, self.way.tp)

    @property
    def tokens(self) -> int:
        return self.batch.tokens

    def room(self, trained: int) -> int:
        """Collective: the least of all ranks, which so keep the same for backward."""
        return -int(largest(-super().room(trained), self.device))

    def budget(self, model: Any) -> int:
        """What `fuse` takes to keep what the plan chooses. It counts parts of layers as if they had all rows."""
        size, least = self.whole_size, ["checkpoint"] * len(self.whole_size.layers)
        planned = bytes_of(size, self.batch, self.machine, 1, Placement(), least)
        room = self.room(size.over(self.way.tp).trained) - planned.exchange - planned.rows
        saves = saves_within(size, self.batch, room, SAVE)
        if saves is None:
            raise torch.OutOfMemoryError(
                f"{room} bytes are left for what layers keep, and {planned.kept + planned.workspace} are needed with "
                "every layer checkpointed"
            )
        layers = describe_layers(decoder_layers(model, fused=True))
        counted = [LayerSize.of(layer, True) for layer in layers]
        return kept_bytes(counted, saves, self.tokens, dtype_of(self.device).itemsize)

    @cached_property
    def machine(self) -> Machine:
        """The plan's rates for these GPUs; an H200's for CPUs, and for GPUs that plans do not know."""
        return machine_of(None, self.device) or MACHINES["H200"]

    @cached_property
    def whole_size(self) -> ModelSize:
        """Of the model on one GPU."""
        lora = LoRAConfig(r=RANK, lora_alpha=ALPHA, target_modules=list(self.targets))
        return ModelSize.of(self.spec.config(), lora)

    @property
    def described(self) -> str:
        """What layers keep on this rank."""
        if not self.saves:
            return ""
        counts = ", ".join(f"{self.saves.count(s)} × {s}" for s in dict.fromkeys(self.saves))
        kept = kept_of(self.whole_size, self.batch, self.saves)
        return f"{counts}: {kept / 1e9:.1f} GB predicted"

    def arrange(self, model: Any) -> None:
        """Collective: cut layers, then rows, over the ranks that have them together."""
        kinds, variants = self.way.kinds, self.way.variants
        torch.manual_seed(0)  # all ranks draw equal masks
        if "tp" in kinds:
            overlap = False if "in turn" in variants else None
            self.split = parallelize(model, self.mesh["tp"], vocabulary=True, overlap=overlap)
        if "cp" in kinds:
            self.context = context_parallel(model, self.mesh["cp"])
        if self.split is None:
            set_adapters(model)
            return
        whole = self.split.whole_adapters()
        fill_adapters(whole.items())
        trained = dict(model.named_parameters())
        with torch.no_grad():
            for name, own in self.split.own(whole).items():
                trained[name].copy_(own)

    def loss(self, ids: Tensor) -> Tensor:
        """Of int64 [B, T], whole rows on each rank that shares them."""
        over = self.context or self.split
        return super().loss(ids) if over is None else over.loss(ids, input_ids=ids)

    def step(self, ids: Tensor) -> Tensor:
        """Train on int64 [rows, B, T], one row after the other, by one update. Returns the first row's loss."""
        if len(ids) > 1 and self.graphs is not None and self.manager.phase == "recording":
            raise ValueError(f"the first step captures layers: give it one row, not {len(ids)}")
        self.optimizer.zero_grad()
        losses = []
        for number, row in enumerate(ids):
            if number:
                self._end_row()
            loss = self.loss(row)
            (loss / len(ids)).backward()
            losses.append(loss.detach())
        self._reduce_gradients()
        self.optimizer.step()
        self.update_scales()
        self._end_row()  # layers are captured with scales
        return losses[0]

    def _end_row(self) -> None:
        """Rows are not in flight together, so that each is an iteration of the graphs: one block serves all."""
        if self.graphs is None:
            self.rng.advance()
        else:
            self.manager.end_iteration()

    def _reduce_gradients(self) -> None:
        if self.context is not None:
            self.context.reduce_gradients()
        if not self.way.alone:
            average_gradients(self.trained, self.mesh["dp"].get_group())

    def check(self) -> None:
        """Collective: raise ValueError if ranks that should have the same adapters, scales and generators do not."""
        for part in (self.split, self.context):
            if part is not None:
                part.check()
        if self.way.alone:
            return
        sums = torch.stack([p.detach().double().abs().sum() for p in self.trained])
        found = torch.stack((sums, -sums))
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self.mesh["dp"].get_group())
        if not torch.equal(found[0], -found[1]):
            raise ValueError("replicas have other adapters")

    def predicted(self) -> ShardPlan | None:
        """What `lorakernels plan` says; None of what it does not know: a CPU, layers without graphs, rows in turn."""
        if self.device.type != "cuda" or "in turn" in self.way.variants or self.graphs is None:
            return None
        ranks = dist.get_world_size()
        placement = Placement(ranks if self.way.sharded else 1)
        gpus = 1 if self.way.alone else ranks
        size = self.whole_size
        return predict(size, self.batch, self.machine, gpus, placement, self.saves)

    def outside(self) -> int:
        """Bytes on this GPU that torch's allocator does not count: shards that other ranks read."""
        if self.sharded is None or self.sharded.transport != "peer":
            return 0
        return int(self.sharded.shards.memory.numel())

    def close(self) -> None:
        """Drop the graphs, before the communicators that they use."""
        if self.graphs is not None:
            self.manager.close()
