# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of models: their files, the names and forms of their tensors, and the model without values."""

from lorakernels.lazy import offer_submodules

offer_submodules(__name__)
