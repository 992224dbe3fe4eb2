# SPDX-License-Identifier: Apache-2.0
"""Load a transformers checkpoint straight into FP8. The model never exists in bf16.

    loaded = load_quantized("path/to/llama", device="cuda", lora=LoRAConfig(r=16, target_modules="all-linear"))
    loaded.model, loaded.report

The model is built without memory for its weights. Shards are opened one after the other. Each tensor is copied to
the device by itself and quantized there.

* Host peak: one mapped shard, whose pages the kernel may drop.
* Device peak: the model, and the matrix being quantized once in `dtype` and twice in fp32.

With `frozen="plain"` the result equals `from_pretrained(dtype=dtype)` followed by `apply_lora`, bit for bit. "fp8"
also quantizes the linear layers without an adapter. Under BlockScaling, a block-FP8 weight (e4m3 `weight`,
`weight_scale_inv`) keeps its bytes and scales. Under DelayedScaling it keeps its bytes if all its scales are equal.
Otherwise it is requantized from its exact amax, one matrix at a time.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lorakernels.checkpoints.base.expert_files import with_experts
from lorakernels.checkpoints.base.file_names import Renamed, names_in_model
from lorakernels.checkpoints.base.format import BLOCK, take_format
from lorakernels.checkpoints.base.shards import Directory, TensorSource
from lorakernels.checkpoints.base.skeleton import build, config_of, read_generation_config
from lorakernels.checkpoints.loading.plan import LoadPlan
from lorakernels.checkpoints.loading.sharded import ShardedWeights
from lorakernels.checkpoints.loading.stages import OtherStages, StageMesh
from lorakernels.checkpoints.loading.tensor import TensorParts, TensorSplit
from lorakernels.config import LoRAConfig
from lorakernels.modules import LoRAReport, apply_lora
from lorakernels.modules.experts.layer import LoRAExperts, restack
from lorakernels.modules.linear.frozen import FrozenFP8Linear, quantize_weight
from lorakernels.modules.linear.spec import FrozenSpec
from lorakernels.modules.model.convert import check_fp8_linear, dequantize, held_weight
from lorakernels.modules.model.pretrained import guard_saving
from lorakernels.parallel import Offload, ShardedBase
from lorakernels.parallel.base.offload import as_offload
from lorakernels.parallel.base.shard import check_mesh
from lorakernels.parallel.base.stores import Member
from lorakernels.parallel.ranks import comm
from lorakernels.recipes import BlockScaling, DelayedScaling, Recipe
from lorakernels.state.fp8 import FP8State
from lorakernels.state.philox import PhiloxState, PhiloxStates
from lorakernels.values import Weight

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Loaded:
    """The result of `load_quantized`.

    Attributes:
        model: in eval mode.
        report: the adapters' report; None without `lora`.
        fp8_state: the scales and amax histories of the FP8 layers; None under BlockScaling, which has none.
        tensors, bytes: how many tensors were read, and their size.
        left_out: the tensors that were not read: what models compute, what the model's class ignores by its own list,
            and the fixed scales of a static activation scheme, for which the recipe makes its own.
        peak_host_bytes: the largest sum of an open shard and a tensor read from it.
        seconds: the time that loading took.
        sharded: the sharded base; None without a mesh.
    """

    model: nn.Module = field(repr=False)
    report: LoRAReport | None = field(repr=False)
    fp8_state: FP8State | None
    tensors: int
    bytes: int
    peak_host_bytes: int
    seconds: float
    sharded: ShardedBase | None = field(default=None, repr=False)
    left_out: tuple[str, ...] = ()


def load_quantized(
    source: str | Path | TensorSource,
    *,
    config: Any = None,
    model_class: Any = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.bfloat16,
    lora: LoRAConfig | None = None,
    fp8: Recipe | None = None,
    frozen: str = "fp8",
    adapter_dtype: torch.dtype | None = torch.float32,
    rng_state: PhiloxState | PhiloxStates | None = None,
    attn_implementation: str | None = None,
    progress: bool | Progress = False,
    mesh: Any = None,
    offload: float | Offload = 0.0,
    embeddings: bool = False,
    stages: Any = None,
    tp: Any = None,
    vocabulary: bool = False,
) -> Loaded:
    """Load a decoder-only model with its linear layers in FP8. Nothing is downloaded, no code of the checkpoint
    runs.

    Args:
        source: a directory with config.json, safetensors and perhaps generation_config.json, or a `TensorSource` of
            tensors.
        config: transformers config; None reads `source`/config.json.
        model_class: e.g. LlamaForCausalLM; None asks AutoModelForCausalLM.
        device: the model's device; None is the current GPU, or the CPU without one.
        dtype: dtype of the unquantized parts (embedding, norms, head). Weights are rounded to it before they become
            FP8.
        lora: selects the layers that get adapters, as in `apply_lora`. Adapter values come from torch's generator.
            None adds no adapters.
        fp8: the recipe, a DelayedScaling or a BlockScaling; None takes `lora`'s, or DelayedScaling().
        frozen: "fp8" or "plain" (in `dtype`) for linear layers without an adapter. The output head, routers, tied
            weights and layers that are not a plain `nn.Linear` are always plain.
        adapter_dtype, rng_state: as for `apply_lora`.
        attn_implementation: as for transformers. None leaves the choice to it: what `config` asks for, or "sdpa" if the
            model has that.
        progress: a function is called with (bytes read, total bytes) after each tensor. True shows one line on a
            terminal, False nothing.
        mesh: a DeviceMesh of one axis, such as `mesh["dp_shard"]`. The base is then sharded over its ranks, as
            `shard_base` leaves it, and no rank ever holds all of it. Collective. `fuse` may follow, adapters may not:
            give `lora`.
        offload: the fraction of every layer's FP8 weights that goes to pinned memory of the host, as for `shard_base`;
            also without a `mesh`. The GPU never holds these weights together.
        embeddings: split the embedding and the head over the ranks of `mesh`, too, as for `shard_base`. Each rank has
            them whole while it loads.
        stages: a DeviceMesh of one axis, such as `mesh["pp"]`, or (mesh["pp"], chunks). This rank then reads its part
            of the model, as `pipeline_parallel` over the same mesh cuts it, and no other weights. Collective.
            `fuse` and `pipeline_parallel` follow, and all ranks must draw the same adapters. Give `lora`.
        tp: a DeviceMesh of one axis, such as `mesh["tp"]`, or (mesh["tp"], plan). This rank then reads its part of each
            weight that `parallelize` over the same mesh splits, and every other weight whole. Collective. Give `lora`.
            The model runs as it is, with all rows on each rank. `fuse` may follow, and `parallelize` for rows and
            vocabulary; fused layers need it.
        vocabulary: with `tp`, read this rank's rows of the embedding and of the output head alone. Both must be plain
            and frozen. Call `parallelize` with `vocabulary=True`, too.

    With `mesh`, `stages` or `tp`, an exception on one rank is raised on all. The other ranks raise a ValueError that
    names the rank.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: checkpoint and model differ in their tensors or shapes, or a file is corrupted. Also if `lora`
            starts from the 16-bit weight ("olora", "pissa"), which is never loaded. Also if a weight is
            not finite, a scale is negative, or a kind of quantization is not known. Also if the recipe is BlockScaling
            and the checkpoint has blocks other than 128 × 128. Everything but the values is checked before the first
            value is read. With `tp`, a part that would end inside a block of a block-FP8 weight is such a case.
        ImportError: transformers is not installed.
    """
    began = time.perf_counter()
    if frozen not in ("fp8", "plain"):
        raise ValueError(f'frozen must be "fp8" or "plain", found {frozen!r}')
    if lora is not None and not isinstance(lora, LoRAConfig):
        lora = LoRAConfig.from_peft(lora)
    if lora is not None and lora.changes_base:
        raise ValueError(
            f"lora.init_lora_weights={lora.init_lora_weights!r} starts from the 16-bit weight, which load_quantized "
            'never holds: load the model in 16 bits and call apply_lora(..., frozen="fp8")'
        )
    recipe = _recipe(lora, fp8)
    target = _device(device)
    wanted, split = StageMesh.of(stages), TensorSplit.of(tp, vocabulary)
    group = _patient(mesh, wanted, split)
    together = nullcontext if group is None else partial(comm.together, group)
    with together():
        files = Directory(source) if isinstance(source, (str, Path)) else source
        config = config_of(source, config)
        block = take_format(files, config).block
        model = build(config, model_class, dtype, attn_implementation)
        read_generation_config(model, source)
        files = with_experts(files, model, block)
        files = Renamed(files, names_in_model(model, files.tensors))
        plan = LoadPlan(model, files.tensors, lora, frozen, block, config)
        _check_layout(lora, mesh, offload, wanted or split)
        if embeddings and mesh is None:
            raise ValueError("embeddings=True needs a mesh, found None")
        _check_block(plan, recipe)
        _check_experts(model, mesh is not None or as_offload(offload).fraction or wanted or split)
        others = None if wanted is None else OtherStages(model, wanted, target)
        if others is not None:
            plan.leave_out(others.inside)
        parts = None
        if split is not None:
            parts = TensorParts(model, split, plan, recipe, (target, group))
            parts.agree()
    shards = None
    if mesh is not None or as_offload(offload).fraction:
        member = Member.of(mesh, target)
        shards = ShardedWeights(model, plan.quantized, member, offload, embeddings)
    loader = _Loader(model, files, plan, recipe, target, shards, others, parts)
    report = None
    with nullcontext() if shards is None else shards, together():
        loader.run(_Line() if progress is True else progress or None)
        model.to(target)
        guard_saving(model)
        restack(model)  # those that stay plain, before apply_lora takes their layers for others
        if lora is not None:
            report = apply_lora(
                model, lora, adapter_dtype=adapter_dtype, rng_state=rng_state, frozen=frozen
            )
        restack(model)
        if others is not None:
            others.take_out(model)
        if parts is not None:
            parts.cut(model)
    sharded = None if shards is None else shards.finish()
    state = loader.state if report is None or report.fp8_state is None else report.fp8_state
    seconds = time.perf_counter() - began
    read = (len(plan.read), plan.bytes, loader.peak_host_bytes)
    return Loaded(model, report, state, *read, seconds, sharded, tuple(plan.left_out))


def _patient(mesh: Any, stages: StageMesh | None, split: TensorSplit | None) -> Any:
    """Collective: the group in which ranks wait for each other's reading; None for one process alone.

    Raises:
        ValueError: both `stages` and `split` are given.
    """
    if stages is not None and split is not None:
        raise ValueError("tp does not go with stages yet: leave out one of them")
    mesh = next((source.mesh for source in (stages, split) if source is not None), mesh)
    check_mesh(mesh)
    return None if mesh is None else comm.patient(mesh.get_group())


def _check_layout(
    lora: LoRAConfig | None,
    mesh: Any,
    offload: float | Offload,
    apart: StageMesh | TensorSplit | None,
) -> None:
    held = mesh is not None or as_offload(offload).fraction
    name = "tp" if isinstance(apart, TensorSplit) else "stages"
    if apart is not None and held:
        then = "call shard_base after parallelize" if name == "tp" else "leave out mesh and offload"
        raise ValueError(
            f"{name}: what ranks read in parts is neither sharded nor offloaded while it is read: {then}"
        )
    if apart is not None and lora is None:
        raise ValueError(f"{name} needs lora: adapters cannot follow on a part of a model")
    if not held and apart is None:
        return
    if lora is not None and lora.use_dora:
        raise ValueError(
            "lora.use_dora=True needs whole weights for its norms: leave out mesh, offload, stages and tp"
        )


def _check_experts(model: nn.Module, apart: Any) -> None:
    held = any(isinstance(module, LoRAExperts) for module in model.modules())
    if held and apart:
        raise ValueError(
            "a base that is sharded, offloaded or read in parts takes no mixture of experts: leave out mesh, offload, "
            "stages and tp"
        )


def _check_block(plan: LoadPlan, recipe: Recipe) -> None:
    if isinstance(recipe, BlockScaling) and plan.scales and plan.block != BLOCK:
        raise ValueError(
            f"the checkpoint's weight_block_size must be {BLOCK} under BlockScaling, found {plan.block}; "
            "DelayedScaling requantizes other blocks with one scale"
        )


def _recipe(lora: LoRAConfig | None, fp8: Recipe | None) -> Recipe:
    if lora is None:
        return fp8 or DelayedScaling()
    if lora.fp8 is None:
        raise ValueError(
            "lora.fp8 must be a DelayedScaling or a BlockScaling, found None: load_quantized holds the base in FP8"
        )
    if fp8 not in (None, lora.fp8):
        raise ValueError(f"fp8 is {fp8}, lora.fp8 {lora.fp8}: give one of them")
    return lora.fp8


def _device(device: torch.device | str | None) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.empty(0, device=device).device  # "cuda" becomes "cuda:0"


class _Loader:
    """Reads one shard after the other and puts each tensor where the plan says.

    Values go to `device`, into `shards` if there are any, and not for `others`. `parts` says what of a tensor is read.
    """

    def __init__(
        self,
        model: nn.Module,
        files: TensorSource,
        plan: LoadPlan,
        recipe: Recipe,
        device: torch.device,
        shards: ShardedWeights | None,
        others: OtherStages | None,
        parts: TensorParts | None,
    ) -> None:
        self.model, self.files, self.plan, self.recipe = model, files, plan, recipe
        self.device, self.shards, self.others, self.parts = device, shards, others, parts
        self.state: FP8State | None = None
        if isinstance(recipe, DelayedScaling):
            self.state = FP8State(plan.quantized, recipe, self.device)
        self.peak_host_bytes = 0
        self._quantized = set(plan.quantized)
        self._scales: dict[str, Tensor] = {}
        self._done = 0

    @torch.no_grad()
    def run(self, progress: Progress | None) -> None:
        for name in self.plan.elsewhere:
            self._stand_in(name)
        for names, put in (
            (self.plan.scales, self._keep_scale),
            (self.plan.take, self._put),
            (self.plan.copies, self._compare),
        ):
            shards: dict[str, list[str]] = {}
            for name in names:
                shards.setdefault(self.files.tensors[name].shard, []).append(name)
            for shard in sorted(shards):
                self._run_shard(shard, shards[shard], put, progress)

    def _run_shard(
        self,
        shard: str,
        names: list[str],
        put: Callable[[str, Tensor], None],
        progress: Progress | None,
    ) -> None:
        with self.files.open(shard) as read:
            for name in names:
                size, part = self.plan.info(name).bytes, self.plan.parts.get(name)
                peak = self.files.mapped_bytes(shard) + size
                self.peak_host_bytes = max(self.peak_host_bytes, peak)
                put(name, read(name) if part is None else read(name, part))
                self._done += size
                if progress is not None:
                    progress(self._done, self.plan.bytes)

    def _keep_scale(self, name: str, tensor: Tensor) -> None:
        weight = name.removesuffix("_scale_inv")
        if self.parts is not None and weight in self.parts:
            tensor = self.parts.scales(weight, tensor)
        self._scales[weight] = tensor.to(self.device, copy=True)

    def _compare(self, name: str, tensor: Tensor) -> None:
        original = self.plan.copies[name]
        path, _, attribute = original.rpartition(".")
        original_tensor = getattr(self.model.get_submodule(path), attribute)
        if self.parts is not None and original in self.parts:
            original_tensor = self.parts.kept(original)
        if not torch.equal(tensor.to(self.device).to(original_tensor.dtype), original_tensor):
            raise ValueError(f"{name} differs from {original}, to which the model's config ties it")

    def _put(self, name: str, tensor: Tensor) -> None:
        path, _, attribute = name.rpartition(".")
        module = self.model.get_submodule(path)
        current = getattr(module, attribute)
        tensor = tensor.to(self.device, copy=True)
        scales = self._scales.pop(name, None)
        fp8 = None if scales is None else FP8Weight(name, tensor, scales, self.plan.block)
        if attribute == "weight" and path in self._quantized:
            self._put_quantized(path, module, current, tensor, fp8)
            return
        if fp8 is not None:
            tensor = dequantize(fp8)
        tensor = tensor.to(current.dtype) if current.is_floating_point() else tensor
        if self.parts is not None and name in self.parts:
            tensor = self.parts.keep_plain(name, tensor)
        self._put_plain(name, current, tensor)

    def _stand_in(self, name: str) -> None:
        """Put what stands for a tensor of another rank."""
        assert self.others is not None
        path, _, attribute = name.rpartition(".")
        module = self.model.get_submodule(path)
        current = getattr(module, attribute)
        if attribute == "weight" and path in self._quantized:
            spec = FrozenSpec(self.recipe, self.state, path)
            weight = self.others.stand_ins.weight(current.shape, spec.blocks)
            self._hold(path, module, weight, spec)
            return
        self._put_plain(name, current, self.others.stand_ins.tensor(current))

    def _put_plain(self, name: str, current: Tensor, value: Tensor) -> None:
        if isinstance(current, nn.Parameter):
            value = nn.Parameter(value, requires_grad=current.requires_grad)
        for holder in self.plan.holders[name]:
            owner, _, attribute = holder.rpartition(".")
            module = self.model.get_submodule(owner)
            table: Any = (
                module._parameters if isinstance(current, nn.Parameter) else module._buffers
            )
            table[attribute] = value

    def _put_quantized(
        self, path: str, module: Any, current: Tensor, tensor: Tensor, fp8: FP8Weight | None
    ) -> None:
        """Replace the linear layer at `path` by a FrozenFP8Linear. Its bias may be loaded before or after."""
        spec = FrozenSpec(self.recipe, self.state, path)
        try:
            if self.parts is not None and f"{path}.weight" in self.parts:
                weight = self.parts.keep(path, tensor, current.dtype, fp8)
            elif fp8 is None:
                weight = Weight(*quantize_weight(tensor.to(current.dtype), spec.blocks))
            else:
                weight = held_weight(fp8, self.recipe)
        except comm.OtherRankError:
            raise
        except ValueError as error:
            raise ValueError(f"{path}.weight: {error}") from error
        if self.shards is not None and path in self.shards:
            weight = weight._replace(data=self.shards.keep(path, weight.data))
        self._hold(path, module, weight, spec)

    def _hold(self, path: str, module: Any, weight: Weight, spec: FrozenSpec) -> None:
        new = FrozenFP8Linear.from_weight(weight, module.bias, spec)
        parent, _, name = path.rpartition(".")
        setattr(self.model.get_submodule(parent), name, new.eval())


class FP8Weight(nn.Module):
    """A block-FP8 weight, with the attributes that convert.py reads from transformers' FP8Linear."""

    def __init__(self, name: str, weight: Tensor, scales: Tensor, block: tuple[int, ...]) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("weight_scale_inv", scales)
        self.block_size = block
        check_fp8_linear(name.removesuffix(".weight"), self)


class _Line:
    """Shows `loading 12.3 of 70.6 GB` on a terminal, in a line that overwrites itself."""

    def __init__(self) -> None:
        self._shown = -1

    def __call__(self, done: int, total: int) -> None:
        percent = 100 * done // max(total, 1)
        if percent == self._shown or not sys.stderr.isatty():
            return
        self._shown = percent
        end = "\n" if done == total else ""
        text = f"\rloading {done / 1e9:.1f} of {total / 1e9:.1f} GB, {percent} %"
        print(text, end=end, file=sys.stderr, flush=True)
