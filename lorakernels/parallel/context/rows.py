# SPDX-License-Identifier: Apache-2.0
"""A rank's tokens of whole rows: its chunks, the rows of its adapters' dropout masks, and the ends of documents.

This file also checks the rows of a rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lorakernels.modules.linear.lora import LoRALinear
from lorakernels.parallel.context.attention import Chunks
from lorakernels.parallel.ranks import comm
from lorakernels.parallel.ranks.group import Ranks
from lorakernels.parallel.tensor.head import IGNORE
from lorakernels.parallel.tensor.known_tokens import unknown
from lorakernels.values import RowChunks

NO_MASK = "attention_mask must be None over ranks: pass cu_seq_lens_q, or pad rows on the right"


def chunks_of(ranks: Ranks, whole: Tensor) -> Chunks:
    """This rank's chunks of whole rows [B, S, …].

    Raises:
        ValueError: S is no positive multiple of twice the number of ranks.
    """
    pieces = 2 * ranks.size
    if whole.dim() < 2 or whole.shape[1] % pieces or not whole.shape[1]:
        raise ValueError(
            f"rows over {ranks.size} ranks must have a positive multiple of {pieces} tokens, found "
            f"{tuple(whole.shape)}: pad them, with labels of {IGNORE}"
        )
    return Chunks.of(ranks, whole.shape[1] // ranks.size)


def to_document_end(chunks: Chunks, batch: int, starts: Tensor | None, device: Any) -> Tensor:
    """int64 [1 or B, S/n]: how many tokens follow in the document of each of this rank's tokens, itself included.

    The host waits for nothing. A document ends with its row.

    Args:
        chunks: this rank's chunks.
        batch: B.
        starts: int32 [N + 1], where documents begin among the B S tokens; None if each row is one document.
        device: of the result.
    """
    columns = [torch.arange(b, b + chunks.size, device=device) for b in chunks.begins]
    column = torch.cat(columns)[None]
    to_row_end = chunks.length - column
    if starts is None:
        return to_row_end
    flat = column + torch.arange(batch, device=device)[:, None] * chunks.length
    after = torch.searchsorted(starts.long(), flat, right=True).clamp(max=len(starts) - 1)
    return torch.minimum(starts[after] - flat, to_row_end)


class OwnChunks:
    """Sets the `chunks` of adapters, so that a token gets the dropout mask that a single process would draw for it.

    It is called whenever a layer runs: a recomputation may follow a forward of other rows.
    """

    def __init__(self, adapters: Sequence[LoRALinear], ranks: Ranks) -> None:
        self._adapters, self._rank, self._ranks, self._tokens = (
            [*adapters],
            ranks.rank,
            ranks.size,
            0,
        )

    def of(self, tokens: int) -> None:
        """A call begins in which this rank has `tokens` tokens of each row."""
        if tokens != self._tokens:
            for adapter in self._adapters:
                adapter.chunks = RowChunks(self._rank, self._ranks, tokens // 2)
            self._tokens = tokens

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A forward_pre_hook for modules that take [B, tokens, …].

        Under tensor parallelism an attention module gets a stand-in of that shape (tensor/rows.py).
        """
        x: Tensor = args[0] if args else kwargs["hidden_states"]
        self.of(x.shape[1])


def objection(rows: Tensor, inputs: dict[str, Any]) -> str:
    """Why a model whose rows are over ranks cannot be called so; "" if it can.

    Args:
        rows: [B, S/n, …], this rank's tokens.
        inputs: the other arguments of the call.
    """
    if rows.dim() < 2:
        return f"rows must be [B, S/n] or [B, S/n, H], found {list(rows.shape)}"
    if inputs.get("position_ids") is None:
        return "position_ids must be given: the model sees this rank's tokens, ContextParallel.shard(positions)"
    if inputs.get("attention_mask") is not None:
        return NO_MASK
    if rows.shape[1] % 2 or not rows.shape[1]:
        return f"a rank has two chunks of a row, found {rows.shape[1]} tokens: cut rows by ContextParallel.shard"
    return ""


class Limits(NamedTuple):
    """Limits for the rows of a call.

    Attributes:
        longest: the most tokens of a document; None stands for B S.
        vocabulary: the size of the vocabulary if rows are tokens, else 0.
        dynamic: the most tokens of a document under dynamic RoPE; 0 without it.
    """

    longest: int | None = None
    vocabulary: int = 0
    dynamic: int = 0


def too_long_for_dynamic(most: int, tokens: int) -> str:
    """The message for a document of more than `most` tokens under dynamic RoPE."""
    return (
        f"a document may have at most {most} tokens over ranks, max_position_embeddings, found {tokens}: dynamic RoPE "
        "has other angles for each longer length, and a rank has only its own tokens"
    )


def refuse_long(most: int, length: int, inputs: dict[str, Any]) -> None:
    """Raise ValueError if rows of `length` tokens may have a document of more than `most` tokens."""
    if inputs.get("cu_seq_lens_q") is not None:
        length = min(length, int(inputs.get("max_length_q") or length))
    if length > most:
        raise ValueError(too_long_for_dynamic(most, length))


