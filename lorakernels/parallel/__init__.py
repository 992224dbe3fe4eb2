# SPDX-License-Identifier: Apache-2.0
"""One model over several GPUs: the frozen FP8 base, and the optimizer's state, kept once and not once a GPU."""

from lorakernels.parallel.optimizer import ShardedAdamW
from lorakernels.parallel.plan import ShardPlan
from lorakernels.parallel.sharded_base import ShardedBase, shard_base

__all__ = ["ShardPlan", "ShardedAdamW", "ShardedBase", "shard_base"]
