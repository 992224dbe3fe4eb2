# SPDX-License-Identifier: Apache-2.0
"""One model over several GPUs: layers split over them, or the frozen FP8 base and the optimizer's state kept once."""

from lorakernels.parallel.offload import Offload
from lorakernels.parallel.optimizer import ShardedAdamW
from lorakernels.parallel.plan import ShardPlan
from lorakernels.parallel.sharded_base import ShardedBase, shard_base
from lorakernels.parallel.tensor import TensorParallel, parallelize
from lorakernels.parallel.tensor_layers import ColumnParallelLoRALinear, RowParallelLoRALinear

__all__ = [
    "ColumnParallelLoRALinear",
    "Offload",
    "RowParallelLoRALinear",
    "ShardPlan",
    "ShardedAdamW",
    "ShardedBase",
    "TensorParallel",
    "parallelize",
    "shard_base",
]
