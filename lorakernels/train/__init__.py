# SPDX-License-Identifier: Apache-2.0
"""The fine-tuning job behind ``lorakernels finetune``, in the order data takes through it:
options → data → packing → model → loss → loop → checkpoint, metrics."""
