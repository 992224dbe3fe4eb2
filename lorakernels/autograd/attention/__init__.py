# SPDX-License-Identifier: Apache-2.0
"""Attention: its backends, which of them runs, and the graphs of cuDNN."""

from lorakernels.lazy import offer_submodules

offer_submodules(__name__)
