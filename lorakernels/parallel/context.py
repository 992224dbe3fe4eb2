# SPDX-License-Identifier: Apache-2.0
"""Context parallelism: ranks share rows that are too long for one GPU, each with some of a row's tokens.

All but attention looks at one token at a time, so a rank runs the model on its tokens alone (context_attention.py has
which). Weights, whole or in a sharded base, are as without it. The loss is over all tokens, and gradients are summed.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lorakernels.fusion.families import spec_of
from lorakernels.fusion.parts import Parts
from lorakernels.modules.holder import ROWS_OVER_RANKS
from lorakernels.modules.lora import LoRALinear
from lorakernels.modules.projections import frozen_layers, share_state
from lorakernels.parallel import comm
from lorakernels.parallel.context_attention import Chunks, ContextAttention
from lorakernels.parallel.context_check import OF_MODULE, fingerprint, objection
from lorakernels.parallel.context_rows import OwnChunks, check_places
from lorakernels.parallel.head import IGNORE, sum_of_losses
from lorakernels.parallel.known_tokens import refuse_unknown, vocabulary_of
from lorakernels.parallel.layers import decoder_layers
from lorakernels.parallel.pipeline_cut import Cut
from lorakernels.parallel.row_exchange import row_exchange
from lorakernels.parallel.tensor_check import check_equal
from lorakernels.parallel.tensor_ranks import Ranks
from lorakernels.state.fp8 import FP8State

ATTENTION = "lorakernels_context_parallel"  # among transformers' attention functions
_OF_MODEL = "context_parallel"
# what transformers' models take, and dimension 1 is a row's tokens
_CUT = ("input_ids", "inputs_embeds", "position_ids")
_WHOLE = ("cu_seq_lens_q", "max_length_q")
NO_MASK = "attention_mask must be None over ranks: pass cu_seq_lens_q, or pad rows on the right"


class _Given(NamedTuple):
    """What `loss` is given, of this rank's tokens.

    Attributes:
        inputs: of the model.
        wanted: int64 [B, S/n], of each token the next one.
        items: fp32 [], by which the losses' sum is divided.
    """

    inputs: dict[str, Any]
    wanted: Tensor
    items: Tensor


class _Total(torch.autograd.Function):
    """The sum of every rank's loss, the same bits on all. Its gradient is that of this rank's."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: Any) -> Tensor:
        total = own.clone()
        comm.all_reduce(group, total)
        return total

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor, None]:
        return dloss, None


