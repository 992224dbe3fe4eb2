# SPDX-License-Identifier: Apache-2.0
"""A model of transformers without memory for its weights, as `load_quantized` fills it."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


def config_of(source: Any, config: Any) -> Any:
    """A copy of `config`, or what the directory `source` has.

    Raises:
        ValueError: there is neither.
        FileNotFoundError: the directory has no config.json.
    """
    if config is not None:
        return copy.deepcopy(config)
    if not isinstance(source, (str, Path)):
        raise ValueError("config must be given for a source that is not a directory, found None")
    import transformers

    if not (Path(source) / "config.json").is_file():
        raise FileNotFoundError(f"{source} has no config.json: give config")
    return transformers.AutoConfig.from_pretrained(
        source, local_files_only=True, trust_remote_code=False
    )


class _LargeOnMeta(TorchFunctionMode):
    """Allocates no memory for `torch.empty`, from which linear and embedding layers take their weights.

    Computed tensors, such as rotary frequencies and the ones of norms, are real.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty and kwargs.get("device") is None:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def build(config: Any, model_class: Any, dtype: torch.dtype, attention: str | None) -> Any:
    """The model in eval mode, its linear layers and embeddings on the meta device.

    Raises:
        ValueError: transformers knows no causal LM of `config`, and there is no `model_class`.
    """
    make = model_class or causal_lm(config, "give load_quantized a model_class")
    build = make.from_config if hasattr(make, "from_config") else make._from_config
    random = torch.get_rng_state()
    options = {} if attention is None else {"attn_implementation": attention}
    with _LargeOnMeta():
        model = build(config, dtype=dtype, **options)
    torch.set_rng_state(random)
    _keep_in_fp32(model, dtype)
    return model.eval()


def causal_lm(config: Any, cure: str) -> Any:
    """transformers' AutoModelForCausalLM.

    Raises:
        ValueError: it has no model for `config`; the message says `cure`.
    """
    import transformers

    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(
            f"transformers has no causal LM of a {type(config).__name__} (model_type {config.model_type!r}), as of "
            f"some models with towers: {cure}"
        )
    return transformers.AutoModelForCausalLM


def _keep_in_fp32(model: Any, dtype: torch.dtype) -> None:
    """Hold in fp32 what the model's class wants so, such as DeepSeek-V3's e_score_correction_bias."""
    strict = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    others = getattr(model, "_keep_in_fp32_modules", None) or ()
    names = (*strict, *others) if dtype == torch.float16 else strict
    wanted = [name.replace("*", ".*") for name in names]
    if dtype not in (torch.float16, torch.bfloat16) or not wanted:
        return
    for path, tensor in model.state_dict(keep_vars=True).items():
        if tensor.is_floating_point() and any(re.search(name, path) for name in wanted):
            owner, _, leaf = path.rpartition(".")
            module = model.get_submodule(owner)
            if leaf in module._parameters:
                kept = torch.nn.Parameter(tensor.detach().float(), tensor.requires_grad)
                module._parameters[leaf] = kept
            else:
                module._buffers[leaf] = tensor.float()


def read_generation_config(model: Any, source: Any) -> None:
    """Read generation_config.json as from_pretrained does.

    Without the file, the model keeps the generation config made of its own config.
    """
    import transformers

    name = transformers.utils.GENERATION_CONFIG_NAME
    there = isinstance(source, (str, Path)) and (Path(source) / name).is_file()
    if not there or not model.can_generate():
        return
    try:
        model.generation_config = transformers.GenerationConfig.from_pretrained(
            source, local_files_only=True
        )
    except OSError as error:
        raise ValueError(f"{Path(source) / name} cannot be read: {error}") from error
