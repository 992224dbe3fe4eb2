# SPDX-License-Identifier: Apache-2.0
"""The fine-tuning job behind ``lorakernels finetune``.

Data passes through the rooms in this order: options → data → model → layouts → run. ``job.py`` joins them; files/,
ranks/ and optimizer/ serve them.
"""
