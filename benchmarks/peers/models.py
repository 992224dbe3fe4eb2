# SPDX-License-Identifier: Apache-2.0
"""The models of bench_end_to_end.py: their shapes, random weights made on the device, and the text they train on.

Every weight is a function of its name alone, so that all providers have the same model. The large ones never exist as a
whole in bf16: `Random` is a source for `load_quantized` that makes one tensor at a time.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.peers.texts import library_sources
from lorakernels import LoRAConfig, apply_lora
from lorakernels.checkpoints.base.shards import Read, TensorInfo
from lorakernels.train.data.byte_tokenizer import SPECIALS
from lorakernels.train.model.flops import flops_per_token

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
# "one": all but one projection of the first layer is frozen, through which backward passes to it
ADAPTED = {
    "qkvo": ATTENTION,
    "all": (*ATTENTION, "gate_proj", "up_proj", "down_proj"),
    "one": ("layers.0.self_attn.q_proj",),
}
RANK, ALPHA, P = 16, 32, 0.1
STD = 0.02


@dataclass(frozen=True)
class Spec:
    """A model, the tokens it is timed with, and its adapters' rank."""

    name: str
    shape: dict[str, Any]
    length: int
    batch: int = 1
    rank: int = RANK

    @property
    def alpha(self) -> int:
        """So that adapters of any rank are scaled by ALPHA / RANK."""
        return ALPHA * self.rank // RANK

    def lora(self, adapted: str, dropout: float = 0.0, **more: Any) -> LoRAConfig:
        """Adapters on the modules of ADAPTED[adapted]."""
        more |= {"lora_dropout": dropout, "target_modules": list(ADAPTED[adapted])}
        return LoRAConfig(r=self.rank, lora_alpha=self.alpha, **more)

    def cut(self, layers: int) -> Spec:
        """The same with fewer layers."""
        name = f"{layers} layers of {self.name}"
        return replace(self, name=name, shape={**self.shape, "num_hidden_layers": layers})

    def config(self) -> Any:
        import transformers

        return transformers.LlamaConfig(
            max_position_embeddings=self.length,
            rms_norm_eps=1e-5,
            use_cache=False,
            attn_implementation="sdpa",
            **self.shape,
        )


# From the models' config.json, but for Llama 3's scaling of rotary frequencies, which changes no shape
SPECS = {
    "1b": Spec(
        "Llama-3.2-1B",
        {
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
            "rope_theta": 500000.0,
            "tie_word_embeddings": True,
        },
        length=1024,
    ),
    "8b": Spec(
        "Llama-3.1-8B",
        {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
            "rope_theta": 500000.0,
            "tie_word_embeddings": False,
        },
        length=4096,
    ),
    "70b": Spec(
        "Llama-2-70B",
        {
            "hidden_size": 8192,
            "intermediate_size": 28672,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "vocab_size": 32000,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
        },
        length=8192,
    ),
    "405b": Spec(
        "Llama-3.1-405B",
        {
            "hidden_size": 16384,
            "intermediate_size": 53248,
            "num_hidden_layers": 126,
            "num_attention_heads": 128,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
            "rope_theta": 500000.0,
            "tie_word_embeddings": False,
        },
        length=4096,
    ),
    "tiny": Spec(
        "a Llama of two layers",
        {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 320,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
        },
        length=32,
    ),
    "tiny-8": Spec(
        "a Llama of two layers and eight key heads",
        {
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
            "vocab_size": 320,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
        },
        length=64,
    ),
}


def value(name: str, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """The tensor of that name: normal with the standard deviation of Llama's initialization; norms are 1."""
    if len(shape) < 2:
        return torch.ones(shape, device=device, dtype=dtype)
    generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
    return torch.randn(shape, generator=generator, device=device, dtype=dtype).mul_(STD)


def dtype_of(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def empty_model(config: Any) -> Any:
    """Without memory."""
    import transformers

    with torch.device("meta"):
        return transformers.LlamaForCausalLM(config)


class Random:
    """A source for `load_quantized` whose tensors are made on `device` when they are read; it keeps none."""

    def __init__(self, config: Any, device: torch.device) -> None:
        self.device, self.dtype = device, dtype_of(device)
        name = {torch.bfloat16: "BF16", torch.float32: "F32"}[self.dtype]
        self.tensors = {
            key: TensorInfo("all", tuple(p.shape), name)
            for key, p in empty_model(config).named_parameters()
        }

    def mapped_bytes(self, shard: str) -> int:
        return 0

    @contextlib.contextmanager
    def open(self, shard: str) -> Iterator[Read]:
        def read(name: str, part: tuple[slice, ...] = ()) -> Tensor:
            return value(name, self.tensors[name].shape, self.device, self.dtype)[part]

        yield read


def plain_model(
    config: Any,
    device: torch.device,
    convert: Callable[[nn.Module, str], None] = lambda layer, path: None,
) -> Any:
    """A frozen LlamaForCausalLM on `device`; `convert(layer, path)` changes a decoder layer before the next is made."""
    model = empty_model(config).requires_grad_(False)
    for path in [f"model.layers.{i}" for i in range(config.num_hidden_layers)]:
        layer = model.get_submodule(path)
        _materialize(layer, path, device)
        convert(layer, path)
    _materialize(model, "", device)
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)
    return model.train()


def _materialize(module: nn.Module, path: str, device: torch.device) -> None:
    """Give every parameter that has no memory its values."""
    for name, owner in module.named_modules(prefix=path):
        for key, parameter in owner.named_parameters(recurse=False):
            if parameter.is_meta:
                full = f"{name}.{key}" if name else key
                made = value(full, tuple(parameter.shape), device, dtype_of(device))
                owner.register_parameter(key, nn.Parameter(made, requires_grad=False))


def sizes(spec: Spec, adapted: str) -> tuple[int, int, float]:
    """(parameters of the base, of the adapters, FLOPs of forward and backward per token), by flops.py."""
    model = empty_model(spec.config())
    base = sum(p.numel() for p in model.parameters())
    report = apply_lora(model, spec.lora(adapted, fp8=None))
    flops = flops_per_token(model, model.config, spec.length)
    return base, report.trainable_parameters, flops


def token_rows(length: int, rows: int) -> Tensor:
    """int64 [rows, length]: the standard library's sources, byte by byte, <eos> after each."""
    eos = 256 + SPECIALS.index("<eos>")
    tokens: list[int] = []
    for text in library_sources():
        tokens += [*text.encode(), eos]
        if len(tokens) >= rows * length:
            return torch.tensor(tokens[: rows * length]).view(rows, length)
    raise ValueError(
        f"the sources have {len(tokens)} tokens, {rows} rows of {length} were asked for"
    )
