# SPDX-License-Identifier: Apache-2.0
"""All scales of a model from their amax histories, both directions in one launch (csrc/ops/amax_and_scale_update).

forward, backward fp32 [L + 1, n]: rows 0…L−1 the amax history of n tensors, row L their scales; `current` fp32 [2n] or
None. It reads and writes each state once where PyTorch's form needs a dozen launches. The rules are
`reference.amax_and_scale_update`'s.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lorakernels import checks, reference
from lorakernels.device import capability_of, extension, why_not_csrc
from lorakernels.kernels.pointers import stream


def amax_and_scale_update(
    forward: Tensor,
    backward: Tensor,
    current: Tensor | None,
    gated: bool,
    fp8_max_forward: float,
    fp8_max_backward: float,
    margin: int,
    most_recent: bool,
) -> None:
    """`reference.amax_and_scale_update` on the current stream."""
    if why_not_csrc(capability_of(forward.device)):
        return reference.amax_and_scale_update(
            forward,
            backward,
            current,
            gated,
            fp8_max_forward,
            fp8_max_backward,
            margin,
            most_recent,
        )
    checks.fp8_states(forward, backward, current)
    if gated and current is None:  # every block asks the whole row 0, which others already roll
        current = torch.cat((forward[0], backward[0]))
    extension().amax_and_scale_update(
        forward.data_ptr(),
        backward.data_ptr(),
        0 if current is None else current.data_ptr(),
        forward.shape[1],
        forward.shape[0] - 1,
        fp8_max_forward,
        fp8_max_backward,
        margin,
        "most_recent" if most_recent else "max",
        gated,
        stream(forward.device),
        forward.get_device(),
    )
