# SPDX-License-Identifier: Apache-2.0
"""Merged models as files."""

from lorakernels.lazy import offer_submodules

offer_submodules(__name__)
