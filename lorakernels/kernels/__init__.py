# SPDX-License-Identifier: Apache-2.0
"""Triton's kernels, tile sizes of GEMMs and of a decoder layer's kernels, and what csrc takes instead of tensors."""

from lorakernels.lazy import offer_submodules

offer_submodules(__name__)
