# SPDX-License-Identifier: Apache-2.0
"""Which implementation each op takes on a device, and why, as `lorakernels doctor` and the report show it."""

from __future__ import annotations

from lorakernels.ops.hardware import LayerOnGPU
from lorakernels.ops.register import OPS


def implementations(
    device_type: str, place: LayerOnGPU | None = None
) -> dict[str, tuple[str, str]]:
    """{op: (implementation, reason)} of every op that does not merely go with another one.

    Args:
        device_type: "cpu" or "cuda".
        place: the GPU and the layer; needed for "cuda".

    Raises:
        ValueError: another device type.
    """
    if device_type not in ("cpu", "cuda"):
        raise ValueError(f'device_type must be "cpu" or "cuda", found {device_type!r}')
    named = {op.name.rstrip("_"): op.chosen for op in OPS.values() if op.chosen is not None}
    if device_type == "cpu":
        return dict.fromkeys(named, ("reference", "PyTorch on the CPU; masks drawn by csrc"))
    return {name: chosen(place or LayerOnGPU((0, 0))) for name, chosen in named.items()}
