# SPDX-License-Identifier: Apache-2.0
"""Where a rank's tokens lie: the rows of the masks that its adapters draw, and the documents of all ranks' rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lorakernels.modules.lora import LoRALinear
from lorakernels.parallel import comm
from lorakernels.parallel.context_attention import Chunks
from lorakernels.parallel.tensor_layers import OWN_ROWS, ColumnPart
from lorakernels.parallel.tensor_ranks import Ranks


class FirstRows:
    """Gives adapters their `row0` by the tokens that come: a rank's masks lie behind those of the ranks before it.

    It is asked wherever a layer runs, and so in a recomputation too, which may follow a forward of other rows.
    """

    def __init__(self, adapters: Sequence[LoRALinear], rank: int) -> None:
        self._adapters, self._rank, self._tokens = [*adapters], rank, 0

    def of(self, tokens: int) -> None:
        """The rank has `tokens` tokens in the call that begins."""
        if tokens != self._tokens:
            for adapter in self._adapters:
                adapter.row0 = tokens * self._rank
            self._tokens = tokens

    def before(self, adapter: nn.Module, args: tuple[Tensor, ...]) -> None:
        """A forward_pre_hook of an adapter, which may be split by tensor parallelism as well."""
        x: Tensor = getattr(args[0], OWN_ROWS, args[0])
        spread = 1
        if isinstance(adapter, ColumnPart) and adapter.ranks.sequence:
            spread = adapter.ranks.size
        self.of(x.shape[:-1].numel() * spread)


def check_places(
    ranks: Ranks, rows: Tensor, positions: Tensor, starts: Tensor | None, longest: int | None
) -> None:
    """Collective: refuse packed documents whose starts are not said. The host waits for the device.

    Args:
        ranks: who share the rows.
        rows: [B, S/n, …], this rank's tokens.
        positions: [1 or B, S/n], theirs.
        starts: int32 [N + 1], where documents begin among the B S tokens; None where each row is one.
        longest: tokens that no document may have more of; None stands for B S.

    Raises:
        ValueError: on all ranks, if on any: positions jump within a row without `starts`, or `starts` do not reach from
            the first token to the last, or a document is longer than `longest`.
    """
    chunks, batch = Chunks.of(ranks, rows.shape[1]), rows.shape[0]
    if (
        positions.dim() != 2
        or len(positions) not in (1, batch)
        or positions.shape[1] != rows.shape[1]
    ):
        raise ValueError(
            f"position_ids must be [1 or {batch}, {rows.shape[1]}] as this rank's tokens, found {list(positions.shape)}"
        )
    if starts is not None and (starts.dim() != 1 or starts.dtype != torch.int32 or len(starts) < 2):
        raise ValueError(
            f"cu_seq_lens_q must be int32 [documents + 1], found {starts.dtype} {list(starts.shape)}"
        )
    total = batch * chunks.length
    found = torch.zeros(2 * batch + 2, dtype=torch.int64, device=rows.device)
    if starts is None:
        at = positions.device
        plain = torch.cat([torch.arange(b, b + chunks.size, device=at) for b in chunks.begins])
        ahead = (positions - plain).expand(batch, -1)
        found[:batch], found[batch : 2 * batch] = ahead.amax(1), (-ahead).amax(1)
    else:
        found[-1] = (starts[0] != 0) | (starts[-1] != total) | (starts.diff() < 0).any()
        found[-2] = starts.diff().max() - (longest or total)
    comm.maximum(ranks.group, found)
    jumps = (found[:batch] != -found[batch : 2 * batch]).any()
    over, broken, jumped = torch.stack((*found[-2:], jumps.long())).tolist()
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
    if jumped:
        raise ValueError(
            "position_ids must go up by one from token to token of a row, found a jump: documents that are packed need "
            "cu_seq_lens_q, int32 [N + 1], where they begin among the tokens of all ranks"
        )
