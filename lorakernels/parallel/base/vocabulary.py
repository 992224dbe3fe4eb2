# SPDX-License-Identifier: Apache-2.0
"""A model's frozen embedding and output head, split over ranks. They are gathered for each use and freed after it.

    embedding   gathered before its forward, freed after it
    head        gathered before its use, freed after it. Where logits of all tokens are computed, autograd keeps it
                until their backward. `linear_cross_entropy` computes dh in forward, and does not.

Each is one block of bytes, as a layer's weights are (ranks/blocks.py). A gathered weight lies in memory of torch's
allocator, which other tensors reuse afterwards. Bytes are only copied. Between uses all elements of the parameter are
views of one NaN.

Gathers run on the current stream, and are not overlapped. A head that is gathered during the last layer would exist at
the same time as that layer's tensors. Then the peak of some models would be as high as with a whole head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from lorakernels.autograd.lent import lend
from lorakernels.modules.linear.frozen import is_sharded
from lorakernels.parallel.base.stores import Member
from lorakernels.parallel.ranks import comm
from lorakernels.parallel.ranks.blocks import Block, lay_out
from lorakernels.parallel.ranks.shards import Shards

_T = TypeVar("_T")
DDP = "_ddp_params_and_buffers_to_ignore"  # an attribute that DistributedDataParallel reads


class VocabularyWeight(NamedTuple):
    """One weight that is split. `modules`: {path: module that has it}, two where head and embedding are tied."""

    parameter: nn.Parameter
    modules: dict[str, nn.Module]
    block: Block

    def __str__(self) -> str:
        return "=".join(self.modules)


class VocabularySplit(NamedTuple):
    """The weights that `shard_base(embeddings=True)` splits, and {path: reason} of those that stay whole."""

    weights: list[VocabularyWeight]
    stay: dict[str, str]


def find(model: Any, ranks: int) -> VocabularySplit:
    """The embedding and the head of a transformers model, in blocks for `ranks` ranks.

    Raises:
        ValueError: there is neither, none can be split, or another module has the same weight.
    """
    if not hasattr(model, "get_input_embeddings") or not hasattr(model, "get_output_embeddings"):
        raise ValueError(
            f"embeddings=True needs a model of transformers, found {type(model).__name__}"
        )
    paths = {id(module): path for path, module in model.named_modules()}
    kinds = {"embedding": nn.Embedding, "head": nn.Linear}
    ends = zip(kinds, (model.get_input_embeddings(), model.get_output_embeddings()), strict=True)
    weights: dict[int, VocabularyWeight] = {}
    stay: dict[str, str] = {}
    for name, module in ends:
        objection = _objection(module, kinds[name])
        path = paths.get(id(module), name)
        if objection is not None:
            stay[path] = objection
            continue
        parameter = module.weight
        rows, size = len(parameter), parameter[0].numel() * parameter.element_size()
        block = lay_out([[("weight", (rows, size))]], ranks)
        weight = weights.setdefault(id(parameter), VocabularyWeight(parameter, {}, block))
        weight.modules[path] = module
    if not weights:
        reasons = "; ".join(f"{path} {objection}" for path, objection in stay.items())
        raise ValueError(f"embeddings=True has nothing to split: {reasons}")
    _check_owners(model, weights)
    return VocabularySplit(list(weights.values()), stay)


def _objection(module: Any, kind: type[nn.Module]) -> str | None:
    """Why a module's weight stays whole on every rank, or None."""
    if module is None:
        return "does not exist"
    if not isinstance(module, kind) or (kind is nn.Linear and type(module) is not kind):
        return f"is a {type(module).__name__}, not an nn.{kind.__name__}"
    weight: Any = module.weight
    if weight.requires_grad:
        return "is trained"
    if is_sharded(weight):
        return "is sharded by FSDP2"
    if weight.is_meta:
        return "is on the meta device"
    if getattr(module, "max_norm", None) is not None:
        return "has a max_norm, by which its forward writes to it"
    return None


