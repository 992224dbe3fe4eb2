# SPDX-License-Identifier: Apache-2.0
"""Layers that ranks hold together, each with a part of every weight."""

from lorakernels.lazy import offer_submodules

offer_submodules(__name__)
