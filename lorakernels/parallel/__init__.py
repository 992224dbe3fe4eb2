# SPDX-License-Identifier: Apache-2.0
"""One model over several GPUs: its layers, rows or depth split; the frozen FP8 base and optimizer states kept once."""

from lorakernels.lazy import offer_submodules
from lorakernels.parallel.context import ContextParallel, context_parallel
from lorakernels.parallel.offload import Offload
from lorakernels.parallel.optimizer import ShardedAdamW
from lorakernels.parallel.pipeline import PipelineParallel, pipeline_parallel
from lorakernels.parallel.pipeline_stages import Microbatch
from lorakernels.parallel.plan import ShardPlan
from lorakernels.parallel.sharded_base import ShardedBase, shard_base
from lorakernels.parallel.tensor import TensorParallel, parallelize
from lorakernels.parallel.tensor_layers import ColumnParallelLoRALinear, RowParallelLoRALinear
from lorakernels.parallel.tensor_vocabulary import VocabularyHead
from lorakernels.plan_axes import PlanAxes

offer_submodules(__name__)

__all__ = [
    "ColumnParallelLoRALinear",
    "ContextParallel",
    "Microbatch",
    "Offload",
    "PipelineParallel",
    "PlanAxes",
    "RowParallelLoRALinear",
    "ShardPlan",
    "ShardedAdamW",
    "ShardedBase",
    "TensorParallel",
    "VocabularyHead",
    "context_parallel",
    "parallelize",
    "pipeline_parallel",
    "shard_base",
]
