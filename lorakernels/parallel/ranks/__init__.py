# SPDX-License-Identifier: Apache-2.0
"""Ranks of a process group: collectives, exchanges of rows, shards of weights, and checks that models are equal."""

from lorakernels.lazy import offer_submodules

offer_submodules(__name__)
