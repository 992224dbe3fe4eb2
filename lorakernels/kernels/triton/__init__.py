# SPDX-License-Identifier: Apache-2.0
"""Triton's kernels and the functions that launch them; which op takes which kernel is said in ops/."""

from lorakernels.lazy import offer_submodules

offer_submodules(__name__)
