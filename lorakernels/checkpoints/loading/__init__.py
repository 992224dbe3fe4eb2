# SPDX-License-Identifier: Apache-2.0
"""Checkpoints read straight into FP8, whole or a part on each rank."""

from lorakernels.lazy import offer_submodules

offer_submodules(__name__)
