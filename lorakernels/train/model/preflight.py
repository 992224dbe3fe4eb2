# SPDX-License-Identifier: Apache-2.0
"""Check options and model against config.json before a weight is read.

The model is built on PyTorch's meta device, without memory, and gets its adapters there. Options that do not fit the
model, and models that this job cannot train, stop the run within seconds. `check_model` checks by computing, later.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lorakernels import LoRAConfig, apply_lora, check_export
from lorakernels.train.data.tokens import TokenFile
from lorakernels.train.errors import ModelError, OptionError
from lorakernels.train.files.written import MERGED
from lorakernels.train.model.disk import TrainedSize
from lorakernels.train.model.model import attention_of, decoder_and_head, quiet_transformers
from lorakernels.train.options.options import FinetuneOptions

RECURRENT = {"linear_attention", "mamba", "mamba2", "conv", "recurrent", "rwkv"}


def check_before_loading(
    directory: Path, options: FinetuneOptions, lora: LoRAConfig, say: Callable[[str], None]
) -> tuple[Any, TrainedSize]:
    """Check what the model's config alone shows, and report through `say`. Returns the config of the model's text
    part, and what will be trained.

    Raises:
        OptionError: an option does not fit this model.
        ModelError: this job cannot train the model, or not correctly.
    """
    config = read_config(directory)
    text = config.get_text_config()
    check_length(text, options.seq_len)
    if options.isolate_documents:
        _check_layers(text)
    _check_divides(text, options.tp)
    model = build_on_meta(config)
    decoder_and_head(model)
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            apply_lora(model, replace(lora, fp8=None))
    except ValueError as error:
        raise OptionError(str(error)) from error
    except TypeError as error:
        if isinstance(lora.target_modules, str):  # all-linear: the model is at fault
            raise ModelError(f"{type(model).__name__} cannot be adapted: {error}") from error
        raise OptionError(str(error)) from error
    for warning in warned:
        if issubclass(warning.category, UserWarning):
            say(str(warning.message))
    _check_head(model, options)
    merged = _check_merge(directory, options)
    if experts := _experts(model):
        say(experts)
    adapters = [p for p in model.parameters() if p.requires_grad]
    return text, TrainedSize(sum(p.numel() for p in adapters), len(adapters), merged)


def read_config(directory: Path) -> Any:
    transformers = quiet_transformers()
    try:
        return transformers.AutoConfig.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # transformers raises many kinds
        raise ModelError(
            f"{directory / 'config.json'} is not one that transformers {transformers.__version__} reads, and no code "
            f"from the directory is run: {type(error).__name__}: {_first_sentence(error)}"
        ) from error


def build_on_meta(config: Any) -> Any:
    """The model that `load_model` would build, on the meta device, without memory."""
    transformers = quiet_transformers()
    config.__dict__.pop("quantization_config", None)  # a block-FP8 checkpoint has one
    try:
        with torch.device("meta"):
            return transformers.AutoModelForCausalLM.from_config(
                config, attn_implementation=attention_of(config)
            )
    except Exception as error:  # transformers raises many kinds
        raise ModelError(
            f"{config.model_type} models cannot be trained here, as causal LMs over torch's "
            f"scaled_dot_product_attention: {_first_sentence(error)}"
        ) from error


def check_length(config: Any, seq_len: int) -> None:
    limit = getattr(config, "max_position_embeddings", None)
    if limit and seq_len > limit:
        raise OptionError(
            f"seq_len must be at most {limit}, the model's max_position_embeddings, got {seq_len}"
        )


def check_vocabulary(config: Any, files: Iterable[TokenFile]) -> None:
    """Raise ModelError for a token that the model of `config` has no embedding for: a GPU would only assert."""
    for file in files:
        token, vocabulary = file.max_token, config.vocab_size
        if token >= vocabulary:
            raise ModelError(
                f"{file.place_of(token)}: the tokenizer makes token {token}, the model knows {vocabulary}: they do not "
                "belong together"
            )


def _check_layers(config: Any) -> None:
    if recurrent := RECURRENT & set(getattr(config, "layer_types", None) or ()):
        raise ModelError(
            f"{config.model_type} has recurrent layers ({', '.join(sorted(recurrent))}), in which documents packed "
            "into a row would see each other: finetune cannot train it correctly; --no-isolate-documents takes a row "
            "as one sequence"
        )


def _check_divides(config: Any, tp: int) -> None:
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        size = getattr(config, name, None)
        if size and size % tp:
            raise OptionError(f"tp must divide the model's {name}, {size}, got {tp}")


def _check_head(model: Any, options: FinetuneOptions) -> None:
    head = model.get_output_embeddings()
    if options.fp8_head and type(head) is not nn.Linear:
        raise OptionError(
            f"fp8_head multiplies by a plain frozen head, found {type(head).__name__}: drop one of them"
        )


def _check_merge(directory: Path, options: FinetuneOptions) -> int:
    """Returns the merged model's bytes, 0 if none is asked for."""
    if options.merge is None:
        return 0
    try:
        return check_export(directory, Path(str(options.output)) / MERGED, format=options.merge)
    except ValueError as error:
        raise OptionError(f"merge: {error}") from error


def _experts(model: nn.Module) -> str | None:
    """A sentence about expert matrices that are one parameter for all experts; None if there are none.

    No linear layer holds such a parameter, so it gets no adapter and stays out of FP8.
    """
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    experts = [n for n, p in model.named_parameters() if p.ndim == 3 and "expert" in n]
    if not experts:
        return None
    held = sum(sizes[name] for name in experts)
    return (
        f"{type(model).__name__} is a mixture of experts: {held:,} of its {sum(sizes.values()):,} parameters are those "
        "of experts, which get no adapter and are not held in FP8; the layers around them are trained. "
        "--target-parameters adapts experts"
    )


def _first_sentence(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text.split(". ")[0].rstrip(".")
