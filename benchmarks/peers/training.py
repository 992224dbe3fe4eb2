# SPDX-License-Identifier: Apache-2.0
"""Whole models that train one batch at a time: ours and its peers, one class each, behind one interface.

All compute LoRA over the base of models.py. AdamW (fused) updates the adapters alone, and the loss is of each next
token. Our step also updates the FP8 scales, once, and advances the random state.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

import lorakernels
from benchmarks.peers.base import Unavailable
from benchmarks.peers.models import (
    ADAPTED,
    STD,
    P,
    Random,
    Spec,
    dtype_of,
    plain_model,
    value,
)
from benchmarks.peers.te import autocast, te_or_unavailable
from benchmarks.peers.te_layers import Adapter, Cached, First, WithAdapter
from lorakernels import BlockScaling, DelayedScaling, PhiloxState
from lorakernels.fusion.memory import OFFLOADED, SAVE, kept_bytes
from lorakernels.fusion.over_ranks import together_of
from lorakernels.parallel import ShardedAdamW
from lorakernels.parallel.optimizer.sharded_adamw import BUCKET_BYTES
from lorakernels.planner.memory import Placement, saves_within
from lorakernels.planner.size import ELEMENT, ModelSize
from lorakernels.planner.time import BatchSize
from lorakernels.recipes import Recipe

LR = 2e-4
SPARE = 0.07  # of the GPU; 5 GiB of an H200's lay in pieces that Llama-2-70B's layers could not use
NO_LIMIT = 1 << 50  # bytes
IGNORE = -100
FITS = {"fit": False, "fit, offload": True}  # whether something may be offloaded


class Training:
    """`step(ids)` trains on int64 [B, T] of the model's device and returns the loss before it.

    Attributes: `fp8`, whether the base multiplies in FP8; `note`, what there is to say besides numbers.
    """

    fp8 = False
    warmup_steps = 2

    def __init__(self, spec: Spec, adapted: str, device: torch.device) -> None:
        self.spec, self.device, self.targets = spec, device, ADAPTED[adapted]
        self.adapted = adapted
        self.note = ""
        self.model = self.build()
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = self.make_optimizer()

    def build(self) -> Any:
        raise NotImplementedError

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.trained, lr=LR, weight_decay=0.0, fused=True)

    def loss(self, ids: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=ids, labels=ids).loss
        return loss

    def step(self, ids: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.loss(ids)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def close(self) -> None:
        """Give back what the model does not own."""


class HfPeft(Training):
    """transformers and PEFT, bf16, adapters in the base's dtype (PEFT's fp32 default is slower)."""

    def __init__(
        self,
        spec: Spec,
        adapted: str,
        device: torch.device,
        liger: bool = False,
        compiled: bool = False,
        checkpointed: bool = False,
    ) -> None:
        if compiled and device.type != "cuda":
            raise Unavailable("needs a GPU")
        self.liger, self.compiled, self.checkpointed = liger, compiled, checkpointed
        super().__init__(spec, adapted, device)

    def build(self) -> Any:
        try:
            from peft import LoraConfig, inject_adapter_in_model
        except ImportError as error:
            raise Unavailable(f"peft is not installed ({error})") from error
        apply_liger = _liger_or_unavailable() if self.liger else None
        model = plain_model(self.spec.config(), self.device)
        if apply_liger is not None:
            apply_liger(model=model)
        rank, alpha = self.spec.rank, self.spec.alpha
        config = LoraConfig(
            r=rank, lora_alpha=alpha, lora_dropout=P, target_modules=list(self.targets)
        )
        model = inject_adapter_in_model(config, model).train()
        set_adapters(model)
        if self.checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        if self.compiled:
            for layer in model.model.layers:
                layer.compile(dynamic=False)
        return model


def _liger_or_unavailable() -> Callable[..., None]:
    try:
        from liger_kernel.transformers import apply_liger_kernel_to_llama
    except Exception as error:  # it looks for a GPU and for Triton as it is imported
        raise Unavailable(f"liger_kernel cannot be imported ({error})") from error
    return apply_liger_kernel_to_llama


def set_adapters(model: nn.Module, prefix: str = "") -> None:
    """A of the same values for every provider, B = 0. `prefix` is that of the names inside `model`."""
    fill_adapters((prefix + name, parameter) for name, parameter in model.named_parameters())


@torch.no_grad()
def fill_adapters(named: Iterable[tuple[str, Tensor]]) -> None:
    """The same of whole tensors by their names."""
    for name, tensor in named:
        if "lora_A" in name:
            tensor.copy_(_a(name, tensor))
        elif "lora_B" in name:
            tensor.zero_()


def _a(name: str, like: Tensor) -> Tensor:
    path = name.partition(".lora_A")[0]
    shape = (like.shape[-2], like.shape[-1])  # adapters in one batch start alike
    scale = like.shape[-1] ** -0.5 / STD
    return value(f"{path}.lora_A", shape, like.device, torch.float32).mul_(scale).to(like.dtype)


class HfTe(Training):
    """transformers' model with te.Linear in FP8, LoRA in torch ops over it; weights are cast once.

    `quantized` keeps them in FP8 only (te.quantized_model_init), else TE holds bf16 as well.
    """

    fp8 = True
    warmup_steps = 3  # a weight's scale comes from the amax of the casts before

    def __init__(
        self,
        spec: Spec,
        adapted: str,
        device: torch.device,
        quantized: bool = False,
        checkpointed: bool = False,
    ) -> None:
        self.te = te_or_unavailable()
        if device.type != "cuda":
            raise Unavailable("needs a GPU")
        self.quantized, self.checkpointed = quantized, checkpointed
        self.first, self.casts = First(), 0
        super().__init__(spec, adapted, device)

    def build(self) -> Any:
        model = plain_model(self.spec.config(), self.device, self.convert)
        if self.checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        return model

    def convert(self, layer: nn.Module, path: str) -> None:
        for name, linear in list(layer.named_modules()):
            if not isinstance(linear, nn.Linear):
                continue
            parent, _, leaf = name.rpartition(".")
            new: nn.Module = Cached(self.frozen(linear), self.first)
            if leaf in self.targets:
                new = WithAdapter(new, self.adapter(linear, f"{path}.{name}"), normed=False)
            setattr(layer.get_submodule(parent), leaf, new)

    def frozen(self, linear: nn.Linear) -> nn.Module:
        from transformer_engine.common.recipe import DelayedScaling as TeRecipe

        n, k = linear.weight.shape
        held: AbstractContextManager[Any] = contextlib.nullcontext()
        if self.quantized:
            held = self.te.quantized_model_init(enabled=True, recipe=TeRecipe())
        with held:
            new = self.te.Linear(
                k, n, bias=False, params_dtype=linear.weight.dtype, device=self.device
            )
        with torch.no_grad():
            new.weight.copy_(linear.weight)
        return new.requires_grad_(False)

    def adapter(self, linear: nn.Linear, path: str) -> Adapter:
        n, k = linear.weight.shape
        rank = self.spec.rank
        like = torch.empty(rank, k, device=self.device, dtype=linear.weight.dtype)
        b = torch.zeros(n, rank, device=self.device)
        return Adapter(_a(f"{path}.lora_A", like), b, P, linear.weight.dtype)

    def loss(self, ids: Tensor) -> Tensor:
        with autocast(self.te):
            loss = super().loss(ids)
        self.casts += 1
        self.first.value = self.casts < self.warmup_steps
        return loss


class Ours(Training):
    """`load_quantized`, `fuse`, then as `graphs` says: None eager, "layer" by GraphManager or "iteration" by StepGraph.

    `save` is `fuse`'s; "fit" chooses it per layer so that all of it fits the device, and "fit, offload" with what is
    offloaded as well. `fp8_head` is linear_cross_entropy's `fp8`, of a weight that is quantized once. `base` is more of
    `load_quantized`'s options, such as `mesh` and `offload`. `spare` is the part of the GPU that "fit" leaves to the
    allocator.
    """

    fp8 = True
    dropout = P
    seed = 1
    recipe: Recipe = DelayedScaling()

    def __init__(
        self,
        spec: Spec,
        adapted: str,
        device: torch.device,
        graphs: str | None = None,
        save: str | None = "recompute",
        fp8_head: bool = False,
        base: dict[str, Any] | None = None,
        spare: float = SPARE,
    ) -> None:
        if graphs is not None and device.type != "cuda":
            raise Unavailable("needs a GPU")
        self.graphs, self.save, self.spare = graphs, save, spare
        self.base = base or {}
        self.saves: list[str] = []  # of `fuse`, layer by layer
        self.rng = PhiloxState(self.seed, device)
        super().__init__(spec, adapted, device)
        self.labels = torch.full((spec.batch, spec.length), IGNORE, device=device)
        positions = torch.arange(spec.length, device=device)[None]
        like = torch.empty(1, spec.length, spec.shape["hidden_size"], device=device)
        embeddings = self.model.model.rotary_emb(like.to(self.plain_dtype), positions)
        self.embeddings = tuple(t.detach() for t in embeddings)
        self.head: dict[str, Any] = {"weight": self.model.lm_head.weight}
        if fp8_head:
            w8, scale_inv = lorakernels.quantize_head(self.model.lm_head.weight)
            self.head = {"weight": w8, "weight_scale_inv": scale_inv, "fp8": True}
        self._run = self._make_run()

    @property
    def plain_dtype(self) -> torch.dtype:
        return self.model.model.norm.weight.dtype

    def build(self) -> Any:
        config = self.spec.lora(self.adapted, self.dropout, fp8=self.recipe)
        shape = self.spec.config()
        loaded = lorakernels.load_quantized(
            Random(shape, self.device),
            config=shape,
            device=self.device,
            dtype=dtype_of(self.device),
            lora=config,
            rng_state=self.rng,
            progress=False,
            **self.base,
        )
        self.sharded = loaded.sharded
        model, self.state = loaded.model.train(), loaded.fp8_state
        if self.save is not None:
            self._fuse(model)
        self.arrange(model)
        self.update_scales()
        return model

    def arrange(self, model: Any) -> None:
        """Give the adapters of the fused model their values."""
        set_adapters(model)

    def update_scales(self) -> None:
        if self.state is not None:
            self.state.reduce_and_update()

    @property
    def tokens(self) -> int:
        """That a layer of this process sees at a time."""
        return self.spec.batch * self.spec.length

    def _fuse(self, model: Any) -> None:
        options: dict[str, Any] = {"save": self.save, "tokens": self.tokens}
        if self.save in FITS:
            options = {"memory_budget": self.budget(model), "tokens": self.tokens}
            options["offload_activations"] = FITS[self.save]
        report = lorakernels.fuse(model, **options)
        self.saves = [layer.save for layer in report.layers]
        counts = {save: self.saves.count(save) for save in dict.fromkeys(self.saves)}
        mix = ", ".join(f"{n} × {save}" for save, n in counts.items())
        self.note = f"{mix}: {report.saved_bytes / 1e9:.1f} GB predicted"

    def budget(self, model: nn.Module) -> int:
        """Bytes that layers may keep: `room`, less the plan's workspace."""
        size, batch = ModelSize.of(model, None), BatchSize(self.spec.batch, self.spec.length)
        room = self.room(size.trained)
        forms = OFFLOADED if FITS[str(self.save)] else SAVE
        placement = Placement()
        if self.base.get("embeddings"):  # the head comes as a whole at the loss
            placement = Placement(self.base["mesh"].size(), embeddings=True)
        saves = saves_within(size, batch, room, forms, placement)
        if saves is None:
            raise torch.OutOfMemoryError(f"{room} bytes are left for what layers keep")
        return kept_bytes(size.layers, saves, batch.tokens, ELEMENT)

    def optimizer_bytes(self, trained: int) -> int:
        """Of the gradients and moments of so many fp32 parameters."""
        return 12 * trained

    def room(self, trained: int) -> int:
        """What is free, less gradients and moments of `trained` parameters, and what the allocator cannot use.

        Graphs take no more: a layer's input is what it keeps. A CPU has enough.
        """
        if self.device.type != "cuda":
            return NO_LIMIT
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.device)
        gpu = torch.cuda.current_device() if self.device.index is None else self.device.index
        allowed = torch.cuda.get_per_process_memory_fraction(gpu)
        free -= int((1 - allowed) * total)
        return free - self.optimizer_bytes(trained) - int(self.spare * allowed * total)

    def make_optimizer(self) -> torch.optim.Optimizer:
        if self.graphs != "iteration":
            return super().make_optimizer()
        lr = torch.tensor(LR, device=self.device)
        return torch.optim.AdamW(self.trained, lr=lr, weight_decay=0.0, fused=True, capturable=True)

    def loss(self, ids: Tensor) -> Tensor:
        """The decoder's own loop: transformers' looks for packed documents and waits for the device to do so."""
        decoder = self.model.model
        hidden = decoder.embed_tokens(ids)
        for layer in decoder.layers:
            hidden = layer(hidden, attention_mask=None, position_embeddings=self.embeddings)
            hidden = hidden[0] if isinstance(hidden, tuple) else hidden
        self.labels[:, :-1].copy_(ids[:, 1:])
        normed = decoder.norm(hidden)
        return lorakernels.linear_cross_entropy(normed, labels=self.labels, **self.head)

    def _eager(self, ids: Tensor) -> Tensor:
        loss = super().step(ids)
        self.update_scales()
        return loss

    def _make_run(self) -> Callable[[Tensor], Tensor]:
        if self.graphs is None:
            return self._eager_and_advance
        from lorakernels.graphs import GraphManager, GraphOptions, StepGraph

        states = {"fp8_state": self.state, "rng_states": [self.rng]}
        states["warmup_steps"] = self.warmup_steps - 1
        if self.graphs == "iteration":
            options = {"modules": [self.model], "optimizers": [self.optimizer], **states}
            self.manager = StepGraph(self._eager, **options)
            return self.manager
        layers = self.model.model.layers
        states["options"] = GraphOptions(together=together_of(layers))
        self.manager = GraphManager(layers, **states)
        return self._replay_layers

    def _eager_and_advance(self, ids: Tensor) -> Tensor:
        loss = self._eager(ids)
        self.rng.advance()
        return loss

    def _replay_layers(self, ids: Tensor) -> Tensor:
        loss = self._eager(ids)
        self.manager.end_iteration()
        return loss

    def renew_graphs(self) -> None:
        """Drop the graphs, and warm up and capture again: the model has changed."""
        if self.graphs is not None:
            self.manager.close() if self.graphs == "layer" else self.manager.reset()
        torch.cuda.empty_cache()
        self._run = self._make_run()

    def step(self, ids: Tensor) -> Tensor:
        return self._run(ids)


class OursSharded(Ours):
    """The same with AdamW's state over the ranks of `base["mesh"]`. It sums the gradients over them, too."""

    def optimizer_bytes(self, trained: int) -> int:
        """Whole gradients, the buffer for a bucket, and 16 bytes of each parameter of this rank's part."""
        buffer = min(4 * trained, BUCKET_BYTES)
        return 4 * trained + buffer + 16 * trained // self.base["mesh"].size()

    def make_optimizer(self) -> torch.optim.Optimizer:
        return ShardedAdamW(self.trained, self.base["mesh"], lr=LR, weight_decay=0.0, fused=True)


class OursInBlocks(Ours):
    """The same under BlockScaling, which has no state."""

    recipe = BlockScaling()
