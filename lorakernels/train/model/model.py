# SPDX-License-Identifier: Apache-2.0
"""Load and check a causal LM and its tokenizer from a directory. Nothing is downloaded, and no code from it is run."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.utils.deterministic
from torch import Tensor, nn

from lorakernels import BaseFiles, ContextParallel, change_of_logits, load_quantized
from lorakernels.train.data.packing import PackedBatch, attention_mask
from lorakernels.train.errors import ModelError, OptionError, require
from lorakernels.train.model.folder import why_no_model
from lorakernels.train.model.loss import chunked_cross_entropy
from lorakernels.train.options.options import FinetuneOptions
from lorakernels.train.progress import Observer, nobody
from lorakernels.train.ranks.ranks import RunRanks

MASKLESS = "lorakernels_maskless_sdpa"  # transformers' sdpa under a name for which it makes no mask
# The first is CUDA's, the second is what torch calls it from 2.9 on
ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


def pick_device(name: str, ranks: RunRanks = RunRanks()) -> torch.device:  # noqa: B008  (frozen)
    """The device called ``name``. With several ranks, "auto" and "cuda" are the GPU of this rank.

    Raises:
        OptionError: there is no such device.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if ranks.size > 1 and name == "cuda":
        name = f"cuda:{ranks.local}"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise OptionError(f"device must be auto, cpu, cuda or cuda:N, got {name!r}") from error
    if device.type not in ("cpu", "cuda"):
        raise OptionError(f"device must be auto, cpu, cuda or cuda:N, got {name!r}")
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            raise OptionError(f"device {name} was asked for, this machine has {count} CUDA devices")
        return torch.device("cuda", device.index or 0)
    return device


@contextlib.contextmanager
def reproducible(wanted: bool) -> Iterator[None]:
    """Use PyTorch's deterministic kernels inside the context.

    cuDNN's attention is then off, and sums are added in one order.
    """
    if not wanted or not torch.cuda.is_available():
        yield
        return
    # cuBLAS reads this variable at its first use.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled()
    memory: Any = torch.utils.deterministic
    fill = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        memory.fill_uninitialized_memory = fill


def keep_large_blocks_whole() -> None:
    """Tell CUDA's allocator not to split blocks of more than 64 MiB, for layers that fill the GPU up to a budget.

    Split blocks leave pieces in which no layer's tensors fit: 5 GiB of an H200's memory with Llama-2-70B. torch reads
    the variable at its first allocation. What the user has set stays.
    """
    if not any(name in os.environ for name in ALLOCATOR):
        os.environ[ALLOCATOR[0]] = "max_split_size_mb:64"


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def check_directory(directory: Path) -> None:
    """Check that a model directory has everything it needs, before anything of it is loaded.

    Raises:
        ModelError: a file is missing or broken, or the directory holds an adapter.
    """
    if (why := why_no_model(directory)) is not None:
        raise ModelError(why)
    config = directory / "config.json"
    try:
        json.loads(config.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{config} is not JSON: {error}") from error
    if (directory / "adapter_config.json").exists():
        raise ModelError(
            f"{directory} holds an adapter (adapter_config.json), which transformers would put under the new "
            "one: give the plain base's directory, or merge the adapter first"
        )
    if not any((directory / name).is_file() for name in TOKENIZER_FILES):
        raise ModelError(
            f"model directory {directory} has no tokenizer (none of {', '.join(TOKENIZER_FILES)})"
        )
    _base_files(directory)


def _base_files(directory: Path) -> BaseFiles:
    try:
        return BaseFiles(directory)
    except (ValueError, OSError) as error:
        raise ModelError(str(error)) from error


def quiet_transformers() -> Any:
    transformers = require("transformers")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


def load_tokenizer(directory: Path) -> Any:
    transformers = quiet_transformers()
    try:
        return transformers.AutoTokenizer.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # transformers raises many kinds
        raise ModelError(
            f"the tokenizer of {directory} cannot be loaded: {type(error).__name__}: {error}"
        ) from error


def attention_of(config: Any) -> str:
    """transformers' attention for a model of this config: its own formula where scores are capped, else torch's."""
    capped = getattr(config.get_text_config(), "attn_logit_softcapping", None)
    return "sdpa" if capped is None else "eager"


def load_model(
    directory: Path,
    dtype: torch.dtype,
    device: torch.device,
    say: Callable[[str], None] | None = None,
    progress: Observer = nobody,
) -> nn.Module:
    """The base model in ``dtype`` on ``device``, by transformers.

    Every tensor must come from the directory, and every tensor there must be used. ``say`` reports tensors
    that transformers leaves out by its own lists. ``progress`` reports the bytes read of a base in block FP8.

    Raises:
        ModelError: a tensor is missing or has no place, or the model cannot be loaded.
    """
    transformers = quiet_transformers()
    check_directory(directory)
    files = _base_files(directory)
    local: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    try:
        config = transformers.AutoConfig.from_pretrained(directory, **local)
        attention = attention_of(config)
        why_not = ""
        if files.fp8:
            loaded = _dequantized(directory, dtype, device, attention, say, progress)
            if isinstance(loaded, nn.Module):
                return loaded
            why_not = loaded
        _declare(files, config, why_not)
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            directory,
            config=config,
            dtype=dtype,
            **local,
            use_safetensors=True,
            attn_implementation=attention,
            output_loading_info=True,
        )
    except ModelError:
        raise
    except Exception as error:  # transformers raises many kinds
        raise ModelError(
            f"the model in {directory} cannot be loaded: {type(error).__name__}: {error}"
        ) from error
    if info["missing_keys"]:
        raise ModelError(
            f"{directory} lacks tensors of its model: {', '.join(sorted(info['missing_keys'])[:5])}"
        )
    try:
        gone = files.left_out(model, config, info["unexpected_keys"])
    except ValueError as error:
        raise ModelError(f"{directory}: {error}") from error
    if gone and say is not None:
        say(not_read(gone))
    model.config.use_cache = False
    placed: nn.Module = model.to(device)
    return placed


