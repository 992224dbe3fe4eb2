# SPDX-License-Identifier: Apache-2.0
"""shard_base: each rank keeps 1/n of the frozen FP8 weights, and gathers a layer's weights just before the layer runs.

    shards   rank r: part r of every layer's block (ranks/blocks.py, ranks/shards.py); written once, while loading
    slots    k memory slots at fixed addresses (slots.py). `weight.data` of layer i always lies in memory slot i mod k;
             with two ranks and peer copies, a weight that this rank holds whole lies in its shard instead
    hooks    before a layer's forward, and before its backward: `Slots.ensure`, which also gathers the next layer

A forward hook runs before the layer. A hook on the layer's outputs runs before its backward, when autograd reaches
them. A forward that runs inside a backward recomputes, so its direction is backward. These hooks are outside of the
layers' own graphs; a replayed layer reads the same addresses. A step that is captured as a whole contains the gathers.

A microbatch of L layers gathers 2 (L − k) blocks: where forward turns into backward and back, k layers are still in
their memory slots. Layers may run in another order, which only waits for more gathers.

With `offload`, a part of every layer's weights is in pinned memory of the hosts (offload.py). It has memory slots of
its own, which are filled one layer earlier. This works on a single GPU, too; the other weights stay where they are.

Bytes are only copied, so results are bit-equal to those of the replicated base. Scales, biases, norms and adapters stay
whole on every rank. So do embedding and head without `embeddings=True` (vocabulary.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lorakernels.device import in_backward
from lorakernels.fusion.find import decoder_layers
from lorakernels.modules.linear.frozen import FrozenFP8Linear
from lorakernels.modules.marks import SplitModule, mark
from lorakernels.modules.order import refuse
from lorakernels.numerics.fp8 import E4M3
from lorakernels.parallel.base.layers import (
    check_layers,
    frozen_linears,
    join_groups,
    shapes_of,
    stored,
    sums_of_frozen,
)
from lorakernels.parallel.base.offload import Offload, as_offload
from lorakernels.parallel.base.stores import (
    BaseLayout,
    Member,
    Store,
    allocate,
    discard,
    lay_out_base,
    write,
)
from lorakernels.parallel.base.vocabulary import (
    ShardedVocabulary,
    VocabularySplit,
    agreed,
    refuse_loading,
    untraced,
)
from lorakernels.parallel.ranks import comm
from lorakernels.parallel.ranks.agree import check_equal
from lorakernels.parallel.ranks.blocks import Block, Entry

POISON_VARIABLE = "LORAKERNELS_POISON_SLOTS"
Home = Callable[[int, Entry], Tensor | None]


class ShardedBase:
    """The frozen weights of a model's decoder layers, split over the ranks of a group. `shard_base` makes it.

    `print(base)` shows what was chosen. With transport "nccl" or "gloo", and with offload on several ranks, everything
    that gathers is a collective: all ranks must do it, in one order.

    Attributes:
        layers: {path: decoder layer}.
        stores: the stores of the weights, one or two.
        shards, slots, transport, reason: of the first store. This rank's bytes, the memory slots, the transport's name,
            and why it was chosen.
        vocabulary: the split embedding and head; None if they are not split.
    """

    def __init__(
        self,
        layers: Mapping[str, nn.Module],
        stores: Sequence[Store],
        vocabulary: ShardedVocabulary | None = None,
        group: Any = None,
    ) -> None:
        self.layers, self.stores, self.vocabulary = dict(layers), tuple(stores), vocabulary
        self._group = group  # None for a single process
        first = self.stores[0]
        self.shards, self.slots, self.reason = first.shards, first.slots, first.reason
        self.transport = first.transport.name
        self._handles: list[Any] = []

    @property
    def gathers(self) -> int:
        """How many blocks of layers this rank has gathered so far."""
        return sum(store.slots.gathers for store in self.stores)

    def ensure(self, layer: int, ahead: int) -> None:
        """`Slots.ensure` in every store."""
        for store in self.stores:
            store.slots.ensure(layer, ahead)

    def attach(self) -> None:
        """Move the layers' weights into memory slots and shards, and hook the layers."""
        for index, layer in enumerate(self.layers.values()):
            for store in self.stores:
                self._place(index, store, store.slots.of(index), store.shards.home)
            hooks = _LayerHooks(self, index)
            self._handles += [
                layer.register_forward_pre_hook(untraced(hooks.before_forward)),
                layer.register_forward_hook(untraced(hooks.after_forward)),
            ]
            # also linears that keep their memory: if only some of a layer refused, it would be half moved or loaded
            for linear in frozen_linears(layer).values():
                mark(linear, weight_holder=hooks)
                self._handles.append(linear.register_load_state_dict_pre_hook(refuse_loading))
            for linear in self._in_stores(index):
                self._handles += [
                    linear.register_state_dict_post_hook(partial(hooks.clone_saved)),
                    linear.register_state_dict_pre_hook(hooks.before_saving),
                ]
        if self.vocabulary is not None:
            self.vocabulary.attach()
        self._forget()

    @contextmanager
    def gathered(self, layer: int | str | nn.Module) -> Iterator[dict[str, Tensor]]:
        """{path in the layer: weight, e4m3 [N, K]} of all frozen linears of one layer.

        They are views of the layer's memory slot: read them before another layer runs. Collective, except over "peer"
        without offload.

        Args:
            layer: its index, path or module.

        Raises:
            ValueError: the base has no such layer.
        """
        index = self._index(layer)
        self.ensure(index, 0)
        linears = frozen_linears(list(self.layers.values())[index])
        yield {name: stored(m).detach().view(torch.uint8).view(E4M3) for name, m in linears.items()}

    def unshard(self) -> None:
        """Collective: give every rank the whole base again, in new memory. This object cannot be used afterwards.

        Raises:
            torch.OutOfMemoryError: the whole base does not fit. It stays sharded, and may be unsharded later.
            ValueError: it does not fit on another rank.
        """
        with comm.together(self._group):
            rooms = [
                [torch.empty_like(store.slots.of(index)) for store in self.stores]
                for index in range(len(self.layers))
            ]
            whole = None if self.vocabulary is None else self.vocabulary.rooms()
        if self.vocabulary is not None and whole is not None:
            self.vocabulary.unshard(whole)
            self.vocabulary = None
        for index, layer in enumerate(self.layers.values()):
            self.ensure(index, 0)
            for store, memory in zip(self.stores, rooms[index], strict=True):
                self._place(index, store, memory, lambda *_: None)
            for linear in frozen_linears(layer).values():
                mark(linear, weight_holder=None)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._forget()
        for store in self.stores:
            store.transport.close()

    def __str__(self) -> str:
        parts = self.stores if self.vocabulary is None else (*self.stores, self.vocabulary)
        return "\n".join(map(str, parts))

    def __reduce_ex__(self, _: Any) -> NoReturn:
        raise RuntimeError(
            "a model whose base is sharded cannot be copied or pickled: call unshard() of its ShardedBase first"
        )

    def _index(self, layer: int | str | nn.Module) -> int:
        for index, (path, module) in enumerate(self.layers.items()):
            if layer is module or layer == path or (type(layer) is int and layer == index):
                return index
        raise ValueError(f"layer must be one of {list(self.layers)}, found {layer!r}")

    def _in_stores(self, index: int) -> Iterator[FrozenFP8Linear]:
        """The linears of a layer whose weights are in a store."""
        linears = frozen_linears(list(self.layers.values())[index])
        for store in self.stores:
            for entry in store.entries(index):
                yield linears[entry.name]

    def _forget(self) -> None:
        for store in self.stores:
            store.slots.forget()

    @torch.no_grad()
    def _place(self, index: int, store: Store, memory: Tensor, home: Home) -> None:
        """Let the weights of a layer that are in `store` use their home memory, or copy them into `memory`.

        Args:
            index: the layer's index.
            store: a store of this base.
            memory: uint8 [size] for the layer's block.
            home: (layer, entry) → memory that has the weight's values already, or None.
        """
        layer = list(self.layers.values())[index]
        linears = frozen_linears(layer)
        for entry in store.entries(index):
            weight = stored(linears[entry.name])
            if weight.is_meta:
                raise ValueError(f"{entry.name} is on the meta device")
            raw = home(index, entry)
            if raw is None:
                raw = memory[entry.offset : entry.end]
                raw.copy_(weight.data.view(torch.uint8).view(-1))
            weight.data = raw.view(entry.shape).view(weight.dtype)
        join_groups(layer)