def check_places(
    ranks: Ranks,
    rows: Tensor,
    positions: Tensor | None,
    starts: Tensor | None,
    limits: Limits,
    objection: str = "",
) -> None:
    """Collective: refuse packed documents without `starts`, and wrong `starts`. The host waits for the device, once.

    One all-reduce of fourteen numbers decides for all ranks, whatever shapes they have.

    Args:
        ranks: the ranks that share the rows.
        rows: [B, S/n, …], this rank's tokens.
        positions: [1 or B, S/n], their positions.
        starts: int32 [N + 1], where documents begin among the B S tokens; None if each row is one document.
        limits: of the call.
        objection: this rank's objection so far; "" if there is none.

    Raises:
        ValueError: on all ranks, if one rank has an `objection`, a wrong shape or dtype, a token outside of the
            vocabulary, or a document that is longer than the limits; or if the ranks' rows differ in shape, only some
            have `starts`, positions jump within a row without `starts`, or `starts` do not reach from the first token
            to the last.
    """
    longest, vocabulary, dynamic = limits
    objection = objection or _misfit(rows, positions, starts, longest)
    batch, tokens, packed = (0, 0, False) if objection else (*rows.shape[:2], starts is not None)
    total = batch * tokens * ranks.size
    maxima = torch.zeros(14, dtype=torch.int64, device=rows.device)
    shape = torch.tensor((bool(objection), batch, tokens, packed, -batch, -tokens, -packed))
    maxima[:7].copy_(shape, non_blocking=True)  # assigning Python numbers would wait for the device
    if not objection:
        assert positions is not None
        maxima[7:12] = _unfit(ranks, rows, positions, starts, longest or total)
        if vocabulary:
            maxima[12] = unknown(rows, vocabulary)
        if dynamic:
            maxima[13] = positions.max() + 1
    comm.maximum(ranks.group, maxima)
    on_any, *shapes, offsets, negated, jumped, over, broken, outside, most_of_one = maxima.tolist()
    if on_any:
        with comm.together(ranks.group):
            if objection:
                raise ValueError(objection)
    most, least = shapes[:3], [-x for x in shapes[3:]]
    if most != least:
        raise ValueError(
            f"all ranks must have as many rows and tokens, and cu_seq_lens_q on all or on none; found "
            f"{[batch, tokens]} {'with' if packed else 'without'} cu_seq_lens_q on rank {ranks.rank}, and ranks with "
            f"{least[:2]} to {most[:2]}"
        )
    if outside:
        raise ValueError(f"input_ids must be in [0, {vocabulary}) on all ranks, found others")
    if broken:
        ends = "None" if starts is None else f"{int(starts[0])} to {int(starts[-1])}"
        raise ValueError(
            f"cu_seq_lens_q must go up from 0 to all {total} tokens of {batch} rows over {ranks.size} ranks, found "
            f"{ends}: let padding be a document of its own"
        )
    if over > 0:
        raise ValueError(
            f"max_length_q must be at least the tokens of each document in cu_seq_lens_q, found {longest} for one of "
            f"{(longest or total) + over}"
        )
    if jumped or offsets != -negated:
        raise ValueError(
            "position_ids must go up by one from token to token of a row, found a jump: documents that are packed need "
            "cu_seq_lens_q, int32 [N + 1], where they begin among the tokens of all ranks"
        )
    if most_of_one > dynamic:
        raise ValueError(too_long_for_dynamic(dynamic, most_of_one))


def _misfit(rows: Tensor, positions: Any, starts: Any, longest: Any) -> str:
    """Why shapes and dtypes do not fit; "" if they do. The device is not read."""
    batch, tokens = rows.shape[:2]
    expected = f"position_ids must be [1 or {batch}, {tokens}] as this rank's tokens"
    if not isinstance(positions, Tensor):
        return f"{expected}, found {type(positions).__name__}"
    if positions.dim() != 2 or len(positions) not in (1, batch) or positions.shape[1] != tokens:
        return f"{expected}, found {list(positions.shape)}"
    if starts is not None and not isinstance(starts, Tensor):
        return f"cu_seq_lens_q must be int32 [documents + 1], found {type(starts).__name__}"
    if starts is not None and (starts.dim() != 1 or starts.dtype != torch.int32 or len(starts) < 2):
        return f"cu_seq_lens_q must be int32 [documents + 1], found {starts.dtype} {list(starts.shape)}"
    whole = isinstance(longest, int | None)
    if isinstance(longest, Tensor):
        whole = longest.numel() == 1 and not longest.is_floating_point()
    if not whole:
        return f"max_length_q must be an integer, found {longest!r}"
    return ""


def _unfit(
    ranks: Ranks, rows: Tensor, positions: Tensor, starts: Tensor | None, longest: int
) -> Tensor:
    """int64 [5]: five measures of wrong positions or starts; the largest over the ranks decides.

    They are a digest of the offset of positions to the tokens' indices in their rows, and its negative; whether
    positions jump between this rank's tokens; by how much a document is too long; and whether `starts` are broken.
    """
    measures = torch.zeros(5, dtype=torch.int64, device=rows.device)
    chunks, batch = Chunks.of(ranks, rows.shape[1]), rows.shape[0]
    if starts is None:
        device = positions.device
        plain = torch.cat([torch.arange(b, b + chunks.size, device=device) for b in chunks.begins])
        offsets = (positions - plain).expand(batch, -1)
        first = offsets[:, 0].long()
        # equal weights on all ranks, so that other offsets have another sum
        weights = torch.randint(2**40, (batch,), generator=torch.Generator().manual_seed(0))
        digest = (first * weights.to(device, non_blocking=True)).sum()
        measures[0], measures[1] = digest, -digest
        measures[2] = (offsets != first[:, None]).any()
    else:
        lengths = starts.diff()
        measures[3] = lengths.max() - longest
        ends = (starts[0] != 0) | (starts[-1] != batch * chunks.length)
        measures[4] = ends | (lengths < 0).any()
    return measures
