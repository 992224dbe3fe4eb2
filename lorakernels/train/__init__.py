# SPDX-License-Identifier: Apache-2.0
"""The fine-tuning job behind ``lorakernels finetune``.

Data passes through the modules in this order: options → data → packing → model → loss → loop → checkpoint, metrics.
"""
