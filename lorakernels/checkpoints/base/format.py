# SPDX-License-Identifier: Apache-2.0
"""The format in which a base's weights are stored, decided by its configs and headers before a value is read.

    plain      F64, F32, BF16, F16
    block FP8  e4m3 X and X_scale_inv: a scale for each block, or one for the tensor, as floats or e8m0 (uint8, too)

Any other format is refused by name. Every way of reading a base asks here first.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lorakernels.checkpoints.base.shards import INDEX, SINGLE, Directory, TensorInfo, TensorSource

E4M3 = "F8_E4M3"
BLOCK = (128, 128)
PLAIN = ("F64", "F32", "BF16", "F16")
SCALES = (*PLAIN, "F8_E8M0", "U8")
MODELOPT = "hf_quant_config.json"
_SCALE = "_scale_inv"
_KEYS = ("quantization_config", "compression_config")
# What integer tensors of one dimension, and these of any, are in models: positions, indices, masks
_INDICES = ("I64", "BOOL")
_TITLES = {
    "awq": "AWQ",
    "bitsandbytes": "bitsandbytes",
    "compressed-tensors": "compressed-tensors",
    "fbgemm_fp8": "FBGEMM's FP8",
    "gptq": "GPTQ",
    "modelopt": "ModelOpt's format",
    "modelopt_fp4": "ModelOpt's NVFP4",
    "mxfp4": "MXFP4",
    "mxfp8": "MXFP8",
    "nvfp4": "NVFP4",
}
# What ends of names show, the most telling first
_SIGNS = (
    (r"\.weight_scale_2$", "ModelOpt's NVFP4"),
    (
        r"\.weight_(packed|shape|zero_point|global_scale|g_idx)$|\.input_global_scale$",
        "compressed-tensors",
    ),
    (r"\.(nested_)?(absmax|quant_map)$|\.quant_state\.|\.SCB$|\.weight_format$", "bitsandbytes"),
    (r"\.g_idx$", "GPTQ"),
    (r"\.(qweight|qzeros)$", "GPTQ or AWQ"),
    (r"_weight_qdata$|:", "torchao's format"),
    (r"\.W_q$", "HQQ"),
    (r"\.weight_scale$", "FP8 with a weight_scale, as AutoFP8, ModelOpt and FBGEMM write it"),
    (r"\.qscale_weight$", "FP8 with a qscale_weight"),
)
_MXFP4 = r"_(blocks|scales)$"
_OF_INPUT = ("activation_scale", "input_scale")


class BaseFormat(NamedTuple):
    """How a base's weights are stored.

    Attributes:
        block: rows and columns for which a block-FP8 weight has one scale.
        fp8: whether a weight is in block FP8.
        quantization_config: what a config says of it, or None.
    """

    block: tuple[int, ...]
    fp8: bool
    quantization_config: dict[str, Any] | None


def format_of(
    tensors: Mapping[str, TensorInfo], config: Any, folder: Path | None = None
) -> BaseFormat:
    """The format of a base.

    Args:
        tensors: what its files hold, by name.
        config: as transformers reads it from config.json, or a dict.
        folder: where its files are; config.json and ModelOpt's hf_quant_config.json may be there.

    Raises:
        ValueError: it is in a format that is not read here, or an e4m3 weight has no scale.
    """
    _check_files(config, folder)
    declared = list(_declared(config, folder))
    for where, quantization in declared:
        method = _method(quantization)
        if method != "fp8":
            title = _TITLES.get(method, f"the format {method!r}" if method else "an unnamed format")
            raise ValueError(_refusal(f"{where} says", title))
    first_declared = next((quantization for _, quantization in declared), None)
    block = tuple((first_declared or {}).get("weight_block_size") or BLOCK)
    _check_names(tensors)
    for name, info in tensors.items():
        _check_tensor(name, info, tensors)
        if name.endswith(_SCALE):
            _check_scale(name, tensors, block)
    fp8 = any(info.dtype == E4M3 for info in tensors.values())
    return BaseFormat(block, fp8, first_declared)


def take_format(files: TensorSource, config: Any) -> BaseFormat:
    """`format_of`, after which `config` does not call the model quantized: ours holds FP8 in its own way."""
    folder = files.path if isinstance(files, Directory) else None
    stored = format_of(files.tensors, config, folder)
    undeclare(config)
    return stored


def undeclare(config: Any) -> None:
    """Take out of `config`, an object or a dict, what it says of quantization."""
    for part, key in itertools.product(_parts(config), _KEYS):
        part.pop(key, None)


def check_whole_blocks(tensors: Mapping[str, TensorInfo], block: tuple[int, ...]) -> None:
    """Refuse what transformers dequantizes wrongly: it divides a weight evenly by the number of its scales.

    Raises:
        ValueError: a weight's last block of rows or columns is smaller than the others.
    """
    for name, info in tensors.items():
        scale = tensors.get(f"{name}_scale_inv")
        if scale is None or math.prod(scale.shape) == 1:
            continue
        sides = zip(info.shape[-2:], scale.shape[-2:], block, strict=False)
        if any(count > 1 and size != count * side for size, count, side in sides):
            raise ValueError(
                f"{name} {list(info.shape)} does not consist of whole blocks of {list(block)}, and transformers would "
                "multiply it by the wrong scales"
            )


def _check_names(tensors: Mapping[str, TensorInfo]) -> None:
    for pattern, title in _SIGNS:
        for name, info in tensors.items():
            if re.search(pattern, name):
                raise ValueError(_refusal(f"{name} in {info.shard} shows", title))


def _check_tensor(name: str, info: TensorInfo, tensors: Mapping[str, TensorInfo]) -> None:
    """Refuse a tensor that is neither plain, nor an index, nor a part of a weight in block FP8."""
    if info.dtype in (*PLAIN, *_INDICES) or (info.dtype in SCALES and name.endswith(_SCALE)):
        return
    if info.dtype == E4M3:
        if f"{name}_scale_inv" not in tensors:
            where = f"{name} in {info.shard}, e4m3 without {name}_scale_inv, shows"
            raise ValueError(_refusal(where, "FP8 without scales"))
        return
    # [1, 1, T, T]: old files of GPT-2 and GPT-NeoX hold their causal masks as U8
    is_mask = len(info.shape) == 4 and info.shape[:2] == (1, 1)
    if (len(info.shape) < 2 or is_mask) and not info.dtype.startswith("F"):
        return
    what = "MXFP4" if re.search(_MXFP4, name) else f"a quantized format with {info.dtype}"
    raise ValueError(_refusal(f"{name} in {info.shard} shows", what))


def _check_scale(name: str, tensors: Mapping[str, TensorInfo], block: tuple[int, ...]) -> None:
    """Refuse a scale that does not belong to an e4m3 weight, or has another shape than its blocks."""
    weight, scale = tensors.get(name.removesuffix(_SCALE)), tensors[name]
    if weight is None:
        raise ValueError(f"scales without a weight: {name}")
    if weight.dtype != E4M3:
        raise ValueError(
            f"{name.removesuffix(_SCALE)} is {weight.dtype} with {name}: only e4m3 weights have one"
        )
    blocks = (-(-n // b) for n, b in zip(weight.shape[-2:], block, strict=False))
    expected = (*weight.shape[:-2], *blocks)
    if math.prod(scale.shape) != 1 and scale.shape != expected:
        raise ValueError(
            f"{name} must be {expected} for {weight.shape} in blocks of {block}, found {scale.shape}"
        )


def of_input(name: str, tensors: Collection[str]) -> bool:
    """Whether a tensor is the fixed scale of the input of a layer in block FP8. Recipes make their own scales."""
    path, _, leaf = name.rpartition(".")
    return leaf in _OF_INPUT and f"{path}.weight_scale_inv" in tensors


def _parts(config: Any) -> Iterator[dict[str, Any]]:
    """The dicts of `config` and of all configs inside it."""
    values = config if isinstance(config, dict) else vars(config)
    yield values
    for name, part in values.items():
        if name not in _KEYS and (isinstance(part, dict) or hasattr(part, "to_dict")):
            yield from _parts(part)


def _declared(config: Any, folder: Path | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """(what says so, the quantization) of each that the configs declare."""
    for where, whole in _configs(config, folder).items():
        for part, key in itertools.product(_parts(whole), _KEYS):
            if quantization := part.get(key):
                if not isinstance(quantization, dict) and not hasattr(quantization, "to_dict"):
                    raise ValueError(f"{key} of {where} must be an object, found {quantization!r}")
                yield (
                    f"{key} of {where}",
                    quantization if isinstance(quantization, dict) else quantization.to_dict(),
                )
    if folder is not None and (path := folder / MODELOPT).is_file():
        content = _json(path)
        quantization = content.get("quantization") or content
        if quantization.get("quant_algo"):  # without it, the key-value cache alone may be in FP8
            yield str(path), {"quant_method": "modelopt"}


def _configs(config: Any, folder: Path | None) -> dict[str, Any]:
    """{path: config} of the configs in the folder, config.json first."""
    configs = {"the model's config": config}
    if folder is not None and (path := folder / "config.json").is_file():
        configs = {str(path): _json(path), **configs}
    return configs


def _check_files(config: Any, folder: Path | None) -> None:
    """Refuse weights in files that transformers alone would look for."""
    for where, whole in _configs(config, folder).items():
        name = next(_parts(whole)).get("transformers_weights")
        if name not in (None, SINGLE, INDEX):
            raise ValueError(
                f"{where} has transformers_weights={name!r}, and only {SINGLE} or the files of {INDEX} are read: "
                "rename the weights, and leave out transformers_weights"
            )


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, found {type(content).__name__}")
    return content


def _method(quantization: Mapping[str, Any]) -> str:
    method = quantization.get("quant_method")
    if method is not None:
        return str(getattr(method, "value", method)).lower()
    if quantization.get("load_in_4bit") or quantization.get("load_in_8bit"):
        return "bitsandbytes"
    if "quant_algo" in quantization or "producer" in quantization:
        return "modelopt"
    return "compressed-tensors" if "config_groups" in quantization else ""


def _refusal(where: str, title: str) -> str:
    return (
        f"{where} that the base's weights are in {title}, which is not read here: dequantize them with the tool that "
        "wrote them and save them in bf16, or take the bf16 checkpoint. Block FP8 (e4m3 with weight_scale_inv) is read"
    )