class ContextParallel:
    """What `context_parallel` returns.

    Attributes:
        model: the model, which now runs on this rank's tokens.
        ranks: the group, and this rank's place in it.
        checks_places: whether each call looks at where documents begin, for which the host waits for the device, and
            `loss` at whether inputs fit on all ranks. Leave it out where rows are right by the way they are made.
    """

    def __init__(self, model: nn.Module, ranks: Ranks) -> None:
        self.model, self.ranks, self.checks_places = model, ranks, True
        self._before: list[
            tuple[Any, str, Any]
        ] = []  # (owner, attribute, its value; ... if it had none)
        self._hooks: list[Any] = []
        self._plain: Tensor | None = None  # positions of rows that are one document each, made here
        self._looked = False  # whether who calls the model has looked at its rows

    def __deepcopy__(self, memo: dict[int, Any]) -> ContextParallel:
        """The ContextParallel of a copied model, over the same ranks."""
        made = memo[id(self)] = ContextParallel(self.model, self.ranks)
        made.model, made.checks_places = copy.deepcopy(self.model, memo), self.checks_places
        for owner, name, value in self._before:
            theirs = copy.deepcopy(owner, memo)
            made._before.append((theirs, name, value))
            if isinstance(owner, FP8State):  # whose copies have no groups
                theirs.shared_over = owner.shared_over
        made._hooks = copy.deepcopy(self._hooks, memo)
        return made

    @classmethod
    def of(cls, model: nn.Module) -> ContextParallel | None:
        """The ContextParallel of a model whose rows are shared; None if they are not."""
        found: ContextParallel | None = vars(model).get(_OF_MODEL)
        return found

    def shard(self, whole: Tensor) -> Tensor:
        """This rank's tokens [B, S/n, …] of [B, S, …].

        Raises:
            ValueError: S is no positive multiple of twice the number of ranks.
        """
        return self._chunks(whole).own(whole)

    def whole(self, part: Tensor) -> Tensor:
        """Collective: [B, S, …] of every rank's tokens [B, S/n, …], without a gradient."""
        gathered = comm.gather_rows(self.ranks.group, part.detach())
        return Chunks.of(self.ranks, part.shape[1]).in_order(gathered)

    def loss(self, labels: Tensor, items: Any = None, **inputs: Any) -> Tensor:
        """Collective: the mean loss of a causal language model, fp32 [], equal on all ranks.

        Its gradients are those of this rank's tokens; `reduce_gradients` sums them. Logits of all tokens never exist.

        Args:
            labels: int64 [B, S] as transformers takes them: the model's own shift follows; −100 does not count.
            items: divide by this number instead of by the labels that count.
            inputs: of the whole rows: `input_ids` [B, S] or `inputs_embeds` [B, S, H]; `position_ids` [1 or B, S], from
                0 to S − 1 if not given; for packed documents `cu_seq_lens_q`, int32 [N + 1] over the B S tokens, with
                `max_length_q`.

        Raises:
            RuntimeError: the model was cut into stages, which `PipelineParallel.forward_backward` runs.
            TypeError: another input.
            ValueError: a shape or dtype does not fit, ranks have other shapes, modes or items, positions jump without
                `cu_seq_lens_q`, or it does not reach the end, or has a document longer than `max_length_q`. All ranks
                raise if one does.
        """
        model: Any = self.model
        if Cut.of(model) is not None:
            raise RuntimeError(
                "the model was cut into stages: call PipelineParallel.forward_backward, or PipelineParallel.loss"
            )
        given = (self._agreed if self.checks_places else self._given)(labels, items, inputs)
        hidden = model.base_model(use_cache=False, **given.inputs).last_hidden_state
        own = sum_of_losses(model, hidden, given.wanted) / given.items
        total: Tensor = _Total.apply(own, self.ranks.group)
        return total

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        """Collective: sum the gradients over the ranks, in place and in fp32. Then all ranks have equal ones.

        Where only other ranks have a gradient of a parameter, such as of an expert that no token here chose, this rank
        gets theirs. The host then waits for the device.
        """
        trained = [p for p in self.model.parameters() if p.requires_grad]
        if not trained:
            return
        dtype = torch.float64 if trained[0].dtype == torch.float64 else torch.float32
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
        there = torch.tensor([float(p.grad is not None) for p in trained])
        parts = [*grads, there.to(grads[0].device, non_blocking=True)]
        flat = torch.cat([part.reshape(-1).to(dtype) for part in parts])
        comm.all_reduce(self.ranks.group, flat)
        *sums, counts = flat.split([part.numel() for part in parts])
        torch._foreach_copy_(grads, [x.view(g.shape) for x, g in zip(sums, grads, strict=True)])
        if any(p.grad is None for p in trained):
            for p, grad, count in zip(trained, grads, counts.tolist(), strict=True):
                p.grad = grad if count else None

    def check(self) -> None:
        """Collective: look for ranks that have drifted apart, such as one that drew random numbers of its own.

        It reads the device, so call it now and then.

        Raises:
            ValueError: trained parameters, scales and histories of FP8 or generators differ, or a module has come
                whose masks cannot be drawn over ranks, such as of an adapter of PEFT's own. It names the first.
        """
        with comm.together(self.ranks.group):
            _refuse_masks(self.model, self.ranks.group)
        check_equal(comm.agree(self.ranks.group, fingerprint(self.model)))

    def together(self) -> AbstractContextManager[None]:
        """Collective at its end: what one rank raises inside is raised on all. For `GraphOptions.together`."""
        return comm.together(self.ranks.group)

    def close(self) -> None:
        """Let the model run on whole rows again."""
        while self._hooks:
            self._hooks.pop().remove()
        while self._before:
            owner, name, value = self._before.pop()
            if value is ...:
                delattr(owner, name)
            else:
                setattr(owner, name, value)

    def _chunks(self, whole: Tensor) -> Chunks:
        pieces = 2 * self.ranks.size
        if whole.dim() < 2 or whole.shape[1] % pieces or not whole.shape[1]:
            raise ValueError(
                f"rows over {self.ranks.size} ranks must have a positive multiple of {pieces} tokens, found "
                f"{tuple(whole.shape)}: pad them, with labels of {IGNORE}"
            )
        return Chunks.of(self.ranks, whole.shape[1] // self.ranks.size)

    def _agreed(self, labels: Tensor, items: Any, inputs: dict[str, Any]) -> _Given:
        """Collective: `_given`, if it is right on all ranks. They wait for each other on the host, not for a device."""
        group = comm.on_host(self.ranks.group, next(self.model.parameters()).device)
        error: Exception | None = None
        form: tuple[int, ...] | None = None
        how = f"training {self.model.training}, gradients {torch.is_grad_enabled()}, items "
        how += repr(items) if isinstance(items, Real) else type(items).__name__
        try:
            given = self._given(labels, items, inputs)
            refuse_unknown(self.model, inputs.get("input_ids"), labels)
            form = (*labels.shape, "cu_seq_lens_q" in given.inputs, self.looks_at(given.inputs))
            form += (zlib.crc32(how.encode()),)
        except Exception as found:  # any: the other ranks wait below
            error = found
        if not comm.alike(group, 5, form):
            with comm.together(group):
                if error is not None:
                    raise error
            agreed, hows = zip(*comm.agree(group, (form[:4] if form else None, how)), strict=True)
            if len({*hows}) > 1:
                raise ValueError(
                    f"all ranks must have equal modes and items, found by rank {[*hows]}"
                )
            forms = [
                [*rows, "cu_seq_lens_q" if packed else "position_ids" if places else "neither"]
                for *rows, packed, places in agreed
            ]
            raise ValueError(
                "all ranks must have equal rows [B, S], and cu_seq_lens_q and position_ids on all or on none, found by "
                f"rank {forms}"
            )
        return given

    def _given(self, labels: Tensor, items: Any, inputs: dict[str, Any]) -> _Given:
        own = self.own_inputs(labels, inputs)
        if not isinstance(items, Real | Tensor | None):
            raise TypeError(f"items must be a number, found {items!r}")
        shifted = nn.functional.pad(labels, (0, 1), value=IGNORE)[:, 1:]
        if isinstance(items, Real):  # filled in: a copy from the host would wait for the device
            items = torch.full((), float(items), dtype=torch.float32, device=labels.device)
        count = (shifted != IGNORE).sum().clamp(min=1) if items is None else items
        count = torch.as_tensor(count, dtype=torch.float32, device=labels.device)
        return _Given(own, self.shard(shifted), count)

    def own_inputs(self, labels: Tensor, inputs: dict[str, Any]) -> dict[str, Any]:
        """This rank's part of `inputs` of whole rows, with positions. Arguments and errors are those of `loss`."""
        for name in inputs:
            if name not in (*_CUT, *_WHOLE):
                raise TypeError(f"loss takes {[*_CUT, *_WHOLE]} of whole rows, found {name}")
        rows = next((inputs[n] for n in _CUT[:2] if inputs.get(n) is not None), None)
        if rows is None:
            raise TypeError("loss needs input_ids or inputs_embeds")
        if labels is None or labels.shape != rows.shape[:2] or labels.dtype != torch.int64:
            found = None if labels is None else f"{labels.dtype} {list(labels.shape)}"
            raise ValueError(
                f"labels must be int64 {list(rows.shape[:2])} as the rows, found {found}"
            )
        if labels.device != rows.device:
            raise ValueError(f"labels must be on {rows.device} as the rows, found {labels.device}")
        made = inputs.get("position_ids") is None
        if made:
            plain = torch.arange(rows.shape[1], device=rows.device)[None]
            inputs = {**inputs, "position_ids": plain}
        own = {n: self.shard(x) if n in _CUT else x for n, x in inputs.items() if x is not None}
        self._plain = own["position_ids"] if made else None
        return own

    def looks_at(self, inputs: dict[str, Any]) -> bool:
        """Whether `look_at` waits for the device: rows are not one document each as they are made here."""
        positions, starts = inputs.get("position_ids"), inputs.get("cu_seq_lens_q")
        plain = starts is None and positions is not None and positions is self._plain
        return self.checks_places and not plain

    def look_at(self, rows: Tensor, inputs: dict[str, Any]) -> None:
        """Collective if `looks_at`: refuse a call of the model that cannot be right over the ranks.

        Args:
            rows: [B, S/n, …], this rank's tokens.
            inputs: what else the call has.

        Raises:
            RuntimeError: the model's attention is another one since `context_parallel`.
            ValueError: as `loss` does.
        """
        config: Any = self.model.config
        found = config.get_text_config()._attn_implementation
        if found != ATTENTION:
            raise RuntimeError(
                f"attention no longer runs over the ranks: attn_implementation is {found!r} since context_parallel; "
                "call ContextParallel.close, change the model, and call context_parallel again"
            )
        why = _refused(rows, inputs)
        if self.looks_at(inputs):
            places = inputs.get("position_ids"), inputs.get("cu_seq_lens_q")
            known = 0 if rows.is_floating_point() else vocabulary_of(self.model)
            check_places(self.ranks, rows, *places, inputs.get("max_length_q"), why, known)
        elif why:
            raise ValueError(why)

    @contextmanager
    def looked(self) -> Iterator[None]:
        """Inside, calls of the model are not looked at, as `look_at` has seen their rows."""
        self._looked = True
        try:
            yield
        finally:
            self._looked = False

    def attach(self, layers: dict[str, nn.Module]) -> ContextParallel:
        """Let the model's attention run over the ranks."""
        model: Any = self.model
        contexts: dict[str, ContextAttention] = {}
        adapters = [m for m in model.modules() if isinstance(m, LoRALinear)]
        own_chunks = OwnChunks(adapters, self.ranks)
        _register()
        self._put(model, _OF_MODEL, self)
        for layer in layers.values():
            module, wanted = layer.get_submodule(spec_of(layer).attention), "auto"
            parts: Parts | None = layer.__dict__.get("_fused")
            if parts is not None:
                wanted = parts.attention
            context = contexts.setdefault(
                wanted, ContextAttention(self.ranks, wanted, own_chunks.of)
            )
            self._put(module, OF_MODULE, context)
            if parts is not None:
                self._put(parts, "context", context)  # which says the rows by itself
            elif adapters:
                hook = module.register_forward_pre_hook(own_chunks.before, with_kwargs=True)
                self._hooks.append(hook)
        for module in (m for m in model.modules() if m._parameters):
            self._put(module, ROWS_OVER_RANKS, True)
        config = model.config.get_text_config()
        self._put(config, "_attn_implementation", ATTENTION)
        share_state(frozen_layers(model))  # `attach` would else put another state in their place
        states = {id(s): s for m in model.modules() if (s := getattr(m, "fp8_state", None))}
        for state in states.values():
            self._put(state, "shared_over", (*state.shared_over, self.ranks.group))
        inside = {id(m) for layer in layers.values() for m in layer.modules()}
        for adapter in adapters:
            self._put(adapter, "chunks", adapter.chunks)
            self._put(adapter, "row0", 0)
            if id(adapter) not in inside:
                hook = adapter.register_forward_pre_hook(own_chunks.before, with_kwargs=True)
                self._hooks.append(hook)
        self._hooks += [
            model.register_forward_pre_hook(self._before_model, with_kwargs=True),
            model.base_model.register_forward_pre_hook(self._before_rows, with_kwargs=True),
        ]
        return self

    def _put(self, owner: Any, name: str, value: Any) -> None:
        self._before.append((owner, name, getattr(owner, name, ...)))
        setattr(owner, name, value)

    def _before_model(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if kwargs.get("labels") is not None:
            raise ValueError(
                "labels: the model sees this rank's tokens alone; call ContextParallel.loss(labels, input_ids=…)"
            )

    def _before_rows(self, base: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        rows = args[0] if args else kwargs.get("input_ids")
        rows = kwargs.get("inputs_embeds") if rows is None else rows
        if rows is not None and not self._looked:
            self.look_at(rows, kwargs)


def _refused(rows: Tensor, kwargs: dict[str, Any]) -> str:
    """What is wrong with the call of a model whose rows are over ranks; "" if nothing."""
    if rows.dim() < 2:
        return f"rows must be [B, S/n] or [B, S/n, H], found {list(rows.shape)}"
    if kwargs.get("position_ids") is None:
        return "position_ids must be given: the model sees this rank's tokens, ContextParallel.shard(positions)"
    if kwargs.get("attention_mask") is not None:
        return NO_MASK
    if rows.shape[1] % 2 or not rows.shape[1]:
        return f"a rank has two chunks of a row, found {rows.shape[1]} tokens: cut rows by ContextParallel.shard"
    return ""


def context_parallel(model: nn.Module, mesh: Any) -> ContextParallel:
    """Collective: let the ranks of `mesh` share the model's rows, each with some of every row's tokens.

    Every rank has the same model, its frozen base whole or sharded over the same ranks. Keys and values of a layer are
    gathered while it runs. A token's masks of dropout are those that one process draws for it.

    Args:
        model: a causal language model of transformers of a family that `fuse` knows, fused or not, or after
            `parallelize` or `pipeline_parallel` over another dimension.
        mesh: one dimension of a DeviceMesh, such as `mesh["cp"]`.

    Raises:
        TypeError: the model has no config of transformers, or is PEFT's around one.
        ValueError: the mesh has several dimensions; ranks' adapters, FP8 scales or generators differ; a layer has a
            sliding window, capped scores or FP8 attention, or graphs replay it; there is an nn.Dropout, or dropout
            over DoRA; layers are split, or stages are, over the same ranks. All ranks raise, and nothing is changed.
    """
    if mesh.ndim != 1:
        raise ValueError(f"mesh must have one dimension, such as mesh['cp'], found {mesh}")
    ranks, cut = Ranks(mesh.get_group()), Cut.of(model)
    with nullcontext() if cut is None else comm.together(cut.ranks.group):
        layers = _checked(model, ranks, cut)
    ranks.rows, _ = row_exchange("auto", ranks.group, next(model.parameters()).device)
    found = ContextParallel(model, ranks)
    try:
        with comm.together(ranks.group):
            return found.attach(layers)
    except BaseException:
        found.close()
        raise


def _checked(model: nn.Module, ranks: Ranks, cut: Cut | None) -> dict[str, nn.Module]:
    """Collective: the model's decoder layers; if it was cut, those of this rank's stages.

    Errors are those of `context_parallel`.
    """
    with comm.together(ranks.group):
        config = getattr(model, "config", None)
        if config is None or not hasattr(config, "get_text_config"):
            raise TypeError(f"model must be one of transformers, found {type(model).__name__}")
        if hasattr(model, "get_base_model"):
            raise TypeError(
                f"model must be one of transformers, found {type(model).__name__} around it: give its get_base_model()"
            )
        if cut is not None and cut.ranks.group is ranks.group and ranks.size > 1:
            raise ValueError(
                "the model has stages on these ranks already: rows over ranks need a dimension of their own"
            )
        layers = decoder_layers(model)
        for path, layer in layers.items():
            if why := objection(layer):
                raise ValueError(f"{path} {why}")
        _refuse_masks(model, ranks.group)
        mine = fingerprint(model)
    check_equal(comm.agree(ranks.group, mine))
    return layers


def _refuse_masks(model: nn.Module, group: Any) -> None:
    """ValueError, which names it, for a module whose masks cannot be drawn over the ranks of `group`."""
    for name, module in model.named_modules():
        if why := _cannot_draw(module, group):
            raise ValueError(f"{name} {why}")


def _cannot_draw(module: nn.Module, group: Any) -> str:
    """Why a module's masks, or its FP8 scales, cannot be of rows over ranks; "" if they can."""
    split = getattr(module, "ranks", None)
    if isinstance(split, Ranks) and split.group is group:
        return "is split over these ranks already: tensor parallelism needs a dimension of its own"
    if isinstance(module, nn.Dropout) and module.p:
        return f"is {module}, which would draw equal masks on all ranks: set lora_dropout of our layers, or p = 0"
    if isinstance(module, LoRALinear) and module.lora_dropout and module.has_magnitude:
        return (
            f"is a {type(module).__name__} with dropout, whose masks cannot be drawn over ranks yet"
        )
    return ""


def _register() -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if ATTENTION not in ALL_ATTENTION_FUNCTIONS:
        ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _attend)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: out [B, T, H, D]. It has no mask for this name, and makes none."""
    context: ContextAttention = vars(module)[OF_MODULE]
    if attention_mask is not None or kwargs.get("dropout"):
        raise ValueError("attention over ranks has no attention_mask and no dropout")
    longest = kwargs.get("max_length_q") or query.shape[0] * query.shape[2] * context.size
    documents = kwargs.get("cu_seq_lens_q"), longest
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return context.attend(query, key, value, documents, scale).transpose(1, 2).contiguous(), None
