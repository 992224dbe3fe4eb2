# SPDX-License-Identifier: Apache-2.0
"""Linear layers with adapters: their values, the ops of forward and backward, and the recordings of both."""

from lorakernels.lazy import offer_submodules

offer_submodules(__name__)
