# SPDX-License-Identifier: Apache-2.0
"""All scales of one direction from their amax histories, in one launch (csrc/amax_and_scale_update.cu).

state fp32 [L + 1, n]: rows 0…L−1 the amax history of n tensors, row L their scales; `gate` fp32 [n'] or
None. It reads and writes the state once where PyTorch's form needs a dozen launches. The rules are
`reference.amax_and_scale_update`'s.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lorakernels import reference
from lorakernels.device import capability_of, extension, why_not_csrc


def amax_and_scale_update(
    state: Tensor, gate: Tensor | None, fp8_max: float, margin: int, most_recent: bool
) -> None:
    """Roll the histories and compute new scales in place, on the current stream."""
    if why_not_csrc(capability_of(state.device)):
        return reference.amax_and_scale_update(state, gate, fp8_max, margin, most_recent)
    if not state.is_contiguous() or state.dtype != torch.float32:
        raise ValueError(
            f"state must be contiguous float32, found {state.dtype} with strides {state.stride()}"
        )
    extension().amax_and_scale_update(
        state.data_ptr(),
        state.shape[1],
        state.shape[0] - 1,
        fp8_max,
        margin,
        "most_recent" if most_recent else "max",
        0 if gate is None else gate.data_ptr(),
        0 if gate is None else gate.numel(),
        torch.cuda.current_stream(state.device).cuda_stream,
        state.get_device(),
    )
