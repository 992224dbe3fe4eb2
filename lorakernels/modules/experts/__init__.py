# SPDX-License-Identifier: Apache-2.0
"""Adapters of a mixture's experts."""

from lorakernels.lazy import offer_submodules

offer_submodules(__name__)
