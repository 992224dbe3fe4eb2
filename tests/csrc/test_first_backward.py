# SPDX-License-Identifier: Apache-2.0
"""autograd's thread may meet our kernels before any other CUDA call, when it has no context yet."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import torch
from lorakernels import LoRAConfig, LoRALinear

plain = torch.nn.Linear(256, 256, bias=False, device="cuda", dtype=torch.bfloat16)
layer = LoRALinear.from_linear(plain, LoRAConfig(r=16{}))
x = torch.randn(512, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
dy = torch.randn_like(x)
layer(x).backward(dy)  # nothing of torch's runs in backward before ours
print(bool(x.grad.isfinite().all()))
"""


@pytest.mark.gpu
@pytest.mark.parametrize("options", [", fp8=None", ""], ids=["plain base", "FP8 base"])
def test_the_first_backward_of_a_process_may_be_ours_alone(options: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE.format(options)], capture_output=True, text=True, timeout=300
    )
    assert done.stdout.strip() == "True", done.stderr
