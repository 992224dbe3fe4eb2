# SPDX-License-Identifier: Apache-2.0
"""shard_base: each rank keeps 1/n of the frozen FP8 weights, and layers get theirs just before they run.

    shards   rank r: part r of every layer's block (ranks/blocks.py, ranks/shards.py); written once, while loading
    slots    k blocks of memory at fixed addresses (slots.py). `weight.data` of layer i lies in slot i mod k for good;
             with two ranks and peer copies, a weight that this rank holds whole lies in its shard instead
    hooks    before a layer's forward, and before its backward: `Slots.ensure`, which also gathers the next layer

A forward hook runs before the layer. A hook on the layer's outputs runs before its backward, as autograd comes to
them. A forward that runs inside a backward recomputes, so its direction is backward. These hooks are outside of the
layers' own graphs; a replayed layer reads the same addresses. A step that is captured as a whole has the gathers in it.

A microbatch of L layers gathers 2 (L − k) blocks: at both turns the last k layers are in their slots still. Another
order of use is right, too; it only waits for more gathers.

With `offload`, a part of every layer's weights is in pinned memory of the hosts (offload.py). It has slots of its own,
which are filled one layer earlier. One GPU alone may do so, too; its other weights stay where they are.

Bytes are only copied, so that results equal those of the replicated base bit for bit. Scales, biases, norms and
adapters stay whole on every rank. So do embedding and head without `embeddings=True` (vocabulary.py).
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
    Layout,
    Place,
    Store,
    allocate,
    discard,
    lay_out_base,
    write,
)
from lorakernels.parallel.base.vocabulary import (
    Found,
    ShardedVocabulary,
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

    `print(base)` says what was chosen. With transport "nccl" or "gloo", and with offload on several ranks, whatever
    gathers is a collective: all ranks must do it, in one order.

    Attributes:
        layers: {path: decoder layer}.
        stores: where the weights are kept.
        shards, slots, transport, reason: of the first store. This rank's bytes, the memory in which the layers' weights
            lie, how gathers run, and why so.
        vocabulary: the embedding and the head, where they are split, too.
    """

    def __init__(
        self,
        layers: Mapping[str, nn.Module],
        stores: Sequence[Store],
        vocabulary: ShardedVocabulary | None = None,
        group: Any = None,
    ) -> None:
        self.layers, self.stores, self.vocabulary = dict(layers), tuple(stores), vocabulary
        self._group = group  # of the ranks; None of one process
        first = self.stores[0]
        self.shards, self.slots, self.reason = first.shards, first.slots, first.reason
        self.transport = first.transport.name
        self._handles: list[Any] = []

    @property
    def gathers(self) -> int:
        """How many blocks of layers this rank has gathered so far."""
        return sum(store.slots.gathers for store in self.stores)

    def ensure(self, layer: int, ahead: int) -> None:
        """Bring the weights of `layer`, as `Slots.ensure`, in every store."""
        for store in self.stores:
            store.slots.ensure(layer, ahead)

    def attach(self) -> None:
        """Give the layers' weights their places in slots and shards, and hook the layers."""
        for index, layer in enumerate(self.layers.values()):
            for store in self.stores:
                self._place(index, store, store.slots.of(index), store.shards.home)
            held = _Layer(self, index)
            self._handles += [
                layer.register_forward_pre_hook(untraced(held.before_forward)),
                layer.register_forward_hook(untraced(held.after_forward)),
            ]
            # those that keep their memory, too: a layer that refuses in its middle would be half moved or loaded
            for linear in frozen_linears(layer).values():
                mark(linear, weight_holder=held)
                self._handles.append(linear.register_load_state_dict_pre_hook(refuse_loading))
            for linear in self._in_stores(index):
                self._handles += [
                    linear.register_state_dict_post_hook(partial(held.clone_saved)),
                    linear.register_state_dict_pre_hook(held.before_saving),
                ]
        if self.vocabulary is not None:
            self.vocabulary.attach()
        self._forget()

    @contextmanager
    def gathered(self, layer: int | str | nn.Module) -> Iterator[dict[str, Tensor]]:
        """All frozen weights of one layer, e4m3 [N, K] by their modules' paths in it.

        They are views of the layer's slot: read them before another layer runs. Collective, except over "peer" without
        offload.

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
        """Collective: give every rank the whole base again, in memory of the layers' own. The base is over then.

        Raises:
            torch.OutOfMemoryError: it does not fit. The base goes on then, and may be unsharded later.
            ValueError: so it is on another rank.
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
        """Move the weights of a layer that are in `store` to their homes, or with their values into `memory`.

        Args:
            index: the layer's.
            store: one of the base's.
            memory: uint8 [size] of the layer's block.
            home: of a layer and an entry, memory that has the weight's values already; None: there is none.
        """
        layer = list(self.layers.values())[index]
        linears = frozen_linears(layer)
        for entry in store.entries(index):
            weight = stored(linears[entry.name])
            if weight.is_meta:
                raise ValueError(f"{entry.name} is on the meta device")
            place = home(index, entry)
            if place is None:
                place = memory[entry.offset : entry.end]
                place.copy_(weight.data.view(torch.uint8).view(-1))
            weight.data = place.view(entry.shape).view(weight.dtype)
        join_groups(layer)


