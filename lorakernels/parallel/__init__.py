# SPDX-License-Identifier: Apache-2.0
"""One model over several GPUs: its layers, rows or depth split; the frozen FP8 base and optimizer states kept once."""

from lorakernels.lazy import offer_submodules
from lorakernels.parallel.base.offload import Offload
from lorakernels.parallel.base.shard import ShardedBase, shard_base
from lorakernels.parallel.context.share import ContextParallel, context_parallel
from lorakernels.parallel.optimizer.sharded_adamw import ShardedAdamW
from lorakernels.parallel.pipeline.run import PipelineParallel, pipeline_parallel
from lorakernels.parallel.pipeline.stages import Microbatch
from lorakernels.parallel.tensor.layers import ColumnParallelLoRALinear, RowParallelLoRALinear
from lorakernels.parallel.tensor.parallelize import TensorParallel, parallelize
from lorakernels.parallel.tensor.vocabulary import VocabularyHead

offer_submodules(__name__)

__all__ = [
    "ColumnParallelLoRALinear",
    "ContextParallel",
    "Microbatch",
    "Offload",
    "PipelineParallel",
    "RowParallelLoRALinear",
    "ShardedAdamW",
    "ShardedBase",
    "TensorParallel",
    "VocabularyHead",
    "context_parallel",
    "parallelize",
    "pipeline_parallel",
    "shard_base",
]