@dataclass(eq=False)
class _LayerHooks:
    """The hooks of one layer and of its linears. It is the `weight_holder` of these linears."""

    base: ShardedBase
    index: int

    def bring(self) -> None:
        self.base.ensure(self.index, 0)

    def before_forward(self, module: nn.Module, args: Any) -> None:
        self.base.ensure(self.index, -1 if in_backward() else 1)

    def before_backward(self, grad: Tensor) -> None:
        self.base.ensure(self.index, -1)

    def after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            for x in pytree.tree_leaves(output):
                if isinstance(x, Tensor) and x.requires_grad:
                    x.register_hook(self.before_backward)

    def before_saving(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        self.bring()

    def clone_saved(
        self, module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any
    ) -> None:
        """The memory slot will soon hold another layer."""
        key = f"{prefix}weight"
        state_dict[key] = state_dict[key].detach().clone()


def shard_base(
    model: nn.Module,
    mesh: Any = None,
    slots: int = 2,
    prefetch: int = 1,
    transport: str = "auto",
    offload: float | Offload = 0.0,
    embeddings: bool = False,
) -> ShardedBase:
    """Split the frozen FP8 weights of the decoder layers of `model` over the ranks of `mesh`, in place.

    The model may be fused or not. It has adapters, and every linear layer of its decoder layers is in FP8. Results stay
    the same, bit for bit. Collective.

    Args:
        model: its frozen tensors are equal on all ranks, which is checked by reading them once. After `parallelize`,
            shard over ranks that hold the same parts.
        mesh: a DeviceMesh of one axis, such as `mesh["dp_shard"]`. Gathers stay on that axis. None is for a single
            process, which needs `offload`.
        slots: how many layers' weights a rank keeps whole, at least 1. Weights on the host have one memory slot more.
        prefetch: how many layers ahead gathers start, less than `slots`. Weights on the host start one layer earlier.
        transport: "peer", "nccl", "gloo" or "auto": parallel/ranks/comm.py.
        offload: the least fraction of every layer's weights that goes to pinned memory of the host; or an Offload.
        embeddings: split the frozen embedding and output head of a transformers model over the ranks of `mesh`, too.
            Each is whole while it is used. One that is trained or has an adapter stays whole. Off by default: it takes
            the time of two more gathers a microbatch, and the memory of the larger one of them at the loss.

    Returns:
        The ShardedBase. Keep it for `unshard` and `gathered`, and to print what was chosen.

    Raises:
        ValueError: an argument is not one of these; the model has no decoder layer that `fuse` supports, or was cut
            into stages; a weight cannot be sharded or is sharded already; neither embedding nor head can be split; the
            host has too little memory; or the ranks' models differ. The message names it.
        RuntimeError: transport "peer", and a rank cannot read the others' memory.
        OSError: the system did not pin memory of the host.

    Errors are raised on every rank, before the model is changed.
    """
    device = next(model.parameters()).device
    check_mesh(mesh)
    member = Member.of(mesh, device)

    def find() -> BaseLayout:
        if mesh is not None and mesh.device_type != device.type:
            raise ValueError(
                f"mesh must be of the model's device, {device}, found {mesh.device_type}"
            )
        return _layout(model, member, (slots, prefetch), offload)

    options = {
        "slots": slots,
        "prefetch": prefetch,
        "transport": transport,
        "offload": unchecked_fraction(offload),
        "embeddings": embeddings,
        "the part of layers that parallelize split": _part_of(model),
    }
    layout = agreed_layout(member, find, options)
    split = agreed_embeddings(model, member, embeddings)
    if member.group is not None:
        with comm.together(member.group):
            sums = sums_of_frozen(model, device)
        check_equal(comm.agree(member.group, sums))
    chosen = choose_transport(transport, member)
    stores = allocate(member, layout, as_offload(offload), chosen)
    try:
        with comm.together(member.group):  # one rank's GPU may be full
            for index, layer in enumerate(layout.layers.values()):
                for name, linear in frozen_linears(layer).items():
                    write(stores, index, name, stored(linear))
        vocabulary = split and ShardedVocabulary.of(model, split, member, chosen[0])
        return finish(member, layout, stores, (slots, prefetch), vocabulary)
    except BaseException:
        discard(stores)
        raise


def _part_of(model: nn.Module) -> str:
    """Which part of split layers this rank has."""
    ranks = next((m.ranks for m in model.modules() if isinstance(m, SplitModule)), None)
    return "none" if ranks is None else f"{ranks.rank} of {ranks.size}"


def agreed_embeddings(model: nn.Module, member: Member, embeddings: bool) -> VocabularySplit | None:
    """Collective: the embedding and the head that can be split; None without `embeddings`.

    Raises:
        ValueError: this is a single process, there is nothing to split, or the ranks differ.
    """
    if not embeddings:
        return None
    if member.group is None:
        raise ValueError("embeddings=True needs a mesh, found None")
    return agreed(model, member.group, member.ranks)


def choose_transport(transport: str, member: Member) -> tuple[str, str]:
    """Collective: as `comm.choose`; "host" for a single process, which only offloads."""
    if member.group is None:
        if transport != "auto":
            raise ValueError(f"transport {transport!r} needs a mesh, found None")
        return "host", "one process"
    return comm.choose(transport, member.group, member.device)


def finish(
    member: Member,
    layout: BaseLayout,
    stores: Sequence[Store],
    ahead: tuple[int, int],
    vocabulary: ShardedVocabulary | None = None,
) -> ShardedBase:
    """Collective: the base over stores that are written, attached to the layers. `ahead`: (slots, prefetch)."""
    poison = os.environ.get(POISON_VARIABLE, "0") not in ("", "0")
    for store in stores:
        store.transport.publish(store.shards)
        with comm.together(member.group):  # one rank's GPU may be full
            store.open(*ahead)
        store.slots.poison = poison
    base = ShardedBase(layout.layers, stores, vocabulary, member.group)
    base.attach()
    return base


def check_mesh(mesh: Any) -> None:
    """Raise ValueError unless `mesh` is None, or has one axis with this rank on it."""
    if mesh is None:
        return
    if mesh.ndim != 1:
        raise ValueError(
            f"mesh must have one axis, found {mesh.ndim}: {mesh.mesh_dim_names}; pass one of them, such as "
            'mesh["dp_shard"]'
        )
    if mesh.get_coordinate() is None:
        raise ValueError(f"mesh must have this rank in it, found {mesh}")


def _layout(
    model: nn.Module, member: Member, ahead: tuple[int, int], offload: float | Offload
) -> BaseLayout:
    slots, prefetch = ahead
    for name, value, least in (("slots", slots, 1), ("prefetch", prefetch, 0)):
        if type(value) is not int or value < least:
            raise ValueError(f"{name} must be an integer of at least {least}, found {value!r}")
    if prefetch >= slots:
        raise ValueError(f"prefetch must be less than slots = {slots}, found {prefetch}")
    fraction = check_offload(offload, member)
    refuse(model, "shard_base", ())
    layers = decoder_layers(model, fused=True)
    check_layers(layers)
    return lay_out_base(layers, lambda _, layer: shapes_of(layer), member.ranks, fraction)


def check_offload(offload: float | Offload, member: Member) -> float:
    """The fraction of the base that goes to the host.

    Raises:
        ValueError: `offload` is no valid fraction, or there is neither a mesh nor anything to offload.
    """
    fraction = as_offload(offload).fraction
    if member.group is None and not fraction:
        raise ValueError("mesh must be a DeviceMesh of one axis, found None, which needs offload")
    return fraction


def unchecked_fraction(offload: Any) -> Any:
    """The fraction of an `offload=` argument that was not checked yet."""
    return offload.fraction if isinstance(offload, Offload) else offload


def agreed_layout(
    member: Member, find: Callable[[], BaseLayout], options: Mapping[str, Any]
) -> BaseLayout:
    """Collective: the layout that `find` returns, which must be the same on every rank.

    Args:
        member: this rank.
        find: finds this rank's layout.
        options: {name: value} of arguments that must be equal on all ranks.

    Raises:
        ValueError: `find` raised a ValueError or TypeError on a rank, or the ranks' layouts or `options` differ.
    """
    layout = BaseLayout({}, [], [], [])
    problem: str | None = None
    try:
        layout = find()
    except (ValueError, TypeError) as error:
        problem = str(error)
    mine = (problem, dict(options), _named(layout))
    every = comm.agree(member.group, mine)
    for rank, (objection, _, _) in enumerate(every):
        if objection is not None:
            raise ValueError(f"rank {rank}: {objection}")
    for rank, other in enumerate(every):
        for name, value in every[0][1].items():
            if other[1][name] != value:
                raise ValueError(
                    f"{name} differs: {value!r} on rank 0, {other[1][name]!r} on rank {rank}"
                )
        if other[2] != every[0][2]:
            raise ValueError(
                f"the models differ: {_difference(every[0][2], other[2])} on ranks 0 and {rank}"
            )
    return layout


def _named(layout: BaseLayout) -> list[tuple[str, Block]]:
    paths = list(layout.layers)
    kept = [blocks for blocks in (layout.on_gpu, layout.on_host) if blocks]
    return [pair for blocks in kept for pair in zip(paths, blocks, strict=True)]


def _difference(ours: Sequence[Any], theirs: Sequence[Any]) -> str:
    pairs = zip(ours, theirs, strict=False)
    for (path, block), (other, another) in pairs:
        if path != other:
            return f"layers {path} and {other}"
        if block != another:
            return f"{path} has weights {_shapes(block)} and {_shapes(another)}"
    return f"{len(ours)} and {len(theirs)} layers"


def _shapes(block: Block) -> dict[str, list[int]]:
    return {entry.name: list(entry.shape) for entry in block.entries}
