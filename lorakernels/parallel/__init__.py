# SPDX-License-Identifier: Apache-2.0
"""One model over several GPUs: layers or rows split over them; the frozen FP8 base and optimizer states kept once."""

from lorakernels.parallel.context import ContextParallel, context_parallel
from lorakernels.parallel.offload import Offload
from lorakernels.parallel.optimizer import ShardedAdamW
from lorakernels.parallel.plan import ShardPlan
from lorakernels.parallel.sharded_base import ShardedBase, shard_base
from lorakernels.parallel.tensor import TensorParallel, parallelize
from lorakernels.parallel.tensor_layers import ColumnParallelLoRALinear, RowParallelLoRALinear

__all__ = [
    "ColumnParallelLoRALinear",
    "ContextParallel",
    "Offload",
    "RowParallelLoRALinear",
    "ShardPlan",
    "ShardedAdamW",
    "ShardedBase",
    "TensorParallel",
    "context_parallel",
    "parallelize",
    "shard_base",
]
