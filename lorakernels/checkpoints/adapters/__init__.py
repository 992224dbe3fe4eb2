# SPDX-License-Identifier: Apache-2.0
"""Adapters in PEFT's format."""

from lorakernels.lazy import offer_submodules

offer_submodules(__name__)
