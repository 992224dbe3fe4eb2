# SPDX-License-Identifier: Apache-2.0
"""Graphs that follow the order in which layers run. Knows callables; knows nothing of LoRA."""

from .backend import CudaBackend
from .errors import CaptureError, GraphError, ReplayError
from .iteration import StepGraph
from .manager import GraphManager
from .options import GraphOptions
from .order import Direction, Order, OrderError, ReplayOrderError, Step
from .recorder import OrderRecorder
from .report import GraphReport, Report

__all__ = [
    "GraphManager",
    "StepGraph",
    "GraphOptions",
    "CudaBackend",
    "Report",
    "GraphReport",
    "GraphError",
    "CaptureError",
    "ReplayError",
    "Direction",
    "Order",
    "OrderError",
    "OrderRecorder",
    "ReplayOrderError",
    "Step",
]
