# SPDX-License-Identifier: Apache-2.0
"""Ranks that work together: their groups, what they send each other, and whether they hold the same."""

from lorakernels.lazy import offer_submodules

offer_submodules(__name__)
