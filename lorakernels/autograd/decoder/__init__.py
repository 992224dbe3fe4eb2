# SPDX-License-Identifier: Apache-2.0
"""A decoder layer as three nodes."""

from lorakernels.lazy import offer_submodules

offer_submodules(__name__)
