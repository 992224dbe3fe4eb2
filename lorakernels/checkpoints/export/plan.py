# SPDX-License-Identifier: Apache-2.0
"""Plan a merged checkpoint: which tensors it has and how each is made. Only headers are read, no values.

A tensor of the base is copied, has an adapter added (W + scaling · B A), or is replaced by a trained tensor.
Floating-point values become bf16. Tensors in fp32 stay fp32 if the base's embedding has another dtype.

In the FP8 format, the weights of linear layers become e4m3 with one scale_inv per block, as defined by
transformers' FineGrainedFP8Config. Layers whose sizes are not multiples of the block stay bf16, for two reasons.
transformers derives the block from the shapes when it dequantizes, and vLLM shards by whole blocks. Projections
that vLLM packs together with such a layer stay bf16 too. What the base holds in FP8 stays FP8 in any case.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from lorakernels.checkpoints.adapters.embeddings import (
    check_embeddings,
    is_same_base,
    take_embeddings,
)
from lorakernels.checkpoints.adapters.keys import (
    PREFIX,
    check_keys,
    expected_tensors,
    stacks_of,
    without_peft_copies,
)
from lorakernels.checkpoints.adapters.peft_format import (
    CONFIG_NAME,
    WEIGHTS_NAME,
    read_config,
    read_weights,
)
from lorakernels.checkpoints.base.expert_files import ExpertPart, expert_parts
from lorakernels.checkpoints.base.file_names import Renamed
from lorakernels.checkpoints.base.format import E4M3
from lorakernels.checkpoints.base.shards import TensorInfo, TensorSource
from lorakernels.checkpoints.loading.plan import holders_of
from lorakernels.config import LoRAConfig
from lorakernels.modules.experts.layer import named_parameters
from lorakernels.modules.model.targets import match_saved, match_targets

_FLOATS = ("F64", "F32", "BF16", "F16", E4M3, "F8_E5M2")
_PACKED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


@dataclass(frozen=True)
class AdapterChanges:
    """The values of an adapter file, sorted by what they do to the base.

    Attributes:
        deltas: module path → (A [R, K], B [N, R], scaling).
        values: tensor name → the value that replaces it. A delta is added to that value.
    """

    deltas: dict[str, tuple[Tensor, Tensor, float]]
    values: dict[str, Tensor]


@dataclass(frozen=True)
class Out:
    """One tensor to write.

    Attributes:
        name: its name in the model.
        source: the name, in the model, of the base's tensor that it is made of.
        dtype: by safetensors' name, e.g. "BF16".
        shape: its shape.
        block: rows and columns of an FP8 block, empty without FP8. The scales are a tensor named `name` +
            "_scale_inv".
        keeps: whether the bytes and scales of the source are copied unchanged.
        file_name: its name in the merged checkpoint, which is that in the base's files.
    """

    name: str
    source: str
    dtype: str
    shape: tuple[int, ...]
    block: tuple[int, ...] = ()
    keeps: bool = False
    file_name: str = ""

    @property
    def written(self) -> tuple[str, str]:
        """The names under which the tensor and its scales are written."""
        name = self.file_name or self.name
        return name, f"{name}_scale_inv"

    @property
    def layout(self) -> dict[str, tuple[str, tuple[int, ...], int]]:
        name, scale_name = self.written
        parts = [(name, self.dtype, self.shape)]
        if self.block:
            parts.append((scale_name, "F32", _blocks(self.shape, self.block)))
        return {n: (dtype, shape, TensorInfo("", shape, dtype).bytes) for n, dtype, shape in parts}


@dataclass
class MergePlan:
    """The tensors of a merged checkpoint, by shard.

    Attributes:
        shards: name of a shard of the base → the tensors made of its contents.
        block: rows and columns of an FP8 block.
        untied: whether tied embeddings differ after the merge.
        plain: paths of linear layers that stay bf16 in the FP8 format.
    """

    shards: dict[str, list[Out]]
    block: tuple[int, ...]
    untied: bool
    plain: list[str] = field(default_factory=list)

    @property
    def outs(self) -> list[Out]:
        return [out for outs in self.shards.values() for out in outs]

    @property
    def bytes(self) -> int:
        return sum(size for out in self.outs for _, _, size in out.layout.values())


def read_adapter(model: nn.Module, folder: Path, files: TensorSource) -> AdapterChanges:
    """Read the adapter in `folder` and check that it fits `model`, which may be on the meta device.

    An expert's adapter is split like its tensors in `files`, the base.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is not valid, uses a feature that lorakernels lacks, or does not fit `model`.
    """
    config = read_config(folder, None)
    if config.use_dora:
        raise ValueError(
            f"{folder / CONFIG_NAME}: use_dora=True is not supported by export: merge by merge_and_unload"
        )
    tensors = read_weights(folder)
    try:
        expected, saved = expected_tensors(model, config), match_saved(model, config)
        stacks, experts = stacks_of(model, config), named_parameters(model, config)
        only_experts = config.target_parameters and not config.target_modules
        paths = [] if only_experts else match_targets(model, config)
        embeddings = take_embeddings(model, expected, tensors)
        check_embeddings(model, embeddings, {})
    except (ValueError, TypeError) as error:
        raise ValueError(f"the adapter in {folder} does not fit this model: {error}") from error
    tensors = without_peft_copies(tensors, saved)
    for stack in stacks:
        stack.split(tensors)
    check_keys(folder / WEIGHTS_NAME, expected, tensors)
    deltas = {}
    for path in paths:
        lora_A, lora_B = (
            tensors.pop(f"{PREFIX}{path}.lora_{which}.weight") for which in ("A", "B")
        )
        deltas[path] = (lora_A, lora_B, config.scaling_for(path))
    if experts:
        deltas |= _of_experts(config, experts, tensors, files)
    biases = {f"{path}.base_layer.bias": f"{path}.bias" for path in paths}
    names = {key: key.removeprefix(PREFIX) for key in tensors}
    values = {biases.get(name, name): tensors[key] for key, name in names.items()}
    return AdapterChanges(deltas, values | _changed(model, embeddings, files))


def _changed(
    model: nn.Module, embeddings: Mapping[str, Tensor], files: TensorSource
) -> dict[str, Tensor]:
    """The adapter file's `embeddings` that differ from the base in `files`; a tied one under each of its names."""
    changed: dict[str, Tensor] = {}
    holders = holders_of(model)
    for name, value in embeddings.items():
        names = holders.get(name, [name])
        for there in [n for n in names if n in files.tensors][:1]:
            with files.open(files.tensors[there].shard) as read:
                base = read(there)
                same = base.element_size() > 1 and is_same_base(base, value)
            if same:
                break
        else:
            changed |= dict.fromkeys(names, value)
    return changed


