# SPDX-License-Identifier: Apache-2.0
"""GEGLU, Gemma's activation, by torch's operations in fp32, with one rounding when a result is stored.

    act = gelu(gate) ⊙ up          gelu(g) = g (1 + tanh(√(2/π) (g + 0.044715 g³))) / 2
    dup = dact ⊙ gelu(gate)        dgate = dact ⊙ up ⊙ gelu'(gate)

gate_up = gate | up [M, 2F], plain or the bytes that are kept until backward (numerics/gate_up.py). There is no kernel
that also quantizes the result, as ops/swiglu.py has. In backward some 20 MF bytes exist for a while besides the result.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from lorakernels.numerics.gate_up import halves
from lorakernels.values import Scaled


def geglu(gate_up: Scaled, dtype: torch.dtype) -> Tensor:
    """act [M, F] in `dtype`."""
    gate, up = halves(gate_up)
    return F.gelu(gate, approximate="tanh").mul_(up).to(dtype)


def geglu_backward(dact: Tensor, gate_up: Scaled, multiplier: Tensor) -> Tensor:
    """dgate · m₀ | dup · m₁ [M, 2F] in dact's dtype, for multiplier fp32 [2]."""
    gate, up = halves(gate_up)
    wide, dgate_up = dact.float(), dact.new_empty(gate_up.data.shape)
    dgate, dup = dgate_up.chunk(2, 1)
    of_gate = torch.ops.aten.gelu_backward(wide * up, gate, approximate="tanh")
    dgate.copy_(of_gate.mul_(multiplier[0]))
    del of_gate
    dup.copy_(F.gelu(gate, approximate="tanh").mul_(wide).mul_(multiplier[1]))
    return dgate_up