def _declare(files: BaseFiles, config: Any, why_not: str) -> None:
    """Let transformers dequantize, after it was refused tensor by tensor."""
    try:
        files.declare(config)
    except ValueError as error:
        raise ModelError(f"{why_not}; nor can transformers dequantize it: {error}") from error


def _dequantized(
    directory: Path,
    dtype: torch.dtype,
    device: torch.device,
    attention: str,
    say: Callable[[str], None] | None,
    progress: Observer,
) -> nn.Module | str:
    """A base in block FP8 in ``dtype``, tensor by tensor; why not, if that is refused before a value is read.

    Raises:
        ModelError: a value cannot be used.
    """
    began = False

    def read(done: int, total: int) -> None:
        nonlocal began
        began = True
        progress(done, total)

    try:
        loaded: Any = load_quantized(
            directory,
            device=device,
            dtype=dtype,
            frozen="plain",
            attn_implementation=attention,
            progress=read,
        )
    except (ValueError, TypeError, OSError) as error:
        if began:
            raise ModelError(f"the model in {directory} cannot be loaded: {error}") from error
        if say is not None:
            say(f"dequantized by transformers instead of tensor by tensor: {error}")
        return str(error)
    if loaded.left_out and say is not None:
        say(not_read(loaded.left_out))
    loaded.model.config.use_cache = False
    model: nn.Module = loaded.model
    return model


def not_read(names: Sequence[str]) -> str:
    """The sentence of a report about tensors that were left out."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"not read, since the model does not compute with them: {', '.join(names[:3])}{more}"


def save_activations(model: Any) -> None:
    """Switch on gradient checkpointing, under the name that the installed transformers gives it."""
    enable = (
        getattr(model, "activation_checkpointing_enable", None)
        or model.gradient_checkpointing_enable
    )
    enable({"use_reentrant": False})


def decoder_and_head(model: Any) -> tuple[nn.Module, nn.Module]:
    """The module that makes hidden states and the module that turns them into logits.

    Raises:
        ModelError: the model is not a decoder with an output head.
    """
    decoder, head = getattr(model, model.base_model_prefix, None), model.get_output_embeddings()
    if decoder is None or head is None or decoder is model:
        raise ModelError(f"{type(model).__name__} is not a decoder with an output head on top")
    return decoder, head


def hidden_states(model: Any, batch: PackedBatch, isolate: bool = True) -> Tensor:
    """Hidden states [B, T, H] of a packed batch.

    Documents in a row do not see each other, unless ``isolate`` is False. In that case a row is one causal sequence.
    Where ranks share rows (layouts/context.py), the batch says it.
    Its padding is at the end, where no token before it sees it.
    """
    decoder, _ = decoder_and_head(model)
    if ContextParallel.of(model) is not None:
        output = decoder(input_ids=batch.input_ids, use_cache=False, **places_over_ranks(batch))
    elif isolate:
        output = decoder(input_ids=batch.input_ids, use_cache=False, **places_of(decoder, batch))
    else:
        with no_mask(decoder, batch.input_ids.shape[1]):
            output = decoder(input_ids=batch.input_ids, use_cache=False)
    hidden: Tensor = output.last_hidden_state
    return hidden


@contextlib.contextmanager
def no_mask(decoder: Any, tokens: int = 0) -> Iterator[None]:
    """Inside the context, layers get no mask, and attention is causal by its flag, which every fast kernel accepts.

    Otherwise transformers looks for documents in the positions, and waits for the device to do so. Under stream
    capture it cannot look, and makes a mask [B, 1, T, T] instead. It makes no mask for an attention that it has no
    mask for. Rows of more ``tokens`` than a sliding window keep its mask.
    """
    config = decoder.config
    if config._attn_implementation != "sdpa" or window_of(config, tokens) is not None:
        yield
        return
    functions = require("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS
    if MASKLESS not in functions:
        functions.register(MASKLESS, functions["sdpa"])
    config._attn_implementation = MASKLESS
    try:
        yield
    finally:
        config._attn_implementation = "sdpa"


def window_of(config: Any, tokens: int) -> int | None:
    """The sliding window of some layers' attention where it is shorter than ``tokens``."""
    window: int | None = getattr(config.get_text_config(), "sliding_window", None)
    return window if window and 0 < window < tokens else None


