# SPDX-License-Identifier: Apache-2.0
"""Names of what a run writes into its output, besides a directory for each job. Others there begin with a dot."""

ADAPTER, MERGED, CHECKPOINTS, TOKENS = "adapter", "merged", "checkpoints", "tokens"
OPTIONS, METRICS, LOSS, RUN = "options.json", "metrics.jsonl", "loss.png", "run.json"
TENSORBOARD, WANDB = "tensorboard", "wandb"  # wandb's client chooses its name
WRITTEN = (
    ADAPTER, MERGED, CHECKPOINTS, TOKENS, OPTIONS, METRICS, LOSS, RUN, TENSORBOARD, WANDB,
)  # fmt: skip
