# SPDX-License-Identifier: Apache-2.0
"""One small Llama as tools store it: its tensors, its quantization_config, and files beside them."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

transformers = pytest.importorskip("transformers")
E4M3 = torch.float8_e4m3fn
SIZES = {
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 144,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "use_cache": False,
}


class Stored(NamedTuple):
    """What a tool makes of a linear layer's weight: {end of a name: tensor}."""

    of: Callable[[Tensor], dict[str, Tensor]]
    quantization: dict[str, Any] | None = None
    beside: Mapping[str, Any] = MappingProxyType({})  # {file: what it holds}
    names: Callable[[str], str] = str
    nested: bool = False


@functools.cache
def plain_tensors() -> dict[str, Tensor]:
    """The model's values. e4m3 and a scale of 1/64, or of powers of two for the blocks, hold them exactly."""
    torch.manual_seed(3)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    tensors = {}
    for name, value in model.state_dict().items():
        exact = (value * 64).to(E4M3).float() / 64 if is_linear(name) else value
        tensors[name] = exact.bfloat16()
    return tensors


def is_linear(name: str) -> bool:
    return name.endswith("_proj.weight")


def write_form(folder: Path, form: Stored) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    made: dict[str, Tensor] = {}
    for name, value in plain_tensors().items():
        ends = form.of(value.float()) if is_linear(name) else {"weight": value}
        stem = form.names(name.removesuffix("weight"))
        made |= {f"{stem}{end}": tensor.clone().contiguous() for end, tensor in ends.items()}
    save_file(made, folder / "model.safetensors", {"format": "pt"})
    config = transformers.LlamaConfig(**SIZES, dtype="bfloat16").to_dict()
    config["architectures"] = ["LlamaForCausalLM"]
    if form.quantization is not None:
        inside = {"quantization_config": form.quantization}
        config |= {"llm_config": inside} if form.nested else inside
    (folder / "config.json").write_text(json.dumps(config))
    for file, content in form.beside.items():
        (folder / file).write_text(json.dumps(content))
    return folder


def e4m3(weight: Tensor) -> Tensor:
    return (weight * 64).to(E4M3)


def with_scale(name: str, **more: Tensor) -> Callable[[Tensor], dict[str, Tensor]]:
    return lambda w: {"weight": e4m3(w), name: torch.tensor(1 / 64), **more}


