# SPDX-License-Identifier: Apache-2.0
"""Projections of one input that quantize it once."""

from lorakernels.lazy import offer_submodules

offer_submodules(__name__)