def _check_owners(model: nn.Module, weights: dict[int, VocabularyWeight]) -> None:
    memory = {w.parameter.data_ptr(): w for w in weights.values()}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        path, weight = name.rpartition(".")[0], memory.get(parameter.data_ptr())
        if weight is not None and (parameter is not weight.parameter or path not in weight.modules):
            raise ValueError(
                f"{name} shares its memory with {weight}.weight, which embeddings=True splits: tie them as one "
                "parameter of embedding and head, or leave embeddings=True out"
            )


class ShardedVocabulary:
    """The embedding and head of `model`, split over the ranks of a group. `shard_base(embeddings=True)` makes it.

    Attributes:
        weights: the weights that are split.
        stay: {path: reason} of an embedding or head that stays whole on every rank.
        shards: this rank's bytes.
        gathers: how many weights were gathered so far.
    """

    def __init__(
        self, model: nn.Module, split: VocabularySplit, shards: Shards, transport: comm.Transport
    ) -> None:
        self.weights, self.stay = split
        self.shards, self.gathers = shards, 0
        self._model, self._transport = model, transport
        self._handles: list[Any] = []

    @classmethod
    def of(
        cls,
        model: nn.Module,
        split: VocabularySplit,
        member: Member,
        transport: str,
    ) -> ShardedVocabulary:
        """Collective: copy this rank's parts. The model is not changed before `attach`.

        Args:
            model: has the weights of `split`.
            split: equal on all ranks.
            member: this rank.
            transport: its name.

        Raises:
            ValueError, RuntimeError: a rank lacks memory. Every rank raises.
        """
        group, rank, ranks, device = member
        blocks = [weight.block for weight in split.weights]
        carrier = comm.make(transport, group, device)
        with comm.together(group):
            memory = carrier.allocate(Shards.bytes_of(blocks, ranks))
        shards = Shards(blocks, rank, ranks, memory)
        with comm.together(group):
            for index, weight in enumerate(split.weights):
                (entry,) = weight.block.entries
                raw = weight.parameter.detach().contiguous().view(torch.uint8)
                shards.write(index, entry, raw.view(entry.shape))
        carrier.publish(shards)
        return cls(model, split, shards, carrier)

    def attach(self) -> None:
        """Free the memory of the whole weights, and hook their modules."""
        for index, weight in enumerate(self.weights):
            parameter = weight.parameter
            nothing = torch.full((), torch.nan, dtype=parameter.dtype, device=parameter.device)
            parameter.data = nothing.expand(parameter.shape)
            lend(parameter, untraced(partial(self.bring, index)))
            for module in weight.modules.values():
                self._hook(index, module)
        names = [f"{path}.weight" for weight in self.weights for path in weight.modules]
        setattr(self._model, DDP, [*getattr(self._model, DDP, []), *names])

    def bring(self, index: int) -> Tensor:
        """Gather the whole weight into new memory, which lives as long as the result."""
        return self._filled(index, self._room(index))

    def _room(self, index: int) -> Tensor:
        """Memory for a whole weight."""
        size, device = self.weights[index].block.size, self.shards.memory.device
        return torch.empty(size, dtype=torch.uint8, device=device)

    def _filled(self, index: int, memory: Tensor) -> Tensor:
        parameter = self.weights[index].parameter
        pending = self._transport.gather(index, memory.data)  # `.data` has its own version counter
        if pending is not None:
            pending.wait()
        self.gathers += 1
        used = memory[: parameter.numel() * parameter.element_size()]
        return used.view(parameter.dtype).view(parameter.shape)

    @contextmanager
    def gathered(self, path: str) -> Iterator[Tensor]:
        """The whole weight of the module at `path`. Collective, except over "peer".

        Raises:
            ValueError: no weight of that module is split.
        """
        for index, weight in enumerate(self.weights):
            if path in weight.modules:
                yield self.bring(index)
                return
        raise ValueError(f"path must be one of {[*self._paths()]}, found {path!r}")

    def rooms(self) -> list[Tensor]:
        """Memory for all whole weights, for `unshard`.

        Raises:
            torch.OutOfMemoryError: they do not fit.
        """
        return [self._room(index) for index in range(len(self.weights))]

    def unshard(self, rooms: list[Tensor]) -> None:
        """Collective: gather the whole weights into `rooms`, for good."""
        gathered = [self._filled(index, memory) for index, memory in enumerate(rooms)]
        for weight, whole in zip(self.weights, gathered, strict=True):
            weight.parameter.data = whole
            lend(weight.parameter, None)
            for module in weight.modules.values():
                module.__dict__.pop("_apply", None)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        ours = {f"{path}.weight" for path in self._paths()}
        if others := [name for name in getattr(self._model, DDP) if name not in ours]:
            setattr(self._model, DDP, others)
        else:
            delattr(self._model, DDP)
        self._transport.close()

    def __str__(self) -> str:
        sizes = [weight.block.size for weight in self.weights]
        names = " and ".join(map(str, self.weights))
        stay = "".join(f"; {path} stays whole, as it {why}" for path, why in self.stay.items())
        return (
            f"{names}: {sum(sizes):,} bytes over {self.shards.ranks} ranks: {self.shards.memory.numel():,} bytes a "
            f"rank, and at most {max(sizes):,} while one is used{stay}"
        )

    def _paths(self) -> Iterator[str]:
        for weight in self.weights:
            yield from weight.modules

    def _hook(self, index: int, module: nn.Module) -> None:
        parameter = self.weights[index].parameter

        def lend_to(module: nn.Module, args: Any) -> None:
            module._parameters["weight"] = nn.Parameter(self.bring(index), requires_grad=False)

        def take_back(module: nn.Module, args: Any, output: Any) -> None:
            module._parameters["weight"] = parameter

        def save(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
            state[f"{prefix}weight"] = self.bring(index)

        self._handles += [
            module.register_forward_pre_hook(untraced(lend_to)),
            module.register_forward_hook(untraced(take_back), always_call=True),
            module.register_state_dict_post_hook(save),
            module.register_load_state_dict_pre_hook(refuse_loading),
        ]
        module.__dict__["_apply"] = partial(_refuse_moving, module)


def agreed(model: nn.Module, group: Any, ranks: int) -> VocabularySplit:
    """Collective: the result of `find`, which must be the same on every rank.

    Raises:
        ValueError: `find` raised on a rank, or ranks differ.
    """
    with comm.together(group):
        split = find(model, ranks)
    mine = [f"{w} {list(w.parameter.shape)} of {w.parameter.dtype}" for w in split.weights]
    every = comm.agree(group, mine)
    for rank, other in enumerate(every):
        if other != every[0]:
            raise ValueError(
                f"the models differ: embeddings are {every[0]} on rank 0, {other} on rank {rank}"
            )
    return split


def untraced(hook: Callable[..., _T]) -> Callable[..., _T]:
    """`hook`, hidden from torch.compile: a module that is compiled by itself is traced with its hooks."""
    hidden: Callable[..., _T] = torch.compiler.disable(hook, reason="it gathers frozen weights")
    return hidden


def refuse_loading(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """A hook that raises RuntimeError if a weight that is split would be loaded."""
    if f"{prefix}weight" in state_dict:
        raise RuntimeError(
            f"{prefix}weight is in a sharded base, into which no state_dict is loaded: call its unshard() first, or "
            "leave the frozen weights out of the state_dict"
        )


def _refuse_moving(
    module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True
) -> nn.Module:
    """Replaces `nn.Module._apply`: raises if `fn` would change the weight's memory or dtype."""
    probe = torch.zeros(1, dtype=module.weight.dtype, device=module.weight.device)  # type: ignore[arg-type]
    if fn(probe).data_ptr() != probe.data_ptr():
        raise RuntimeError(
            f"cannot move or cast the {type(module).__name__} of a sharded base: call its unshard() first"
        )
    return type(module)._apply(module, fn, recurse)
