# SPDX-License-Identifier: Apache-2.0
"""Check that tokens and labels are in the vocabulary, and equal on ranks that must have the same rows.

A rank that raised alone would leave the others waiting. Ranks with different tokens would all get the same wrong loss.

On a CPU an embedding and a loss raise for an unknown number, and a check before them costs no wait. On a GPU an unknown
token is a device assertion, after which the process cannot go on, and a check makes the host wait. So values on a GPU
are compared in some calls only. A loader that gives ranks different rows does so from the first call.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lorakernels.parallel.tensor.head import IGNORE
from lorakernels.parallel.tensor.vocabulary import VocabularyEmbedding, VocabularyHead

EVERY = 64  # one of so many calls compares values on a GPU


class Turns:
    """Counts calls, in step on all ranks."""

    def __init__(self) -> None:
        self._calls = 0

    def next(self) -> bool:
        """Whether this call compares values on a GPU: the first one and each 64th after it, except in a capture."""
        self._calls += 1
        captured = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        return self._calls % EVERY == 1 and not captured


def digests(values: Mapping[str, Any], on_gpu: bool) -> dict[str, int]:
    """{name: a digest} of the tensors in `values` that hold integers or one number.

    Args:
        values: arguments of a call, by name. Others, such as `inputs_embeds`, are ignored.
        on_gpu: whether to read a GPU's tensors, for which the host waits.
    """
    return {
        name: _digest(x)
        for name, x in values.items()
        if isinstance(x, Tensor)
        and (x.numel() == 1 or not x.is_floating_point())
        and (on_gpu if x.is_cuda else x.device.type == "cpu")
    }


def digest_of(values: Mapping[str, int]) -> int:
    """One number for all `digests`."""
    return zlib.crc32(repr(sorted(values.items())).encode())


def check_values(said: list[dict[str, int]], whose: str) -> None:
    """Refuse ranks whose values differ from those of the first one.

    Args:
        said: the `digests` of each rank.
        whose: what these ranks do, after "all ranks that", such as "have stages".

    Raises:
        ValueError: it names what differs, and on which rank.
    """
    for rank, values in enumerate(said):
        both = said[0] | values
        if names := [name for name in both if values.get(name) != said[0].get(name)]:
            raise ValueError(
                f"all ranks that {whose} must have equal rows, found other values of {', '.join(names)} on rank {rank} "
                "than on rank 0: let a DistributedSampler divide the data over data-parallel ranks alone"
            )


def _digest(x: Tensor) -> int:
    flat = x.detach().reshape(-1)
    if x.is_cuda:
        places = torch.arange(1, len(flat) + 1, device=x.device)
        return int((flat.double().long() * places * places).sum())
    return zlib.crc32(flat.contiguous().view(torch.uint8).numpy().tobytes())


def vocabulary_of(model: Any) -> int:
    """How many tokens the embedding of a model of transformers knows; 0 if another rank has the embedding."""
    embedding = model.get_input_embeddings()
    weight = getattr(embedding, "weight", None)
    if weight is None:
        return 0
    split = isinstance(embedding, VocabularyEmbedding)
    return len(weight) * (embedding.ranks.size if split else 1)


def unknown(tokens: Tensor, vocabulary: int) -> Tensor:
    """bool []: whether one of `tokens` is not in [0, vocabulary)."""
    return ((tokens < 0) | (tokens >= vocabulary)).any()


def refuse_unknown(model: Any, tokens: Any, labels: Tensor | None = None) -> None:
    """Refuse tokens for which the model's embedding or head would raise. Nothing is read from a GPU.

    Args:
        model: a causal language model of transformers, or one rank's stages of it.
        tokens: int64 [B, S]; other types are ignored.
        labels: int64 [B, S] before the model's shift; IGNORE does not count.

    Raises:
        ValueError: one is outside of the vocabulary.
    """
    size = vocabulary_of(model)
    if size and _can_be_read(tokens) and unknown(tokens, size):
        raise ValueError(f"input_ids must be in [0, {size}), found {_ends(tokens)}")
    head = model.get_output_embeddings()
    weight = getattr(head, "weight", None)
    if weight is None or not _can_be_read(labels):
        return
    assert labels is not None
    counted = labels[:, 1:][labels[:, 1:] != IGNORE]
    most = len(weight) * (head.ranks.size if isinstance(head, VocabularyHead) else 1)
    if unknown(counted, most):
        raise ValueError(f"labels must be {IGNORE} or in [0, {most}), found {_ends(counted)}")


def _can_be_read(numbers: Any) -> bool:
    """Whether these are integers that the host can read without waiting for a device."""
    is_tensor = isinstance(numbers, Tensor) and numbers.device.type == "cpu"
    return is_tensor and numbers.dtype in (torch.int64, torch.int32)


def _ends(numbers: Tensor) -> str:
    least, most = numbers.aminmax()
    return f"{int(least)} to {int(most)}"
