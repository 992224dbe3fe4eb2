# SPDX-License-Identifier: Apache-2.0
"""torch's engine over a rank's stages: its stages and its 1F1B schedules, of torch.distributed.pipelining."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lorakernels.parallel.pipeline.stages import Sent, Stage
from lorakernels.parallel.ranks.group import Ranks


def engine(
    stages: Sequence[Stage], sent: Sent, ranks: Ranks, microbatches: int, trains: bool
) -> Any:
    """A schedule over this rank's stages. Making one is collective where they send by "peer".

    It passes shapes, because torch would run stages to find them, and so draw masks and record amaxes.

    Args:
        stages: this rank's stages.
        sent: the form of the tensors that stages send.
        ranks: the pipeline's, with equally many stages each.
        microbatches: of a step.
        trains: whether there is a backward.
    """
    from torch.distributed.pipelining import (
        PipelineStage,
        Schedule1F1B,
        ScheduleInterleaved1F1B,
    )

    rows = torch.empty(sent.shape[:2], dtype=torch.int64, device="meta")
    hidden = torch.empty(sent.shape, dtype=sent.dtype, device="meta", requires_grad=trains)
    loss = torch.empty(1, device="meta")
    kind: Callable[..., PipelineStage] = PipelineStage
    if sent.by == "peer" and ranks.size > 1:
        from lorakernels.parallel.pipeline.peers import PeerPost, PeerStage

        count = (1 + trains) * len(stages) * microbatches
        kind = partial(PeerStage, PeerPost(ranks.group, sent, count), microbatches)
    made = [
        kind(
            stage,
            stage.index,
            len(stages) * ranks.size,
            sent.device,
            input_args=rows if stage.is_first else hidden,
            output_args=loss if stage.is_last else hidden,
            group=ranks.group,
        )
        for stage in stages
    ]
    # the losses are divided by the labels of all microbatches already
    options: dict[str, Any] = {"loss_fn": _as_it_is if trains else None, "scale_grads": False}
    if len(made) == 1:
        return Schedule1F1B(made[0], microbatches, **options)
    return ScheduleInterleaved1F1B([*made], microbatches, **options)


@contextmanager
def as_it_was() -> Iterator[None]:
    """torch replaces a stage's exception by one that lists shapes. Raise the original one."""
    try:
        yield
    except RuntimeError as error:
        if error.__cause__ is not None and "failed to run forward" in str(error):
            raise error.__cause__ from None
        raise


def _as_it_is(loss: Tensor, microbatch: Tensor) -> Tensor:
    """The last stage's output, for torch to run backward from."""
    return loss
