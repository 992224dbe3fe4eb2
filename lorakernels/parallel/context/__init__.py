# SPDX-License-Identifier: Apache-2.0
"""Rows that ranks share, each with some of the tokens."""

from lorakernels.lazy import offer_submodules

offer_submodules(__name__)