def _of_experts(
    config: LoRAConfig, experts: Mapping[str, Any], tensors: dict[str, Tensor], files: TensorSource
) -> dict[str, tuple[Tensor, Tensor, float]]:
    """The deltas of each expert's tensors in `files`. Removes the experts' adapters from `tensors`.

    Raises:
        ValueError: the files hold the experts of a layer in one tensor.
    """
    deltas: dict[str, tuple[Tensor, Tensor, float]] = {}
    by_layer: dict[str, list[tuple[str, ExpertPart]]] = {}
    for name, part in expert_parts(files.tensors).items():
        by_layer.setdefault(part.layer, []).append((name, part))
    for path, (number, *_) in experts.items():
        for expert in range(number):
            layer = f"{path}.{expert}"
            lora_A, lora_B = (
                tensors.pop(f"{PREFIX}{layer}.lora_{factor}.weight") for factor in "AB"
            )
            if layer not in by_layer:
                raise ValueError(
                    f"the adapter changes {layer}, and the base does not hold a tensor for each projection of each "
                    "expert: merge_and_unload merges it, and save_pretrained writes such files"
                )
            for name, part in by_layer[layer]:
                rows = lora_B.chunk(part.parts)[part.place]
                deltas[name.removesuffix(".weight")] = (lora_A, rows, config.scaling_for(layer))
    return deltas