def in_blocks(weight: Tensor, dtype: Any = torch.float32) -> dict[str, Tensor]:
    """Scales that differ, powers of two."""
    n, k = (-(-size // 128) for size in weight.shape)
    powers = -6.0 - torch.arange(n * k).view(n, k) % 2
    wide = powers.repeat_interleave(128, 0)[: len(weight)].repeat_interleave(128, 1)
    scales = 2**powers
    stored = (weight / 2 ** wide[:, : weight.shape[1]]).to(E4M3)
    if dtype == torch.uint8:
        return {
            "weight": stored,
            "weight_scale_inv": scales.to(torch.float8_e8m0fnu).view(dtype),
        }
    return {"weight": stored, "weight_scale_inv": scales.to(dtype)}


def one_scale(*shape: int, **more: Tensor) -> Callable[[Tensor], dict[str, Tensor]]:
    return lambda w: {
        "weight": e4m3(w),
        "weight_scale_inv": torch.full(shape, 1 / 64),
        **more,
    }


def bytes_of(*shape: int, dtype: Any = torch.uint8) -> Tensor:
    return torch.ones(shape, dtype=dtype)


def packed(**ends: Any) -> Callable[[Tensor], dict[str, Tensor]]:
    """Packed weights: their values do not matter, as nothing reads them."""
    return lambda w: {end.replace("__", "."): tensor for end, tensor in ends.items()}


def fp8(**more: Any) -> dict[str, Any]:
    return {"quant_method": "fp8", "activation_scheme": "dynamic", **more}


IN_BLOCKS = fp8(weight_block_size=[128, 128])
IN_ONE = fp8(weight_block_size=None)
STATIC = IN_ONE | {"activation_scheme": "static"}
SCALE = torch.tensor(1 / 64)
INPUT = torch.tensor(0.25)
ALGO = {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": None}}
I32 = torch.int32


def without_prefix(name: str) -> str:
    return name.removeprefix("model.")


def mixed_prefix(name: str) -> str:
    return name if "layers.0" in name else without_prefix(name)


TAKEN = {
    "bf16": Stored(lambda w: {"weight": w.bfloat16()}),
    "bf16, no prefix": Stored(lambda w: {"weight": w.bfloat16()}, names=without_prefix),
    "bf16, some with a prefix": Stored(lambda w: {"weight": w.bfloat16()}, names=mixed_prefix),
    "blocks": Stored(in_blocks, IN_BLOCKS),
    "blocks, FP8": Stored(in_blocks, IN_BLOCKS | {"quant_method": "FP8"}),
    "blocks, no config": Stored(in_blocks),
    "blocks, config of a part": Stored(in_blocks, IN_BLOCKS, nested=True),
    "blocks, no prefix": Stored(in_blocks, IN_BLOCKS, names=without_prefix),
    "blocks, e8m0": Stored(lambda w: in_blocks(w, torch.float8_e8m0fnu), IN_BLOCKS),
    "blocks, uint8": Stored(lambda w: in_blocks(w, torch.uint8), IN_BLOCKS),
    "one scale, 0-d": Stored(one_scale(), IN_ONE),
    "one scale, (1,)": Stored(one_scale(1), IN_ONE),
    "one scale, (1, 1)": Stored(one_scale(1, 1), IN_ONE),
    "one scale, inputs": Stored(one_scale(activation_scale=INPUT), STATIC),
    "one scale (1, 1), inputs": Stored(one_scale(1, 1, activation_scale=INPUT), STATIC),
}
# {form: (how it is stored, what the refusal must say)}
REFUSED = {
    "modelopt, declared": (
        Stored(with_scale("weight_scale"), {"quant_method": "modelopt", "quant_algo": "FP8"}),
        "ModelOpt",
    ),
    "modelopt, declared by its algorithm": (
        Stored(with_scale("weight_scale"), {"quant_algo": "FP8", "producer": {"name": "modelopt"}}),
        "ModelOpt",
    ),
    "modelopt, its own file": (
        Stored(with_scale("weight_scale"), beside={"hf_quant_config.json": ALGO}),
        "hf_quant_config.json says .* ModelOpt",
    ),
    "modelopt, NVFP4": (
        Stored(
            packed(
                weight=bytes_of(32, 16),
                weight_scale=bytes_of(32, 2).to(E4M3),
                weight_scale_2=SCALE,
                input_scale=INPUT,
            )
        ),
        "NVFP4",
    ),
    "AutoFP8": (
        Stored(with_scale("weight_scale", input_scale=INPUT), fp8(activation_scheme="static")),
        "AutoFP8",
    ),
    "compressed-tensors": (
        Stored(with_scale("weight_scale"), {"quant_method": "Compressed-Tensors"}),
        "compressed-tensors",
    ),
    "compressed-tensors, as it was called": (
        Stored(with_scale("weight_scale"), {"config_groups": {}, "format": "float-quantized"}),
        "compressed-tensors",
    ),
    "compressed-tensors, packed, no config": (
        Stored(packed(weight_packed=bytes_of(32, 4, dtype=I32), weight_scale=bytes_of(32, 1))),
        "compressed-tensors",
    ),
    "FBGEMM": (Stored(with_scale("weight_scale"), {"quant_method": "fbgemm_fp8"}), "FBGEMM"),
    "GPTQ": (
        Stored(
            packed(
                qweight=bytes_of(4, 32, dtype=I32),
                qzeros=bytes_of(1, 4, dtype=I32),
                scales=torch.ones(1, 32),
                g_idx=bytes_of(32, dtype=I32),
            )
        ),
        "GPTQ",
    ),
    "AWQ, config of a part": (
        Stored(packed(qweight=bytes_of(32, 4, dtype=I32)), {"quant_method": "awq"}, nested=True),
        "AWQ",
    ),
    "AWQ, no config": (
        Stored(packed(qweight=bytes_of(32, 4, dtype=I32), scales=torch.ones(1, 32))),
        "GPTQ or AWQ",
    ),
    "bitsandbytes, 4 bit": (
        Stored(
            packed(weight=bytes_of(512, 1), weight__absmax=torch.ones(16)),
            {"load_in_4bit": True},
        ),
        "bitsandbytes",
    ),
    "bitsandbytes, 4 bit, no config": (
        Stored(packed(weight=bytes_of(512, 1), weight__absmax=torch.ones(16))),
        "bitsandbytes",
    ),
    "bitsandbytes, 8 bit, no config": (
        Stored(packed(weight=bytes_of(32, 32, dtype=torch.int8), SCB=torch.ones(32))),
        "bitsandbytes",
    ),
    "MXFP4": (
        Stored(packed(weight_blocks=bytes_of(32, 1, 16), weight_scales=bytes_of(32, 1))),
        "MXFP4",
    ),
    "torchao": (
        Stored(packed(_weight_qdata=bytes_of(32, 32).to(E4M3), _weight_scale=SCALE)),
        "torchao",
    ),
    "one that is not known": (Stored(with_scale("weight_scale"), {"quant_method": "new"}), "'new'"),
    "e4m3 without scales": (Stored(lambda w: {"weight": e4m3(w)}), "FP8 without scales"),
    "e4m3 without scales, called FP8": (
        Stored(lambda w: {"weight": e4m3(w)}, IN_BLOCKS),
        "FP8 without scales",
    ),
    "a scale of each row": (
        Stored(lambda w: {"weight": e4m3(w), "weight_scale_inv": torch.full((len(w), 1), 1 / 64)}),
        r"weight_scale_inv must be \(\d, \d\) for",
    ),
    "blocks of another size": (
        Stored(in_blocks, fp8(weight_block_size=[64, 64])),
        r"must be \(1, 3\) for \(32, 144\) in blocks of \(64, 64\), found \(1, 2\)",
    ),
    "bf16 with a scale of FP8": (
        Stored(lambda w: {"weight": w.bfloat16(), "weight_scale_inv": SCALE}),
        "is BF16 with .*weight_scale_inv: only e4m3 weights have one",
    ),
    "scales of integers": (
        Stored(lambda w: {"weight": e4m3(w), "weight_scale_inv": bytes_of(1, 1, dtype=I32)}),
        "I32",
    ),
    "a scale without a weight": (
        Stored(lambda w: {"weight": w.bfloat16(), "other_scale_inv": SCALE}),
        "scales without a weight",
    ),
    "e5m2": (Stored(lambda w: {"weight": w.to(torch.float8_e5m2)}), "F8_E5M2"),
    "integers": (Stored(lambda w: {"weight": w.to(torch.int8)}), "I8"),
    "bf16 with a scale": (
        Stored(lambda w: {"weight": w.bfloat16(), "smooth_scale": SCALE}),
        "smooth_scale",
    ),
}
