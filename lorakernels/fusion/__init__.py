# SPDX-License-Identifier: Apache-2.0
"""Run a Hugging Face decoder layer as three autograd nodes. `fuse` checks and rewires a model; `unfuse` undoes it."""

from lorakernels.lazy import offer_submodules

offer_submodules(__name__)