def plan_merge(
    model: nn.Module, files: Renamed, adapter: AdapterChanges, block: tuple[int, ...], fp8: bool
) -> MergePlan:
    """Plan the merge of `adapter` into the base in `files`, which use the names of `model`, the base's model.

    `model` may be on the meta device.

    Raises:
        ValueError: the base lacks a tensor that the adapter changes, or holds one of another shape. Also if `fp8`
            would change no layer.
    """
    infos = {k: i for k, i in files.tensors.items() if not _is_side(k)}
    _check_shapes(model, infos)
    names, untied = _names(model, infos, adapter)
    main = _main_dtype(model, infos)
    linear, plain = _fp8_linear(model, infos, block) if fp8 else (set(), [])
    if fp8 and not linear:
        raise ValueError(
            f'format "fp8": no linear layer of this model is made of whole {block[0]}×{block[1]} blocks; take "bf16"'
        )
    changed = {f"{path}.weight" for path in adapter.deltas} | set(adapter.values)
    shards: dict[str, list[Out]] = {}
    for name, source in names.items():
        info = infos[source]
        out = Out(name, source, _dtype_of(name, info, adapter, main), info.shape)
        if name in linear:
            same = name not in changed and info.dtype == E4M3
            same = same and files.tensors[f"{source}_scale_inv"].shape == _blocks(info.shape, block)
            out = Out(name, source, E4M3, info.shape, block, keeps=same)
        out = replace(out, file_name=files.original.get(name, ""))
        shards.setdefault(info.shard, []).append(out)
    return MergePlan(dict(sorted(shards.items())), block, untied, plain)


def _is_side(name: str) -> bool:
    """True for scales that accompany an FP8 weight, and for fixed activation scales, which a merge makes stale."""
    return name.endswith(("_scale_inv", ".activation_scale", ".input_scale"))


def _check_shapes(model: nn.Module, infos: dict[str, TensorInfo]) -> None:
    for name, parameter in model.state_dict().items():
        if name in infos and infos[name].shape != tuple(parameter.shape):
            raise ValueError(
                f"{name} is {list(infos[name].shape)} in the base, {list(parameter.shape)} by its config.json"
            )


def _names(
    model: nn.Module, infos: dict[str, TensorInfo], adapter: AdapterChanges
) -> tuple[dict[str, str], bool]:
    """({tensor to write: tensor of the base that it is made of}, whether tied tensors differ after the merge)."""
    names, untied = {name: name for name in infos}, False
    holders = holders_of(model)
    for name in (*(f"{path}.weight" for path in adapter.deltas), *adapter.values):
        group = holders.get(name, [name])
        there = [other for other in group if other in infos]
        if not there:
            raise ValueError(f"the adapter changes {name}, which the base does not hold")
        untied = untied or len(group) > 1
        for other in group:
            names.setdefault(other, there[0])
    return names, untied


def _main_dtype(model: Any, infos: dict[str, TensorInfo]) -> str:
    """The dtype of the input embedding, or else of the first floating-point tensor."""
    embedding = model.get_input_embeddings()
    for path, module in model.named_modules():
        if module is embedding and f"{path}.weight" in infos:
            return infos[f"{path}.weight"].dtype
    return next((i.dtype for i in infos.values() if i.dtype in _FLOATS), "BF16")


def _dtype_of(name: str, info: TensorInfo, adapter: AdapterChanges, main: str) -> str:
    if info.dtype not in _FLOATS:
        return info.dtype
    merged = name.removesuffix(".weight") in adapter.deltas
    keeps = info.dtype in ("F64", "F32") and info.dtype != main
    return info.dtype if keeps and not merged else "BF16"


def _blocks(shape: tuple[int, ...], block: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(-(-n // b) for n, b in zip(shape, block, strict=True))


def _fp8_linear(
    model: Any, infos: dict[str, TensorInfo], block: tuple[int, ...]
) -> tuple[set[str], list[str]]:
    """(names of the weights to write in FP8, modules that transformers must not convert)."""
    head = model.get_output_embeddings()
    linear = {p: m for p, m in model.named_modules() if type(m) is nn.Linear}
    whole = {
        path
        for path, m in linear.items()
        if m is not head
        and f"{path}.weight" in infos
        and m.out_features % block[0] == 0
        and m.in_features % block[1] == 0
    }
    for path in linear:
        parent, _, name = path.rpartition(".")
        for packed in _PACKED:
            group = {f"{parent}.{other}" for other in packed} & set(linear)
            if name in packed and not group <= whole:
                whole -= group
    whole |= {p for p in linear if (i := infos.get(f"{p}.weight")) is not None and i.dtype == E4M3}
    experts = [p for p, _ in model.named_modules() if p.endswith(".experts")]
    return {f"{path}.weight" for path in whole}, [*(p for p in linear if p not in whole), *experts]