def places_of(decoder: Any, batch: PackedBatch) -> dict[str, Any]:
    """The arguments that say where tokens are, and keep packed documents apart.

    Fused layers get the starts of the documents; their attention then computes nothing between documents. Other layers
    get a mask [B, 1, T, T], which "eager" adds to the scores. Where a document may be longer than a sliding window,
    transformers makes the masks of each kind of layer by the positions.
    """
    if window_of(decoder.config, batch.longest or batch.input_ids.shape[1]) is not None:
        return {"position_ids": batch.positions}
    if batch.starts is None or not takes_starts(decoder, batch.input_ids):
        mask = attention_mask(batch.segments)
        if _is_eager(decoder):
            dtype = _dtype(decoder, decoder.get_input_embeddings())
            least = torch.finfo(dtype).min
            mask = torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, least)
        return {"position_ids": batch.positions, "attention_mask": mask}
    # No layer reads this 4-D mask. It keeps transformers from looking for documents, which would wait for the device.
    unread = batch.starts.new_ones(1, 1, 1, 1, dtype=torch.bool)
    return {
        "position_ids": batch.positions,
        "attention_mask": unread,
        "cu_seq_lens_q": batch.starts,
        "max_length_q": batch.longest or batch.input_ids.shape[1],
    }


def places_over_ranks(batch: PackedBatch) -> dict[str, Any]:
    """Arguments with the positions of this rank's tokens, where ranks share rows. Starts count in whole rows."""
    where: dict[str, Any] = {"position_ids": batch.positions, "cu_seq_lens_q": batch.starts}
    if batch.starts is not None and batch.longest is not None:
        where["max_length_q"] = batch.longest
    return where


def _is_eager(decoder: Any) -> bool:
    """Whether a mask is added to attention's scores."""
    return getattr(getattr(decoder, "config", None), "_attn_implementation", None) == "eager"


def takes_starts(decoder: Any, like: Tensor) -> bool:
    """True if fused layers have flash attention of variable lengths on ``like``'s device.

    Elsewhere they would turn the starts into a mask of all rows, as they do where scores are capped.
    """
    halves = (torch.bfloat16, torch.float16)
    plain = not _is_eager(decoder)
    return (
        is_fused(decoder)
        and plain
        and like.is_cuda
        and _dtype(decoder, decoder.embed_tokens) in halves
    )


def is_fused(decoder: Any) -> bool:
    """Whether it has fused layers."""
    layers = getattr(decoder, "layers", None) or [decoder]
    return any("FusedDecoderLayer" in {kind.__name__ for kind in type(m).__mro__} for m in layers)


def _dtype(decoder: Any, embedding: Any) -> torch.dtype:
    """The dtype of hidden states. In a stage without the embedding, the norms have it."""
    weight = getattr(embedding, "weight", None)
    if weight is None:
        frozen = (p for p in decoder.parameters() if p.is_floating_point() and not p.requires_grad)
        weight = next(p for p in frozen if p.element_size() > 1)
    dtype: torch.dtype = weight.dtype
    return dtype


def summed_loss(model: Any, batch: PackedBatch, chunk: int, isolate: bool = True) -> Tensor:
    """Sum of the token losses of a batch, an fp32 scalar."""
    _, head = decoder_and_head(model)
    hidden = hidden_states(model, batch, isolate).flatten(0, 1)
    labels, change = batch.labels.flatten(), change_of_logits(model.config.get_text_config())
    return chunked_cross_entropy(hidden, head, labels, chunk, change=change)


def mean_loss(
    model: Any,
    batch: PackedBatch,
    options: FinetuneOptions,
    items: Tensor,
    head8: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """The loss of a microbatch: the sum of its token losses divided by ``items``, the number of tokens in the whole
    step. ``head8`` is what `quantize_head` made of the output head's weight, where FP8 multiplies.

    Returns an fp32 scalar on the batch's device.
    """
    _, head = decoder_and_head(model)
    hidden = hidden_states(model, batch, options.isolate_documents).flatten(0, 1)
    labels, change = batch.labels.flatten(), change_of_logits(model.config.get_text_config())
    return chunked_cross_entropy(hidden, head, labels, options.loss_chunk, items, head8, change)
