# SPDX-License-Identifier: Apache-2.0
"""An exception at a chosen point of what tensors are made and written, as Ctrl-C or a full device would raise it."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Interrupt(TorchDispatchMode):
    """Raises before the op that would make the `at`-th new tensor, or copy into one that is there; counts them."""

    def __init__(self, at: int = 0, error: type[BaseException] = KeyboardInterrupt) -> None:
        super().__init__()
        self.at, self.error, self.count = at, error, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        new = (r.alias_info is None and "Tensor" in str(r.type) for r in func._schema.returns)
        if any(new) or func is torch.ops.aten.copy_.default:
            self.count += 1
            if self.count == self.at:
                raise self.error(f"at {func}")
        return func(*args, **(kwargs or {}))