@dataclass(eq=False)
class _Layer:
    """The hooks of one layer and of its linears, whose `weight_holder` this is."""

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
        """The slot will hold another layer soon."""
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

    The model may be fused or not; it has adapters, and every linear layer of its decoder layers is in FP8. Results stay
    as they are, bit for bit. Collective.

    Args:
        model: equal on all ranks in what is frozen, which is read once to compare it. After `parallelize`, these are
            the ranks with the same parts.
        mesh: a DeviceMesh of one axis, such as `mesh["dp_shard"]`. Gathers stay on that axis. None is this process
            alone, which needs `offload`.
        slots: how many layers' weights a rank has in whole, at least 1. What is on the host has one slot more.
        prefetch: how many layers ahead gathers start, less than `slots`. What is on the host starts one layer earlier.
        transport: "peer", "nccl", "gloo" or "auto": parallel/ranks/comm.py.
        offload: the fraction of every layer's weights that goes to pinned memory of the host, at least; or an Offload.
        embeddings: split the frozen embedding and output head of a transformers model over the ranks of `mesh`, too.
            Each is whole while it is used. What is trained or has an adapter stays whole. Off by default: it takes the
            time of two more gathers a microbatch, and the memory of the larger one of them at the loss.

    Returns:
        The ShardedBase. Keep it: `unshard`, `gathered` and what was chosen are there.

    Raises:
        ValueError: an argument is not one of these, the model has no decoder layer that `fuse` knows or was cut into
            stages, a weight cannot be sharded or is so already, neither embedding nor head can, the host has too little
            memory, or the ranks' models differ. The message names it.
        RuntimeError: transport "peer", and a rank cannot read the others' memory.
        OSError: the system did not pin memory of the host.

    Errors are raised on every rank, before the model is changed.
    """
    device = next(model.parameters()).device
    check_mesh(mesh)
    place = Place.of(mesh, device)

    def find() -> Layout:
        if mesh is not None and mesh.device_type != device.type:
            raise ValueError(
                f"mesh must be of the model's device, {device}, found {mesh.device_type}"
            )
        return _layout(model, place, (slots, prefetch), offload)

    options = {
        "slots": slots,
        "prefetch": prefetch,
        "transport": transport,
        "offload": asked_fraction(offload),
        "embeddings": embeddings,
        "the part of layers that parallelize split": _part_of(model),
    }
    layout = agreed_layout(place, find, options)
    found = agreed_embeddings(model, place, embeddings)
    if place.group is not None:
        with comm.together(place.group):
            sums = sums_of_frozen(model, device)
        check_equal(comm.agree(place.group, sums))
    chosen = choose_transport(transport, place)
    stores = allocate(place, layout, as_offload(offload), chosen)
    try:
        with comm.together(place.group):  # one rank's GPU may be full
            for index, layer in enumerate(layout.layers.values()):
                for name, linear in frozen_linears(layer).items():
                    write(stores, index, name, stored(linear))
        vocabulary = found and ShardedVocabulary.of(model, found, place, chosen[0])
        return finish(place, layout, stores, (slots, prefetch), vocabulary)
    except BaseException:
        discard(stores)
        raise


def _part_of(model: nn.Module) -> str:
    """Which part of split layers this rank has."""
    found = (m.ranks for m in model.modules() if isinstance(m, SplitModule))
    ranks = next(found, None)
    return "none" if ranks is None else f"{ranks.rank} of {ranks.size}"


def agreed_embeddings(model: nn.Module, place: Place, embeddings: bool) -> Found | None:
    """Collective: the embedding and the head that can be split; None if that was not asked for.

    Raises:
        ValueError: this process is alone, there is nothing to split, or the ranks differ.
    """
    if not embeddings:
        return None
    if place.group is None:
        raise ValueError("embeddings=True needs a mesh, found None")
    return agreed(model, place.group, place.ranks)


def choose_transport(transport: str, place: Place) -> tuple[str, str]:
    """Collective: as `comm.choose`; a process alone with offload gathers from no other."""
    if place.group is None:
        if transport != "auto":
            raise ValueError(f"transport {transport!r} needs a mesh, found None")
        return "host", "one process"
    return comm.choose(transport, place.group, place.device)


def finish(
    place: Place,
    layout: Layout,
    stores: Sequence[Store],
    ahead: tuple[int, int],
    vocabulary: ShardedVocabulary | None = None,
) -> ShardedBase:
    """Collective: the base over stores that are written, attached to the layers. `ahead`: (slots, prefetch)."""
    poison = os.environ.get(POISON_VARIABLE, "0") not in ("", "0")
    for store in stores:
        store.transport.publish(store.shards)
        with comm.together(place.group):  # one rank's GPU may be full
            store.open(*ahead)
        store.slots.poison = poison
    base = ShardedBase(layout.layers, stores, vocabulary, place.group)
    base.attach()
    return base


def check_mesh(mesh: Any) -> None:
    """Raise ValueError if `mesh` has not one axis, or has not this rank in it. None is right."""
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
    model: nn.Module, place: Place, ahead: tuple[int, int], offload: float | Offload
) -> Layout:
    slots, prefetch = ahead
    for name, value, least in (("slots", slots, 1), ("prefetch", prefetch, 0)):
        if type(value) is not int or value < least:
            raise ValueError(f"{name} must be an integer of at least {least}, found {value!r}")
    if prefetch >= slots:
        raise ValueError(f"prefetch must be less than slots = {slots}, found {prefetch}")
    fraction = check_offload(offload, place)
    refuse(model, "shard_base", ())
    layers = decoder_layers(model, fused=True)
    check_layers(layers)
    return lay_out_base(layers, lambda _, layer: shapes_of(layer), place.ranks, fraction)


def check_offload(offload: float | Offload, place: Place) -> float:
    """The fraction of the base that goes to the host.

    Raises:
        ValueError: it is not one, or there is neither a mesh nor anything to offload.
    """
    fraction = as_offload(offload).fraction
    if place.group is None and not fraction:
        raise ValueError("mesh must be a DeviceMesh of one axis, found None, which needs offload")
    return fraction


def asked_fraction(offload: Any) -> Any:
    """The fraction of an offload that was not checked yet."""
    return offload.fraction if isinstance(offload, Offload) else offload


def agreed_layout(place: Place, find: Callable[[], Layout], options: Mapping[str, Any]) -> Layout:
    """Collective: what `find` returns, if it is the same on every rank.

    Args:
        place: this rank.
        find: finds this rank's layout.
        options: {name: value} of what must be equal on all ranks.

    Raises:
        ValueError: `find` raised a ValueError or TypeError on a rank, or the ranks' layouts or `options` differ.
    """
    layout = Layout({}, [], [], [])
    problem: str | None = None
    try:
        layout = find()
    except (ValueError, TypeError) as error:
        problem = str(error)
    mine = (problem, dict(options), _named(layout))
    every = comm.agree(place.group, mine)
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


def _named(layout: Layout) -> list[tuple[str, Block]]:
    paths = list(layout.layers)
    blocks = [blocks for blocks in (layout.near, layout.far) if blocks]
    return [pair for each in blocks for pair in zip(paths, each, strict=True)]


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
