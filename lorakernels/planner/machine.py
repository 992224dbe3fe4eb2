# SPDX-License-Identifier: Apache-2.0
"""The machine of a plan: a few rates. docs/plan.md names the recorded rows behind each.

Rates are of kernels that run alone for a moment, with the clock at its highest. A step that draws more than `power`
is stretched as a whole, by the watts that each kind of kernel draws.
"""

from __future__ import annotations

from dataclasses import dataclass

# What the probe's own product and copy reach on the H200 that the constants are of (docs/plan.md)
PRODUCT = 1635e12  # operations a second of torch's FP8 products, with all tiles busy
COPY = 4.12e12  # bytes a second, read and written


@dataclass(frozen=True)
class Machine:
    """GPUs of one kind in one host. Rates are per second; sizes are bytes; `power` and `*_watts` are watts.

    Attributes:
        memory: of one GPU.
        fp8_forward, fp8_backward: operations of FP8 products whose tiles fill all multiprocessors.
        bf16: operations of bf16 products, the head's.
        bandwidth: bytes that kernels between the products read and write.
        peer: bytes that a GPU receives from the others' memory.
        host: bytes that a GPU copies from pinned host memory, all GPUs at once.
        processors: multiprocessors of a GPU.
        power: what a GPU may draw; `gemm_watts`, `attention_watts` and `memory_watts` at the highest clock.
    """

    name: str
    memory: int
    fp8_forward: float = 1550e12
    fp8_backward: float = 1500e12
    bf16: float = 720e12
    bandwidth: float = 3.5e12
    peer: float = 305e9
    host: float = 43.6e9
    processors: int = 132
    power: float = 700.0
    gemm_watts: float = 867.0
    attention_watts: float = 867.0
    memory_watts: float = 420.0


MACHINES = {
    "H200": Machine("H200", 150_109_880_320),
    "H100-80GB": Machine("H100-80GB", 85_000_000_000, bandwidth=3.5e12 * 3.35 / 4.8),
}
