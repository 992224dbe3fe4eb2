# SPDX-License-Identifier: Apache-2.0
"""From data files to packed rows: sources (files and rows) → formats and messages (examples) → template_check →
encode (token ids and loss mask) → tokens (files on disk) → split (held-out documents, weights) →
packing (rows) → prepare (those of a run).
"""
