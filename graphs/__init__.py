# SPDX-License-Identifier: Apache-2.0
"""Graphs that follow the order in which layers run. Knows callables; knows nothing of LoRA."""

from .order import Direction, Order, OrderCursor, OrderError, ReplayOrderError, Step
from .recorder import OrderRecorder
from .schedule import gpipe, interleaved_one_forward_one_backward, one_forward_one_backward

__all__ = [
    "Direction",
    "Order",
    "OrderCursor",
    "OrderError",
    "OrderRecorder",
    "ReplayOrderError",
    "Step",
    "gpipe",
    "interleaved_one_forward_one_backward",
    "one_forward_one_backward",
]
