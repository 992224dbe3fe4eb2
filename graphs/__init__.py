# SPDX-License-Identifier: Apache-2.0
"""Graphs that follow the order in which layers run. Knows callables; knows nothing of LoRA."""

from .compare.signature import TensorSpec, flatten
from .device.backend import CudaBackend
from .device.pool import Pool, pool_in_use
from .interface.errors import CaptureError, GraphError, ReplayError
from .interface.options import GraphOptions
from .interface.report import GraphReport, Report
from .layers.manager import GraphManager
from .plan.order import Direction, Order, OrderError, ReplayOrderError, Step
from .record.hooks import Hook
from .record.order_recorder import OrderRecorder
from .whole.followers import Follower, follow
from .whole.step_graph import StepGraph

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
    # for code outside of the loop that drives a manager
    "Hook",
    "TensorSpec",
    "flatten",
    # for records, on the host, of what a step does on the device
    "Follower",
    "follow",
    # for memory on the host that captured graphs use
    "Pool",
    "pool_in_use",
]
