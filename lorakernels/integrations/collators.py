# SPDX-License-Identifier: Apache-2.0
"""Give batches of packed documents equal shapes, which CUDA graphs need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


class FixedShapes:
    """Wraps a collator that packs all documents of a batch into one row, and gives every batch one shape.

        trainer = SFTTrainer(..., args=SFTConfig(packing=True, max_length=L, per_device_train_batch_size=B))
        trainer.data_collator = FixedShapes(trainer.data_collator, B * L, longest=L)

    It works with TRL's `padding_free`, which packing switches on. It also works with transformers'
    `DataCollatorWithFlattening(return_flash_attn_kwargs=True)`.

    The row is padded to `tokens` with documents that have no labels. `cu_seq_lens` is padded with empty documents to a
    multiple of `documents`. `seq_idx`, which layers of linear attention read, is left out.

    Args:
        collator: returns input_ids, labels and position_ids [1, T], and cu_seq_lens_q.
        tokens: tokens of each batch, at least as many as any batch has.
        longest: length of the longest document in tokens; `tokens` when None.
        documents: the number of documents of a batch is rounded up to a multiple of this.

    Raises:
        ValueError: an argument is not a positive integer, a batch or a document is too long, or a batch is not one
            row.
    """

    def __init__(
        self,
        collator: Callable[[Sequence[Any]], dict[str, Any]],
        tokens: int,
        *,
        longest: int | None = None,
        documents: int = 64,
    ) -> None:
        for name, value in (
            ("tokens", tokens),
            ("longest", longest or 1),
            ("documents", documents),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a positive integer, found {value!r}")
        self.collator, self.tokens = collator, tokens
        self.longest, self.documents = min(longest or tokens, tokens), documents

    def __call__(self, examples: Sequence[Any]) -> dict[str, Any]:
        batch = self.collator(examples)
        rows, starts = batch["input_ids"], batch.get("cu_seq_lens_q")
        if starts is None or rows.dim() != 2 or rows.shape[0] != 1:
            raise ValueError(
                f"the collator must pack documents into one row and return cu_seq_lens_q, found input_ids "
                f"{list(rows.shape)} and {sorted(batch)}"
            )
        tokens, longest = rows.shape[1], int(starts.diff().max())
        if tokens > self.tokens or longest > self.longest:
            raise ValueError(
                f"a batch must have at most {self.tokens} tokens and documents of {self.longest}, found {tokens} and "
                f"{longest}"
            )
        ends = [
            min(start + self.longest, self.tokens)
            for start in range(tokens, self.tokens, self.longest)
        ]
        starts = torch.cat([starts, starts.new_tensor(ends)])
        count = -(-(len(starts) - 1) // self.documents) * self.documents + 1
        starts = torch.cat([starts, starts.new_full((count - len(starts),), self.tokens)])
        made = {key: value for key, value in batch.items() if key != "seq_idx"}
        made["input_ids"] = self._padded(rows, 0)
        made["labels"] = self._padded(batch["labels"], -100)
        tail = (torch.arange(self.tokens - tokens) % self.longest)[None]
        made["position_ids"] = torch.cat([batch["position_ids"], tail.to(rows.dtype)], 1)
        made["cu_seq_lens_q"] = made["cu_seq_lens_k"] = starts
        made["max_length_q"] = made["max_length_k"] = self.longest
        return made

    def _padded(self, row: Tensor, value: int) -> Tensor:
        return torch.nn.functional.pad(row, (0, self.tokens - row.shape[1]), value=value)
