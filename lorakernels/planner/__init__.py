# SPDX-License-Identifier: Apache-2.0
"""How to train a model on the GPUs of a host, and what that takes, before a weight is read."""

from lorakernels.lazy import offer_submodules

offer_submodules(__name__)
