# SPDX-License-Identifier: Apache-2.0
"""One model over several GPUs: the frozen FP8 base, kept once and not once a GPU."""

from lorakernels.parallel.sharded_base import ShardedBase, shard_base

__all__ = ["ShardedBase", "shard_base"]
